"""Tiers of the third rung under core's protection."""

import itertools
import threading
import time
from array import array

import pytest

from kvtiers.api import JobResult, LookupResult, SecondaryTierManager, TierConfig, TransferJob
from kvtiers.base import RequestContext
from kvtiers.rows.names import StorageNames
from kvtiers.secondary.sealing import SealedTier
from kvtiers.tiering.results import is_of

HIT, MISS = LookupResult.HIT, LookupResult.MISS
REQUEST = RequestContext("r")


class AsyncTier(SecondaryTierManager):
    """Holds values by key; a job moves when the test says so. ``heard``: what named a request, in order."""

    def __init__(self, rows, value_bytes):
        self.rows, self.value_bytes = rows, value_bytes
        self.values, self.waiting, self.results = {}, [], []
        self.abandoned, self.closed, self.ended_steps = [], 0, 0
        self.refuse = False
        self.heard = []

    def on_new_request(self, context):
        self.heard.append(("new", context))
        return True

    def on_request_finished(self, context):
        self.heard.append(("finished", context))

    def lookup(self, key, context):
        self.heard.append(("lookup", context))
        return HIT if key in self.values else MISS

    def submit_store(self, job):
        self._submit(job)

    def submit_load(self, job):
        self._submit(job)

    def _submit(self, job):
        self.heard.append(("load" if job.is_promotion else "store", job.context))
        if self.refuse:
            raise OSError("no")
        self.waiting.append(job)

    def move(self, *, success=True, keys=None):
        """End the oldest job."""
        job = self.waiting.pop(0)
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            place = slice(row * self.value_bytes, (row + 1) * self.value_bytes)
            if job.is_promotion:
                self.rows.memory[place] = self.values[key]
            else:
                self.values[key] = bytes(self.rows.memory[place])
        self.results.append(JobResult(job.job_id, success, keys, 1, 0.1))

    def get_finished_jobs(self):
        results, self.results = self.results, []
        return results

    def drain(self, timeout):
        while self.waiting:
            self.move()
        return True

    def abandon_job(self, job_id):
        self.abandoned.append(job_id)

    def on_schedule_end(self):
        self.ended_steps += 1

    def close(self):
        self.closed += 1


@pytest.fixture
def clock(kit):
    return kit.Clock()


@pytest.fixture
def made(kit, clock):
    """Make a sealed tier; all are closed at the end."""
    tiers = []

    def make(opener=None, **options):
        inner = AsyncTier(kit.rows, kit.VALUE)
        config = TierConfig.model_validate({"type": "t", "breaker": {"failures": 2, "delay": "10ms"}, **options})
        sizes = [(kit.PAYLOAD, kit.VALUE)]
        tier = SealedTier(config, opener or (lambda: inner), kit.rows.views, kit.NAMES, sizes, clock)
        tiers.append(tier)
        if opener is None:
            assert tier.wait_open(kit.PATIENCE) == ""
        return tier, inner

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(4)]


_ids = itertools.count(1)


def job(keys, *, promotion=False, context=REQUEST):
    return TransferJob(next(_ids), keys, memoryview(array("i", range(len(keys)))), promotion, context)


def finish(kit, tier):
    """Step until a result comes."""
    results = []

    def step():
        tier.on_schedule_end()
        results.extend(tier.get_finished_jobs())
        return bool(results)

    kit.wait_until(step, "a result")
    return results


def handed_over(kit, tier, inner):
    def step():
        tier.on_schedule_end()
        return bool(inner.waiting)

    kit.wait_until(step, "the job's hand-over")


def store(kit, tier, inner, keys):
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.move()
    (result,) = finish(kit, tier)
    assert result.success
    for row in range(len(keys)):
        kit.rows.poison(row)


def test_stores_are_sealed_off_the_engines_thread_and_loads_come_back(kit, made, keys):
    tier, inner = made()
    store(kit, tier, inner, keys)
    assert all(value[-64:-57] == b"kvtSEAL" for value in inner.values.values())
    tier.submit_load(job(keys, promotion=True))
    inner.move()
    (result,) = finish(kit, tier)
    assert result.success
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


