"""``kvtiers store bump``: an engine that starts afterwards finds nothing that was there, of any writer and any age."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KVTIERS = Path(sys.executable).with_name("kvtiers")


@pytest.fixture
def tier(tmp_path):
    where = {"path": str(tmp_path / "values"), "capacity": "1GiB", "min_free": 0}
    return {"type": "fs", "name": "disk", "processes": 1, **where}


@pytest.fixture
def kvtiers_store(tmp_path, tier):
    file = tmp_path / "tiers.yaml"

    def run(command, *arguments, tiers=(tier,)):
        document = {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [*tiers]}
        file.write_text(json.dumps(document))
        done = subprocess.run(
            [KVTIERS, "store", command, *arguments, "--config", file, "--json"],
            capture_output=True,
            text=True,
            check=True,
            timeout=500,
        )
        return json.loads(done.stdout)

    return run


def test_engines_from_before_and_after_a_bump_share_nothing_and_each_has_its_own(start, tier, machine, kvtiers_store):
    wanted = machine.keys(0, 8)
    before = start(tier)
    before.until_available()
    before.store(wanted)

    assert kvtiers_store("bump")["tiers"]["disk"]["values"] == 8
    after = start(tier)
    after.until_available()
    before.store(machine.keys(100, 4))  # it has not seen that, and goes on as it was
    assert after.load(machine.keys(100, 4)) == 0
    assert after.load(wanted) == 0
    after.store(wanted)
    after.forget()
    assert after.load(wanted) == 8
    after.close()

    again = start(tier)
    again.until_available()
    assert again.load(wanted) == 8, "a bump holds, and what came after it is shared"
    again.close()
    found = kvtiers_store("verify", "disk")
    assert (found["ok"]["values"], found["foreign"]["values"], found["damaged"]["values"]) == (12, 0, 0)


def test_an_engine_from_before_a_bump_whose_host_restarts_stays_without_the_tier(
    start, tier, machine, kvtiers_store, caplog
):
    engine = start(tier)
    engine.until_available()
    wanted = machine.keys(0, 8)
    kvtiers_store("bump")
    os.kill(engine.host("disk"), signal.SIGKILL)
    engine.until(lambda: "was bumped while this engine ran" in caplog.text, "the line")
    engine.put(wanted)
    engine.until_idle()
    engine.forget()
    assert engine.load(wanted) == 0
    assert kvtiers_store("du", "disk")["total"]["values"] == 0, "what it holds from before gets into no later epoch"


def test_of_several_hosts_one_that_restarts_after_a_bump_stays_out_and_the_others_go_on_as_they_were(
    start, tier, machine, kvtiers_store, caplog
):
    engine = start(tier | {"processes": 2})
    engine.until(lambda: engine.own("disk")["hosts_open"] == 2, "both hosts")
    wanted = machine.keys(0, 64)
    kvtiers_store("bump")
    os.kill(engine.each_host("disk")["disk (1 of 2)"], signal.SIGKILL)
    engine.until(lambda: "was bumped while this engine ran" in caplog.text, "the line")
    engine.until(lambda: engine.own("disk")["hosts_open"] == 1, "its staying out")
    engine.store(wanted)
    engine.forget()
    assert engine.load(wanted) == 64
    after = start(tier)
    after.until_available()
    assert after.load(wanted) == 0, "what it holds from before gets into no later epoch"


def test_a_record_that_is_damaged_keeps_the_tier_out_until_it_is_bumped_again(
    start, tier, machine, kvtiers_store, caplog
):
    kvtiers_store("bump")
    (record,) = Path(tier["path"]).rglob("_epoch")
    content = bytearray(record.read_bytes())
    content[3] ^= 1
    record.write_bytes(content)
    engine = start({**tier, "breaker": {"delay": "50ms", "max_delay": "100ms"}})
    engine.until(lambda: "it is unknown which values are retired" in caplog.text, "the line")
    kvtiers_store("bump")
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    assert engine.load(wanted) == 8


def test_two_tiers_of_which_one_was_bumped_store_the_same_rows_at_the_same_time_each_with_its_own_seal(
    start, tier, tmp_path, machine, kvtiers_store
):
    other = tier | {"name": "other", "path": str(tmp_path / "other")}
    kvtiers_store("bump")  # of 'disk' alone
    engine = start(tier, other, rows=1024)
    engine.until_available()
    for first in range(0, 8_000, 400):
        engine.store(machine.keys(first, 400))
    engine.close()
    for name in ("disk", "other"):
        found = kvtiers_store("verify", name, tiers=[tier, other])
        assert {verdict: found[verdict]["values"] for verdict in ("ok", "foreign", "damaged")} == {
            "ok": 8_000,
            "foreign": 0,
            "damaged": 0,
        }, name
