"""Whatever a tier does, the engine's step goes on."""

import os

import pytest

from kvtiers._failures import FORKED_STATUS
from kvtiers.api import JobResult
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.tier_slot import TierOptions, TierSlot

from .harness import HIT, MISS, PENDING, RETRY, Bench, chain

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS, THERE = chain("k", 4), chain("there", 4)
METHODS = [
    "lookup_many",
    "submit_store",
    "submit_load",
    "get_started_jobs",
    "get_failed_jobs",
    "get_finished_jobs",
    "is_available",
    "abandon_job",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
]


def use_all(bench):
    """A request that promotes, stores and loads, and jobs that may become overdue."""
    for _ in range(2):
        ctx = bench.request()
        bench.lookup(THERE, ctx)
        bench.step()
        bench.manager.complete_store(bench.begin_store(KEYS, ctx))
        bench.step()
        assert bench.load(KEYS, ctx)
        bench.manager.on_request_finished(ctx)
        bench.step(40.0)
        bench.manager.has_pending_work()
        bench.manager.reset_cache()
    bench.step()


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_a_tier_reaches_no_caller(method, hold):
    bench = Bench(tiers={"broken": {}, "sound": {}}, options=WIDE)
    bench.tier["broken"].raises = {method}
    bench.tier["broken"].hold = hold
    bench.tier["broken"].put(THERE)
    use_all(bench)
    if (method, hold) not in {("abandon_job", False), ("has_pending_work", True)}:  # which are then not called
        assert bench.figures("broken")["raised"] > 0
    assert bench.figures("sound")["raised"] == 0
    assert bench.tier["sound"].has(KEYS) == [True] * 4
    assert bench.figures("broken")["out_of_use"] == 0, "a failure is no lie"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "abandon_job"])
@pytest.mark.parametrize("ending", ["returns", "raises", "exits"])
def test_a_child_that_a_tier_forks_is_no_second_engine(method, ending, capfd):
    bench = Bench(tiers={"forking": {}}, options=WIDE)
    tier, children = bench.tier["forking"], []
    tier.put(THERE)
    honest = getattr(tier, method)

    def forks(*args):
        if not children:
            children.append(os.fork())
            if not children[0] and ending != "returns":
                raise SystemExit if ending == "exits" else ValueError
        return honest(*args)

    setattr(tier, method, forks)
    use_all(bench)
    [child] = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FORKED_STATUS
    assert f"its child {child} has come back from the call" in capfd.readouterr().err


class Silent(EventTier):
    """A tier that has nothing to say to what may be left out."""


class HearsEnds(Silent):
    def on_request_finished(self, context):
        pass


class WantsAll(Silent):
    def on_new_request(self, context):
        return True


@pytest.mark.parametrize(("kind", "wants"), [(Silent, False), (HearsEnds, True), (WantsAll, True)])
def test_a_tier_is_notified_of_requests_if_it_overrides_a_notification(monkeypatch, kind, wants):
    monkeypatch.setattr(kind, "__abstractmethods__", frozenset())
    assert TierSlot(0, kind(), TierOptions("t")).wants_requests is wants


@pytest.mark.parametrize(
    "answers", [None, 5, "hit", [], [None], [True] * 4, [HIT, 1, HIT], [PENDING] * 4, {HIT: 1}, iter([MISS])]
)
def test_an_answer_that_is_none_is_a_miss(answers):
    bench = Bench(options=WIDE)
    bench.tier["a"].lookup_many = lambda keys, context: answers
    ready, pending, unresolved = bench.lookup(KEYS, bench.request())
    assert ready == 0
    assert pending in ((1,) if answers in ([HIT, 1, HIT], {HIT: 1}) else (0,)) or pending == 4
    assert not unresolved


def test_more_answers_than_questions_do_no_harm():
    bench = Bench(options=WIDE)
    bench.tier["a"].lookup_many = lambda keys, context: [HIT] * 99
    assert bench.lookup(KEYS, bench.request()) == (0, 4, False)
    bench.tier["a"].lookup_many = lambda keys, context: (RETRY for _ in keys)
    assert bench.lookup(chain("other", 2), bench.request()) == (0, 0, True)


def test_more_answers_than_questions_are_not_about_what_follows():
    bench = Bench(rows=1024, tiers={"liar": {}, "sound": {}}, options=WIDE)
    keys = chain("k", 240)
    bench.tier["sound"].put(keys[:1])
    bench.tier["liar"].lookup_many = lambda asked, context: [HIT] * 160 if asked[0] != keys[0] else [MISS]
    chunks = sum(bench.lookup(keys, bench.request())[:2])
    assert bench.primary.find(keys[:chunks]) == [PENDING] * chunks


def test_results_that_came_before_an_exception_are_not_lost():
    bench = Bench(options=WIDE, hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS))
    tier = bench.tier["a"]

    def one_and_then_none():
        yield JobResult(1, success=True)
        raise OSError("connection lost")

    tier.get_finished_jobs = one_and_then_none
    bench.step()
    bench.step()
    assert bench.figures("a")["stored_chunks"] == 4
    assert bench.figures("a")["raised"] == 1


def test_a_tier_that_raises_all_the_time_does_not_flood_the_log(caplog):
    bench = Bench(options=WIDE)
    bench.tier["a"].raises = {"on_schedule_end"}
    for _ in range(1000):
        bench.step()
    assert bench.figures("a")["raised"] == 1000
    assert len(caplog.records) == 10  # the 1st, 2nd, 4th ... 512th time


def test_a_tier_that_is_not_available_is_not_asked():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS)
    bench.tier["a"].available = False
    assert bench.lookup(KEYS, bench.request()) == (0, 0, False)
    assert not bench.tier["a"].asked
    bench.tier["a"].available = True
    assert bench.lookup(KEYS, bench.request()) == (0, 4, False)
