"""What a store's tier has recorded of its chunks, and what it asks."""

import pytest
from tests.unit.secondary.store_tier.hand_backend import HIT, MISS, RETRY, job, lookup, result_of, step

from kvtiers.host.messages import JobFailed, Probed, Status


def test_a_lookup_is_asked_at_the_end_of_the_step_and_answered_in_a_later_one(tier, backend, keys):
    assert lookup(tier, keys) == [RETRY]
    assert backend.probes == []
    step(tier)
    ((probe_id, asked),) = backend.probes
    assert asked == keys
    backend.say(Probed(probe_id, bytes([1, 1, 0])))
    step(tier)
    assert lookup(tier, keys) == [HIT, HIT, MISS]


def test_a_store_that_completes_is_a_hit_from_then_on(tier, backend, keys):
    tier.submit_store(job(1, keys))
    result_of(backend, 1, Status.DONE, Status.PRESENT, Status.DROPPED, Status.DONE, Status.DONE, Status.DONE)
    (finished,), _ = step(tier)
    assert (finished.success, list(finished.successful_keys)) == (False, [*keys[:2], *keys[3:]])
    assert lookup(tier, keys) == [HIT, HIT, RETRY]


def test_what_the_store_is_known_to_have_is_not_sent_again_while_the_answer_holds(make, backend, clock, keys):
    tier = make(exists_ttl="10s")
    lookup(tier, keys)
    step(tier)
    backend.say(Probed(backend.probes[-1][0], bytes([1] * 5)))  # of the last one nothing is known
    step(tier)
    tier.submit_store(job(1, keys[:5]))
    (finished,), _ = step(tier)
    assert (finished.job_id, finished.success, backend.jobs) == (1, True, [])
    assert tier.stats()["already_present"] == 5
    tier.submit_store(job(2, keys))
    assert [sent.keys for sent in backend.jobs] == [keys], "with one that it may lack they are all sent"
    clock.now += 11
    tier.submit_store(job(3, keys[:5]))
    assert backend.jobs[-1].job_id == 3


def test_what_the_store_says_to_have_and_did_not_give_is_sent_again(tier, backend, keys):
    lookup(tier, keys)
    step(tier)
    backend.say(Probed(backend.probes[-1][0], bytes([1] * 6)))
    step(tier)
    tier.submit_load(job(1, keys, promotion=True))
    result_of(backend, 1, *[Status.DONE] * 5, Status.CORRUPT)
    step(tier)
    tier.submit_store(job(2, keys[5:]))
    assert backend.jobs[-1].job_id == 2


@pytest.mark.parametrize("status", [Status.MISSING, Status.CORRUPT, Status.FAILED])
def test_a_chunk_that_could_not_be_loaded_is_a_miss_from_then_on(tier, backend, keys, status):
    lookup(tier, keys)
    step(tier)
    backend.say(Probed(backend.probes[-1][0], bytes([1] * 6)))
    step(tier)
    tier.submit_load(job(1, keys, promotion=True))
    result_of(backend, 1, Status.DONE, Status.DONE, status, Status.DONE, Status.DONE, Status.DONE)
    (finished,), _ = step(tier)
    assert list(finished.successful_keys) == [*keys[:2], *keys[3:]]
    assert lookup(tier, keys) == [HIT, HIT, MISS]


def test_what_was_not_given_is_written_over_by_the_next_store_that_is_sent_under_these_names(tier, backend, kit, keys):
    tier.submit_load(job(1, keys, promotion=True))
    result_of(backend, 1, *[Status.DONE] * 4, Status.MISSING, Status.CORRUPT)
    step(tier)
    tier.submit_load(job(2, keys, promotion=True))
    tier.submit_store(job(3, keys))
    tier.submit_store(job(4, keys[:4]))
    assert [sent.overwrites for sent in backend.jobs[1:]] == [b"", bytes([0, 0, 0, 0, 1, 1]), b""]
    tier.set_names(kit.NAMES)
    tier.submit_store(job(5, keys))
    result_of(backend, 2, *[Status.MISSING] * 6)
    step(tier)
    tier.submit_store(job(6, keys))
    assert [sent.overwrites for sent in backend.jobs[4:]] == [b"", b""], "they were other names' chunks"


@pytest.mark.parametrize("who", ["engine", "backend"])
def test_a_chunk_whose_load_failed_is_a_miss_though_the_load_has_not_ended(tier, backend, keys, who):
    tier.submit_store(job(1, keys))
    result_of(backend, 1, *[Status.DONE] * 6)
    step(tier)
    assert lookup(tier, keys) == [HIT] * 6
    tier.submit_load(job(2, keys[3:], promotion=True))
    if who == "engine":
        tier.abandon_job(2)
    else:
        backend.say(JobFailed(2, "ListStore kept the buffer"))
        step(tier)
    assert lookup(tier, keys) == [HIT, HIT, HIT, MISS]


def test_a_tier_whose_lookups_are_never_answered_is_taken_out_of_use_and_restarted(make, backend, clock, kit):
    tier = make(deadline="30s", breaker={"failures": 3})
    for number in range(3):
        lookup(tier, [kit.key(number)])
        step(tier)
    clock.now += 30.1
    step(tier)
    assert not tier.is_available()
    clock.now += 1.1
    step(tier)
    assert backend.restarts == []
    clock.now += 30.1
    step(tier)
    assert backend.restarts == ["it has not answered for 30s"]


def test_a_question_that_cannot_be_sent_is_a_miss(tier, backend, keys):
    backend.takes_probes = False
    lookup(tier, keys)
    step(tier)
    assert lookup(tier, keys) == [MISS]


def test_what_is_announced_is_sent_at_once_and_answered_by_the_time_of_the_lookup(tier, backend, keys):
    tier.announce(keys)
    [(probe_id, asked)] = backend.probes
    assert asked == keys
    assert lookup(tier, keys) == [RETRY]
    backend.say(Probed(probe_id, b"\1\1\0"))
    step(tier)
    assert lookup(tier, keys) == [HIT, HIT, MISS]
    tier.announce(keys)
    assert len(backend.probes) == 1, "what is known is not asked again"


def test_announced_questions_leave_room_for_those_of_lookups(tier, backend, kit):
    for number in range(200):
        tier.announce([kit.key(2 * number), kit.key(2 * number + 1)])
    assert len(backend.probes) == 64
    assert lookup(tier, [kit.key(1000)]) == [RETRY], "not a MISS, as for one question too many"
