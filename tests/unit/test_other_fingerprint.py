"""An engine that finds values of its model under another fingerprint says, once, in which field they differ."""

import dataclasses
import json
import re
import uuid

import pytest
from click.testing import CliRunner
from tests.stores import DictStore
from tests.unit.test_runtime import KEYS, LAYOUT, config, copied, running, step_until

from kvtiers.api import TierConfig
from kvtiers.cli.main import cli
from kvtiers.host.layout_record import LayoutRecord
from kvtiers.layout.cache_layout import ModelIdentity
from kvtiers.layout.fingerprint_record import (
    LIMITS_FIELD,
    WRITER_FIELD,
    Described,
    describe_layout,
    read_layout,
    write_layout,
)
from kvtiers.layout.storage_name import StorageNames
from kvtiers.runtime import EngineFacts
from kvtiers.types import BlockSpec, RequestContext
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

OTHER = dataclasses.replace(LAYOUT, model=dataclasses.replace(LAYOUT.model, kv_dtype="fp8"))


@pytest.fixture
def disk(tmp_path):
    return {"type": "fs", "path": str(tmp_path / "store"), "capacity": "64MiB", "min_free": 0}


def is_open(manager, tier="fs"):
    return manager.stats()["tiers"][tier]["own"]["open"]


def store(engine, tier="fs", chunk=0):
    """Store a chunk, and wait until it is in the tier, which has it already or takes it."""
    manager, worker, _ = engine
    step_until(manager, lambda: is_open(manager, tier) and manager.on_schedule_end() is None)
    plan = manager.prepare_store([KEYS[chunk]], RequestContext("r"))
    copied(worker, worker.submit_store, BlockSpec([0], (1,), (0,)), plan.chunk_ids)
    manager.complete_store(plan)
    step_until(manager, lambda: manager.stats()["tiers"][tier]["stored_chunks"])