def test_a_damaged_value_is_left_out_of_the_result(kit, made, keys):
    tier, inner = made()
    store(kit, tier, inner, keys)
    name = list(inner.values)[1]
    inner.values[name] = inner.values[name][:100] + b"?" + inner.values[name][101:]
    tier.submit_load(job(keys, promotion=True))
    inner.move()
    (result,) = finish(kit, tier)
    assert (result.success, list(result.successful_keys)) == (False, [keys[0], *keys[2:]])
    assert tier.stats()["seal_failures"] == 1
    assert tier.is_available()


def test_values_under_other_names_are_other_values(kit, made, keys):
    tier, inner = made()
    store(kit, tier, inner, keys)
    assert list(tier.lookup_many(keys, REQUEST)) == [HIT] * 4
    tier.set_names(StorageNames("test/other-0123456789abcdef01234567/", b"layout-2"))
    assert list(tier.lookup_many(keys, REQUEST)) == [MISS]


def test_two_values_that_a_tier_swapped_are_both_left_out(kit, made, keys):
    tier, inner = made()
    store(kit, tier, inner, keys)
    first, second, *_ = list(inner.values)
    inner.values[first], inner.values[second] = inner.values[second], inner.values[first]
    tier.submit_load(job(keys, promotion=True))
    inner.move()
    (result,) = finish(kit, tier)
    assert list(result.successful_keys) == keys[2:]


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("named", ["another's", "the engine's", "some of each", "none at all", "a number"])
def test_keys_that_are_not_of_the_job_reach_the_manager_which_refuses_them(kit, made, keys, named, success):
    """Above all the engine's own keys, which no tier is given: the manager knows them, and nothing was checked."""
    tier, inner = made()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    good = list(inner.values)
    inner.values = {name: bytes(kit.VALUE) for name in inner.values}
    ours = {
        "another's": [b"never heard of"],
        "the engine's": keys,
        "some of each": [good[0], keys[1]],
        "none at all": [[]],
        "a number": 5,
    }
    inner.move(success=success, keys=ours[named])
    (result,) = finish(kit, tier)
    assert result.job_id == loading.job_id
    assert not is_of(loading, result)
    assert not tier._jobs


def test_a_second_result_never_passes_unchecked_and_reaches_the_manager(kit, made, keys):
    tier, inner = made()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    inner.values = {name: bytes(kit.VALUE) for name in inner.values}
    inner.move()
    inner.results *= 2
    results = list(tier.get_finished_jobs())
    kit.wait_until(lambda: results.extend(tier.get_finished_jobs()) or len(results) == 2, "two results")
    assert [result.job_id for result in results] == [loading.job_id] * 2
    assert not any(result.success or result.successful_keys for result in results)


@pytest.mark.parametrize("lie", [None, "done", JobResult([1], success=True)], ids=["none", "a word", "no id"])
def test_what_is_no_result_reaches_the_manager_and_the_results_beside_it_are_not_lost(kit, made, keys, lie):
    tier, inner = made()
    for _ in range(2):
        tier.submit_store(job(keys))
    kit.wait_until(lambda: tier.on_schedule_end() or len(inner.waiting) == 2, "both jobs' hand-over")
    inner.move()
    inner.results.append(lie)
    inner.move()
    first, between, last = tier.get_finished_jobs()
    assert between is lie
    assert [first.success, last.success] == [True, True]
    assert not tier._jobs


def test_results_that_came_before_an_exception_are_not_lost(kit, made, keys):
    tier, inner = made()
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.move()
    told = list(inner.results)

    def results():
        yield from told
        told.clear()
        raise OSError("no more")

    inner.get_finished_jobs = results
    bad = TransferJob(next(_ids), keys[:1], memoryview(array("i", [10_000])), False, REQUEST)
    tier.submit_store(bad)
    tier._sealer.settle(kit.PATIENCE)
    (result,) = tier.get_finished_jobs()
    assert result.success
    (result,) = tier.get_finished_jobs()
    assert result.job_id == bad.job_id, "what comes from core's own thread needs no tier"
    with pytest.raises(OSError, match="no more"):
        tier.get_finished_jobs()


