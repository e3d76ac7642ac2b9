"""Jobs of a store's tier, and what is counted of them."""

import itertools

from tests.unit.secondary.store_tier.hand_backend import MISS, job, lookup, result_of, step

from kvtiers.host.messages import JobDone, JobFailed, JobStarted, Status
from kvtiers.types import RequestContext


def test_the_store_queue_takes_whole_jobs_while_it_has_room_and_drops_and_counts_the_others(make, backend, kit, keys):
    tier = make(store_queue=4)
    tier.submit_store(job(1, keys))
    step(tier)
    tier.submit_store(job(2, keys[:2]))
    assert [(sent.job_id, len(sent.keys), len(sent.rows)) for sent in backend.jobs] == [(1, 6, 6)]
    (finished,), _ = step(tier)
    assert (finished.job_id, finished.success) == (2, False)
    result_of(backend, 1, *[Status.DONE] * 6)
    (finished,), _ = step(tier)
    assert finished.success
    assert tier.stats()["dropped_queue"] == 2
    assert tier.is_available(), "a full queue is no failure of the tier"
    tier.submit_store(job(3, [kit.key(100 + place) for place in range(3)]))
    assert backend.jobs[-1].job_id == 3


def test_the_jobs_of_a_request_in_a_step_are_queued_together_or_not_at_all(make, backend, kit):
    """A large store comes as several jobs; the windows of a hybrid's prompt, needed to find it, are last."""
    tier = make(store_queue=4)
    first, second = RequestContext("first"), RequestContext("second")
    parts = [[kit.key(100 * number + place) for place in range(4)] for number in range(6)]
    for number, context in enumerate((first, first, first, second, second)):
        tier.submit_store(job(number, parts[number], context=context))
    assert [sent.job_id for sent in backend.jobs] == [0, 1, 2]
    assert tier.stats()["dropped_queue"] == 8
    step(tier)
    tier.submit_store(job(5, parts[5], context=first))
    assert tier.stats()["dropped_queue"] == 12, "the next step is asked anew"


def test_jobs_without_a_request_are_queued_each_by_itself(make, backend, kit):
    tier = make(store_queue=4)
    nobody = RequestContext("")
    for number in range(3):
        tier.submit_store(job(number, [kit.key(100 * number + place) for place in range(4)], context=nobody))
    assert [sent.job_id for sent in backend.jobs] == [0]
    assert tier.stats()["dropped_queue"] == 8


def test_the_queue_of_a_store_has_room_for_two_seconds_of_its_rate(make, backend, kit, clock):
    """A burst is computed faster than a fast store writes it; what waits for a slow one would outlive its deadline."""
    tier = make(rows=8 * 9000, row_bytes=2**18)
    numbers = itertools.count(1)

    def taken(count, *, seconds=0.0):
        """Offer stores of 100 chunks each in one step until one is refused; write those taken in so many seconds."""
        sent = []
        while True:
            number = next(numbers)
            tier.submit_store(job(number, [kit.key(number * 10_000 + place) for place in range(count)]))
            if backend.jobs[-1].job_id != number:
                break
            sent.append(number)
            tier.on_schedule_end()
        clock.now += seconds
        for number in sent:
            result_of(backend, number, *[Status.DONE] * count)
        step(tier)
        return len(sent) * count

    assert taken(100, seconds=1.0) == 1100, "1,024 values while nothing is known of the store"
    assert taken(100, seconds=1.0) == 2200, "of 1,100 a second"
    clock.now += 3600.0
    assert 3200 <= taken(100, seconds=0.1) <= 3600, "of some 1,700 a second: a pause says nothing of its speed"
    assert taken(100, seconds=0.1) > 6000
    assert taken(100, seconds=20.0) == 9000, "an eighth of the rows"
    assert taken(100) == 1100, "it has become slow"


def test_small_values_may_wait_in_256_mib(make, backend, kit):
    tier = make(rows=1 << 20, row_bytes=2**16)
    for number in range(5):
        tier.submit_store(job(number, [kit.key(number * 10_000 + place) for place in range(1024)]))
        tier.on_schedule_end()
    assert [sent.job_id for sent in backend.jobs] == [0, 1, 2, 3]


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


def test_a_job_that_failed_but_may_still_touch_its_rows_is_reported_as_failed_first_and_ends_later(tier, backend, keys):
    tier.submit_load(job(1, keys, promotion=True))
    backend.say(JobStarted(1), JobFailed(1, "ListStore kept the buffer"))
    finished, failed = step(tier)
    assert (finished, failed) == ([], [1])
    backend.say(JobFailed(1, "again"))
    assert step(tier) == ([], [])
    backend.say(JobDone(1, bytes([Status.FAILED]) * 6, 0, 1.0, 0, "ListStore kept the buffer"))
    finished, _ = step(tier)
    assert [result.job_id for result in finished] == [1]
    assert tier.stats()["errors"] == 1, "one failure, however often it is reported"


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
    assert list(tier.poll()) == [JobStarted(1)]
    assert list(tier.poll()) == []


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
