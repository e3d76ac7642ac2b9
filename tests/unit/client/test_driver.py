"""Whose rows are whose, which time is over, and what a tier may not report."""

import numpy as np
import pytest

from kvtiers.api import JobResult
from kvtiers.client.driver import CLOSED, Driver
from kvtiers.client.requests import Get, Prefix, Put
from kvtiers.secondary.tier_jobs import JobFailed, JobReleased, JobStarted

PATIENCE = 60.0


class Unreadable:
    """Whatever is read of it raises."""

    @property
    def job_id(self):
        raise ValueError("its id")

    def __hash__(self):
        raise ValueError("its hash")

    def __repr__(self):
        raise ValueError("its repr")


def _raising():
    raise OSError("its keys")
    yield


def test_rows_of_a_call_that_is_over_are_free_only_when_its_job_has_ended(bench, played, keys, clock):
    tier = played(*keys)
    bench.drive(tier)
    get = bench.begin(Get, keys, clock.now + 1)
    get.lease.release()  # as its caller does, whose time is over
    clock.now += 2
    bench.step()
    assert get.over.is_set()
    assert bench.free == 4
    tier.end(success=True)
    bench.step()
    assert bench.free == 8
    assert get.found == {}, "what comes later is not taken in"


def test_no_job_begins_when_the_time_is_over_though_the_tier_has_answered(bench, played, keys, clock):
    tier = played(*keys)
    tier.answers = False
    bench.drive(tier)
    get = bench.begin(Get, keys, clock.now + 1)
    get.lease.release()
    assert bench.free == 4, "the driver holds the rows of a request that is not over"
    tier.answers = True
    clock.now += 1
    bench.step()
    assert tier.jobs == {}
    assert get.over.is_set()
    assert bench.free == 8


def test_a_request_that_comes_late_is_over_at_once(bench, played, keys, clock):
    tier = played(*keys)
    bench.drive(tier)
    put = bench.begin(Put, keys, clock.now)
    assert (put.over.is_set(), put.error, tier.jobs) == (True, "no time left", {})


def test_an_overdue_job_is_given_up_once_and_its_deadline_begins_with_its_start(bench, played, keys, clock):
    tier = played()
    bench.drive(tier)
    bench.begin(Put, keys)
    (job_id,) = tier.jobs
    clock.now += 20
    tier.says.append(JobStarted(job_id))
    bench.step()
    clock.now += 20
    bench.step()
    assert tier.abandoned == []
    clock.now += 11
    bench.step()
    clock.now += 11
    bench.step()
    assert tier.abandoned == [job_id]


def test_a_job_that_has_failed_in_use_keeps_its_rows_and_says_why(bench, played, keys):
    tier = played()
    bench.drive(tier)
    put = bench.begin(Put, keys)
    put.lease.release()
    tier.says.append(JobFailed(next(iter(tier.jobs)), "its host ended"))
    bench.step()
    assert bench.free == 4
    tier.end()
    bench.step()
    assert (bench.free, put.error) == (8, "t0: its host ended")


def test_a_job_that_has_failed_in_use_and_does_not_end_by_its_deadline_is_given_up_once(bench, played, keys, clock):
    tier = played()
    driver = bench.drive(tier)
    bench.begin(Put, keys)
    (job_id,) = tier.jobs
    tier.says.append(JobFailed(job_id, ""))
    bench.step()
    assert tier.abandoned == []
    for _ in range(2):
        clock.now += 31
        bench.step()
    assert tier.abandoned == [job_id], "else nothing opens the breaker of a managed tier that ends no job"
    metrics = driver.slots[0].metrics
    assert (metrics.expired_jobs, metrics.running_jobs, metrics.quarantined_rows) == (1, 0, 4)
    tier.end()
    bench.step()
    assert (metrics.running_jobs, metrics.quarantined_rows) == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_tier_may_release_the_buffer_that_names_its_rows(bench, played, keys, fails):
    tier = played()
    driver = bench.drive(tier)
    put = bench.begin(Put, keys)
    put.lease.release()
    with tier.jobs[1].chunk_ids:
        pass
    if fails:
        tier.says.append(JobFailed(1, ""))
    tier.end(success=True)
    bench.step()
    assert (put.over.is_set(), bench.free, list(put.stored["t0"])) == (True, 8, keys)
    assert driver.slots[0].metrics.quarantined_rows == 0


