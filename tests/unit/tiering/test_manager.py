"""The manager as a whole: resets, weights, pending work, events, figures, and its end."""

import json
import threading

import pytest

from kvtiers.recorder import Recorder
from kvtiers.tiering import reports
from kvtiers.tiering.engine_side import Watchers
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.provenance import Provenance
from kvtiers.types import PromptGroup, RequestContext, RequestHints

from .harness import HIT, MISS, Bench, chain, payload

WIDE = TieringOptions(lookup_wait=0.02, load_wait=60.0, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 8)


def with_everything_in_flight():
    """A store and a load of the GPU's, a cascade, a promotion, a reservation, and a parked chunk."""
    bench = Bench(rows=64, tiers={"a": {}, "w": {}}, options=WIDE, hold=True)
    bench.tier["a"].put(chain("promoted", 4) + chain("reserved", 4))
    bench.manager.complete_store(bench.begin_store(chain("cascading", 4)))
    load = bench.manager.prepare_load(chain("cascading", 4), bench.request())
    bench.lookup(chain("promoted", 4), bench.request())
    bench.step()
    store = bench.begin_store(chain("storing", 4))
    bench.tier["w"].wants_whole = True
    ctx = bench.request()
    parked = bench.begin_store(chain("storing", 4), ctx)
    bench.manager.complete_store(parked)
    bench.lookup(chain("reserved", 4), bench.request())
    return bench, store, load, ctx


@pytest.mark.parametrize("weights", [False, True])
def test_a_reset_forgets_all_at_once_and_rows_come_back_when_nothing_touches_them(weights):
    bench, store, load, ctx = with_everything_in_flight()
    tier = bench.tier["a"]
    if weights:
        bench.manager.set_weights_version("new")
    else:
        bench.manager.reset_cache()
    names = ["cascading", "promoted", "storing", "reserved"]
    assert all(bench.primary.find(chain(name, 4)) == [MISS] * 4 for name in names)
    held = 4 + 4 + 4  # the load's and the cascades', the promotion's, the store's
    assert bench.primary.free_rows == bench.rows - held
    assert bench.primary.quarantined_rows == held
    # Late results change nothing but free the rows; late copies do no harm.
    fresh = bench.begin_store(KEYS)
    for key, row in zip(store.keys, store.chunk_ids.tolist(), strict=True):
        bench.row(row)[:] = payload(key, "late")
    bench.manager.complete_store(store)
    bench.manager.complete_load(load)
    for faulty in bench.tier.values():
        faulty.end_all()
    bench.step()
    bench.step()
    assert all(bench.primary.find(chain(name, 4)) == [MISS] * 4 for name in names)
    assert bench.primary.free_rows == bench.rows - 8
    assert [bytes(bench.row(row)) for row in fresh.chunk_ids] == [payload(k, bench.engine.version) for k in KEYS]
    bench.manager.complete_store(fresh)
    for faulty in bench.tier.values():
        faulty.end_all()
    bench.manager.on_request_finished(ctx)
    bench.settle()
    assert bench.load(KEYS, bench.request())
    assert bench.figures()["generation"] == 1
    # The tiers keep what they have, under its own weights.
    assert ("", chain("cascading", 4)[0]) in tier.values
    assert (bench.engine.version, KEYS[0]) in tier.values
    assert bench.lookup(chain("promoted", 4), bench.request())[1] == (0 if weights else 4)


def test_a_result_that_a_reset_overtook_says_nothing_about_the_chunk_that_has_the_key_now():
    bench = Bench(rows=16, tiers={"a": {"admission": "on_eviction"}}, options=WIDE, hold=True)
    bench.tier["a"].put(KEYS[:2])
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    bench.manager.reset_cache()
    bench.manager.complete_store(bench.begin_store(KEYS[:2], ctx))
    bench.tier["a"].end(1, landed=[])
    bench.step()
    assert bench.primary.find(KEYS[:2]) == [HIT, HIT]
    assert bench.lookup(KEYS[:2], ctx) == (2, 0, False)
    assert bench.figures("a")["failed_loads"] == 0


def test_old_weights_bytes_are_never_read_as_the_new_ones():
    bench = Bench(options=WIDE)
    bench.store(KEYS)
    bench.manager.set_weights_version("new")
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    bench.store(KEYS, ctx)
    assert bench.load(KEYS, ctx)
    bench.forget()
    other = bench.request()
    bench.lookup(KEYS, other)
    bench.settle()
    assert bench.load(KEYS, other)


# -- pending work