def test_a_submit_that_raises_is_a_failed_job_for_a_store_and_raises_for_a_load(kit, made, keys):
    tier, inner = made(breaker={"failures": 9})
    inner.refuse = True
    tier.submit_store(job(keys))
    (result,) = finish(kit, tier)
    assert not result.success
    with pytest.raises(OSError, match="no"):
        tier.submit_load(job(keys, promotion=True))
    assert not tier._jobs, "what has not begun is not owed"


def test_a_store_that_is_given_up_before_the_tier_has_it_never_reaches_it(kit, made, keys):
    gate = threading.Event()
    tier, inner = made()
    tier._sealer._work.put(lambda: gate.wait(kit.PATIENCE))
    waiting = job(keys)
    tier.submit_store(waiting)
    tier.abandon_job(waiting.job_id)
    gate.set()
    (result,) = finish(kit, tier)
    assert not result.success
    assert (inner.waiting, inner.abandoned) == ([], [])


def test_a_job_that_is_given_up_is_the_tiers_to_know_and_its_late_result_frees_the_rows(kit, made, keys):
    tier, inner = made()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    tier.abandon_job(loading.job_id)
    assert inner.abandoned == [loading.job_id]
    inner.move()
    assert [result.job_id for result in finish(kit, tier)] == [loading.job_id]


def test_failures_open_the_breaker_and_the_next_job_is_the_probe(kit, made, keys, clock):
    tier, inner = made()
    for _ in range(2):
        tier.submit_load(job(keys, promotion=True))
        inner.waiting.clear()
        inner.results.append(JobResult(next(reversed(tier._jobs)), success=False))
        finish(kit, tier)
    assert not tier.is_available()
    clock.now += 1
    tier.on_schedule_end()
    assert tier.is_available()
    inner.values = {kit.NAMES.layout_id + key: bytes(kit.VALUE) for key in keys}
    tier.submit_load(job(keys, promotion=True))
    assert not tier.is_available(), "one probe, and nothing beside it"
    inner.move()
    finish(kit, tier)
    assert tier.is_available()


def test_a_probe_that_ends_too_late_leaves_the_tier_out_of_use(kit, made, keys, clock):
    tier, inner = made()
    for _ in range(2):
        tier.submit_load(job(keys, promotion=True))
        inner.results.append(JobResult(inner.waiting.pop().job_id, success=False))
        finish(kit, tier)
    clock.now += 1
    tier.on_schedule_end()
    inner.values = {kit.NAMES.layout_id + key: bytes(kit.VALUE) for key in keys}
    probe = job(keys, promotion=True)
    tier.submit_load(probe)
    tier.abandon_job(probe.job_id)
    inner.move()
    finish(kit, tier)
    assert not tier.is_available()


def test_an_overdue_job_counts_once_against_the_tier_whatever_comes_of_it_later(kit, made, keys):
    tier, inner = made()
    late = job(keys, promotion=True)
    tier.submit_load(late)
    tier.abandon_job(late.job_id)
    inner.results.append(JobResult(inner.waiting.pop().job_id, success=False))
    finish(kit, tier)
    assert tier.is_available(), "one failure of the two that open the breaker"
    late = job(keys, promotion=True)
    tier.submit_load(late)
    tier.abandon_job(late.job_id)
    assert not tier.is_available()


def test_a_probe_that_the_tier_refuses_does_not_leave_it_out_of_use_for_ever(kit, made, keys, clock):
    tier, inner = made()
    inner.refuse = True
    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            tier.submit_load(job(keys, promotion=True))
        clock.now += 1
        tier.on_schedule_end()
    clock.now += 100
    tier.on_schedule_end()
    assert tier.is_available()


def test_a_tier_that_cannot_be_opened_is_tried_again(kit, made, log_lines):
    tries = []

    def opener():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionRefusedError("refused")
        return AsyncTier(kit.rows, kit.VALUE)

    tier, _ = made(opener)
    assert "refused" in tier.wait_open(kit.PATIENCE) or len(tries) > 3
    assert "t: out of use: ConnectionRefusedError: refused" in log_lines("out of use")
    kit.wait_until(tier.is_available, "its opening")
    assert tier.wait_open(0) == ""


