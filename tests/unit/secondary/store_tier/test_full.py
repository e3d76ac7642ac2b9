"""A store that does not take values: said once with the reason or what to do, and once when it does again."""

import pytest
from tests.unit.secondary.store_tier.hand_backend import job, result_of, step

from kvtiers.host.messages import Status

FULL = "t: full: its store has not taken 4 values; what it holds is read as before; give it more room, or have it"


@pytest.fixture
def store(tier, backend, kit):
    """Store so many new chunks, of which so many are dropped."""
    numbers = iter(range(1, 1000))

    def store(count, dropped, status=Status.DROPPED, why=""):
        number = next(numbers)
        tier.submit_store(job(number, [kit.key(100 * number + place) for place in range(count)]))
        result_of(backend, number, *[status] * dropped, *[Status.DONE] * (count - dropped), error=why)
        step(tier)

    return store


def test_a_full_store_is_said_once_and_is_a_figure_and_no_failure(tier, backend, store):
    for _ in range(20):
        store(4, 4)
    assert [line for line in backend.logged if line.startswith(FULL)] == backend.logged
    assert len(backend.logged) == 1
    figures = tier.stats()
    assert (figures["full"], figures["dropped_full"], figures["breaker_state"]) == (1, 80, 0)


def test_the_end_says_how_many_were_dropped_and_counting_begins_again(tier, backend, store, clock):
    store(4, 4)
    clock.now += 29.0
    store(6, 2)
    clock.now += 29.0
    store(4, 0)
    assert tier.stats()["full"] == 1, "at its limit a store takes some and drops some"
    clock.now += 1.0
    store(4, 0)
    assert backend.logged[1:] == ["t: takes values again; 6 were dropped while it was full"]
    assert tier.stats()["full"] == 0
    store(4, 4)
    assert backend.logged[2].startswith(FULL)


def test_a_store_that_has_all_of_it_already_has_not_taken_anything(tier, backend, store, keys, clock):
    store(4, 4)
    clock.now += 60.0
    tier.submit_store(job(2000, keys[:2]))
    result_of(backend, 2000, Status.PRESENT, Status.PRESENT)
    step(tier)
    assert tier.stats()["full"] == 1


def test_a_store_that_refuses_some_is_said_once_with_its_reason_and_is_neither_full_nor_a_failure(
    tier, backend, store, clock
):
    for _ in range(20):
        store(6, 2, Status.REFUSED, "node 3: connection refused")
    assert backend.logged == [
        "t: refusing: its store has not taken 2 values; what it holds is read as before; node 3: connection refused"
    ]
    figures = tier.stats()
    assert (figures["refusing"], figures["full"], figures["breaker_state"]) == (1, 0, 0)
    assert (figures["dropped_refused"], figures["dropped_full"], figures["errors"]) == (40, 0, 0)
    clock.now += 31.0
    store(6, 0)
    assert backend.logged[1:] == ["t: takes values again; 40 were dropped while it refused some"]
    assert tier.stats()["refusing"] == 0


def test_its_figures_are_of_the_moment_and_not_of_the_line_in_the_log(tier, store, clock):
    store(4, 4)
    store(6, 2)
    clock.now += 40.0
    figures = tier.stats()
    assert (figures["not_taken"], figures["taken_meanwhile"], figures["not_taken_seconds"]) == (6, 4, 40.0)
    store(4, 0)
    figures = tier.stats()
    assert [figures[name] for name in ("full", "not_taken", "taken_meanwhile", "not_taken_seconds")] == [0] * 4


def test_an_idle_engine_does_not_call_its_store_full_for_ever_and_says_nothing_of_that(tier, backend, store, clock):
    store(4, 4)
    clock.now += 299.0
    assert tier.stats()["full"] == 1
    clock.now += 1.0
    assert tier.stats()["full"] == 0, "it is not known any more"
    assert len(backend.logged) == 1
    store(4, 4)
    assert (tier.stats()["full"], tier.stats()["not_taken"]) == (1, 8)
    assert len(backend.logged) == 1, "it is not said again before it has ended"
    clock.now += 301.0
    store(4, 0)
    assert backend.logged[1:] == ["t: takes values again; 8 were dropped while it was full"]