def test_the_engine_keeps_stepping_while_a_job_or_a_request_waits():
    bench = Bench(options=WIDE, hold=True)
    manager = bench.manager
    assert not manager.has_pending_work()
    manager.complete_store(bench.begin_store(KEYS[:2]))
    assert manager.has_pending_work()
    bench.step()
    bench.tier["a"].end_all()
    assert manager.has_pending_work()
    bench.step()
    assert not manager.has_pending_work()
    bench.tier["a"].put(chain("x", 1))
    bench.lookup(chain("x", 1), bench.request())
    assert manager.has_pending_work(), "reserved, not submitted"
    bench.manager.reset_cache()
    assert not manager.has_pending_work()
    bench.tier["a"].pending_work = True
    assert manager.has_pending_work()


# -- events


def events(bench):
    found = [(list(event.keys), event.removed, event.tier) for event in bench.heard.events]
    bench.heard.events.clear()
    return found


def test_events_say_what_became_resident_and_what_left_in_order():
    bench = Bench(rows=4, tiers={}, options=WIDE)
    bench.store(KEYS[:4])
    bench.step()
    bench.store(chain("x", 3))
    recorded = events(bench)
    assert recorded[0] == (KEYS[:4], False, "")
    assert (sorted(recorded[1][0]), recorded[1][1:]) == (KEYS[1:4], (True, ""))
    assert recorded[2:] == [(chain("x", 3), False, "")]
    assert events(bench) == []


def test_a_store_that_failed_is_no_event_and_a_promotion_is_one():
    bench = Bench(options=WIDE)
    bench.manager.complete_store(bench.begin_store(KEYS[:2]), success=False)
    bench.tier["a"].put(chain("p", 2))
    bench.lookup(chain("p", 2), bench.request())
    bench.settle()
    assert events(bench) == [(chain("p", 2), False, "")]


def test_events_say_what_each_tier_has_stored_and_nothing_of_what_it_has_not():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE, hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:4]))
    bench.step()
    a, b = bench.tier.values()
    b.end(min(b.held), KEYS[:3])
    bench.step()
    a.end(min(a.held))
    bench.step()
    assert events(bench) == [(KEYS[:4], False, ""), (KEYS[:3], False, "b"), (KEYS[:4], False, "a")]
    bench.manager.complete_store(bench.begin_store(KEYS[4:]))
    bench.step()
    a.end(min(a.held))
    b.end(min(b.held), ())
    bench.step()
    assert events(bench) == [(KEYS[4:], False, ""), (KEYS[4:], False, "a")]


def test_where_no_events_are_taken_none_is_kept_of_the_tiers_either():
    bench = Bench(options=WIDE, record_events=False)
    bench.manager.complete_store(bench.begin_store(KEYS[:4]))
    bench.settle()
    assert bench.figures("a")["stored_chunks"] == 4
    assert events(bench) == []


def test_a_store_that_other_weights_overtook_is_no_event():
    bench = Bench(options=WIDE, hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:2]))
    bench.step()
    bench.manager.set_weights_version("new")
    bench.tier["a"].end_all()
    bench.settle()
    assert events(bench) == []


def test_a_reset_takes_back_events_that_were_not_passed_on():
    bench = Bench(options=WIDE)
    bench.store(KEYS[:2])
    bench.manager.complete_store(bench.begin_store(KEYS[2:4]))
    bench.step()
    # This also takes the tier's events of the store before.
    bench.manager.complete_store(bench.begin_store(chain("x", 1)))
    bench.manager.reset_cache()
    assert events(bench) == []


# -- figures


def test_stats_are_those_of_now_and_plain_data():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    before = bench.manager.stats()
    assert before["engine"]["stored_chunks"] == 0
    assert before["primary"]["free_rows"] == 16
    bench.engine.own["a"] = {"breaker_state": 0.0}
    bench.store(KEYS[:3])
    bench.load(KEYS[:3], bench.request())
    assert bench.manager.stats()["engine"]["primary_hits"] == 3
    bench.step()
    stats = bench.manager.stats()
    assert stats["engine"]["stored_chunks"] == 3
    assert stats["engine"]["engine_seconds"] > 0
    assert stats["engine"]["step_latency"]["count"] == stats["engine"]["steps"] > 0
    assert stats["tiers"]["a"]["own"] == {"breaker_state": 0.0}
    assert stats["tiers"]["b"]["stored_chunks"] == 3
    assert stats["tiers"]["b"]["cascade_latency"]["count"] == 1
    assert stats["primary"] == {
        "rows": 16,
        "free_rows": 13,
        "evictable_rows": 3,
        "pending_rows": 0,
        "pinned_rows": 0,
        "protected_rows": 0,
        "quarantined_rows": 0,
        "closed_rows": 0,
        "retired_rows": 0,
        "clean_rows": 0,
        "kept_rows": 0,
        "kept_over_share": 0,
        "kept_given_up": 0,
        "misuse": 0,
        "pool": 0,
    }
    stats["engine"]["primary_hits"] = 99
    assert bench.manager.stats()["engine"]["primary_hits"] == 3


