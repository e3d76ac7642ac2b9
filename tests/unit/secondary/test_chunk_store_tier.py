"""The engine's side of a store tier, against a backend that does what the test says, on the test's own clock."""

from array import array
from collections import deque
from itertools import pairwise

import pytest

from kvtiers.api import LookupResult, TierConfig, TransferJob
from kvtiers.base import RequestContext
from kvtiers.secondary.chunk_store_tier import ChunkStoreTier
from kvtiers.secondary.protocol import JobDone, JobFailed, JobStarted, Opened, Probed, Status

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY
REQUEST = RequestContext("r")


class HandBackend:
    """A backend whose host is the test: it sees what is sent, and says what comes back."""

    def __init__(self):
        self.jobs, self.probes, self.abandoned, self.restarts, self.logged = [], [], [], [], []
        self.names = None
        self.takes_jobs = self.takes_probes = True
        self._news = deque()
        self.drained = True

    def say(self, *events):
        self._news.extend(events)

    def wait_open(self, timeout):
        return ""

    def send_job(self, job):
        self.jobs.append(job)
        return self.takes_jobs

    def send_probe(self, probe_id, keys, *, is_prefix):
        self.probes.append((probe_id, list(keys)))
        return self.takes_probes

    def set_names(self, names):
        self.names = names

    def abandon(self, job_id):
        self.abandoned.append(job_id)

    def flush(self):
        pass

    def poll(self):
        news, self._news = list(self._news), deque()
        return news

    def restart(self, reason):
        self.restarts.append(reason)

    def log(self, level, text):
        self.logged.append(text)

    def stats(self):
        return {"held_values": 3.0}

    def drain(self, timeout):
        return self.drained

    def close(self, timeout):
        pass


@pytest.fixture
def backend():
    return HandBackend()


@pytest.fixture
def make(clock, backend):
    def make(**options):
        tier = ChunkStoreTier(TierConfig.model_validate({"type": "t", **options}), backend, clock)
        backend.say(Opened())
        step(tier)
        return tier

    return make


@pytest.fixture
def tier(make):
    return make(breaker={"failures": 3, "delay": "1s"})


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(6)]


def step(tier):
    """One step of the engine: news, results, questions; returns the results."""
    tier.get_started_jobs()
    failed = list(tier.get_failed_jobs())
    finished = list(tier.get_finished_jobs())
    tier.on_schedule_end()
    return finished, failed


def job(job_id, keys, *, promotion=False):
    return TransferJob(job_id, keys, memoryview(array("i", range(len(keys)))), promotion, REQUEST)


def result_of(backend, job_id, *statuses, error=""):
    backend.say(JobStarted(job_id), JobDone(job_id, bytes(statuses), 4096, 0.1, 0, error))


def lookup(tier, keys):
    return list(tier.lookup_many(keys, REQUEST))


def fail_often(tier, backend, times, first=1000):
    """Let so many stores fail."""
    for number in range(first, first + times):
        tier.submit_store(job(number, [b"k" * 36]))
        result_of(backend, number, Status.FAILED, error="OSError: down")
        step(tier)


# -- opening


def test_a_tier_is_not_available_until_its_store_is_open(clock, backend):
    tier = ChunkStoreTier(TierConfig(type="t"), backend, clock)
    assert not tier.is_available()
    backend.say(Opened())
    step(tier)
    assert tier.is_available()


def test_a_store_that_cannot_be_opened_is_one_warning_however_often_it_is_tried(clock, backend):
    tier = ChunkStoreTier(TierConfig(type="t"), backend, clock)
    for _ in range(5):
        backend.say(Opened("ConnectionError: refused"))
        step(tier)
        clock.now += 10
    assert not tier.is_available()
    assert backend.probes == [], "what is not open is not probed"
    assert len(backend.logged) == 1
    assert backend.logged[0].startswith("t: out of use: ConnectionError: refused")


def test_a_store_that_opens_late_is_probed_and_then_in_use(clock, backend, keys):
    tier = ChunkStoreTier(TierConfig(type="t"), backend, clock)
    backend.say(Opened("ConnectionError: refused"))
    step(tier)
    backend.say(Opened())
    step(tier)
    (probe_id, _) = backend.probes.pop()
    assert not tier.is_available()
    backend.say(Probed(probe_id, b"\x00"))
    step(tier)
    assert tier.is_available()
    assert backend.logged[-1] == "t: answers again; back in use"


