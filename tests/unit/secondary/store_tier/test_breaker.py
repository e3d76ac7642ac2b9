"""When a store's tier is in use."""

from itertools import pairwise

from tests.unit.secondary.store_tier.hand_backend import MISS, fail_often, job, lookup, result_of, step

from kvtiers.host.messages import Opened, Probed, Status


def test_failures_take_the_tier_out_of_use_and_one_probe_after_the_delay_puts_it_back(tier, backend, clock, keys):
    fail_often(tier, backend, 3)
    assert not tier.is_available()
    assert backend.logged == ["t: taken out of use after OSError: down; it is probed until it answers"]
    step(tier)
    assert backend.probes == []
    clock.now += 1.1
    step(tier)
    step(tier)
    ((probe_id, _),) = backend.probes
    backend.say(Probed(probe_id, b"\x00"))
    step(tier)
    assert tier.is_available()


def test_failed_probes_come_at_growing_distances(tier, backend, clock):
    fail_often(tier, backend, 3)
    times = []
    for _ in range(400):
        clock.now += 0.1
        step(tier)
        if backend.probes:
            times.append(clock.now)
            probe_id, _ = backend.probes.pop()
            backend.say(Probed(probe_id, b"", "OSError: down"))
    gaps = [round(later - earlier) for earlier, later in pairwise(times)]
    assert gaps[:4] == [2, 4, 8, 16]


def test_questions_that_fail_count_as_failures(tier, backend, kit):
    for number in range(3):
        lookup(tier, [kit.key(number)])
        step(tier)
        backend.say(Probed(backend.probes[-1][0], b"", "TimeoutError"))
        step(tier)
        assert lookup(tier, [kit.key(number)]) == [MISS]
    assert not tier.is_available()


def test_answers_between_failures_keep_the_tier_in_use(tier, backend, kit):
    for number in range(3):
        fail_often(tier, backend, 2, first=1000 + 10 * number)
        lookup(tier, [kit.key(number)])
        step(tier)
        backend.say(Probed(backend.probes[-1][0], b"\x00"))
        step(tier)
    assert tier.is_available(), "never three in a row"


def test_a_probe_that_ended_with_its_host_is_not_held_against_the_next_host(tier, backend, clock):
    fail_often(tier, backend, 3)
    clock.now += 1.1
    step(tier)
    assert len(backend.probes) == 1
    backend.say(Opened("its host ended"))
    step(tier)
    clock.now += 31.0
    step(tier)
    assert backend.restarts == [], "the next one is still opening its store"
    backend.say(Opened())
    step(tier)
    backend.say(Probed(backend.probes[-1][0], b"\x00"))
    step(tier)
    assert tier.is_available()


def test_the_answer_to_an_earlier_probe_of_the_breaker_is_not_taken_for_the_later_ones(tier, backend, clock):
    fail_often(tier, backend, 3)
    clock.now += 1.1
    step(tier)
    (first, _) = backend.probes.pop()
    clock.now += 30.1
    step(tier)
    clock.now += 2.1
    step(tier)
    (second, _) = backend.probes.pop()
    assert first != second
    backend.say(Probed(first, b"\x00"))
    step(tier)
    assert not tier.is_available()
    backend.say(Probed(second, b"\x00"))
    step(tier)
    assert tier.is_available()


def answer_probe(tier, backend, clock):
    """Let the breaker's probe come, and the store answer it."""
    before = len(backend.probes)
    while len(backend.probes) == before:
        clock.now += 0.5
        step(tier)
    backend.say(Probed(backend.probes[-1][0], b"\x00"))
    step(tier)
    assert tier.is_available()


def load(tier, backend, number, status):
    tier.submit_load(job(number, [b"k" * 36], promotion=True))
    result_of(backend, number, status, error="ValueError: bad" if status is Status.FAILED else "")
    step(tier)


def test_a_store_whose_loads_fail_while_it_takes_values_is_taken_out_of_use_in_three_lines_and_no_more(
    tier, backend, clock, kit
):
    for number in range(3):
        assert tier.is_available()
        load(tier, backend, number, Status.FAILED)
        tier.submit_store(job(100 + number, [kit.key(number)]))
        result_of(backend, 100 + number, Status.PRESENT)
        step(tier)
    assert not tier.is_available()
    for number in range(200, 210):
        answer_probe(tier, backend, clock)
        load(tier, backend, number, Status.FAILED)
        assert not tier.is_available()
    first, back, again = backend.logged
    assert first == "t: taken out of use after ValueError: bad; it is probed until it answers"
    assert back == "t: answers again; back in use"
    assert again.startswith("t: taken out of use again after ValueError: bad: it answers questions, but its loads fail")
    answer_probe(tier, backend, clock)
    load(tier, backend, 300, Status.DONE)
    assert backend.logged[3:] == ["t: its loads succeed again; back in use"]


# -- an idle engine


def test_a_tier_that_is_only_tended_is_probed_and_comes_back(tier, backend, clock):
    fail_often(tier, backend, 3)
    while not backend.probes:
        clock.now += 1.0
        tier.tend()
    backend.say(Probed(backend.probes[-1][0], b"\x00"))
    tier.tend()
    assert tier.is_available()
    assert backend.logged[-1] == "t: answers again; back in use"
    clock.now += 100.0
    assert tier.stats()["breaker_seconds"] == 100.0


def test_what_becomes_of_jobs_while_a_tier_is_tended_waits_for_the_engine(tier, backend, keys):
    tier.submit_store(job(1, keys[:2]))
    result_of(backend, 1, Status.DONE, Status.DONE)
    tier.tend()
    tier.tend()
    (finished,), _ = step(tier)
    assert finished.success


def test_a_store_that_does_not_answer_is_silent_for_as_long_as_calls_wait_for_it(tier, backend, clock, kit):
    def figures():
        stats = tier.stats()
        return stats["waiting_calls"], stats["silent_seconds"]

    clock.now += 1000.0
    assert figures() == (0, 0.0)
    lookup(tier, [kit.key(1)])
    step(tier)
    clock.now += 7.0
    tier.submit_load(job(5, [kit.key(2)], promotion=True))
    clock.now += 10.0
    assert figures() == (2, 17.0)
    result_of(backend, 5, Status.FAILED, error="TimeoutError")
    step(tier)
    assert figures() == (1, 17.0), "an error is no answer"
    backend.say(Probed(backend.probes[-1][0], b"\x00"))
    step(tier)
    assert figures() == (0, 0.0)
    clock.now += 100.0
    lookup(tier, [kit.key(3)])
    step(tier)
    assert figures() == (1, 0.0), "nobody had asked it anything"
