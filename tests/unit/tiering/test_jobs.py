"""Jobs: their deadlines, their one result, and rows that are not leased while they may still be touched."""

import math

import numpy as np
import pytest

from kvtiers.api import JobResult
from kvtiers.secondary.tier_jobs import JobFailed, JobReleased, JobStarted
from kvtiers.tiering.jobs import TieringOptions

from .harness import HIT, MISS, PENDING, ROW_BYTES, Bench, chain, payload

WIDE = TieringOptions(lookup_wait=0.02, load_wait=60.0, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 8)


def loading(rows=16, **more):
    """A bench whose tier holds a promotion of four chunks: job 1."""
    bench = Bench(rows=rows, options=WIDE, hold=True, **more)
    bench.tier["a"].put(KEYS[:4])
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 4, False)
    bench.step()
    return bench, ctx


def storing(rows=16):
    """A bench whose tier holds a store of four chunks: job 1."""
    bench = Bench(rows=rows, options=WIDE, hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:4]))
    bench.step()
    return bench


@pytest.mark.parametrize("started", [False, True])
def test_a_load_that_does_not_end_in_time_fails_at_once_for_all_who_wait_by_the_engines_clock(started):
    bench, ctx = loading()
    other = bench.request()
    tier = bench.tier["a"]
    tier.reports_starts = True
    bench.step(20.0)
    if started:
        tier.started.append(1)
        bench.step(0.0)
        bench.step(20.0)  # counted from its start
        assert bench.lookup(KEYS, ctx) == (0, 4, False)
    bench.step(10.1)
    bench.step()
    tier.values.clear()
    assert bench.lookup(KEYS, ctx) == bench.lookup(KEYS, other) == (0, 0, False)
    assert tier.abandoned == [1]
    figures = bench.figures("a")
    assert figures["expired_jobs"] == 1
    assert figures["failed_loads"] == 4
    assert figures["running_jobs"] == figures["loading_chunks"] == 0
    assert not bench.manager.has_pending_work(), "nothing waits for what is in quarantine"


def test_a_chunk_whose_load_was_given_up_is_not_asked_of_that_tier_again_for_this_request():
    bench, ctx = loading()
    bench.step(31.0)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.lookup(KEYS, bench.request()) == (0, 4, False)


def test_a_job_that_a_reset_overtook_and_that_is_overdue_then_says_nothing_about_the_keys():
    bench, ctx = loading()
    bench.manager.reset_cache()
    assert bench.lookup(KEYS, ctx) == (0, 4, False)
    bench.step(25.0)
    bench.tier["a"].end(2)
    bench.step()
    bench.step(6.0)
    assert bench.figures("a")["expired_jobs"] == 1
    assert bench.load(KEYS[:4], ctx)
    assert bench.figures("a")["hits"] == 4
    bench.forget()
    bench.tier["a"].put(KEYS[:4])
    assert bench.lookup(KEYS, ctx) == (0, 4, False)


def test_rows_of_a_load_that_was_given_up_are_not_used_until_the_tier_reports():
    bench, _ = loading(rows=8)
    bench.step(31.0)
    assert bench.figures("a")["quarantined_rows"] == bench.figures("a")["pinned_rows"] == 4
    assert bench.primary.quarantined_rows == 4
    plan = bench.begin_store(chain("x", 4))
    assert bench.manager.prepare_store(chain("y", 1), bench.request()) is None
    bench.tier["a"].end(1)  # it writes into its rows only now
    assert [bytes(bench.row(row)) for row in plan.chunk_ids] == [payload(key) for key in plan.keys]
    bench.step()
    bench.step()
    assert bench.primary.find(KEYS[:4]) == [MISS] * 4
    assert bench.figures("a")["quarantined_rows"] == bench.figures("a")["pinned_rows"] == 0
    assert bench.primary.free_rows == 4
    assert bench.figures("a")["loaded_chunks"] == 0