def test_stats_that_another_thread_asks_for_in_the_middle_of_a_call_have_all_of_it(monkeypatch):
    bench = Bench(options=WIDE)
    inside, go_on = threading.Event(), threading.Event()
    ask = bench.tier["a"].lookup_many

    def lookup_many(keys, context):
        inside.set()
        go_on.wait(60)
        return ask(keys, context)

    bench.tier["a"].lookup_many = lookup_many
    monkeypatch.setattr(reports.time, "sleep", lambda _: (go_on.set(), asking.join(60)))  # the reader waits
    asking = threading.Thread(target=bench.lookup, args=(KEYS, bench.request()))
    asking.start()
    inside.wait(60)
    stats = bench.manager.stats()
    assert stats["engine"]["lookups"] == len(KEYS)
    assert stats["tiers"]["a"]["lookups"] == 1, "counted after the tier has answered"


def test_stats_do_not_wait_long_for_a_call_that_does_not_end(monkeypatch):
    bench = Bench(options=WIDE)
    waited = []
    monkeypatch.setattr(reports.time, "sleep", waited.append)
    bench.tier["a"].lookup_many = lambda _keys, _context: seen.append(bench.manager.stats()) or []
    seen = []
    bench.lookup(KEYS, bench.request())
    assert seen[0]["engine"]["lookups"] == len(KEYS)
    assert 0 < sum(waited) <= 0.1
    waited.clear()
    bench.manager.stats()
    assert not waited


def test_stats_survive_a_way_through_json():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE, hold=True)
    bench.engine.own["a"] = {"breaker_state": 0.0}
    bench.tier["a"].put(KEYS[:2])
    bench.lookup(KEYS, bench.request())
    bench.step()
    bench.tier["a"].end_all()
    bench.step()
    stats = bench.manager.stats()
    assert stats["tiers"]["a"]["promotion_latency"]["count"] == 1
    assert json.loads(json.dumps(stats)) == stats


def test_all_calls_of_the_engines_thread_count_as_its_time_and_none_twice(monkeypatch):
    bench = Bench(options=WIDE)
    monkeypatch.setattr("kvtiers.tiering.manager.time.perf_counter", bench.clock)
    step = bench.manager.on_schedule_end

    def takes(tier, method):
        called = getattr(tier, method)

        def slow(*arguments):
            bench.clock.now += 1.0
            return called(*arguments)

        setattr(tier, method, slow)

    def seconds(call):
        before = bench.figures()["engine_seconds"]
        call()
        return bench.figures()["engine_seconds"] - before

    takes(bench.tier["a"], "get_finished_jobs")
    takes(bench.tier["a"], "has_pending_work")
    bench.tier["a"].announce = lambda keys: None
    takes(bench.tier["a"], "announce")
    takes(bench.engine, "new_weights")
    takes(bench.primary, "reset_cache")
    assert seconds(bench.manager.take_lost_ranks) == 1, "the first call of a step takes the tiers' events"
    assert seconds(bench.manager.take_lost_ranks) == 0
    assert seconds(step) == 0
    assert seconds(step) == 1
    assert seconds(bench.manager.has_pending_work) == 1
    assert seconds(lambda: bench.manager.announce([PromptGroup(KEYS)])) == 1
    assert seconds(bench.manager.reset_cache) == 1
    assert seconds(lambda: bench.manager.set_weights_version("new")) == 2, "the reset in it, and the names"


def test_requests_that_are_missing_in_the_recording_are_counted(tmp_path):
    bench = Bench(watchers=Watchers(Recorder(tmp_path / "trace.jsonl", 1 << 20, 16, most_waiting=2)))
    bench.manager.record_request(0.0, 16, 20, [[b"1"]])
    assert bench.figures()["dropped_records"] == 0
    bench.manager.record_request(0.0, 32, 40, [[b"1", b"2"]])
    assert bench.figures()["dropped_records"] == 1
    bench.manager.shutdown()


def test_a_tier_whose_own_figures_cannot_be_read_has_none():
    bench = Bench(options=WIDE)
    bench.engine.own["a"] = OSError("no")
    bench.step()
    assert bench.manager.stats()["tiers"]["a"]["own"] == {}
    bench.step()
    assert bench.manager.stats()["tiers"]["a"]["raised"] >= 1