def test_a_tier_that_never_opens_does_not_hold_up_the_end(kit, made):
    gate = threading.Event()

    def opener():
        gate.wait(kit.PATIENCE)
        raise OSError("late")

    tier, _ = made(opener)
    assert not tier.is_available()
    assert tier.drain(0.05)
    gate.set()
    tier.close()


def test_a_row_that_cannot_be_sealed_fails_the_store_and_not_the_thread(kit, made, keys):
    tier, inner = made()
    bad = TransferJob(next(_ids), keys[:1], memoryview(array("i", [10_000])), False, REQUEST)
    tier.submit_store(bad)
    (result,) = finish(kit, tier)
    assert not result.success
    store(kit, tier, inner, keys)


def test_a_drain_reports_every_job_and_says_what_was_dropped(kit, made, keys, log_lines):
    tier, inner = made()
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    for _ in range(3):
        tier.submit_store(job(keys))
    assert tier.drain(kit.PATIENCE)
    assert len(tier.get_finished_jobs()) == 3
    inner.drain = lambda timeout: False
    tier.submit_store(job(keys))
    assert not tier.drain(0.05)
    assert log_lines("dropped") == "t: shutdown within 0.05s dropped 1 jobs with 4 chunks"


def test_a_drain_that_raises_says_what_was_dropped_all_the_same(kit, made, keys, log_lines):
    tier, inner = made()

    def drain(timeout):
        raise OSError("no way")

    inner.drain = drain
    tier.submit_store(job(keys))
    assert not tier.drain(kit.PATIENCE)
    assert log_lines("no way") == "t: its drain() failed: OSError: no way"
    assert "dropped 1 jobs with 4 chunks" in log_lines("dropped")


def test_figures_of_a_tier_that_raises_or_counts_nonsense_do_no_harm(made):
    tier, inner = made()

    def figures(stats):
        inner.stats = stats
        tier.on_schedule_end()
        return tier.stats()

    assert figures(lambda: {"a": 1, "b": 2.5})["b"] == 2.5
    assert figures(lambda: 1 / 0)["open"] == 1
    assert "a" not in figures(lambda: {"a": "many"})


def test_close_closes_the_tier_once_on_its_own_thread(kit, made):
    tier, inner = made()
    threads = []
    inner.close = lambda: threads.append(threading.current_thread().name)
    tier.close()
    assert threads == ["kvtiers-t-seal"]
    assert not tier.is_available()


def test_a_tier_whose_close_hangs_is_left_behind(kit, made, monkeypatch):
    from kvtiers.secondary import sealing

    monkeypatch.setattr(sealing, "_CLOSE_SECONDS", 0.05)
    gate, told, ended = threading.Event(), threading.Event(), threading.Event()
    tier, inner = made()
    inner.close = lambda: told.set() or (gate.wait() and ended.set())
    tier.close()
    assert told.wait(kit.PATIENCE)
    assert not ended.is_set()
    gate.set()


# -- what the tier hears of requests


def held_sealing(kit, tier):
    """Keep the sealing thread busy until the event that this returns is set."""
    gate = threading.Event()
    tier._sealer._work.put(lambda: gate.wait(kit.PATIENCE))
    return gate


def step_until_heard(kit, tier, inner, call, context):
    kit.wait_until(lambda: tier.on_schedule_end() or (call, context) in inner.heard, f"{call} of a request")


def test_a_request_ends_for_the_tier_after_its_last_store(kit, made, keys):
    tier, inner = made()
    mine, other = RequestContext("r"), RequestContext("s")
    assert tier.on_new_request(mine)
    tier.on_new_request(other)
    gate = held_sealing(kit, tier)
    for key in keys[:2]:
        tier.submit_store(job([key], context=mine))
    tier.on_request_finished(mine)
    tier.on_request_finished(other)
    tier.on_schedule_end()
    assert inner.heard == [("new", mine), ("new", other), ("finished", other)], "one that waits keeps no other back"
    gate.set()
    step_until_heard(kit, tier, inner, "finished", mine)
    tier.on_schedule_end()
    assert inner.heard[3:] == [("store", mine), ("store", mine), ("finished", mine)]
    assert len(inner.waiting) == 2, "its transfers may still run"


