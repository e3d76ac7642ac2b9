"""When a store's tier is in use."""

from itertools import pairwise

from tests.unit.secondary.store_tier.hand_backend import MISS, fail_often, lookup, step

from kvtiers.host.messages import Opened, Probed


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
