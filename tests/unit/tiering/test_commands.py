"""Commands to a running engine: what each does to tiers, loads in flight and rows, and what a step without one does."""

import queue
import threading
from functools import partial

import pytest

from kvtiers.api import LookupResult, make_offload_key
from kvtiers.tiering.command_queue import Command, CommandQueue, CommandRefused
from kvtiers.tiering.tier_slot import TierOptions, TierSlot

from .harness import Bench, FaultyTier, chain

KEYS = chain("a", 4)


def do(bench, work):
    """Have the engine's next step do some work, after the one that it may be in; return the answer."""
    command = Command(work)
    assert bench.manager.commands.post(command)
    bench.step()
    bench.step()
    return command.answer(0.0)


def switch(bench, to, name="a"):
    return do(bench, partial(bench.manager.tier_commands.switch, name, to))


# -- off and on


def test_a_tier_that_is_off_is_asked_nothing_and_given_nothing_until_it_is_on_again():
    bench = Bench(tiers={"a": {}, "b": {}})
    bench.store(KEYS[:2])
    assert switch(bench, "off")["was"] == "on"
    bench.forget()
    asked, stores = len(bench.tier["a"].asked), len(bench.tier["a"].stores)
    ctx = bench.request()
    assert bench.lookup(KEYS[:2], ctx)[1] == 2, "the other tier has them"
    bench.store(KEYS[2:])
    assert (len(bench.tier["a"].asked), len(bench.tier["a"].stores)) == (asked, stores)
    assert all(bench.tier["b"].has(KEYS))
    assert bench.figures("a")["switched_off"] == 1
    assert switch(bench, "on") == {"tier": "a", "was": "off", "is": "on", "cancelled_chunks": 0, "running_jobs": 0}
    bench.tier["b"].values.clear()
    bench.forget()
    assert bench.lookup(KEYS[:2], bench.request())[1] == 2


def test_loads_of_a_tier_that_is_switched_off_are_misses_at_once_and_their_rows_come_back():
    bench = Bench(hold=True)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx)[1] == 4
    bench.step()
    (job,) = bench.tier["a"].loads
    assert switch(bench, "off")["cancelled_chunks"] == 4
    assert bench.tier["a"].abandoned == [job.job_id]
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.unused_rows() == bench.rows - 4, "the tier may still write into them"
    assert bench.figures("a")["cancelled_loads"] == 4
    bench.step(bench.slots[0].options.deadline + 1.0)
    assert bench.tier["a"].abandoned == [job.job_id], "once: its deadline is no other news"
    assert bench.figures("a")["expired_jobs"] == 0
    bench.tier["a"].end(job.job_id)
    bench.settle()
    assert bench.unused_rows() == bench.rows
    assert bench.figures("a")["pinned_rows"] == 0
    assert bench.lookup(KEYS, ctx) == (0, 0, False), "what has come late is not readable"


def test_what_was_reserved_in_the_same_step_is_a_miss_and_no_row_is_lost():
    bench = Bench(hold=True)
    bench.tier["a"].put(KEYS)
    ctx, other = bench.request(), bench.request()
    bench.lookup(KEYS, ctx)
    bench.lookup(KEYS, other)
    bench.manager.commands.post(Command(partial(bench.manager.tier_commands.switch, "a", "off")))
    bench.manager.look_again()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    bench.manager.on_request_finished(other)
    bench.settle()
    assert not bench.tier["a"].loads
    assert bench.unused_rows() == bench.rows
    assert bench.figures("a")["loading_chunks"] == bench.figures("a")["pinned_rows"] == 0


def test_stores_of_a_tier_that_is_switched_off_are_written_to_the_end():
    bench = Bench(hold=True)
    plan = bench.begin_store(KEYS)
    bench.manager.complete_store(plan)
    assert switch(bench, "off")["running_jobs"] == 1
    bench.tier["a"].end_all()
    bench.settle()
    assert all(bench.tier["a"].has(KEYS))
    assert bench.figures("a")["stored_chunks"] == 4


@pytest.mark.parametrize("admission", ["all", "second_access", "on_eviction"])
def test_a_tier_that_is_read_only_is_read_and_not_written(admission):
    bench = Bench(tiers={"a": {"admission": admission}})
    switch(bench, "read-only")
    for name in "abcdeabcde":  # more than there are rows, twice
        bench.store(chain(name, 4))
    assert not bench.tier["a"].stores
    assert bench.figures("a")["dropped_cascades"] == 0, "it is no loss that anything should be done about"
    bench.tier["a"].put(chain("f", 2))
    bench.forget()
    assert bench.lookup(chain("f", 2), bench.request())[1] == 2


def test_on_leaves_a_tier_that_its_config_makes_read_only_so():
    bench = Bench(tiers={"a": {"read_only": True}})
    switch(bench, "on")
    bench.store(KEYS)
    assert not bench.tier["a"].stores


