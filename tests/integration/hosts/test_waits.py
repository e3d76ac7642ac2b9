"""The waits for a tier: what a tier that answers late, or never, adds to a request."""

import pytest

BOTH = pytest.mark.parametrize("io", ["process", "thread"])


def hits_that_hang(start, faulty, gates, machine, io, **options):
    """An engine whose tier has eight chunks, and hangs when they are read."""
    engine = start(faulty(io=io, deadline="1h"), **options)
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    return engine, wanted


def load_that_hangs(engine, gates, wanted):
    """Have the chunks read, which hangs; return the request."""
    gates.set("read", "always hang")
    ctx = engine.ask_until(lambda: gates.reached("read"), wanted, "the load")
    assert engine.waits(wanted, ctx)
    return ctx


def waits_for(engine, wanted, ctx, seconds):
    """Whether the request waits so many seconds, give or take a quarter, and then takes what there is: nothing."""
    engine.wind(0.75 * seconds)
    waited = engine.waits(wanted, ctx)
    engine.wind(0.5 * seconds)
    hits = engine.lookup(wanted, ctx)
    return waited and (hits.ready, hits.pending, hits.unresolved) == (0, 0, False)


@BOTH
def test_a_lookup_that_takes_for_ever_adds_lookup_wait(start, faulty, gates, machine, io):
    engine = start(faulty(io=io, deadline="1h"), lookup_wait="300s")
    engine.until_available()
    gates.set("exists", "always hang")
    for number in range(3):
        wanted, ctx = machine.keys(100 * number, 8), engine.request()
        assert engine.waits(wanted, ctx)
        engine.step()
        assert waits_for(engine, wanted, ctx, 300.0)
    engine.step()
    assert engine.manager.stats()["engine"]["wait_expired"] >= 3


@BOTH
def test_a_load_that_takes_for_ever_adds_load_wait(start, faulty, gates, machine, io):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, io, load_wait="300s")
    ctx = load_that_hangs(engine, gates, wanted)
    assert waits_for(engine, wanted, ctx, 300.0)


@BOTH
def test_with_auto_an_unmeasured_tier_gets_lookup_wait_and_no_more(start, faulty, gates, machine, io):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, io, lookup_wait="300s", load_wait="auto")
    ctx = load_that_hangs(engine, gates, wanted)
    assert waits_for(engine, wanted, ctx, 300.0)


@BOTH
def test_with_auto_a_measured_tier_gets_as_long_as_computing_would_take(start, faulty, gates, machine, io):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, io, lookup_wait="60s", load_wait="auto")
    assert engine.load(wanted) == 8, "the measurement"
    for _ in range(20):
        engine.manager.on_schedule_end(prefill_tokens=1000, prefill_seconds=5000.0)
    engine.forget()
    ctx = load_that_hangs(engine, gates, wanted)
    assert waits_for(engine, wanted, ctx, 8 * 16 * 5.0)


def test_a_slow_tier_does_not_slow_the_hits_of_another(start, faulty, gates, gates_of, machine):
    slow, fast = faulty(), faulty("fast")
    engine = start(slow, fast)
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    for name in gates.values():
        (gates.root / "values" / name).unlink()
    gates.set("exists", "always hang")
    gates.set("write", "always hang")
    assert engine.resolve(wanted) == 8
    assert engine.figures("fast")["hits"] + engine.figures("fast")["loaded_chunks"] >= 8


def test_a_late_load_still_lands_for_others(start, faulty, gates, machine):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, "process", load_wait="300s")
    gates.set("read", "hang")
    ctx = engine.ask_until(lambda: gates.reached("read"), wanted, "the load")
    engine.wind(400.0)
    assert not engine.waits(wanted, ctx)
    assert machine.release(gates.root / "fifo")
    engine.until_idle()
    assert engine.load(wanted) == 8


@BOTH
def test_a_tier_at_its_pin_budget_takes_no_new_job_until_a_row_returns(start, faulty, gates, machine, io):
    budgets = {"store_reserve": "5%", "all_tiers": "60%", "one_tier": "10%", "protected": "10%"}
    engine = start(faulty(io=io), rows=80, budgets=budgets)
    engine.until_available()
    engine.store(machine.keys(0, 4))
    engine.forget()
    gates.set("write", "always hang")
    for number in range(6):
        engine.put(machine.keys(100 + 2 * number, 2))
    figures = engine.figures()
    assert figures["pinned_rows"] == 8
    assert figures["dropped_cascades"] == 4
    assert engine.resolve(machine.keys(0, 4)) == 0, "it has them, but no row for them"
    assert engine.figures()["pinned_rows"] == 8
    assert engine.own()["breaker_state"] == 0, "a full budget is no failure"
    gates.lift("write")
    with machine.releasing(gates.root.parent):
        engine.until(lambda: not engine.figures()["pinned_rows"], "its release")
    assert engine.load(machine.keys(0, 4)) == 4
