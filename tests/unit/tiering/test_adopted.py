"""What an engine of a pool found in its memory at the start, and its tiers: each has it in the end, and none twice."""

from collections import Counter
from itertools import pairwise

import pytest

from kvtiers.tiering.jobs import TieringOptions

from .harness import MISS, RETRY, Bench, chain, payload

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 100)
HALF = KEYS[::2]


def adopting(keys=KEYS, *, rows=200, options=WIDE, has=(), hold=False, tiers=None, **first):
    """An engine that has found these chunks; ``first``: options of its tier "a", which ``has`` some of them."""
    bench = Bench(rows=rows, tiers=tiers or {"a": first}, options=options, hold=hold, adopted=tuple(keys))
    for tier in bench.tier.values():
        tier.put(has)
    return bench


def steps(bench, count=400, seconds=0.01):
    for _ in range(count):
        bench.step(seconds)


def written(bench, name="a"):
    return [key for job in bench.tier[name].stores for key in job.keys]


def test_a_tier_gets_what_it_lacks_and_nothing_that_it_has():
    bench = adopting(has=HALF)
    steps(bench)
    assert sorted(written(bench)) == sorted(set(KEYS) - set(HALF))
    assert bench.tier["a"].values == {("", key): payload(key) for key in KEYS}
    assert bench.figures("a")["pinned_rows"] == 0


def test_what_was_used_last_is_asked_for_first_and_each_chunk_by_itself():
    bench = adopting()
    bench.step()
    bench.step()
    assert [key for (key,) in bench.tier["a"].asked] == [*KEYS[-8:], *KEYS[-8:]]


def test_once_all_is_known_no_more_is_asked():
    bench = adopting(has=KEYS)
    steps(bench)
    asked = len(bench.tier["a"].asked)
    assert asked == 2 * len(KEYS)
    steps(bench)
    assert len(bench.tier["a"].asked) == asked


def test_each_tier_gets_what_itself_lacks():
    bench = adopting(tiers={"a": {}, "b": {}, "never": {"read_only": True}})
    bench.tier["a"].put(HALF)
    bench.tier["b"].put(KEYS)
    steps(bench)
    assert [len(written(bench, name)) for name in ("a", "b", "never")] == [50, 0, 0]
    assert not bench.tier["never"].asked


def test_a_tier_that_holds_less_than_the_pool_is_not_filled_with_what_was_used_long_ago():
    bench = adopting(chunks=20)
    steps(bench)
    assert sorted(written(bench)) == sorted(KEYS[-20:])


def test_of_second_access_the_next_use_is_the_second_one():
    bench = adopting(has=HALF, admission="second_access")
    steps(bench)
    assert not written(bench)
    assert bench.load(KEYS, bench.request())
    bench.settle()
    assert sorted(written(bench)) == sorted(set(KEYS) - set(HALF))


def test_of_second_access_a_use_before_the_answer_counts_too():
    bench = adopting(KEYS[:4], has=KEYS[:1], admission="second_access")
    assert bench.load(KEYS[:2], bench.request())
    assert not written(bench)
    steps(bench)
    assert written(bench) == KEYS[1:2]
    assert bench.load(KEYS[:4], bench.request())
    steps(bench)
    assert sorted(written(bench)) == sorted(KEYS[1:4])


def test_on_eviction_writes_what_leaves_and_the_tier_lacks():
    bench = adopting(rows=100, has=HALF, admission="on_eviction")
    steps(bench)
    assert len(written(bench)) <= 5, "no more than is needed soon"
    for number in range(40):
        bench.store(chain(f"n{number:02}", 2))
        steps(bench, 3)
    left = [key for key in KEYS if bench.primary.lookup(key) is MISS]
    assert len(left) == 80
    assert bench.tier["a"].has(left) == [True] * 80
    first = written(bench)[:5]  # before the tier was asked
    assert set(written(bench)) & set(HALF) <= set(first)
    assert bench.figures()["dropped_dirty"] == 0


def test_what_one_of_two_late_tiers_has_is_written_to_the_other():
    late = {"admission": "on_eviction"}
    bench = adopting(KEYS[:20], rows=20, tiers={"a": late, "b": late})
    bench.tier["a"].put(KEYS[:20])
    steps(bench)
    for number in range(10):
        bench.store(chain(f"n{number:02}", 1))
        steps(bench, 3)
    assert bench.tier["b"].has(KEYS[:10]) == [True] * 10


def test_chunks_that_have_left_or_are_stored_anew_are_left_out():
    bench = adopting(KEYS[:10], rows=10)
    plans = [bench.begin_store(chain("new", 4)), bench.begin_store(KEYS[:1])]  # in place of the first five
    steps(bench)
    assert sorted(written(bench)) == sorted(KEYS[5:10])
    for plan in plans:
        bench.manager.complete_store(plan)
    bench.settle()
    assert sorted(written(bench)) == sorted([*KEYS[5:10], *chain("new", 4), KEYS[0]])


