"""Several KV groups: the shortest run counts, windows are scanned from the right, keys follow the prefix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import group_of

from .harness import NONE, TOKENS, Bench, Shelf, layout_of, stored

FULL_AND_WINDOW = {"groups": (TOKENS, TOKENS), "windows": (None, 40)}  # 39 tokens back: three blocks


def empty_before(request, group: int, blocks: int) -> None:
    """Let the engine have freed the group's first blocks: they have left the window."""
    request.block_ids[group][:blocks] = [NONE] * blocks


def test_of_a_window_only_what_is_still_read_is_loaded() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 8 * TOKENS, first_block=50)
    empty_before(request, 1, 4)
    assert bench.scheduler.lookup(request, 0) == 7 * TOKENS
    bench.scheduler.start_load(request, 7 * TOKENS)
    (load,) = (transfers := bench.scheduler.end_step()).loads
    assert load.blocks.block_ids.tolist() == [*range(50, 57), 62, 63, 64]
    assert (load.blocks.group_sizes, load.blocks.block_indices) == ((7, 3), (0, 4))
    (outcome,) = bench.done(transfers)
    assert outcome == ("b", True, 0, 7 * TOKENS)
    assert bench.wrong(request, 7 * TOKENS) == []


def test_a_window_that_reaches_into_the_engines_own_hit_is_loaded_from_there_on() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.load(request, 6 * TOKENS) == TOKENS
    assert bench.wrong(request, 7 * TOKENS, start=6 * TOKENS) == []


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 1000])
def test_any_window_gets_exactly_the_blocks_that_its_next_token_reads(window) -> None:
    bench = Bench(layout_of(groups=(TOKENS, TOKENS), windows=(None, window)))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.scheduler.lookup(request, 0) == 7 * TOKENS
    bench.scheduler.start_load(request, 7 * TOKENS)
    (load,) = bench.scheduler.end_step().loads
    read = {token // TOKENS for token in range(max(0, 7 * TOKENS - window + 1), 7 * TOKENS)}
    assert load.blocks.group_sizes == (7, len(read))
    assert load.blocks.block_ids.tolist()[7:] == [58 + block for block in sorted(read)]


def test_of_a_state_space_group_the_last_state_is_loaded() -> None:
    bench = Bench(layout_of(groups=(TOKENS, 4 * TOKENS), state_space=(1,)))
    bench.serve(bench.request("a", 12 * TOKENS))
    request = bench.request("b", 12 * TOKENS, first_block=50)
    empty_before(request, 1, 1)
    assert bench.scheduler.lookup(request, 0) == 8 * TOKENS
    bench.scheduler.start_load(request, 8 * TOKENS)
    (load,) = bench.scheduler.end_step().loads
    assert load.blocks.group_sizes == (8, 1)
    assert load.blocks.block_indices == (0, 1)


def test_states_are_stored_where_the_engine_keeps_a_block_for_one_and_a_prompt_is_found_there() -> None:
    bench = Bench(layout_of(groups=(TOKENS, TOKENS), state_space=(1,)))
    first = bench.request("a", 12 * TOKENS)
    first.block_ids[1] = [block if place % 4 == 3 else NONE for place, block in enumerate(first.block_ids[1])]
    bench.serve(first)
    assert bench.present(first, 1) == [place % 4 == 3 for place in range(12)]
    request = bench.request("b", 12 * TOKENS, first_block=50)
    assert bench.load(request) == 8 * TOKENS
    assert bench.wrong(request, 8 * TOKENS) == []


def test_a_model_of_windows_alone_loads_the_last_window() -> None:
    bench = Bench(layout_of(windows=(40,)))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 8 * TOKENS, first_block=50)
    empty_before(request, 0, 4)
    assert bench.load(request) == 7 * TOKENS
    assert bench.wrong(request, 7 * TOKENS) == []


def test_a_missing_chunk_in_the_window_ends_the_prefix_where_a_whole_window_is_present() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    first = bench.request("a", 8 * TOKENS)
    first.block_ids[1][5] = NONE  # so it is never stored
    bench.serve(first)
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.load(request) == 5 * TOKENS
    assert bench.wrong(request, 5 * TOKENS) == []


