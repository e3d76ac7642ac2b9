"""How many rows the requests in flight need."""

import pytest

from kvtiers_replay.report.summary import chunks_in_flight
from kvtiers_replay.workload import ReplayRequest

REQUESTS = [
    ReplayRequest(16 * len(blocks) + 1, [each.encode() for each in blocks]) for blocks in ("ab", "abc", "x", "y")
]


@pytest.mark.parametrize(("concurrency", "chunks"), [(1, 3), (2, 4), (3, 5), (9, 5)])
def test_what_requests_share_needs_its_rows_once(concurrency, chunks) -> None:
    assert chunks_in_flight(REQUESTS, concurrency, 1) == chunks


def test_a_chunk_of_several_blocks_is_one_and_what_is_not_full_none() -> None:
    assert chunks_in_flight([ReplayRequest(100, [b"a", b"b", b"c", b"d", b"e"])], 1, 2) == 2