@pytest.mark.parametrize("when", ["before the question", "before the answer", "before the end"])
@pytest.mark.parametrize("what", ["reset", "weights"])
def test_after_a_reset_nothing_of_before_is_written(what, when):
    bench = adopting(KEYS[:20], hold=True)
    if when != "before the question":
        bench.tier["a"].answer = RETRY
        bench.step()
        bench.tier["a"].answer = None
    if when == "before the end":
        bench.step()
        assert len(bench.tier["a"].held) == 1
    began = len(written(bench))
    if what == "reset":
        bench.manager.reset_cache()
    else:
        bench.manager.set_weights_version("new")
    bench.tier["a"].hold = False
    bench.tier["a"].end_all()
    steps(bench)
    assert len(written(bench)) == began
    assert bench.figures("a")["pinned_rows"] == 0
    assert bench.primary.free_rows == bench.rows
    bench.store(KEYS[:4])
    assert bench.tier["a"].has(KEYS[:4]) == [True] * 4


def test_nothing_begins_while_the_tier_loads_for_a_request():
    bench = adopting(hold=True)
    bench.tier["a"].put(chain("x", 4))
    ctx = bench.request()
    bench.lookup(chain("x", 4), ctx)
    bench.step()
    assert len(bench.tier["a"].loads) == 1
    asked = len(bench.tier["a"].asked)
    steps(bench, 50, 0.0)
    assert len(bench.tier["a"].asked) == asked
    bench.tier["a"].end_all()
    bench.tier["a"].hold = False
    steps(bench)
    assert bench.tier["a"].has(KEYS) == [True] * len(KEYS)


def test_one_job_at_a_time_of_a_quarter_of_the_room_and_then_a_rest():
    options = TieringOptions(one_tier=0.2, all_tiers=1.0)
    bench = adopting(options=options, hold=True)
    tier, began = bench.tier["a"], bench.clock.now
    steps(bench, 50)
    assert [len(job.keys) for job in tier.stores] == [8]
    tier.end_all()
    bench.step()
    took = bench.clock.now - began
    while len(tier.stores) == 1:
        bench.step(0.01)
    assert 1.9 * took < bench.clock.now - began < 2.3 * took
    tier.hold = False
    tier.end_all()
    steps(bench)
    assert tier.has(KEYS) == [True] * len(KEYS)
    assert max(len(job.keys) for job in tier.stores) == 10, "a quarter of 40 rows"


def test_a_request_gets_its_rows_and_its_cascade_while_a_job_is_in_flight():
    bench = adopting(rows=120, options=TieringOptions(one_tier=0.25), hold=True)
    steps(bench, 20)
    assert len(bench.tier["a"].held) == 1
    assert bench.load(KEYS, bench.request())
    plan = bench.begin_store(chain("n", 20))
    bench.manager.complete_store(plan)
    assert [len(job.keys) for job in bench.tier["a"].stores] == [8, 20]
    assert bench.figures("a")["dropped_cascades"] == 0


def test_a_tier_that_answers_slowly_is_asked_for_less_at_a_time():
    bench = adopting(has=KEYS)
    tier = bench.tier["a"]
    answer, asked_at = tier.lookup_many, {}

    def late(keys, ctx):
        since = bench.clock.now - asked_at.setdefault(keys[0], bench.clock.now)
        return answer(keys, ctx) if since > 0.1 else [RETRY]

    tier.lookup_many = late
    steps(bench, 200)
    assert list(Counter(asked_at.values()).values())[:5] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("how", ["off", "read-only"])
def test_a_tier_that_is_switched_off_gets_the_rest_when_it_is_back(how):
    bench = adopting()
    steps(bench, 5)
    began = len(written(bench))
    assert 0 < began < len(KEYS)
    bench.manager.tier_commands.switch("a", how)
    steps(bench)
    assert len(written(bench)) == began
    bench.manager.tier_commands.switch("a", "on")
    steps(bench)
    assert sorted(written(bench)) == sorted(KEYS)


def test_a_tier_that_goes_out_of_use_between_question_and_answer_is_asked_again():
    bench = adopting()
    tier = bench.tier["a"]
    tier.answer = RETRY
    bench.step()
    tier.available, tier.answer = False, None
    steps(bench)
    assert not written(bench)
    tier.available = True
    steps(bench)
    assert sorted(written(bench)) == sorted(KEYS)


def test_a_tier_that_is_detached_is_asked_nothing_more():
    bench = adopting(hold=True)
    bench.step()
    bench.step()
    assert bench.manager.tier_commands.remove("a") is None, "a job is in flight"
    bench.tier["a"].end_all()
    bench.step()
    assert bench.manager.tier_commands.remove("a") is not None
    asked, began = len(bench.tier["a"].asked), len(written(bench))
    steps(bench)
    assert (len(bench.tier["a"].asked), len(written(bench))) == (asked, began)