@pytest.mark.parametrize(
    ("name", "to", "line"), [("b", "off", "this engine has a"), ("a", "of", "to 'of'; expected on")]
)
def test_a_command_that_does_not_fit_is_one_line_and_changes_nothing(name, to, line):
    bench = Bench()
    with pytest.raises(CommandRefused, match=line):
        switch(bench, to, name)
    assert bench.slots[0].switch == "on"


# -- drain, clear


def test_what_a_tenants_clear_forgets_is_looked_at_again_for_its_tier_when_it_comes_back():
    bench = Bench(tiers={"a": {"admission": "expected-reuse"}}, rows=64)
    keys = [make_offload_key(key[:-4], 0, "blue") for key in KEYS]
    (admission,) = bench.manager._cascades._chosen.values()
    bench.store(keys)
    admission.sent(keys, written=False)
    command = Command(bench.manager.chunk_commands.clear_tenant("blue"))
    bench.manager.commands.post(command)
    bench.settle()
    assert command.answer(0.0)["cleared_chunks"] == len(keys)
    assert admission.unsent(keys) == keys
    assert not admission.looked_at


def test_a_drain_ends_when_the_stores_of_its_begin_have_ended_though_later_ones_have_not():
    bench = Bench(hold=True)
    plan = bench.begin_store(KEYS[:2])
    command = Command(bench.manager.chunk_commands.drain())
    bench.manager.commands.post(command)
    bench.step()
    bench.manager.complete_store(plan)
    bench.step()
    assert bench.manager.has_pending_work(), "an engine without requests steps on"
    later = bench.begin_store(KEYS[2:])
    bench.manager.complete_store(later)
    (first, second) = bench.tier["a"].held
    with pytest.raises(queue.Empty):
        command.answer(0.0)
    bench.tier["a"].end(first)
    bench.step()
    bench.step()
    assert command.answer(0.0) == {"stored_chunks": 2, "failed_chunks": 0, "memory_only_chunks": 0}
    bench.tier["a"].end(second)


@pytest.mark.parametrize("fails", ["is late", "is of a tier that lies"])
def test_a_drain_ends_though_a_tier_never_releases_a_store_that_has_failed(fails):
    bench = Bench(hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:2]))
    command = Command(bench.manager.chunk_commands.drain())
    bench.manager.commands.post(command)
    bench.step()
    if fails == "is late":
        bench.step(bench.slots[0].options.deadline + 1.0)
    else:
        bench.tier["a"].finished.append("done")
        bench.step()
    bench.step()
    assert command.answer(0.0) == {"stored_chunks": 0, "failed_chunks": 2, "memory_only_chunks": 0}
    assert bench.slots[0].metrics.quarantined_rows == 2
    assert not bench.manager.has_pending_work()


def test_a_drain_says_what_waits_in_memory_for_its_eviction():
    bench = Bench(tiers={"a": {"admission": "on_eviction"}})
    bench.store(KEYS)
    assert do(bench, bench.manager.chunk_commands.drain())["memory_only_chunks"] == 4


def test_a_tenants_clear_forgets_its_chunks_alone_and_those_in_use_when_that_has_ended():
    bench = Bench()
    blue = [make_offload_key(key[:-4], 0, "blue") for key in KEYS]
    other = [make_offload_key(key[:-4], 0, "blues") for key in KEYS]
    for keys in (KEYS, blue, other):
        bench.store(keys)
    bench.settle()
    ctx = bench.request()
    plan = bench.manager.prepare_load(blue[:1], ctx)
    command = Command(bench.manager.chunk_commands.clear_tenant("blue"))
    bench.manager.commands.post(command)
    for _ in range(3):
        bench.step()
    with pytest.raises(queue.Empty):
        command.answer(0.0)
    assert bench.primary.find(blue) == [LookupResult.HIT] + [LookupResult.MISS] * 3
    bench.manager.complete_load(plan)
    bench.step()
    bench.step()
    assert command.answer(0.0) == {"tenant": "blue", "cleared_chunks": 4}
    assert bench.primary.find(blue) == [LookupResult.MISS] * 4
    assert bench.primary.find([*KEYS, *other]) == [LookupResult.HIT] * 8
    assert bench.tier["a"].has(blue), "the tiers keep theirs"
    assert bench.primary.evictable + bench.primary.free_rows == bench.rows


def test_a_clear_forgets_what_is_resident_and_the_tiers_keep_theirs():
    bench = Bench()
    bench.store(KEYS)
    assert do(bench, bench.manager.chunk_commands.clear) == {"cleared_chunks": 4}
    assert bench.unused_rows() == bench.rows
    assert all(bench.tier["a"].has(KEYS))


# -- attach, detach


def attach(bench, name, place, **options):
    tier = FaultyTier(bench.view)
    slot = TierSlot(len(bench.slots), tier, TierOptions(name, **options))
    bench.slots.append(slot)
    do(bench, lambda: bench.manager.tier_commands.add(slot, place) or {})
    return tier


