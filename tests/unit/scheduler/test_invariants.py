"""What must never break between the engine's requests and the cache, in whatever order things happen."""

import hypothesis.strategies as st
from hypothesis import given

from .harness import NONE, TOKENS, Bench, layout_of, stored

BLOCKS = 12


def test_what_a_lookup_has_found_is_not_evicted_before_it_is_loaded_when_others_need_rows() -> None:
    bench = Bench(layout_of(), rows=4)
    bench.serve(bench.request("a", 4 * TOKENS))
    reader = bench.request("reader", 5 * TOKENS, first_block=20, text="a" * 5 * TOKENS)
    assert bench.scheduler.lookup(reader, 0) == 4 * TOKENS
    for number in range(3):  # in the same step, and in those that the reader has to wait for blocks
        other = bench.request(f"other {number}", 4 * TOKENS, first_block=40, text=str(number) * 4 * TOKENS)
        assert stored(bench.store_step(other)) == []
        bench.scheduler.finish_request(other)
    assert bench.scheduler.start_load(reader, 4 * TOKENS) == 4 * TOKENS
    bench.done(bench.scheduler.end_step())
    assert bench.wrong(reader, 4 * TOKENS) == []
    last = bench.request("last", 4 * TOKENS, first_block=60, text="b" * 4 * TOKENS)
    assert stored(bench.store_step(last)) == [60, 61, 62, 63], "what was loaded holds no row any more"


@given(
    st.lists(st.integers(0, BLOCKS * TOKENS), min_size=1, max_size=5).map(sorted),
    st.integers(0, BLOCKS),
    st.sampled_from((1, 2, 3)),
    st.booleans(),
)
def test_no_chunk_is_stored_before_each_of_its_blocks_is_there_and_written(ends, nulls, per_chunk, finish) -> None:
    """``ends``: computed tokens, step by step; what lies behind is draft. ``nulls``: blocks that are none, in front."""
    bench = Bench(layout_of(per_chunk))
    request = bench.request("a", BLOCKS * TOKENS)
    request.block_ids[0][:nulls] = [NONE] * nulls
    start, seen = 0, []
    for end in ends:
        bench.compute(request, start, end)
        start = end // TOKENS * TOKENS
        bench.scheduler.on_computed(request, end)
        transfers = bench.scheduler.end_step()
        seen += stored(transfers)
        assert not [block for block in seen if block < nulls or block >= end // TOKENS]
        bench.done(transfers)
    if finish:
        bench.scheduler.finish_request(request)
        bench.done(bench.scheduler.end_step())
    whole = range(-(-nulls // per_chunk), ends[-1] // TOKENS // per_chunk)
    assert [index for index, there in enumerate(bench.present(request)) if there] == list(whole)
    assert seen == [block for chunk in whole for block in range(chunk * per_chunk, (chunk + 1) * per_chunk)]
