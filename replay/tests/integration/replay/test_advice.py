"""What the report says to change, done: the hits that were missing are there."""

import re

import pytest

from kvtiers_replay.code_workload import code_workload
from kvtiers_replay.run import ReplayOptions, replay

from .setups import config

MEMORY = {"type": "memory", "io": "thread", "capacity": "256MiB"}
ADVICE = re.compile(
    r"The primary is too small: it holds 150 chunks, and 16 requests in flight take up to (\d+), .* "
    r"Give primary\.capacity at least (\d+MiB) \(--primary-chunks \1\), or lower --concurrency to (\d+)\."
)


def rate(options: ReplayOptions, **changed) -> tuple[float, list[str]]:
    results = replay(config(MEMORY, budgets={}, **changed), code_workload(200), options)
    assert results.wrong_bytes == 0
    return results.prefix_hits / results.references, results.verdict[1:]


def assert_enough(lines: list[str]) -> None:
    """Check the primary. How many rows a tier pins depends on how fast its thread is: that may be named next."""
    assert not [line for line in lines if "The primary is too small" in line]
    assert len(lines) <= 1, lines


@pytest.fixture(scope="module")
def small() -> tuple[float, re.Match[str]]:
    hits, lines = rate(ReplayOptions(concurrency=16, primary_chunks=150))
    (line,) = lines
    found = ADVICE.fullmatch(line)
    assert found, line
    return hits, found


def test_with_as_many_rows_as_it_says_the_hits_are_there(small) -> None:
    hits, advice = small
    assert hits < 0.4
    larger, lines = rate(ReplayOptions(concurrency=16, primary_chunks=int(advice[1])))
    assert larger > hits + 0.3
    assert_enough(lines)


def test_with_the_capacity_that_it_says_there_are_so_many_rows(small) -> None:
    hits, advice = small
    larger, lines = rate(ReplayOptions(concurrency=16), primary={"capacity": advice[2]})
    assert larger > hits + 0.3
    assert_enough(lines)


def test_with_as_few_requests_in_flight_as_it_says_the_hits_are_there(small) -> None:
    hits, advice = small
    fewer, lines = rate(ReplayOptions(concurrency=int(advice[3]), primary_chunks=150))
    assert fewer > hits + 0.3
    assert_enough(lines)