def test_without_any_whole_window_nothing_is_loaded() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    first = bench.request("a", 8 * TOKENS)
    for block in (0, 3, 6):
        first.block_ids[1][block] = NONE
    bench.serve(first)
    assert bench.present(first, 1).count(True) == 5
    assert bench.lookup(bench.request("b", 8 * TOKENS, first_block=50)) == 0


def test_two_windows_agree_on_a_place_where_both_are_whole() -> None:
    bench = Bench(layout_of(groups=(TOKENS,) * 3, windows=(None, 40, 20)))
    first = bench.request("a", 12 * TOKENS)
    first.block_ids[1][9] = NONE  # the wide window: whole again at 9
    first.block_ids[2][8] = NONE  # the narrow one: not at 9, but at 8
    first.block_ids[1][5] = NONE  # the wide one: not at 8, 7, 6, but at 5
    bench.serve(first)
    request = bench.request("b", 12 * TOKENS, first_block=100)
    assert bench.load(request) == 5 * TOKENS
    assert bench.wrong(request, 5 * TOKENS) == []


def shelved(layout, blocks: int) -> tuple[Bench, Shelf, list[list[bytes]]]:
    """A bench whose primary has nothing and whose tier has a whole request."""
    shelf = Shelf(layout.row_stride)
    bench = Bench(layout, tier=shelf)
    first = bench.request("a", blocks * TOKENS)
    bench.serve(first)
    bench.scheduler.end_step()
    bench.scheduler.reset_cache()
    return bench, shelf, [bench.keys(first, group) for group in range(len(layout.groups))]


def test_only_the_window_that_is_used_is_promoted() -> None:
    bench, shelf, keys = shelved(layout_of(**FULL_AND_WINDOW), 8)
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.lookup(request) is None
    assert set(shelf.loaded) == {*keys[0][:7], *keys[1][4:7]}
    assert bench.lookup(request) is None
    shelf.land()
    assert bench.load(request) == 7 * TOKENS
    assert bench.wrong(request, 7 * TOKENS) == []
    assert set(shelf.loaded.values()) == {1}


def test_an_unknown_chunk_in_the_window_defers_the_answer_and_nothing_is_loaded_before() -> None:
    bench, shelf, keys = shelved(layout_of(**FULL_AND_WINDOW), 8)
    shelf.unknown.update(keys[1])
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.lookup(request) is None
    assert not shelf.loaded
    shelf.unknown.clear()
    del shelf.values[keys[1][6]]  # it turns out to be a miss: the scan goes on to its left
    assert bench.lookup(request) is None
    shelf.land()
    assert bench.load(request) == 6 * TOKENS
    assert bench.wrong(request, 6 * TOKENS) == []


def test_what_a_tier_has_to_the_right_of_a_miss_is_not_waited_for() -> None:
    bench, shelf, keys = shelved(layout_of(**FULL_AND_WINDOW), 8)
    again = bench.request("a2", 8 * TOKENS, first_block=50)
    again.block_ids[1][5] = again.block_ids[1][6] = NONE
    bench.serve(again)  # all but two chunks are in the primary
    del shelf.values[keys[1][5]]
    request = bench.request("b", 8 * TOKENS, first_block=100)
    assert bench.lookup(request) == 5 * TOKENS  # at once
    assert not shelf.loaded, "the chunk at 6 is of no use"


def test_in_a_model_of_windows_alone_a_pending_chunk_is_waited_for_unless_a_miss_cancels_it() -> None:
    bench, shelf, (keys,) = shelved(layout_of(windows=(40,)), 8)
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.lookup(request) is None
    assert set(shelf.loaded) == set(keys[4:7])
    shelf.land()
    assert bench.load(request) == 7 * TOKENS

    bench, shelf, (keys,) = shelved(layout_of(windows=(40,)), 8)
    again = bench.request("a2", 8 * TOKENS, first_block=50)
    again.block_ids[0][5] = again.block_ids[0][6] = NONE
    bench.serve(again)
    del shelf.values[keys[5]]
    request = bench.request("b", 8 * TOKENS, first_block=100)
    assert bench.load(request) == 5 * TOKENS
    assert bench.wrong(request, 5 * TOKENS) == []


