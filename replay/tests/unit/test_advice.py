"""How many rows the requests in flight need, and which budget of them costs hits."""

from types import SimpleNamespace

import pytest

from kvtiers_replay.report.summary import _budget_advice, chunks_in_flight
from kvtiers_replay.workload import ReplayRequest

REQUESTS = [
    ReplayRequest(16 * len(blocks) + 1, [each.encode() for each in blocks]) for blocks in ("ab", "abc", "x", "y")
]


@pytest.mark.parametrize(("concurrency", "chunks"), [(1, 3), (2, 4), (3, 5), (9, 5)])
def test_what_requests_share_needs_its_rows_once(concurrency, chunks) -> None:
    assert chunks_in_flight(REQUESTS, concurrency, 1) == chunks


def test_a_chunk_of_several_blocks_is_one_and_what_is_not_full_none() -> None:
    assert chunks_in_flight([ReplayRequest(100, [b"a", b"b", b"c", b"d", b"e"])], 1, 2) == 2


@pytest.mark.parametrize(
    ("over", "advice"),
    [
        ({"over_one_tier": 8, "over_all_tiers": 3}, "raise 'budgets.one_tier' (at most to 'all_tiers')"),
        ({"over_all_tiers": 8}, "raise 'budgets.all_tiers' (and lower 'protected', if they exceed 100% together)"),
        ({"over_store_reserve": 8}, "lower 'budgets.store_reserve'"),
        ({"over_one_tier": 5}, ""),
    ],
)
def test_the_budget_that_costs_a_tier_hits_in_all_engines_together_is_named(over, advice) -> None:
    """Two engines that were asked for 500 chunks each: of these more than 1 % got no row."""
    names = ("over_one_tier", "over_all_tiers", "over_store_reserve")
    figures = {name: over.get(name, 0) for name in names} | {"loaded_chunks": 484, "failed_loads": 0}
    figures |= {"stored_chunks": 500, "failed_stores": 0}
    engines = [SimpleNamespace(stats={"engine": {"lookups": 500}, "tiers": {"fs": figures}}) for _ in range(2)]
    lines = _budget_advice(engines)
    if not advice:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"fs: 'budgets.{next(iter(over)).removeprefix('over_')}' costs hits: 16 chunks got no row")
    assert line.endswith(f"; {advice}, or raise 'primary.capacity'.")