@pytest.mark.parametrize("fate", ["given up", "refused", "not to be sealed"])
def test_a_store_that_comes_to_nothing_does_not_keep_its_requests_end_back(kit, made, keys, fate):
    tier, inner = made()
    mine = RequestContext("r")
    tier.on_new_request(mine)
    gate = held_sealing(kit, tier)
    storing = job(keys, context=mine)
    if fate == "not to be sealed":
        storing = TransferJob(next(_ids), keys[:1], memoryview(array("i", [10_000])), False, mine)
    tier.submit_store(storing)
    if fate == "given up":
        tier.abandon_job(storing.job_id)
    inner.refuse = fate == "refused"
    tier.on_request_finished(mine)
    gate.set()
    step_until_heard(kit, tier, inner, "finished", mine)
    assert [call for call, _ in inner.heard] == ["new", *["store"] * inner.refuse, "finished"]


def test_an_end_that_is_kept_back_is_told_within_a_drain(kit, made, keys):
    tier, inner = made()
    mine = RequestContext("r")
    tier.on_new_request(mine)
    tier.submit_store(job(keys, context=mine))
    tier.on_request_finished(mine)
    assert tier.drain(kit.PATIENCE)
    assert inner.heard == [("new", mine), ("store", mine), ("finished", mine)]


def test_a_request_whose_id_is_used_again_ends_first_and_what_it_still_stores_is_nobodys(kit, made, keys):
    tier, inner = made()
    before, after = RequestContext("r"), RequestContext("r")
    tier.on_new_request(before)
    gate = held_sealing(kit, tier)
    tier.submit_store(job(keys, context=before))
    tier.on_request_finished(before)
    tier.on_new_request(after)
    assert inner.heard == [("new", before), ("finished", before), ("new", after)]
    tier.submit_store(job(keys, context=after))
    gate.set()
    kit.wait_until(lambda: tier.on_schedule_end() or len(inner.waiting) == 2, "both jobs' hand-over")
    tier.on_request_finished(after)
    assert [context.request_id for _, context in inner.heard[3:]] == ["", "r", "r"]
    assert inner.heard[4:] == [("store", after), ("finished", after)]
    inner.move()
    (result,) = finish(kit, tier)
    assert result.success


def test_requests_that_came_while_the_tier_opened_are_told_before_anything_else(kit, made, keys):
    gate, inner = threading.Event(), AsyncTier(kit.rows, kit.VALUE)
    tier, _ = made(lambda: gate.wait(kit.PATIENCE) and inner)
    first, gone, last, later = (RequestContext(name) for name in ("first", "gone", "last", "later"))
    for context in (first, gone, last):
        assert tier.on_new_request(context) is False
    tier.on_request_finished(gone)
    tier.on_schedule_end()
    assert not tier.stats()["open"]
    gate.set()
    assert tier.wait_open(kit.PATIENCE) == ""
    assert tier.is_available()
    tier.lookup_many(keys[:1], first)
    tier.on_new_request(later)
    tier.on_request_finished(gone)
    for context in (last, later, first):
        tier.on_request_finished(context)
    told = [("new", first), ("new", last), ("lookup", first), ("new", later)]
    assert inner.heard == [*told, ("finished", last), ("finished", later), ("finished", first)]


def test_a_tier_that_raises_over_a_request_that_nobody_waits_for_stops_nothing(kit, made, caplog):
    gate, inner = threading.Event(), AsyncTier(kit.rows, kit.VALUE)
    inner.on_new_request = lambda context: 1 / 0
    tier, _ = made(lambda: gate.wait(kit.PATIENCE) and inner)
    contexts = [RequestContext(str(number)) for number in range(5)]
    for context in contexts:
        tier.on_new_request(context)
    gate.set()
    kit.wait_until(tier.is_available, "its opening")
    for context in contexts:
        tier.on_request_finished(context)
    assert inner.heard == [("finished", context) for context in contexts]
    tier._sealer.settle(kit.PATIENCE)
    assert caplog.text.count("its on_new_request() failed") == 3, "the 1st, the 2nd, the 4th"


# -- a drain that does not return