def test_pending_chunks_behind_the_shortest_run_are_neither_waited_for_nor_promoted() -> None:
    bench, shelf, keys = shelved(layout_of(groups=(TOKENS, TOKENS)), 10)
    again = bench.request("a2", 5 * TOKENS, first_block=50, text="a" * 160)
    bench.serve(again)  # five chunks of each group are in the primary
    for key in keys[1][5:]:
        del shelf.values[key]  # and no more of the second group anywhere
    request = bench.request("b", 10 * TOKENS, first_block=100)
    assert bench.lookup(request) == 5 * TOKENS
    bench.scheduler.end_step()
    assert not shelf.loads


def test_a_group_whose_run_ends_at_an_unknown_chunk_is_asked_again() -> None:
    bench, shelf, keys = shelved(layout_of(groups=(TOKENS, TOKENS)), 6)
    shelf.unknown.add(keys[0][3])
    request = bench.request("b", 6 * TOKENS, first_block=100)
    assert bench.lookup(request) is None
    shelf.land()
    assert bench.lookup(request) is None  # what is ready is not taken while more may turn up
    shelf.unknown.clear()
    assert bench.lookup(request) is None
    shelf.land()
    assert bench.load(request) == 5 * TOKENS


def test_the_first_group_unknown_from_the_start_is_waited_for() -> None:
    bench, shelf, keys = shelved(layout_of(groups=(TOKENS, TOKENS)), 4)
    shelf.unknown.update(keys[0])
    assert bench.lookup(bench.request("b", 4 * TOKENS, first_block=100)) is None


def test_a_hit_ends_where_every_group_has_a_whole_number_of_blocks() -> None:
    bench = Bench(layout_of(groups=(16, 24)))
    bench.serve(bench.request("a", 240))
    request = bench.request("b", 240, first_block=100)
    assert bench.load(request) == 192  # 239 tokens may be loaded, and 48 is the least common multiple
    assert bench.wrong(request, 192) == []
    assert bench.lookup(bench.request("c", 240, first_block=200), 16) == 0  # nor does it begin anywhere else


def test_keys_of_several_groups_are_given_in_the_order_of_the_prefix() -> None:
    bench = Bench(layout_of(groups=(TOKENS, 2 * TOKENS, TOKENS), windows=(None, None, 1000)))
    first = bench.request("a", 6 * TOKENS)
    bench.serve(first)
    request = bench.request("b", 6 * TOKENS + 1, first_block=100)
    assert bench.load(request) == 6 * TOKENS
    wide = [2 * TOKENS if group == 1 else TOKENS for group in range(3)]
    for offered in (bench.manager.offered[0], bench.manager.loaded[0]):
        ends = [(bench.keys(first, group_of(key)).index(key) + 1) * wide[group_of(key)] for key in offered]
        assert ends == sorted(ends)
        assert len(offered) == 6 + 3 + 6
    assert bench.wrong(request, 6 * TOKENS) == []


def test_eviction_takes_the_tail_of_all_groups_alike() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW), rows=20)
    first = bench.request("a", 8 * TOKENS)
    bench.serve(first)
    bench.serve(bench.request("z", 5 * TOKENS, first_block=50, text="z" * 5 * TOKENS))  # ten rows: six are evicted
    assert bench.present(first, 0) == bench.present(first, 1) == [True] * 5 + [False] * 3
    assert bench.load(bench.request("b", 8 * TOKENS, first_block=100)) == 5 * TOKENS


def test_what_a_load_has_left_out_before_a_window_is_never_stored() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 10 * TOKENS, first_block=50)  # this engine allocates those blocks all the same
    assert bench.load(request) == 8 * TOKENS
    bench.scheduler.reset_cache()  # nothing is there any more, so all that the request has is offered again
    bench.compute(request, 8 * TOKENS)
    bench.scheduler.on_computed(request, 10 * TOKENS)
    transfers = bench.scheduler.end_step()
    assert stored(transfers) == [*range(50, 60), *range(65, 70)]
    bench.done(transfers)
    assert bench.present(request, 1) == [False] * 5 + [True] * 5