def test_stats_may_be_read_from_another_thread_while_the_engine_steps():
    bench = Bench(rows=64, options=WIDE)
    stop, seen, wrong = threading.Event(), [0], []

    def read():
        while not stop.is_set():
            figures = bench.manager.stats()
            tier = figures["tiers"]["a"]
            if tier["stored_chunks"] * 16 != tier["stored_bytes"]:
                wrong.append(figures)
            seen[0] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        number = 0
        while seen[0] < 200:
            bench.store(chain(f"n{number}", 3))
            number += 1
    finally:
        stop.set()
        reader.join()
    assert not wrong


def test_unread_keys_are_bounded_and_what_stands_for_many_is_about_right():
    slot = Bench().slots[0]
    provenance, unread = Provenance([slot]), lambda: slot.metrics.unread_bytes
    chunks = [chain(f"n{number:05}", 8) for number in range(150_000)]
    for keys in chunks[:500]:
        provenance.written(slot, keys, 8 * 16)
    assert unread() == 500 * 8 * 16, "exact while there are few"
    for keys in chunks[500:]:
        provenance.written(slot, keys, 8 * 16)
    assert unread() == pytest.approx(150_000 * 8 * 16, rel=0.02)
    written = unread()
    for keys in chunks[-1000:]:
        provenance.read(slot, keys)
    assert written - unread() == pytest.approx(1000 * 8 * 16, rel=0.02)
    written = unread()
    for keys in chunks[:1000]:
        provenance.read(slot, keys)
    assert unread() == written, "the oldest are forgotten, and stay counted as unread"


# -- the end


def test_shutdown_closes_the_tiers_before_the_region_and_only_once():
    bench = Bench(options=WIDE)
    bench.store(KEYS)
    bench.manager.shutdown(timeout=7.0)
    bench.manager.shutdown()
    assert bench.engine.closed == [("tiers", 7.0), "region"]
    assert len(bench.primary.get_kv_memoryview()) == 0


def test_calls_after_the_shutdown_find_nothing_and_touch_no_tier():
    bench = Bench(options=WIDE)
    ctx = bench.request()
    store = bench.begin_store(KEYS, ctx)
    bench.manager.shutdown()
    steps = bench.tier["a"].steps
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.manager.prepare_store(chain("x", 1), ctx) is None
    assert bench.manager.prepare_load(KEYS, ctx) is None
    bench.manager.complete_store(store)
    bench.manager.on_request_finished(ctx)
    bench.manager.touch(KEYS)
    bench.manager.reset_cache()
    bench.manager.set_weights_version("new")
    bench.manager.on_schedule_end()
    assert bench.engine.version == ""
    assert not bench.manager.has_pending_work()
    assert bench.manager.stats()["engine"]["steps"] == 0
    assert bench.tier["a"].steps == steps
    assert not bench.tier["a"].submitted


def test_shutdown_waits_for_the_step_that_another_thread_is_in():
    bench = Bench(options=WIDE)
    inside, go_on, order = threading.Event(), threading.Event(), []
    bench.engine.close_tiers = lambda timeout: order.append("closed")

    def step():
        with bench.manager.lock:
            inside.set()
            go_on.wait(60)
            bench.manager.on_schedule_end()
            order.append("stepped")

    stepping = threading.Thread(target=step)
    stepping.start()
    inside.wait(60)
    closing = threading.Thread(target=bench.manager.shutdown)
    closing.start()
    go_on.set()
    stepping.join(60)
    closing.join(60)
    assert order == ["stepped", "closed"]
    assert bench.manager.lock.acquire(blocking=False)


def test_waiting_for_the_start_is_the_engines_sides():
    bench = Bench()
    bench.manager.wait_ready(3.0)
    assert bench.engine.waited == 3.0


def test_the_eviction_policy_gets_the_hints_of_a_request_and_the_length_of_its_answer():
    bench = Bench(rows=64)
    heard = []
    bench.primary._policy.hint = lambda request_id, hints: heard.append((request_id, hints))
    hinted = RequestContext("hinted", {"session": "s", "expects_turn_in": 3})
    for ctx, output in ((RequestContext("plain"), 0), (hinted, 0), (RequestContext("answered"), 7)):
        bench.manager.on_new_request(ctx)
        bench.manager.on_request_finished(ctx, output)
    expected = RequestHints("s", expects_turn_in=3.0)
    assert heard == [("hinted", expected), ("answered", RequestHints(output_tokens=7))]


