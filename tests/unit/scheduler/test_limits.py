"""What may be loaded and stored: the engine's options, and each request's own limits."""

import pytest

from kvtiers.api import ConfigError
from kvtiers.scheduler import SchedulerOptions, options
from kvtiers.scheduler.options import RequestLimits
from kvtiers.types import RequestContext

from .harness import TOKENS, Bench, layout_of, stored


@pytest.fixture
def bench() -> Bench:
    return Bench(layout_of())


@pytest.fixture(autouse=True)
def _nothing_was_ignored_yet():
    options._ignored.clear()


@pytest.mark.parametrize(
    ("limit", "loaded"),
    [(0, 0), (TOKENS - 1, 0), (2 * TOKENS, 2 * TOKENS), (3 * TOKENS - 1, 2 * TOKENS), (10**9, 4 * TOKENS)],
)
def test_a_request_loads_at_most_its_max_load_tokens(bench, limit, loaded) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    assert bench.load(bench.request("b", 5 * TOKENS, first_block=20, max_load_tokens=limit)) == loaded
    assert bench.primary.evictable == 4


def test_max_load_tokens_counts_what_is_loaded_not_where(bench) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    request = bench.request("b", 5 * TOKENS, first_block=20, max_load_tokens=TOKENS)
    assert bench.lookup(request, 2 * TOKENS) == TOKENS


@pytest.mark.parametrize(
    ("limit", "blocks"),
    [(0, []), (TOKENS - 1, []), (2 * TOKENS, [0, 1]), (2 * TOKENS + 7, [0, 1]), (999, [0, 1, 2, 3])],
)
def test_of_a_request_the_first_max_offload_tokens_are_stored(bench, limit, blocks) -> None:
    request = bench.request("a", 4 * TOKENS, max_offload_tokens=limit)
    first = stored(bench.store_step(request, 3 * TOKENS))
    assert first + stored(bench.store_step(request)) == blocks
    bench.scheduler.finish_request(request)
    assert bench.scheduler.end_step().stores == []


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "16", True, False, [16], {}])
def test_what_is_no_number_of_tokens_is_ignored_with_one_warning(bench, caplog, name, value) -> None:
    bench.serve(bench.request("a", 2 * TOKENS))
    caplog.clear()
    request = bench.request("b", 4 * TOKENS, first_block=20, **{name: value})
    assert bench.load(request) == 2 * TOKENS
    assert stored(bench.store_step(request)) == [22, 23]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"request b: {name} is {value!r}, expected a number of tokens; ignored"


@pytest.mark.parametrize(
    "value",
    ["A" * 5_000_000, ["x" * 1000] * 500_000, dict.fromkeys(range(500000), "x"), -(1 << 40_000)],
    ids=["a string", "a list", "a dict", "a number"],
)
def test_what_a_request_sends_is_logged_in_one_short_line_and_ever_more_seldom(caplog, value) -> None:
    for number in range(100):
        context = RequestContext(f"request {number} " + "y" * 100_000, {"max_load_tokens": value})
        assert RequestLimits.of(context) == RequestLimits(None, None)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 7, "of the 1st, 2nd, 4th, 8th ... 64th"
    assert max(map(len, lines)) < 600
    assert lines[-1].endswith("expected a number of tokens; ignored (64 times so far)")


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_no_limit_is_no_warning(bench, caplog, name) -> None:
    bench.request("a", 2 * TOKENS, **{name: None})
    assert not caplog.records


def test_a_request_that_skips_the_prefix_cache_loads_nothing_and_stores_all_the_same(bench) -> None:
    bench.serve(bench.request("a", 2 * TOKENS))
    request = bench.request("b", 4 * TOKENS, first_block=20, skip_reading_prefix_cache=True)
    assert bench.lookup(request) == 0
    assert stored(bench.store_step(request)) == [22, 23]


def test_with_prompt_only_no_chunk_with_generated_tokens_is_stored() -> None:
    bench = Bench(layout_of(per_chunk=2), options=SchedulerOptions(prompt_only=True))
    request = bench.request("a", 8 * TOKENS)
    prompt, request.num_tokens = request, 5 * TOKENS
    bench.scheduler.finish_request(prompt)
    bench.scheduler.add_request(request)  # a prompt of five blocks; three are generated
    request.num_tokens = 8 * TOKENS
    assert stored(bench.store_step(request)) == [0, 1, 2, 3]
    bench.scheduler.finish_request(request)
    assert bench.scheduler.end_step().stores == []


def test_without_prompt_only_generated_tokens_are_stored_as_they_come(bench) -> None:
    request = bench.request("a", 4 * TOKENS)
    steps = [stored(bench.store_step(request, tokens)) for tokens in range(2 * TOKENS, 4 * TOKENS + 1)]
    assert [step for step in steps if step] == [[0, 1], [2], [3]]


def test_of_a_prefix_below_the_minimum_nothing_is_stored_and_all_of_it_once_it_is_longer() -> None:
    bench = Bench(layout_of(), options=SchedulerOptions(min_offload_tokens=3 * TOKENS))
    request = bench.request("a", 4 * TOKENS)
    assert stored(bench.store_step(request, 2 * TOKENS)) == []
    assert stored(bench.store_step(request, 3 * TOKENS)) == [0, 1, 2]
    assert stored(bench.store_step(request)) == [3]
    short = bench.request("b", 2 * TOKENS, first_block=20, text="b" * 99)
    bench.store_step(short)
    bench.scheduler.finish_request(short)
    assert bench.scheduler.end_step().stores == []