@pytest.mark.parametrize("admission", ["all", "second_access", "on_eviction"])
def test_a_tier_that_is_attached_is_asked_at_its_place_and_gets_what_is_new(admission):
    bench = Bench()
    tier = bench.tier["b"] = attach(bench, "b", 0, admission=admission)
    for name in "abcdeabcde":
        bench.store(chain(name, 4))
    assert any(tier.has(KEYS))
    assert all(tier.has(KEYS)) or admission == "on_eviction"
    tier.put(KEYS)
    bench.forget()
    asked = len(bench.tier["a"].asked)
    assert bench.lookup(KEYS, bench.request())[1] == 4
    assert len(bench.tier["a"].asked) == asked, "the first tier has all of it"
    assert bench.figures("b")["stored_chunks"] >= 4


@pytest.mark.parametrize("policy", ["lru", "arc", "turn-hazard"])
def test_a_tier_that_forecasts_reuse_can_be_attached_to_a_primary_that_is_full(policy):
    bench = Bench(policy=policy)
    for name in "abcd":
        bench.store(chain(name, 4))
    bench.tier["b"] = attach(bench, "b", 1, admission="expected-reuse")
    for name in "efgabcdefghij":
        bench.store(chain(name, 4))
    assert bench.unused_rows() == bench.rows


def test_what_a_detached_tier_has_looked_at_decides_no_eviction_any_more():
    bench = Bench(policy="turn-hazard")
    seen = []
    bench.primary.evict_first = seen.append
    for name in "bcd":
        attach(bench, name, 1, admission="expected-reuse")
        if name == "c":
            do(bench, partial(_remove, bench, "b"))
    chosen = list(bench.manager.tier_commands._cascades._chosen.values())
    assert [len(chosen), len(seen)] == [2, 1]
    assert seen[0] is chosen[0].looked_at
    for name in "cd":
        do(bench, partial(_remove, bench, name))
    assert seen[1] is chosen[1].looked_at
    assert seen[2:] == [None]


def _remove(bench, name):
    return bench.manager.tier_commands.remove(name) and {}


def test_a_tier_that_is_off_makes_no_other_look_at_what_leaves_in_each_step():
    bench = Bench(tiers={name: {"admission": "expected-reuse"} for name in "ab"}, rows=64)
    for number in range(40):
        bench.store(chain(f"k{number}", 4))
    switch(bench, "off", "b")
    looks, leaving = [], bench.primary.leaving
    bench.primary.leaving = lambda *of: looks.append(of) or leaving(*of)
    bench.store(chain("z", 40))
    for _ in range(200):
        bench.step()
    assert 0 < len(looks) <= 5


def test_a_tier_is_detached_when_nothing_of_it_is_in_flight_any_more():
    bench = Bench(tiers={"a": {}, "b": {}}, hold=True)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    plan = bench.begin_store(chain("b", 2))
    bench.manager.complete_store(plan)
    bench.step()
    command = Command(lambda: bench.manager.tier_commands.remove("a") and {})
    bench.manager.commands.post(command)
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    bench.tier["a"].end_all()
    bench.step()
    bench.step()
    assert command.answer(0.0) == {}
    assert list(bench.manager.stats()["tiers"]) == ["b"]
    calls = bench.tier["a"].steps
    bench.tier["b"].end_all()
    bench.settle()
    bench.manager.on_request_finished(ctx)
    assert bench.tier["a"].steps == calls, "a tier that is detached is not called any more"
    assert bench.unused_rows() == bench.rows


# -- the queue


def test_a_command_that_was_withdrawn_is_never_done():
    bench = Bench()
    command = Command(partial(bench.manager.tier_commands.switch, "a", "off"))
    bench.manager.commands.post(command)
    assert command.withdraw()
    bench.step()
    assert bench.slots[0].switch == "on"
    assert not bench.manager.commands.waiting


def test_a_command_of_several_steps_that_is_withdrawn_is_not_worked_on_any_more():
    steps = []
    command, commands = Command(lambda: steps.append(1)), CommandQueue()
    commands.post(command)
    commands.run()
    assert not command.withdraw(), "it has begun"
    commands.run()
    commands.run()
    assert len(steps) == 1
    assert not commands.waiting


def test_a_step_does_a_bounded_number_of_commands_and_the_queue_takes_a_bounded_number():
    done, commands = [], CommandQueue()
    posted = [commands.post(Command(lambda: done.append(1) or {})) for _ in range(100)]
    assert posted.count(True) == 64
    commands.run()
    assert len(done) == 8


def test_what_a_command_raises_is_its_answer_and_no_step_fails():
    bench = Bench()
    with pytest.raises(CommandRefused, match="ZeroDivisionError"):
        do(bench, lambda: 1 / 0)


def test_a_command_is_begun_or_withdrawn_and_never_both():
    """Many times, from two threads at once."""
    for _ in range(300):
        done, gate = [], threading.Barrier(2)
        command, withdrawn = Command(lambda done=done: done.append(1) or {}), []

        def take(command=command, withdrawn=withdrawn, gate=gate):
            gate.wait(10)
            withdrawn.append(command.withdraw())

        other = threading.Thread(target=take)
        other.start()
        gate.wait(10)
        command.step()
        other.join(10)
        assert withdrawn == [not done]