def test_what_a_tier_fails_to_take_is_offered_once_more_after_a_pause():
    bench = adopting(KEYS[:20])
    tier = bench.tier["a"]
    tier.raises = {"submit_store"}
    attempts, submit = [], tier.submit_store

    def counted(job):
        attempts.append((bench.clock.now, list(job.keys)))
        submit(job)

    tier.submit_store = counted
    steps(bench, 1000, 0.5)
    assert sorted(key for _, keys in attempts for key in keys) == sorted(2 * KEYS[:20])
    assert min(after - before for (before, _), (after, _) in pairwise(attempts)) >= 30
    tier.raises = set()
    steps(bench, 1000, 0.5)
    assert not tier.values, "as any other chunk that was not stored"


def test_a_tier_that_failed_for_a_while_has_all_in_the_end():
    bench = adopting()
    tier = bench.tier["a"]
    tier.raises = {"submit_store"}
    steps(bench, 100, 0.5)
    assert not tier.values
    tier.raises = set()
    steps(bench, 1000, 0.5)
    assert tier.has(KEYS) == [True] * len(KEYS)


def test_a_tier_that_never_answers_is_given_up_and_the_other_gets_all():
    bench = adopting(KEYS[:8], tiers={"a": {}, "b": {}})
    bench.tier["a"].answer = RETRY
    steps(bench, 2000, 1.0)
    assert not written(bench, "a")
    assert sorted(written(bench, "b")) == sorted(KEYS[:8])
    asked = len(bench.tier["a"].asked)
    steps(bench, 100, 1.0)
    assert len(bench.tier["a"].asked) == asked


def test_a_job_that_hangs_holds_nothing_up_but_its_tier():
    bench = adopting(tiers={"a": {"deadline": 5.0}, "b": {}})
    bench.tier["a"].hold = True
    steps(bench, 100, 0.1)
    assert bench.tier["b"].has(KEYS) == [True] * len(KEYS)
    assert bench.load(KEYS, bench.request())
    assert len(bench.tier["a"].held) == 1
    bench.tier["a"].hold = False
    bench.tier["a"].end_all()
    steps(bench, 400, 0.5)
    assert bench.tier["a"].has(KEYS) == [True] * len(KEYS)
    assert bench.figures("a")["pinned_rows"] == 0


def test_an_idle_engine_is_kept_stepping_a_moment_at_a_time():
    bench = adopting(chain("k", 60), has=())
    woken = []
    bench.manager.commands.wake = lambda: woken.append(bench.clock.now)
    for _ in range(100):
        bench.manager.tend()
        while bench.manager.has_pending_work():
            bench.step(0.002)
        bench.clock.now += 1.0
    assert bench.tier["a"].has(chain("k", 60)) == [True] * 60
    assert 1 <= len(woken) <= 3
    bench.manager.tend()
    bench.manager.tend()
    assert not bench.manager.has_pending_work()


def test_engines_that_found_nothing_ask_nothing():
    bench = adopting(())
    steps(bench, 10)
    assert not bench.tier["a"].asked


def test_after_a_shutdown_nothing_begins():
    bench = adopting()
    bench.step()
    bench.manager.shutdown(1.0)
    steps(bench, 10)
    assert not written(bench)


def leaving(bench, *left):
    """Have neighbours leave these chunks, one after the other."""
    left = list(left)
    bench.primary.take_left = lambda: left.pop(0) if left else []


def test_what_a_neighbour_leaves_is_offered_to_the_tiers_that_take_all_of_it():
    second, late = ({"admission": rule} for rule in ("second_access", "on_eviction"))
    bench = adopting(has=KEYS, tiers={"a": {}, "second": second, "late": late, "never": {"read_only": True}})
    steps(bench)
    asked = [len(tier.asked) for tier in bench.tier.values()]
    bench.tier["a"].values.clear()
    leaving(bench, KEYS[:10], KEYS[20:30])
    steps(bench)
    assert sorted(written(bench)) == sorted(KEYS[:10] + KEYS[20:30])
    assert [len(tier.asked) for tier in bench.tier.values()][1:] == asked[1:]


def test_what_a_neighbour_leaves_is_not_taken_where_no_tier_is_to_have_it():
    bench = adopting(admission="second_access")
    bench.primary.take_left = None
    steps(bench)


def test_what_is_left_while_a_job_is_in_flight_waits_for_its_end_too():
    bench = adopting(hold=True)
    steps(bench, 3)
    leaving(bench, KEYS[:10])
    steps(bench)
    assert len(bench.tier["a"].stores) == 1
    bench.tier["a"].hold = False
    bench.tier["a"].end_all()
    steps(bench, 1200)
    assert sorted(written(bench)) == KEYS


def test_chunks_that_cannot_be_read_yet_are_not_asked_about_in_each_step():
    bench = adopting()
    read, bench.primary.prepare_read = bench.primary.prepare_read, lambda _keys: None
    steps(bench, 400, 0.01)
    assert len(bench.tier["a"].asked) < 4 / 0.1 * 2 * 16, "ten questions a second, and their answers"
    bench.primary.prepare_read = read
    steps(bench)
    assert sorted(written(bench)) == KEYS