def test_a_hit_below_the_minimum_is_not_loaded_and_nothing_stays_pinned() -> None:
    bench = Bench(layout_of(), options=SchedulerOptions(min_load_tokens=3 * TOKENS))
    bench.serve(bench.request("a", 4 * TOKENS))
    assert bench.lookup(bench.request("b", 9 * TOKENS, first_block=20), 2 * TOKENS) == 0
    assert bench.lookup(bench.request("c", 3 * TOKENS, first_block=40)) == 0
    assert bench.primary.evictable == 4
    assert bench.lookup(bench.request("d", 9 * TOKENS, first_block=60), TOKENS) == 3 * TOKENS


def test_options_out_of_range_are_refused_line_by_line() -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerOptions(mode="later", min_load_tokens=-1, min_offload_tokens=-2)
    assert sorted(caught.value.problems) == [
        "scheduler: min_load_tokens is -1, expected a number of tokens, 0 for no limit",
        "scheduler: min_offload_tokens is -2, expected a number of tokens, 0 for no limit",
        "scheduler: mode is 'later', expected one of eager, lazy",
    ]


# -- what is stored at the end, and when there is no room


def test_the_end_of_a_request_stores_what_is_full_and_was_not_reported(bench) -> None:
    request = bench.request("a", 4 * TOKENS + 3)
    bench.compute(request)
    bench.scheduler.finish_request(request, 4 * TOKENS + 3)
    assert bench.blocks.held == {0: 1, 1: 1, 2: 1, 3: 1}
    transfers = bench.scheduler.end_step()
    assert stored(transfers) == [0, 1, 2, 3]
    bench.done(transfers)
    assert bench.present(request) == [True] * 4
    assert bench.blocks.held == {}
    assert not bench.scheduler.blocks_in_flight


def test_a_request_that_ends_before_it_was_computed_stores_nothing(bench) -> None:
    request = bench.request("a", 4 * TOKENS)
    bench.lookup(request)
    bench.scheduler.finish_request(request)
    assert bench.scheduler.end_step().stores == []


def crowded(rows: int) -> tuple[Bench, object]:
    """A primary that is full of chunks with readers."""
    bench = Bench(layout_of(), rows=rows)
    bench.serve(bench.request("old", rows * TOKENS, first_block=200, text="z" * 999))
    reader = bench.request("reader", (rows + 1) * TOKENS, first_block=300, text="z" * 999)
    assert bench.lookup(reader) == rows * TOKENS
    assert bench.primary.evictable == 0
    return bench, reader


def test_what_found_no_room_is_stored_when_the_next_chunk_is_full_or_the_request_ends() -> None:
    bench, reader = crowded(6)
    request = bench.request("a", 6 * TOKENS)
    assert stored(bench.store_step(request, 2 * TOKENS)) == []
    tries = len(bench.manager.offered)
    assert stored(bench.store_step(request, 2 * TOKENS + 5)) == []
    assert len(bench.manager.offered) == tries  # nothing new is full: no further try
    bench.scheduler.finish_request(reader)
    transfers = bench.store_step(request, 3 * TOKENS)
    assert stored(transfers) == [0, 1, 2]
    bench.done(transfers)

    bench, reader = crowded(6)
    request = bench.request("a", 4 * TOKENS)
    bench.store_step(request)
    bench.scheduler.finish_request(reader)
    bench.scheduler.finish_request(request)
    transfers = bench.scheduler.end_step()
    assert stored(transfers) == [0, 1, 2, 3]


def test_while_there_is_no_room_each_new_chunk_costs_one_small_question() -> None:
    bench, _ = crowded(6)
    request = bench.request("a", 100 * TOKENS)
    bench.store_step(request, 50 * TOKENS)
    bench.manager.offered.clear()
    for tokens in range(50 * TOKENS, 100 * TOKENS + 1):
        bench.scheduler.on_computed(request, tokens)
        bench.scheduler.end_step()
    assert [len(offered) for offered in bench.manager.offered] == [1] * 50


def test_the_last_try_does_not_drop_the_head_of_the_same_prefix() -> None:
    bench = Bench(layout_of(), rows=10)
    request = bench.request("a", 16 * TOKENS)
    bench.done(bench.store_step(request))
    assert bench.present(request)[:8] == [True] * 8
    bench.scheduler.finish_request(request)
    bench.done(bench.scheduler.end_step())
    assert bench.present(request)[:8] == [True] * 8


def test_a_step_without_a_new_full_chunk_asks_the_manager_nothing(bench) -> None:
    request = bench.request("a", 2 * TOKENS)
    bench.store_step(request)
    bench.manager.offered.clear()
    for _ in range(5):
        bench.scheduler.on_computed(request, 2 * TOKENS)
        bench.scheduler.end_step()
    assert bench.manager.offered == []


def test_a_chunk_whose_hash_comes_late_is_stored_then(bench) -> None:
    request = bench.request("a", 3 * TOKENS)
    late = request.block_hashes[0].pop()
    assert stored(bench.store_step(request, 2 * TOKENS)) == [0, 1]
    bench.scheduler.on_computed(request, 3 * TOKENS)
    assert bench.scheduler.end_step().stores == []
    request.block_hashes[0].append(late)
    bench.scheduler.on_computed(request, 3 * TOKENS)
    assert stored(bench.scheduler.end_step()) == [2]
