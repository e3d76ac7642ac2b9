"""Prefetches: what a warm-up loads and how fast, what it never does to requests and rows, and how it ends."""

from functools import partial

import pytest

from kvtiers.tiering.command_queue import CommandRefused
from kvtiers.types import RequestContext

from .harness import ROW_BYTES, Bench, chain
from .test_commands import do

KEYS = chain("a", 8)


def warm(bench, keys=KEYS, *, tier="a", rate=None, most=None, last=True):
    """Begin a warm-up and give it these keys; return its number."""
    warm_ups = bench.manager.warm_ups
    number = do(bench, partial(warm_ups.begin, tier, rate, most))["id"]
    done = do(bench, partial(warm_ups.give, number, [keys], continues=False, is_last=last))
    assert done["taken"] == len(keys)
    return number


def look(bench, number):
    return do(bench, partial(bench.manager.warm_ups.give, number, [], continues=False, is_last=False))


def end(bench, number):
    return do(bench, partial(bench.manager.warm_ups.end, number))


def run(bench, number, most=200):
    """Step until the warm-up has ended; its last figures."""
    for _ in range(most):
        bench.step(0.001)
        if look(bench, number)["ended"]:
            return end(bench, number)
    raise AssertionError(f"not ended: {look(bench, number)}")


def test_a_warm_up_loads_what_its_tier_has_and_counts_what_was_there_and_what_is_missing():
    bench = Bench(rows=32, tiers={"a": {}, "b": {}})
    bench.tier["a"].put(KEYS[:6])
    bench.tier["b"].put(KEYS)
    bench.tier["a"].put(chain("c", 1))
    bench.tier["b"].values.pop(("", KEYS[7]))
    ctx = bench.request()
    assert bench.lookup(chain("c", 1), ctx)[1] == 1
    bench.settle()
    done = run(bench, warm(bench, [*chain("c", 1), *KEYS]))
    assert {name: done[name] for name in ("given", "loaded", "resident", "missing", "failed", "ended")} == {
        "given": 9,
        "loaded": 6,
        "resident": 1,
        "missing": 2,  # b has one of them, and was not asked
        "failed": 0,
        "ended": "done",
    }
    assert done["loaded_bytes"] == 6 * ROW_BYTES
    assert bench.lookup(KEYS[:6], bench.request()) == (6, 0, False)
    assert bench.load(KEYS[:6], bench.request())
    assert [KEYS[0]] not in bench.tier["b"].asked
    assert bench.figures()["prefetched_chunks"] == 6
    assert not bench.manager.has_pending_work()
    assert bench.figures("a")["pinned_rows"] == bench.figures("a")["loading_chunks"] == 0


def test_a_request_that_waits_for_the_tier_is_loaded_before_the_rest_of_a_warm_up():
    bench = Bench(rows=64, hold=True)
    more = chain("m", 40)
    bench.tier["a"].put([*KEYS, *more])
    number = warm(bench, more)
    for _ in range(20):
        bench.step(0.001)
    (first,) = bench.tier["a"].loads
    assert len(first.keys) <= 4, "of a tier that is not measured yet"
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx)[1] == 8
    bench.step()
    assert bench.tier["a"].loads[-1].keys == tuple(KEYS), "the request's load goes out at once"
    bench.tier["a"].end(first.job_id)
    for _ in range(20):
        bench.step(0.001)
    assert len(bench.tier["a"].loads) == 2, "while a request waits, a warm-up gives way"
    bench.tier["a"].end_all()
    bench.step()
    assert bench.load(KEYS, ctx)
    bench.step()
    assert len(bench.tier["a"].loads) > 2, "then it goes on"
    bench.tier["a"].hold = False
    bench.tier["a"].end_all()
    assert run(bench, number)["loaded"] == 40


def test_what_is_in_flight_is_bounded_by_the_tiers_speed():
    bench = Bench(rows=256, hold=True)
    bench.tier["a"].put(chain("m", 200))
    number = warm(bench, chain("m", 200))
    for _ in range(150):
        bench.step(0.01)  # a chunk takes the tier 5 ms
        for job_id, held in list(bench.tier["a"].held.items()):
            assert len(held.job.keys) <= 5, "25 ms of a chunk in 5 ms"
            bench.tier["a"].seconds = 0.005 * len(held.job.keys)
            bench.tier["a"].end(job_id)
    assert end(bench, number)["loaded"] == 200


def test_nothing_is_evicted_for_a_warm_up_and_rows_for_stores_stay_free():
    bench = Bench(rows=16)
    used = chain("u", 6)
    bench.store(used)
    bench.tier["a"].put(chain("m", 20))
    done = run(bench, warm(bench, chain("m", 20)))
    assert done["ended"] == "the primary is full"
    assert bench.primary.free_rows == 2, "10 % of 16, rounded up"
    assert done["loaded"] == 16 - 6 - 2
    assert bench.lookup(used, bench.request())[0] == 6
    bench.store(chain("n", 2))