def test_a_store_that_was_given_up_leaves_its_chunks_readable_and_its_rows_in_place():
    bench = storing(rows=4)
    bench.step(31.0)
    assert bench.primary.find(KEYS[:4]) == [HIT] * 4
    assert bench.load(KEYS[:4], bench.request())
    assert bench.manager.prepare_store(chain("x", 1), bench.request()) is None
    bench.tier["a"].end(1)
    bench.step()
    bench.step()
    assert bench.primary.evictable == 4
    assert bench.figures("a")["failed_stores"] == 4
    assert bench.figures("a")["stored_chunks"] == 0


def test_a_job_that_the_tier_says_has_failed_is_reported_at_once_and_its_rows_come_with_the_result():
    bench, ctx = loading()
    tier = bench.tier["a"]
    tier.failed += [1, 1]
    bench.step()
    tier.values.clear()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.primary.quarantined_rows == 4
    assert tier.abandoned == [], "it has ended the job by itself"
    tier.failed += [1]
    bench.step()
    tier.end(1)
    bench.step()
    assert bench.primary.free_rows == bench.rows
    assert bench.figures("a")["failed_loads"] == 4


def test_a_job_that_has_failed_in_use_and_does_not_end_by_its_deadline_is_given_up_once(caplog):
    bench, _ = loading()
    tier = bench.tier["a"]
    tier.failed += [1]
    bench.step()
    lines = len(caplog.records)
    bench.step(31.0)
    bench.step(31.0)
    assert tier.abandoned == [1]
    figures = bench.figures("a")
    assert (figures["expired_jobs"], figures["failed_loads"], figures["quarantined_rows"]) == (1, 4, 4)
    assert len(caplog.records) == lines, "its failure was logged before"
    tier.end(1)
    bench.step()
    assert bench.primary.free_rows == bench.rows


@pytest.mark.parametrize("ends", ["well", "failed in use", "late"])
@pytest.mark.parametrize("promotion", [True, False])
def test_a_tier_may_release_the_buffer_that_names_its_rows(promotion, ends):
    bench = loading()[0] if promotion else storing()
    tier = bench.tier["a"]
    with tier.held[1].job.chunk_ids:
        pass
    if ends == "failed in use":
        tier.failed += [1]
    bench.step(31.0 if ends == "late" else 0.0)
    quarantined = 0 if ends == "well" else 4
    assert bench.figures("a")["quarantined_rows"] == quarantined
    tier.end(1)
    bench.step()
    figures = bench.figures("a")
    assert figures["running_jobs"] == figures["quarantined_rows"] == figures["pinned_rows"] == 0


def test_what_is_in_quarantine_counts_in_the_tiers_budget():
    bench = Bench(rows=16, options=TieringOptions(load_wait=60.0), hold=True)
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    bench.step()
    bench.step(31.0)
    bench.tier["a"].put(chain("x", 3))
    assert bench.lookup(chain("x", 3), bench.request()) == (0, 0, False)
    bench.manager.complete_store(bench.begin_store(chain("y", 2)))
    assert bench.figures("a")["dropped_cascades"] == 2
    bench.tier["a"].end(1)
    bench.step()
    bench.step()
    assert bench.lookup(chain("x", 3), bench.request()) == (0, 3, False)


def test_a_job_that_the_tier_does_not_take_has_not_begun():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS[:4])
    bench.tier["a"].raises = {"submit_load", "submit_store"}
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.primary.free_rows == bench.rows
    bench.manager.complete_store(bench.begin_store(KEYS[:2]))
    bench.step()
    assert bench.primary.evictable == 2
    figures = bench.figures("a")
    assert (figures["raised"], figures["failed_loads"], figures["failed_stores"]) == (2, 4, 2)
    assert figures["running_jobs"] == figures["pinned_rows"] == 0