# -- an idle engine


@pytest.fixture
def idle():
    """An engine with a tier that can be tended; how often it was."""
    bench = Bench(tiers={"a": {}}, options=WIDE)
    tended = []
    bench.tier["a"].is_tended = True
    bench.tier["a"].tend = lambda: tended.append(bench.clock())
    bench.step()
    bench.manager.tend()
    return bench, tended


def test_tiers_are_tended_while_no_step_comes_and_only_then(idle):
    bench, tended = idle
    assert not tended, "a step has just ended"
    bench.manager.tend()
    bench.manager.tend()
    assert len(tended) == 2
    bench.step()
    bench.manager.tend()
    assert len(tended) == 2
    with bench.manager.lock:
        bench.manager.tend()
    assert len(tended) == 2, "a step is on: nothing waits for its end"
    bench.manager.tend()
    assert len(tended) == 3
    bench.manager.shutdown(0.0)
    bench.manager.tend()
    assert len(tended) == 3


def test_an_idle_engine_makes_one_step_when_a_tier_is_in_another_condition_so_that_its_figures_are_published(idle):
    bench, _ = idle
    woken = []
    bench.manager.commands.wake = lambda: woken.append(1)
    bench.manager.tend()
    bench.tier["a"].available = False
    bench.manager.tend()
    bench.manager.tend()
    assert len(woken) == 1
    assert bench.manager.has_pending_work()
    bench.step()
    assert not bench.manager.has_pending_work()


@pytest.fixture
def full():
    """An engine that has become idle, whose tier has not taken the last of what it was given."""
    bench = Bench(tiers={"a": {}}, options=WIDE, hold=True)
    tier, bench.full_since = bench.tier["a"], bench.clock()
    tier.stats = lambda: {"full": 1, "not_taken_seconds": bench.clock() - bench.full_since}
    bench.end = lambda landed: (tier.end(next(iter(tier.held)), landed), bench.settle())
    bench.woken = []
    bench.manager.commands.wake = lambda: bench.woken.append(bench.clock())
    bench.manager.complete_store(bench.begin_store(KEYS[:3]))
    bench.end(KEYS[:2])
    return bench


def tend_for(bench, seconds):
    """Let so many seconds pass, in each of which an idle engine is tended; it makes the steps that it is woken for."""
    for _ in range(seconds):
        bench.clock.now += 1.0
        bench.manager.tend()
        while len(bench.woken) > bench.manager.steps - bench.first_step:
            bench.step()


def offered(bench):
    return [list(job.keys) for job in bench.tier["a"].stores[1:]]


def test_an_idle_engine_offers_a_full_tier_every_half_minute_what_it_did_not_take_until_it_does(full):
    full.first_step = full.manager.steps
    tend_for(full, 29)
    assert offered(full) == []
    tend_for(full, 2)
    assert offered(full) == [KEYS[2:3]]
    assert full.manager.has_pending_work(), "the engine steps until it has ended"
    full.full_since = full.clock()
    full.end([])
    full.first_step, full.woken[:] = full.manager.steps, []
    tend_for(full, 28)
    assert len(offered(full)) == 1
    tend_for(full, 4)
    assert offered(full) == [KEYS[2:3]] * 2
    full.end(KEYS[2:3])
    assert full.tier["a"].has(KEYS[:3]) == [True] * 3
    full.first_step, full.woken[:] = full.manager.steps, []
    tend_for(full, 100)
    assert len(offered(full)) == 2, "it was taken: whether there is room is known"
    assert not full.manager.has_pending_work()


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: bench.manager.reset_cache(),
        lambda bench: setattr(bench.tier["a"], "available", False),
        lambda bench: bench.manager.tier_commands.switch("a", "read-only"),
        lambda bench: bench.manager.tier_commands.switch("a", "off"),
        lambda bench: setattr(bench.tier["a"], "stats", dict),
    ],
    ids=["no longer resident", "out of use", "read-only", "switched off", "not full"],
)
def test_nothing_is_offered_to_a_tier_that_takes_no_stores_or_is_not_full_or_what_has_left_the_primary(full, change):
    change(full)
    full.settle()
    full.first_step, full.woken[:] = full.manager.steps, []
    tend_for(full, 100)
    assert offered(full) == []
    assert len(full.woken) <= 2


def test_a_tier_that_cannot_be_tended_is_not_called_by_another_thread(idle):
    bench, _ = idle
    tier = bench.tier["a"]
    tier.is_tended = False
    tier.is_available = lambda: pytest.fail("called outside of a step")
    bench.manager.tend()
    bench.manager.tend()
