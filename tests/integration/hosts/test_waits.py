"""Nobody waits for a tier in vain: what a tier that answers late, or never, adds to a request."""

import pytest

STEP = 1.0  # one step, and what a busy machine adds to it; the tiers here would take for ever
BOTH = pytest.mark.parametrize("io", ["process", "thread"])


def hits_that_hang(start, faulty, gates, machine, io, **options):
    """An engine whose tier has eight chunks, and hangs when they are read."""
    engine = start(faulty(io=io), **options)
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    return engine, wanted


@BOTH
def test_a_lookup_that_takes_for_ever_adds_lookup_wait_and_a_step(start, faulty, gates, machine, io):
    engine = start(faulty(io=io), lookup_wait="100ms", load_wait="20s")
    engine.until_available()
    gates.set("exists", "always hang")
    for number in range(3):
        ready, seconds = engine.resolve(machine.keys(100 * number, 8))
        assert ready == 0
        assert seconds < 0.1 + STEP
    engine.step()
    assert engine.manager.stats()["engine"]["wait_expired"] >= 3


@BOTH
def test_a_load_that_takes_for_ever_adds_lookup_wait_load_wait_and_a_step(start, faulty, gates, machine, io):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, io, lookup_wait="100ms", load_wait="200ms")
    gates.set("read", "always hang")
    ready, seconds = engine.resolve(wanted)
    assert ready == 0
    assert 0.2 <= seconds < 0.1 + 0.2 + STEP


@BOTH
def test_with_auto_an_unmeasured_tier_gets_lookup_wait_and_no_more(start, faulty, gates, machine, io):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, io, lookup_wait="100ms", load_wait="auto")
    gates.set("read", "always hang")
    ready, seconds = engine.resolve(wanted)
    assert ready == 0
    assert seconds < 0.1 + 0.1 + STEP


@BOTH
def test_with_auto_a_measured_tier_gets_as_long_as_computing_would_take(start, faulty, gates, machine, io):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, io, lookup_wait="100ms", load_wait="auto")
    assert engine.load(wanted) == 8, "the measurement"
    for _ in range(20):
        engine.manager.on_schedule_end(prefill_tokens=1000, prefill_seconds=5.0)
    engine.forget()
    gates.set("read", "always hang")
    ready, seconds = engine.resolve(wanted)
    assert ready == 0
    compute = 8 * 16 * 0.005
    assert 0.5 * compute < seconds < 0.1 + compute + STEP


def test_a_slow_tier_does_not_slow_the_hits_of_another(start, faulty, gates, gates_of, machine):
    slow, fast = faulty(), faulty("fast")
    engine = start(slow, fast, lookup_wait="200ms", load_wait="20s")
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    for name in gates.values():
        (gates.root / "values" / name).unlink()
    gates.set("exists", "always hang")
    gates.set("write", "always hang")
    ready, seconds = engine.resolve(wanted)
    assert ready == 8
    assert seconds < 0.2 + STEP
    assert engine.figures("fast")["hits"] + engine.figures("fast")["loaded_chunks"] >= 8


def test_a_late_load_still_lands_for_others(start, faulty, gates, machine):
    engine, wanted = hits_that_hang(start, faulty, gates, machine, "process", lookup_wait="1s", load_wait="50ms")
    gates.set("read", "hang")
    ready, _ = engine.resolve(wanted)
    assert ready < 8
    machine.wait_until(lambda: gates.reached("read"), "the load")
    assert machine.release(gates.root / "fifo")
    engine.until_idle()
    assert engine.load(wanted) == 8


@BOTH
def test_a_tier_at_its_pin_budget_takes_no_new_job_until_a_row_returns(start, faulty, gates, machine, io):
    budgets = {"store_reserve": "5%", "all_tiers": "60%", "one_tier": "10%", "protected": "10%"}
    engine = start(faulty(io=io), rows=80, budgets=budgets, lookup_wait="100ms")
    engine.until_available()
    engine.store(machine.keys(0, 4))
    engine.forget()
    gates.set("write", "always hang")
    for number in range(6):
        engine.put(machine.keys(100 + 2 * number, 2))
    figures = engine.figures()
    assert figures["pinned_rows"] == 8
    assert figures["dropped_cascades"] == 4
    ready, _ = engine.resolve(machine.keys(0, 4))
    assert ready == 0, "it has them, but no row for them"
    assert engine.figures()["pinned_rows"] == 8
    assert engine.own()["breaker_state"] == 0, "a full budget is no failure"
    gates.lift("write")
    with machine.releasing(gates.root.parent):
        engine.until(lambda: not engine.figures()["pinned_rows"], "its release")
    assert engine.load(machine.keys(0, 4)) == 4