def test_job_ids_grow_for_ever_also_across_a_reset():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    for number in range(4):
        bench.store(chain(f"n{number}", 2))
        bench.manager.reset_cache()
    ids = sorted(job.job_id for tier in bench.tier.values() for job in tier.submitted)
    assert ids == list(range(1, 9))


def test_a_jobs_rows_are_a_buffer_of_int32_beside_its_keys():
    bench = storing()
    (job,) = bench.tier["a"].submitted
    assert (job.chunk_ids.format, job.chunk_ids.itemsize, job.chunk_ids.ndim) == ("i", 4, 1)
    assert [bytes(bench.row(row)) for row in job.chunk_ids] == [payload(key) for key in job.keys]
    assert job.is_promotion is False


@pytest.mark.parametrize("landed", [4, 1, 0])
def test_how_long_a_promotion_takes_is_known_from_those_that_brought_something(landed):
    bench, _ = loading()
    bench.clock.now += 0.7
    bench.tier["a"].end(1, landed=KEYS[:landed])
    bench.step()
    bench.step()
    latency = bench.figures("a")["promotion_latency"]
    assert (latency["count"], latency["sum"]) == ((1, pytest.approx(0.7)) if landed else (0, 0.0))


def test_a_tier_that_takes_no_promotion_does_not_look_like_a_quick_one():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS)
    bench.tier["a"].raises = {"submit_load"}
    bench.lookup(KEYS, bench.request())
    bench.step()
    assert bench.figures("a")["failed_loads"] == 8
    assert bench.figures("a")["promotion_latency"]["count"] == 0


# -- lies


def lie(bench, what):
    tier = bench.tier["a"]
    match what:
        case "unknown job":
            tier.finished.append(JobResult(77, success=True))
        case "a job of another tier":
            tier.finished.append(JobResult(min(bench.tier["b"].held), success=True))
        case "two results":
            tier.end(1)
            tier.finished *= 2
        case "foreign keys":
            tier.finished.append(JobResult(1, success=False, successful_keys=[KEYS[7]]))
        case "keys that are none":
            tier.finished.append(JobResult(1, success=False, successful_keys=[[]]))
        case "a number for keys":
            tier.finished.append(JobResult(1, success=False, successful_keys=5))
        case "no result":
            tier.finished.append(None)
        case "an id that is none":
            tier.finished.append(JobResult([1], success=True))
        case "a buffer for an id":
            tier.finished.append(JobResult(memoryview(bytearray(2)), success=True))
        case "an array for success":
            tier.finished.append(JobResult(1, success=np.array([True, True])))


@pytest.mark.parametrize(
    "what",
    [
        "unknown job",
        "a job of another tier",
        "two results",
        "foreign keys",
        "keys that are none",
        "a number for keys",
        "no result",
        "an id that is none",
        "a buffer for an id",
        "an array for success",
    ],
)
def test_a_tier_that_lies_is_refused_counted_and_used_no_more(what, caplog):
    bench, ctx = loading(tiers={"a": {}, "b": {}})
    tier = bench.tier["a"]
    bench.manager.complete_store(bench.begin_store(chain("x", 2)))
    lie(bench, what)
    bench.step()
    bench.step()
    figures = bench.figures("a")
    assert (figures["refused_results"], figures["out_of_use"]) == (1, 1)
    assert bench.figures("b")["out_of_use"] == 0
    assert "a: put out of use" in caplog.text
    # It is asked nothing more, given nothing more, believed nothing more.
    steps, asked, submitted = tier.steps, len(tier.asked), len(tier.submitted)
    tier.finished.append(JobResult(99, success=True))
    tier.put(chain("y", 1))
    bench.lookup(chain("y", 1), bench.request())
    bench.manager.complete_store(bench.begin_store(chain("z", 1)))
    bench.step(60.0)
    assert (steps, asked, submitted) == (tier.steps, len(tier.asked), len(tier.submitted))
    assert bench.figures("a")["refused_results"] == 1
    # Its rows stay in quarantine: it may write into them whenever it likes.
    loaded = what == "two results"
    assert bench.primary.lookup(KEYS[0]) is (HIT if loaded else MISS)
    assert bench.figures("a")["quarantined_rows"] == bench.figures("a")["pinned_rows"] == (2 if loaded else 6)
    assert loaded or bench.lookup(KEYS, ctx) == (0, 0, False)
    for held in tier.held.values():
        if held.job.is_promotion:
            for row in held.rows:
                bench.row(row)[:] = b"\xbb" * ROW_BYTES
    for key in (*KEYS, *chain("x", 2), *chain("z", 1)):
        if bench.primary.lookup(key) is HIT:
            assert bench.load([key], bench.request())