def said(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if "another" in record.getMessage() or "under fingerprint" in record.getMessage()
    ]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_the_field_that_differs_is_named_once_and_du_shows_them_apart(disk, tmp_path, caplog, io):
    tiers = config(secondary=[disk | {"io": io}])
    with running(tiers, engine=EngineFacts(release="vLLM 0.32.0")) as engine:
        store(engine)
        first = engine[0].fingerprint()
    assert said(caplog) == []
    with running(tiers, engine=EngineFacts(release="vLLM 0.32.0")) as engine:
        step_until(engine[0], lambda: is_open(engine[0]))
    assert said(caplog) == [], "they are its own"
    with running(tiers, OTHER, engine=EngineFacts(release="vLLM 0.33.0")) as engine:
        store(engine)
        second = engine[0].fingerprint()
    (line,) = said(caplog)
    assert line.startswith("fs: ")
    assert f"under fingerprint {first}" in line
    assert "kv_dtype: '' there, 'fp8' here" in line
    assert "release: 'vLLM 0.32.0' there, 'vLLM 0.33.0' here" in line

    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps({"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [disk]}))
    shown = json.loads(CliRunner().invoke(cli, ["store", "du", "fs", "--config", str(file), "--json"]).stdout)
    assert {(model["fingerprint"], model["release"], model["values"]) for model in shown["models"]} == {
        (first, "vLLM 0.32.0", 1),
        (second, "vLLM 0.33.0", 1),
    }


def test_an_engine_that_shares_nothing_leaves_no_record_and_says_nothing(disk, tmp_path, caplog):
    for _ in range(2):
        with running(
            config(secondary=[disk | {"io": "thread"}]), dataclasses.replace(LAYOUT, model=ModelIdentity("m"))
        ) as e:
            store(e)
    assert said(caplog) == []
    assert not list((tmp_path / "store").rglob("*_layout*"))


def read_layout_field(disk, name):
    store = FsStore(FsConfig(**disk), read_only=True)
    [record] = [entry.name for entry in store.list("") if entry.name.count("-") == 0 and "/_layout/" in entry.name]
    document = read_layout(store, record.partition("/")[0], record.rpartition("/")[2])
    store.close()
    return document.get(name)


def test_an_engine_without_compression_says_that_it_does_not_find_compressed_values(disk, caplog):
    pytest.importorskip("zstandard")

    def said_with(compression):
        caplog.clear()
        with running(config(secondary=[disk | {"io": "thread", "compression": compression}])) as engine:
            store(engine)
        return [line for line in caplog.messages if "the latest values of this model are compressed (zstd)" in line]

    assert said_with("zstd") == said_with("read") == said_with("zstd") == []
    [line] = said_with("none")
    assert line.startswith("fs: ")
    assert line.endswith("does not find them; set 'compression: read', or 'zstd'")
    assert read_layout_field(disk, "compression") == "zstd"
    disk["path"] += "-uncompressed"
    assert said_with("none") == said_with("read") == said_with("zstd") == []
    assert read_layout_field(disk, "compression") is None, "what is there is not compressed"


def limits_said(caplog):
    return [line for line in caplog.messages if "each applies its own" in line]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_an_engine_whose_limits_differ_from_the_last_writers_says_both_once(disk, caplog, io):
    def said_with(chunk, **options):
        caplog.clear()
        with running(config(tenants={}, secondary=[disk | {"io": io} | options])) as engine:
            store(engine, chunk=chunk)
        return limits_said(caplog)

    assert said_with(0, quotas={"blue": "1GiB"}) == said_with(1, quotas={"blue": "1GiB"}) == []
    [line] = said_with(2, quotas={"blue": "1GiB", "*": "1MiB"})
    assert line.startswith("fs: the engine on ")
    assert " UTC has quotas {blue: 1GiB}, this engine has quotas {*: 1MiB, blue: 1GiB}: each applies its own; " in line
    assert line.endswith("give all engines that share the store the same")
    [line] = said_with(3)
    assert "has quotas {*: 1MiB, blue: 1GiB}, this engine has quotas not set" in line
    assert said_with(4) == []


@pytest.mark.parametrize(
    ("limits", "writer", "said"),
    [
        ({"ttl": "1h\n\x1b[2J" + "x" * 5000}, {"host": "a\nb" * 99, "time": 1e300}, True),
        ({"ttl": ["1h"]}, {"host": None, "time": "now"}, True),
        ({"ttl": "1h"}, None, True),
        ({"x" * 1_000_000: "1h"}, None, True),
        ({}, {"host": "a", "time": 5}, False),
        ("1h", {"host": "a", "time": 5}, False),
        (None, None, False),
    ],
)
def test_whatever_limits_are_recorded_are_one_line_of_plain_text_at_most(caplog, limits, writer, said):
    names = StorageNames.of_layout("ns", LAYOUT)
    own = Described(names.prefix, describe_layout(LAYOUT, "", names.fingerprint)).of_tier(TierConfig(type="fs"))
    record = json.loads(own.document) | {LIMITS_FIELD: limits, WRITER_FIELD: writer}
    there = DictStore()
    write_layout(there, names, json.dumps(record))
    LayoutRecord(own, "fs").compare(there, names, None)
    assert len(limits_said(caplog)) == said == len(caplog.messages)
    assert all(line.isprintable() and len(line) < 3000 for line in caplog.messages)


@pytest.mark.parametrize(
    "fields", [{"fingerprint": "a\n\x1b[2J" + "x" * 1_000_000}, {"fingerprint": "a", "b\n\x1b[2J": "c"}]
)
def test_whatever_fingerprint_is_recorded_is_one_line_of_plain_text(caplog, fields):
    names = StorageNames.of_layout("ns", LAYOUT)
    own = Described(names.prefix, describe_layout(LAYOUT, "", names.fingerprint))
    there = DictStore()
    write_layout(there, names, json.dumps(json.loads(own.document) | fields))
    LayoutRecord(own, "fs").compare(there, names, None)
    [line] = said(caplog)
    assert line.isprintable()
    assert len(line) < 3000


def test_limits_that_are_long_are_recorded_and_compared_by_their_digest(caplog):
    names = StorageNames.of_layout("ns", LAYOUT)
    base = Described(names.prefix, describe_layout(LAYOUT, "", names.fingerprint))

    def of_tenants(quota):
        tenants = [str(uuid.uuid5(uuid.NAMESPACE_DNS, str(number))) for number in range(150)]
        return base.of_tier(TierConfig(type="fs", quotas=dict.fromkeys(tenants, quota)))

    there = DictStore()
    LayoutRecord(of_tenants("1GiB"), "fs").write(there, names, "", None)
    LayoutRecord(of_tenants("1GiB"), "fs").compare(there, names, None)
    assert caplog.messages == []
    LayoutRecord(of_tenants("2GiB"), "fs").compare(there, names, None)
    [line] = limits_said(caplog)
    there, here = re.findall(r" has quotas (sha256:[0-9a-f]{16})[,:]", line)
    assert there != here


class Broken(TierConfig):
    @property
    def shared_limits(self):
        raise RuntimeError("no ttl")


class NoMapping(TierConfig):
    @property
    def shared_limits(self):
        return ["ttl"]


class NoText(TierConfig):
    @property
    def shared_limits(self):
        return {"ttl": b"1h"}


@pytest.mark.parametrize(
    ("kind", "limits", "error"),
    [
        (Broken, None, "RuntimeError: no ttl"),
        (NoMapping, None, "AttributeError: 'list' object has no attribute 'items'"),
        (NoText, {"ttl": "b'1h'"}, None),
    ],
)
def test_limits_that_a_plugin_cannot_tell_are_left_out_with_one_line(caplog, kind, limits, error):
    names = StorageNames.of_layout("ns", LAYOUT)
    base = Described(names.prefix, describe_layout(LAYOUT, "", names.fingerprint))
    own = base.of_tier(kind(type="fs", name="disk"))
    assert json.loads(own.document).get(LIMITS_FIELD) == limits
    assert caplog.messages == (
        [f"disk: its limits are not recorded, as its 'shared_limits' failed: {error}"] if error else []
    )