def test_what_a_load_has_left_out_is_stored_once_it_was_computed_after_all() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 10 * TOKENS, first_block=50)
    assert bench.load(request) == 8 * TOKENS
    bench.scheduler.preempt_request(request)
    bench.scheduler.reset_cache()
    assert bench.lookup(request) == 0
    assert stored(bench.store_step(request)) == list(range(50, 70))


def test_chunks_that_slide_out_of_the_window_are_stored_before_and_skipped_after() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    request = bench.request("a", 8 * TOKENS)
    assert stored(bench.store_step(request, 4 * TOKENS)) == [0, 1, 2, 3, 8, 9, 10, 11]
    empty_before(request, 1, 2)
    request.block_ids[1][4] = NONE
    assert stored(bench.store_step(request, 8 * TOKENS)) == [4, 5, 6, 7, 13, 14, 15]


def test_when_the_engine_takes_less_the_window_before_that_place_is_loaded() -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 8 * TOKENS, first_block=50)
    assert bench.scheduler.lookup(request, 0) == 7 * TOKENS
    assert bench.scheduler.start_load(request, 4 * TOKENS + 3) == 4 * TOKENS
    bench.done(bench.scheduler.end_step())
    assert bench.wrong(request, 4 * TOKENS) == []
    assert bench.primary.evictable == 16


def test_a_load_into_blocks_that_are_not_there_is_refused(caplog) -> None:
    bench = Bench(layout_of(**FULL_AND_WINDOW))
    bench.serve(bench.request("a", 8 * TOKENS))
    request = bench.request("b", 8 * TOKENS, first_block=50)
    empty_before(request, 1, 6)  # one too many
    tokens = bench.scheduler.lookup(request, 0)
    assert bench.scheduler.start_load(request, tokens) == 0
    assert "request b: nothing is loaded, since not all of its blocks are allocated" in caplog.text
    assert bench.primary.evictable == 16
    assert bench.blocks.held == {}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([None, 1, 20, 48, 100, 400])), min_size=1, max_size=3
    ),
    st.integers(1, 3),
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
    st.integers(-40, 40),
)
def test_whatever_the_groups_all_that_was_stored_is_found_and_comes_back_right(groups, per_chunk, steps, more) -> None:
    layout = layout_of(per_chunk, [tokens for tokens, _ in groups], windows=[window for _, window in groups])
    bench = Bench(layout, rows=400, num_blocks=1000)
    tokens = sum(steps)
    first = bench.request("a", tokens, text="a" * 2000)
    computed = 0
    for step in steps:  # chunked prefill; blocks are freed as soon as their window has passed
        bench.compute(first, computed, computed := computed + step)
        bench.scheduler.on_computed(first, computed)
        bench.done(bench.scheduler.end_step())
        for group, spec in enumerate(layout.groups):
            if spec.window is not None:
                out = max(0, computed - spec.window + 1) // spec.tokens_per_block
                empty_before(first, group, min(out, computed // spec.tokens_per_block // per_chunk * per_chunk))
    bench.scheduler.finish_request(first)
    for group in range(len(groups)):
        assert bench.present(first, group) == [True] * (tokens // layout.tokens_per_chunk(group))
    second = bench.request("b", max(1, tokens + more), first_block=300, text="a" * 2000)
    found = bench.load(second)
    assert bench.wrong(second, found) == []
    assert found == furthest(bench, second)


def furthest(bench: Bench, request) -> int:
    """The last token, tried one by one, up to which all that is read later is present, in whole blocks."""
    layout = bench.layout
    for end in range(request.num_tokens - 1, 0, -1):
        for group, spec in enumerate(layout.groups):
            present = bench.present(request, group)
            first = 0 if spec.window is None else max(0, end - spec.window + 1)
            chunks = {token // layout.tokens_per_chunk(group) for token in range(first, end)}
            if end % spec.tokens_per_block or not all(chunk < len(present) and present[chunk] for chunk in chunks):
                break
        else:
            return end
    return 0