@pytest.mark.parametrize(
    ("nbytes", "seconds"), [(-5, 1.0), (None, None), ("much", "long"), (0, math.nan), (0, math.inf), (0, -1.0)]
)
def test_figures_that_are_none_do_no_harm(nbytes, seconds):
    bench, ctx = loading()
    tier = bench.tier["a"]
    tier.end(1)
    result = tier.finished.pop()
    tier.finished.append(JobResult(1, success=True, nbytes=nbytes, seconds=seconds))
    assert result.success
    bench.step(0.5)
    assert bench.load(KEYS[:4], ctx)
    figures = bench.figures("a")
    assert figures["loaded_bytes"] == 0
    assert 0.0 <= figures["load_seconds"] <= 1.0
    assert figures["out_of_use"] == 0


def test_events_of_jobs_that_are_over_or_of_another_tier_are_ignored():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE, hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:2]))
    tier = bench.tier["a"]
    tier.reports_starts = True
    tier.started += [2, 99, None, "x", [1]]
    tier.failed += [2, 99, None, "x"]
    bench.step()
    bench.step()
    assert bench.figures("b")["failed_stores"] == 0
    assert bench.figures("b")["running_jobs"] == 1


def test_many_jobs_that_are_overdue_together_are_one_line(caplog):
    options = TieringOptions(one_tier=1.0, all_tiers=1.0, job_bytes=ROW_BYTES)
    bench = Bench(rows=512, options=options, hold=True)
    bench.manager.complete_store(bench.begin_store(chain("k", 400)))
    bench.step()
    bench.step(31.0)
    lines = [record for record in caplog.records if "did not end within 30s" in record.message]
    assert len(lines) == 1
    assert "400 jobs" in lines[0].message
    assert bench.figures("a")["expired_jobs"] == 400


def test_a_lookup_sees_what_has_landed_before_the_step():
    bench, ctx = loading()
    bench.tier["a"].end(1)
    assert bench.primary.lookup(KEYS[0]) is PENDING
    assert bench.lookup(KEYS, ctx) == (4, 0, False)


def test_events_are_handled_in_their_order_and_failures_in_a_row_are_one_line(bench_of_held_stores, caplog):
    bench, jobs = bench_of_held_stores
    first, second, third = (job.job_id for job in jobs)
    stream = [
        JobStarted(first),
        JobFailed(first, ""),
        JobFailed(second, ""),
        JobResult(first, success=False),
        JobReleased(second, b"\0"),
        JobFailed(third, ""),
    ]
    bench.step()
    bench.tier["a"].poll = lambda: [stream.pop(0) for _ in range(len(stream))]
    bench.step()
    assert [record.args[1] for record in caplog.records] == [2, 1]
    assert bench.figures("a")["quarantined_rows"] == 2, "the first one's row is free"
    assert bench.figures("a")["running_jobs"] == 0


@pytest.fixture
def bench_of_held_stores():
    """Three jobs of one chunk each, which the tier holds."""
    bench = Bench(rows=16, hold=True, options=TieringOptions(one_tier=1.0, all_tiers=1.0))
    for name in "xyz":
        bench.manager.complete_store(bench.begin_store(chain(name, 1)))
    return bench, bench.tier["a"].stores