def test_what_a_warm_up_has_loaded_does_not_end_the_protection_of_what_requests_wait_for():
    bench = Bench(rows=20, protected_share=0.2)  # 4 rows
    bench.tier["a"].put([*KEYS[:4], *chain("m", 8)])
    ctx = bench.request()
    assert bench.lookup(KEYS[:4], ctx)[1] == 4
    bench.settle()
    assert bench.primary.protected_rows == 4
    assert run(bench, warm(bench, chain("m", 8)))["loaded"] == 8
    assert bench.primary.protected_rows == 4
    bench.tier["a"].values.clear()
    bench.store(chain("s", 16))
    assert bench.load(KEYS[:4], ctx), "the warm-up's chunks have left instead"


def test_a_warm_up_keeps_to_its_bandwidth():
    bench = Bench(rows=256)
    bench.tier["a"].put(chain("m", 200))
    number = warm(bench, chain("m", 200), rate=100 * ROW_BYTES)
    began, loaded = bench.clock.now, []
    while bench.clock.now < began + 1.0:
        bench.step(0.004)
        loaded.append(bench.figures()["prefetched_chunks"])
    assert 85 <= loaded[-1] <= 110, "100 chunks a second, and a burst of a tenth"
    assert loaded[len(loaded) // 2] <= 60, "evenly"
    assert bench.manager.has_pending_work(), "an idle engine goes on with it"
    assert end(bench, number)["ended"] == "stopped"


def test_a_warm_up_loads_no_more_than_was_asked_for():
    bench = Bench(rows=64)
    bench.tier["a"].put(chain("m", 30))
    done = run(bench, warm(bench, chain("m", 30), most=10 * ROW_BYTES))
    assert (done["loaded"], done["ended"]) == (10, "as much as was asked for is loaded")


def test_a_warm_up_whose_client_says_nothing_ends_by_itself_and_costs_no_further_step():
    bench = Bench(rows=64)
    bench.tier["a"].put(chain("m", 30))
    number = warm(bench, chain("m", 30), rate=ROW_BYTES, last=False)
    for _ in range(40):
        bench.step(0.5)
    assert not bench.manager.has_pending_work()
    assert not bench.manager._prefetches.all
    with pytest.raises(CommandRefused, match=f"there is no warm-up {number}"):
        look(bench, number)
    for _ in range(4):
        warm(bench, [], last=False)
    with pytest.raises(CommandRefused, match="4 warm-ups are on their way already"):
        warm(bench, [], last=False)


@pytest.mark.parametrize("what", ["off", "weights", "reset", "unavailable", "loads fail", "never answers"])
def test_whatever_happens_meanwhile_a_warm_up_ends_and_no_row_is_lost(what):
    bench = Bench(rows=64, hold=True, tiers={"a": {"deadline": 5.0}})
    bench.tier["a"].put(chain("m", 30))
    number = warm(bench, chain("m", 30))
    for _ in range(5):
        bench.step(0.001)
    if what == "off":
        do(bench, partial(bench.manager.tier_commands.switch, "a", "off"))
    elif what == "weights":
        bench.manager.set_weights_version("other")
    elif what == "reset":
        bench.manager.reset_cache()
    elif what == "unavailable":
        bench.tier["a"].available = False
    elif what == "loads fail":
        bench.tier["a"].raises.add("submit_load")
    else:
        bench.tier["a"].answer = "RETRY"
    bench.tier["a"].hold = False
    bench.tier["a"].end_all()
    for _ in range(200):
        bench.step(0.5)
        done = look(bench, number)
        if done["ended"]:
            break
    assert done["ended"]
    done = end(bench, number)
    assert done["loaded"] + done["failed"] + done["missing"] + done["resident"] <= 30
    bench.tier["a"].raises.clear()
    bench.settle()
    assert bench.unused_rows() == bench.rows
    assert bench.figures("a")["pinned_rows"] == bench.figures("a")["loading_chunks"] == 0
    assert not bench.manager.has_pending_work()


def test_a_tier_that_says_between_two_steps_that_it_is_open_is_loaded_from():
    bench = Bench(rows=64)
    tier = bench.tier["a"]
    tier.put(KEYS)
    tier.available, heard = False, []
    tier.open_state = lambda: ""  # as all threads but the engine's know
    tier.has_spoken = lambda: bool(heard)
    number = warm(bench)
    bench.step(0.001)
    bench.step(0.001)
    heard.append("its opening")
    tier.available = True
    assert run(bench, number)["loaded"] == len(KEYS)


def test_an_unknown_tier_and_one_that_is_off_are_refused():
    bench = Bench()
    with pytest.raises(CommandRefused, match="there is no tier 'b'; this engine has a"):
        warm(bench, tier="b")
    do(bench, partial(bench.manager.tier_commands.switch, "a", "off"))
    with pytest.raises(CommandRefused, match="a: it is switched off"):
        warm(bench)


@pytest.mark.parametrize("policy", ["lru", "arc", "turn-hazard"])
def test_the_head_of_a_warmed_prefix_stays_longest(policy):
    bench = Bench(rows=16, policy=policy)
    prefix = chain("p", 12)
    bench.tier["a"].put(prefix)
    assert run(bench, warm(bench, prefix))["loaded"] == 12
    bench.tier["a"].values.clear()
    bench.primary.store_everything()
    bench.store(chain("s", 10))
    here = [bench.primary.resident_run([key])[0] for key in prefix]
    assert here == sorted(here, reverse=True), "tail first"
    assert 0 < sum(here) < 12


# -- prefixes


def test_a_known_prefix_is_prefetched_from_the_first_tier_that_has_each_chunk():
    bench = Bench(rows=32, tiers={"a": {}, "b": {}})
    bench.tier["a"].put(KEYS[:3])
    bench.tier["b"].put(KEYS[:6])
    assert bench.manager.prefetch(KEYS)
    assert bench.manager.has_pending_work()
    bench.settle(50)
    assert [len(bench.tier[name].loads) > 0 for name in "ab"] == [True, True]
    assert bench.lookup(KEYS, bench.request()) == (6, 0, False)
    assert bench.figures()["prefetched_chunks"] == 6
    assert not bench.manager._prefetches.all


def test_a_prefetch_goes_before_a_warm_up_and_only_to_the_tiers_that_its_request_may_load_from():
    bench = Bench(rows=64, tiers={"a": {}, "b": {}}, hold=True)
    bench.tier["a"].put(KEYS)
    bench.tier["b"].put([*KEYS, *chain("m", 30)])
    number = warm(bench, chain("m", 30), tier="b")
    ctx = RequestContext("r", {"kv_load_tiers": ["b"]})
    assert bench.manager.prefetch(KEYS, ctx)
    for _ in range(5):
        bench.step(0.001)
        bench.tier["b"].end_all()
    assert not bench.tier["a"].loads
    assert [job.keys[0] for job in bench.tier["b"].loads if job.keys[0] in KEYS]
    bench.tier["b"].hold = False
    assert run(bench, number)["loaded"] == 30


def test_too_many_prefetches_are_dropped_and_counted():
    bench = Bench(rows=64)
    taken = [bench.manager.prefetch(chain(f"p{number}", 2)) for number in range(70)]
    assert taken == [True] * 64 + [False] * 6
    assert bench.figures()["dropped_prefetches"] == 12
    bench.settle(200)
    assert not bench.manager._prefetches.all


def test_keys_that_are_none_are_missing_and_no_tier_is_asked_about_them():
    bench = Bench()
    assert run(bench, warm(bench, [b"ab", b"x" * 70_000]))["missing"] == 2
    assert not bench.tier["a"].asked


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_load_whose_rows_the_tier_never_releases_ends_its_warm_up_and_keeps_no_engine_stepping(is_reset):
    bench = Bench(rows=64, hold=True, tiers={"a": {"deadline": 5.0}})
    bench.tier["a"].put(KEYS)
    number = warm(bench)
    for _ in range(5):
        bench.step(0.001)
    assert bench.tier["a"].held
    if is_reset:
        bench.manager.reset_cache()
    for _ in range(100):
        bench.step(0.5)
        done = look(bench, number)
    assert done["ended"]
    end(bench, number)
    bench.step()
    assert bench.tier["a"].held, "it still has the rows"
    assert not bench.manager.has_pending_work()
    assert not bench.manager._prefetches.all


def test_what_was_found_in_a_tier_that_is_switched_off_is_asked_of_the_others():
    bench = Bench(rows=128, tiers={"a": {}, "b": {}}, hold=True)
    keys = chain("p", 60)
    bench.tier["b"].put(keys)
    assert bench.manager.prefetch(keys)
    while not bench.tier["b"].held:
        bench.step(0.001)
    assert bench.manager._prefetches.all[0].found, "more than is in flight"
    loads = len(bench.tier["b"].loads)
    do(bench, partial(bench.manager.tier_commands.switch, "b", "off"))
    bench.tier["b"].end_all()
    bench.tier["a"].put(keys)
    bench.tier["a"].hold = False
    bench.settle(100)
    assert len(bench.tier["b"].loads) == loads, "nothing more is given to it"
    assert not bench.manager.has_pending_work()
    assert len(bench.tier["a"].loads) > 0