def test_a_tier_that_reports_what_it_was_not_given_is_put_out_of_use(bench, played, keys):
    stranger, other = played(), played(*keys)
    driver = bench.drive(stranger, other)
    bench.begin(Get, keys)
    (job_id,) = other.jobs
    stranger.says.append(JobResult(job_id, success=True))
    bench.step()
    assert driver.slots[0].retired
    assert not driver.slots[1].retired
    other.says.append(JobResult(job_id, success=False, successful_keys=[b"of no request"]))
    bench.step()
    assert driver.slots[1].retired
    assert bench.free == 4, "what it may still touch is not used again"


@pytest.mark.parametrize(
    "report",
    [
        "no result",
        None,
        Unreadable(),
        JobResult(["no id"], success=True),
        JobResult(Unreadable(), success=True),
        JobResult(memoryview(bytearray(2)), success=True),
    ],
    ids=["a word", "none", "unreadable", "no id", "an unreadable id", "a buffer for an id"],
)
def test_a_tier_that_reports_what_is_no_result_is_put_out_of_use_and_the_others_go_on(bench, played, keys, report):
    stranger, other = played(), played(*keys)
    driver = bench.drive(stranger, other)
    get = bench.begin(Get, keys)
    stranger.says.append(report)
    other.end(success=True)
    bench.step()
    assert (bool(driver.slots[0].retired), bool(driver.slots[1].retired)) == (True, False)
    assert set(get.found) == set(keys)


@pytest.mark.parametrize(
    "more",
    [
        {"success": np.array([True, True])},
        {"success": False, "successful_keys": _raising()},
        {"success": False, "successful_keys": [Unreadable()]},
    ],
    ids=["an array for success", "keys that raise", "a key that raises"],
)
def test_a_tier_whose_result_cannot_be_read_is_put_out_of_use_and_its_rows_are_kept(bench, played, keys, more):
    tier = played()
    driver = bench.drive(tier)
    bench.begin(Put, keys).lease.release()
    tier.says.append(JobResult(1, **more))
    bench.step()
    assert driver.slots[0].retired
    assert bench.free == 4


def test_a_job_that_is_reported_as_started_again_and_again_is_given_up_all_the_same(bench, played, keys, clock):
    tier = played()
    bench.drive(tier)
    bench.begin(Put, keys)
    (job_id,) = tier.jobs
    for _ in range(4):
        tier.says.append(JobStarted(job_id))
        bench.step()
        clock.now += 20
    bench.step()
    assert tier.abandoned == [job_id]


def test_what_a_tier_reports_of_anothers_job_changes_nothing(bench, played, keys):
    stranger, other = played(), played(*keys)
    bench.drive(stranger, other)
    get = bench.begin(Get, keys)
    stranger.says += [JobFailed(1, "not mine"), JobReleased(1, bytes(len(keys)))]
    bench.step()
    assert (get.error, get.stop()) == ("", True)


def test_a_driver_sleeps_without_end_while_nothing_is_to_be_done(bench, played, keys):
    tier = played()
    driver = bench.drive(tier)
    assert driver._pause() is None
    tier.usable = False
    assert driver._pause() == 0.25
    tier.usable = True
    bench.begin(Put, keys)
    assert driver._pause() == 0.0005
    driver._is_polled = False
    assert driver._pause() == 0.005


def test_after_the_stop_all_requests_are_over_and_later_ones_are_refused(bench, played, keys):
    driver = bench.driver = Driver(bench.drive(played()).slots, lambda seconds, fd: None, is_polled=True)
    put = Put(keys, bench.rows.take(4, 0.0), 1e9)
    driver.send(put)
    driver._step()
    driver.start()
    driver.stop(0.05)
    assert (put.over.is_set(), put.error) == (True, CLOSED)
    late = Prefix(keys, 1e9)
    assert not driver.send(late)
    assert (late.over.is_set(), late.error) == (True, CLOSED)


def test_a_stop_lets_the_jobs_in_flight_end(bench, played, keys):
    tier = played()
    bench.drive(tier)
    put = bench.begin(Put, keys)
    tier.end(success=True)
    bench.driver.start()
    bench.driver.stop(PATIENCE)
    assert put.over.is_set()
    assert list(put.stored["t0"]) == keys