def test_a_drain_that_hangs_is_left_behind_and_the_tier_asked_nothing_more(kit, made, keys, log_lines):
    tier, inner = made()
    gate, calls = threading.Event(), []
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.drain = lambda timeout: calls.append(timeout) or gate.wait(kit.PATIENCE)
    for name in ("get_finished_jobs", "get_started_jobs", "on_schedule_end", "is_available", "close"):
        setattr(inner, name, lambda name=name: calls.append(name))
    begin = time.monotonic()
    assert not tier.drain(0.1)
    assert time.monotonic() - begin < 5
    assert not tier.is_available()
    assert tier.get_finished_jobs() == []
    tier.on_schedule_end()
    tier.close()
    gate.set()
    (given,) = calls
    assert 0 <= given <= 0.1
    assert "its drain(" in log_lines("does not return")
    assert log_lines("dropped") == "t: shutdown within 0.1s dropped 1 jobs with 4 chunks"


def test_a_drain_that_takes_all_its_time_is_none_that_hangs(kit, made, keys):
    tier, inner = made()
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.drain = lambda timeout: time.sleep(timeout) or inner.move()
    assert tier.drain(0.2)
    tier.close()
    assert inner.closed == 1


@pytest.mark.parametrize("call", ["on_new_request", "submit_store", "on_request_finished", "get_finished_jobs"])
def test_a_tier_that_hangs_in_another_call_of_a_drain_is_left_behind_as_well(kit, made, keys, log_lines, call):
    gate, opened, calls = threading.Event(), threading.Event(), []
    inner = AsyncTier(kit.rows, kit.VALUE)

    def named(name, real):
        def hang(*arguments):
            calls.append(name)
            return gate.wait(kit.PATIENCE) if name == call else real(*arguments)

        return hang

    names = ["on_new_request", "submit_store", "on_request_finished", "drain", "get_finished_jobs"]
    for name in [*names, "abandon_job", "close"]:
        setattr(inner, name, named(name, getattr(inner, name)))
    tier, _ = made(lambda: opened.wait(kit.PATIENCE) and inner)
    mine = RequestContext("r")
    tier.on_new_request(mine)
    stores = [job(keys, context=mine), job(keys[:1], context=mine)]
    for storing in stores:
        tier.submit_store(storing)
    tier.on_request_finished(mine)
    opened.set()
    assert tier.wait_open(kit.PATIENCE) == ""
    tier._sealer.settle(kit.PATIENCE)
    assert not tier.drain(0.5)
    until_then = list(calls)
    assert until_then[-1] == call
    for storing in stores:
        tier.abandon_job(storing.job_id)
    assert tier.get_finished_jobs() == []
    gate.set()
    tier.close()
    kit.wait_until(lambda: not any(thread.name == "kvtiers-t-drain" for thread in threading.enumerate()), "its end")
    assert calls == until_then, "not even once it has returned"
    assert f"t: its {call}() does not return within the shutdown's 0.5s" in log_lines("does not return")
    assert log_lines("dropped") == "t: shutdown within 0.5s dropped 2 jobs with 5 chunks"


def test_what_was_brought_before_a_tier_hangs_in_a_drain_is_neither_lost_nor_counted(kit, made, keys, log_lines):
    tier, inner = made()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    inner.move()
    tier.get_finished_jobs()
    gate = threading.Event()
    inner.submit_store = lambda _job: gate.wait(kit.PATIENCE)
    tier.submit_store(job(keys[:1]))
    tier._sealer.settle(kit.PATIENCE)
    assert not tier.drain(0.1)
    (result,) = tier.get_finished_jobs()
    assert (result.job_id, result.success) == (loading.job_id, True)
    assert log_lines("dropped") == "t: shutdown within 0.1s dropped 1 jobs with 1 chunks"
    gate.set()


def test_results_that_raise_in_a_drain_say_what_was_dropped_all_the_same(kit, made, keys, log_lines):
    tier, inner = made()
    tier.submit_store(job(keys))
    inner.get_finished_jobs = lambda: 1 / 0
    assert not tier.drain(kit.PATIENCE)
    assert "t: its get_finished_jobs() failed: ZeroDivisionError" in log_lines("division")
    assert "dropped 1 jobs with 4 chunks" in log_lines("dropped")
    tier.close()
    assert inner.closed == 1