def test_a_host_that_ended_is_out_of_use_at_once_and_hits_resume_when_it_is_back(tier, backend, keys):
    tier.submit_store(job(1, keys))
    result_of(backend, 1, *[Status.DONE] * 6)
    step(tier)
    assert lookup(tier, keys) == [HIT] * 6
    backend.say(Opened("its host ended"))
    step(tier)
    assert not tier.is_available()
    backend.say(Opened())
    step(tier)
    backend.say(Probed(backend.probes[-1][0], b"\x00"))
    step(tier)
    assert tier.is_available()
    assert lookup(tier, keys) == [RETRY], "what was known may have gone with the host"


# -- lookups


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


def test_a_tier_whose_lookups_are_never_answered_is_taken_out_of_use_and_begun_anew(make, backend, clock, kit):
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


# -- jobs


def test_a_full_store_queue_takes_what_it_has_room_for_and_drops_and_counts_the_rest(make, backend, keys):
    tier = make(store_queue=4)
    tier.submit_store(job(1, keys))
    tier.submit_store(job(2, keys[:2]))
    assert [(sent.job_id, len(sent.keys), len(sent.rows)) for sent in backend.jobs] == [(1, 4, 4)]
    (finished,), _ = step(tier)
    assert (finished.job_id, finished.success) == (2, False)
    result_of(backend, 1, *[Status.DONE] * 4)
    (finished,), _ = step(tier)
    assert (finished.success, list(finished.successful_keys)) == (False, keys[:4])
    assert tier.stats()["dropped_queue"] == 4
    assert tier.is_available(), "a full queue is no failure of the tier"
    tier.submit_store(job(3, keys[:3]))
    assert backend.jobs[-1].job_id == 3


def test_loads_are_not_held_up_by_a_full_store_queue(make, backend, keys):
    tier = make(store_queue=1)
    tier.submit_store(job(1, keys[:1]))
    tier.submit_load(job(2, keys, promotion=True))
    assert [len(sent.keys) for sent in backend.jobs] == [1, 6]


def test_a_job_that_the_backend_has_no_room_for_fails_at_once(tier, backend, keys):
    backend.takes_jobs = False
    tier.submit_load(job(1, keys, promotion=True))
    tier.submit_store(job(2, keys))
    finished, _ = step(tier)
    assert [(result.job_id, result.success) for result in finished] == [(1, False), (2, False)]
    assert lookup(tier, keys) == [MISS]
    assert tier.stats()["storing_chunks"] == 0
    assert tier.stats()["dropped_queue"] == len(keys), "the store's: a load is nothing that waits to be written"


def test_a_job_that_failed_but_may_still_touch_its_rows_is_told_first_and_reported_later(tier, backend, keys):
    tier.submit_load(job(1, keys, promotion=True))
    backend.say(JobStarted(1), JobFailed(1, "ListStore kept the buffer"))
    finished, failed = step(tier)
    assert (finished, failed) == ([], [1])
    backend.say(JobFailed(1, "again"))
    assert step(tier) == ([], [])
    backend.say(JobDone(1, bytes([Status.FAILED]) * 6, 0, 1.0, 0, "ListStore kept the buffer"))
    finished, _ = step(tier)
    assert [result.job_id for result in finished] == [1]
    assert tier.stats()["errors"] == 1, "one failure, however often it is told"


def test_an_overdue_job_counts_once_and_its_late_success_does_not_make_up_for_it(tier, backend, keys):
    for number in range(3):
        tier.submit_load(job(number, keys[:1], promotion=True))
        tier.abandon_job(number)
        result_of(backend, number, Status.DONE)
        step(tier)
    assert backend.abandoned == [0, 1, 2]
    assert tier.stats()["errors"] == 3
    assert not tier.is_available()


def test_starts_are_passed_on(tier, backend, keys):
    tier.submit_load(job(1, keys, promotion=True))
    backend.say(JobStarted(1))
    assert list(tier.get_started_jobs()) == [1]
    assert list(tier.get_started_jobs()) == []


def test_damage_is_counted_logged_and_no_failure_of_the_tier(tier, backend, keys):
    for number in range(10):
        tier.submit_load(job(number, keys[:2], promotion=True))
        result_of(backend, number, Status.CORRUPT, Status.DONE)
        step(tier)
    assert tier.stats()["seal_failures"] == 10
    assert backend.logged[0] == "t: 1 of 2 values are damaged; counted as misses"
    assert tier.is_available()


def test_a_full_store_is_no_failure_of_the_tier(tier, backend, keys):
    for number in range(10):
        tier.submit_store(job(number, keys[:1]))
        result_of(backend, number, Status.DROPPED)
        step(tier)
    assert tier.stats()["dropped_full"] == 10
    assert tier.is_available()


# -- the breaker


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


# -- other names, the end, figures


