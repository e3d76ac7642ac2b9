"""What happens to a tier is in its figures, and one line exports all that the documentation names."""

import os
import re
import signal
from pathlib import Path

import prometheus_client

from kvtiers import metrics

OPERATE = Path(__file__).parents[3] / "docs" / "operate.md"
ELSEWHERE = {"kvtiers_silent_engines", "kvtiers_tier_off"}  # of `kvtiers metrics`, of vLLM's own page
HOUR = 3600.0
LONG = {"deadline": "1h", "grace": "200ms", "threads": 1, "breaker": {"failures": 3, "delay": "60s"}}


def test_one_line_exports_every_figure_that_the_documentation_names(start, faulty, machine):
    engine = start(faulty())
    engine.until_available()
    engine.until(lambda: "queued_loads" in engine.own(), "its first figures")
    registry = prometheus_client.CollectorRegistry()
    metrics.export(engine.manager.stats, registry)
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    named = re.findall(r"`((?:kvtiers)?_[a-z_]+)`", OPERATE.read_text())
    # Those of the shadow caches are there with them alone: tests/unit/test_metrics.py.
    named = [name for name in named if not name.startswith("kvtiers_what_if_")]
    full = {name if name.startswith("kvtiers") else f"kvtiers_tier{name}" for name in named}
    assert len(full) > 25
    # They are named as vLLM's page has them, where counts of a tier's own store are counters, too.
    missing = {name for name in full if not {name, name.removesuffix("_total"), f"{name}_count"} & exported}
    assert missing == ELSEWHERE


def test_bytes_seconds_and_hits_are_counted_both_ways(start, faulty, machine):
    engine = start(faulty())
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    stored = engine.figures()
    assert (stored["stored_chunks"], stored["stored_bytes"], stored["unread_bytes"]) == (8, *2 * [8 * machine.VALUE])
    assert stored["store_seconds"] > 0
    assert stored["cascade_latency"]["count"] >= 1
    assert stored["cascade_latency"]["sum"] > 0
    engine.forget()
    assert engine.load(wanted) == 8
    loaded = engine.figures()
    assert (loaded["hits"], loaded["loaded_chunks"], loaded["loaded_bytes"]) == (8, 8, 8 * machine.VALUE)
    assert (loaded["unread_bytes"], loaded["failed_loads"], loaded["failed_stores"]) == (0, 0, 0)
    assert loaded["lookups"] >= 8
    assert loaded["load_seconds"] > 0
    assert loaded["promotion_latency"]["count"] >= 1
    assert loaded["promotion_latency"]["sum"] > 0
    assert engine.load(wanted) == 8
    own = engine.manager.stats()["engine"]
    assert (own["lookups"], own["primary_hits"], own["stored_chunks"]) == (16, 8, 8)
    assert own["steps"] == own["step_latency"]["count"] > 0
    assert own["engine_seconds"] > own["step_latency"]["sum"] > 0, "the steps, and the calls between them"


def test_what_waits_what_hangs_and_what_fails_is_counted_by_its_kind(start, faulty, gates, machine):
    engine = start(faulty(**LONG))
    engine.until_available()
    wanted = machine.keys(0, 4)
    engine.store(wanted)
    damaged = gates.root / "values" / gates.values()[0]
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    engine.forget()
    assert engine.load(wanted) < 4
    assert engine.own()["seal_failures"] == engine.figures()["failed_loads"] == 1
    gates.set("write", "fail")
    engine.store(machine.keys(10, 1))
    assert (engine.figures()["failed_stores"], engine.own()["errors"]) == (1, 1)
    gates.set("write", "transient")
    engine.store(machine.keys(20, 1))
    assert (engine.figures()["failed_stores"], engine.own()["retries"]) == (1, 1)
    gates.set("write", "hang")
    engine.put(machine.keys(30, 1))
    engine.put(machine.keys(40, 2))
    figures = engine.figures()
    assert (figures["running_jobs"], figures["pinned_rows"], figures["own"]["storing_chunks"]) == (2, 3, 3)
    machine.wait_until(lambda: gates.reached("write") == 3, "the first of them")
    engine.until(lambda: engine.figures()["quarantined_rows"], "its failure", wind=2 * HOUR)
    assert engine.figures()["expired_jobs"] >= 1
    engine.until(lambda: engine.own()["host_starts"] == 2 and not engine.figures()["pinned_rows"], "its second life")
    engine.until_available()
    opened = engine.own()["breaker_opened"]
    gates.set("exists", "always fail")
    for number in range(50, 53):
        assert engine.resolve(machine.keys(number, 1)) == 0
    assert (engine.own()["breaker_state"], engine.own()["breaker_opened"]) == (1, opened + 1)


def test_what_is_exported_as_a_counter_only_grows_whatever_happens(start, faulty, gates, machine):
    engine = start(faulty(deadline="1h", grace="200ms", threads=1, breaker={"failures": 3, "delay": "50ms"}))
    engine.until_available()
    registry = prometheus_client.CollectorRegistry()
    metrics.export(engine.manager.stats, registry)
    seen = {}

    def look():
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_total", "_count", "_sum", "_bucket")):
                    key = (sample.name, *sorted(sample.labels.items()))
                    assert sample.value >= seen.get(key, 0.0), key
                    seen[key] = sample.value

    def stores(first):
        engine.store(machine.keys(first, 8))
        look()
        engine.forget()
        look()

    stores(0)
    assert engine.load(machine.keys(0, 8)) == 8
    look()
    engine.forget()
    os.kill(engine.host(), signal.SIGKILL)
    engine.until(lambda: not engine.in_use(), "its end")
    look()
    engine.until_available()
    stores(100)
    gates.set("write", "always fail")
    for number in range(4):
        engine.put(machine.keys(200 + 10 * number, 4))
        engine.until_idle()
        look()
    gates.lift("write")
    engine.until_available()
    engine.new_weights("w2")
    stores(300)
    assert engine.load(machine.keys(300, 8)) == 8
    look()
    assert len(seen) > 60