def test_after_new_names_nothing_old_is_believed_and_old_jobs_teach_nothing(tier, backend, kit, keys):
    tier.submit_store(job(1, keys[:3]))
    tier.submit_load(job(2, keys[3:], promotion=True))
    tier.submit_store(job(3, keys[:1]))
    result_of(backend, 3, Status.DONE)
    step(tier)
    tier.set_names(kit.NAMES)
    assert backend.names is kit.NAMES
    result_of(backend, 1, *[Status.DONE] * 3)
    result_of(backend, 2, *[Status.MISSING] * 3)
    finished, _ = step(tier)
    assert sorted(result.job_id for result in finished) == [1, 2]
    assert lookup(tier, keys[:1]) == [RETRY]
    assert lookup(tier, keys[3:]) == [RETRY]


@pytest.mark.parametrize("who", ["engine", "backend"])
def test_a_load_of_old_names_that_fails_says_nothing_of_the_new(tier, backend, kit, keys, who):
    tier.submit_load(job(1, keys, promotion=True))
    tier.set_names(kit.NAMES)
    tier.submit_store(job(2, keys))
    result_of(backend, 2, *[Status.DONE] * 6)
    step(tier)
    if who == "engine":
        tier.abandon_job(1)
    else:
        backend.say(JobFailed(1, "ListStore kept the buffer"))
        step(tier)
    assert lookup(tier, keys) == [HIT] * 6


def test_a_drain_says_how_much_was_dropped_and_still_reports_it(tier, backend, keys):
    tier.submit_store(job(1, keys))
    tier.submit_store(job(2, keys[:2]))
    tier.submit_store(job(3, keys[:1]))
    tier.submit_load(job(4, keys[:4], promotion=True))
    result_of(backend, 1, *[Status.DONE] * 4, Status.FAILED, Status.FAILED, error="the last step did not see it")
    result_of(backend, 3, Status.DONE)

    def drain(timeout):
        result_of(backend, 2, Status.FAILED, Status.FAILED, error="dropped at shutdown")
        return False

    backend.drain = drain
    assert not tier.drain(2.0)
    assert backend.logged == ["t: shutdown within 2s dropped 3 jobs with 8 chunks"]
    assert tier.stats()["dropped_shutdown"] == 8
    assert sorted(result.job_id for result in tier.get_finished_jobs()) == [1, 2, 3]


def test_a_drain_that_drops_nothing_says_nothing(tier, backend, keys):
    tier.submit_store(job(1, keys))
    result_of(backend, 1, *[Status.DONE] * 6)
    assert tier.drain(2.0)
    assert backend.logged == []


def test_what_becomes_of_each_value_is_counted_by_its_kind(tier, backend, keys):
    tier.submit_load(job(1, keys, promotion=True))
    ends = (Status.MISSING, Status.MISSING, Status.CORRUPT, Status.DONE, Status.FAILED, Status.DONE)
    backend.say(JobDone(1, bytes(ends), 8192, 0.1, 5, "OSError: down"))
    step(tier)
    tier.submit_store(job(2, keys))
    backend.say(JobDone(2, bytes([Status.PRESENT] * 3 + [Status.DROPPED] * 2 + [Status.DONE]), 4096, 0.1, 2))
    step(tier)
    backend.takes_jobs = False
    tier.submit_store(job(3, keys))
    step(tier)
    figures = tier.stats()
    counted = ("missing", "seal_failures", "errors", "retries", "already_present", "dropped_full", "dropped_queue")
    assert [figures[name] for name in counted] == [2, 1, 1, 7, 3, 2, 6]
    assert figures["storing_chunks"] == 0


def test_figures_join_the_stores_own_with_the_tiers(tier):
    figures = tier.stats()
    assert figures["held_values"] == 3
    assert figures["open"] == 1
    assert figures["breaker_state"] == 0
    assert all(isinstance(value, int | float) for value in figures.values())


def test_what_is_asked_ahead_is_sent_at_once_and_answered_by_the_time_of_the_lookup(tier, backend, keys):
    tier.ask_ahead(keys)
    [(probe_id, asked)] = backend.probes
    assert asked == keys
    assert lookup(tier, keys) == [RETRY]
    backend.say(Probed(probe_id, b"\1\1\0"))
    step(tier)
    assert lookup(tier, keys) == [HIT, HIT, MISS]
    tier.ask_ahead(keys)
    assert len(backend.probes) == 1, "what is known is not asked again"


def test_questions_asked_ahead_leave_room_for_those_of_lookups(tier, backend, kit):
    for number in range(200):
        tier.ask_ahead([kit.key(2 * number), kit.key(2 * number + 1)])
    assert len(backend.probes) == 64
    assert lookup(tier, [kit.key(1000)]) == [RETRY], "not a MISS, as for one question too many"
