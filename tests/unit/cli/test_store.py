"""``kvtiers store`` on a real directory: what it shows, what it verifies, what it deletes."""

import json
import os
import random
import re
import sys
import threading
import time
from functools import partial

import pytest

from kvtiers.api import make_offload_key
from kvtiers.cli.progress import show_progress
from kvtiers.cli.store import verify
from kvtiers.host.compressed_store import compressed_store
from kvtiers.layout.fingerprint_record import write_layout
from kvtiers.layout.seal import SEAL_FORMAT, seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers_fs.config import FsConfig
from kvtiers_fs.paths import place_of
from kvtiers_fs.slab.format import digest_of
from kvtiers_fs.slab.store import SlabStore
from kvtiers_fs.store import FsStore
from kvtiers_fs.waits import Waits

from .conftest import LLAMA

HOUR, DAY = 3600.0, 86400.0
QWEN = "qwen-2-" + "a0" * 12


def names_of(namespace, model):
    return StorageNames(f"{namespace}/{model}/", bytes.fromhex(model[-24:-8]))


class Disk:
    """An fs tier's directory, with sealed values in it."""

    layout = "files"

    def __init__(self, path):
        self.path = path
        self.store = self.open(FsConfig(type="fs", path=path, capacity="1GiB", min_free=0, layout=self.layout))

    open = FsStore

    def put(self, number, *, namespace="prod", model=LLAMA, pages=1, age=0.0, tenant=""):
        names = names_of(namespace, model)
        name = names.name(make_offload_key(number.to_bytes(8, "big"), 0, tenant))
        value = memoryview(bytearray(bytes([number]) * (4096 * pages)))
        seal_value(value, len(value) - 100, name, names.layout_id)
        self.store.write(name, value)
        self.age(name, age)
        return name

    def raw(self, name, content, age=0.0):
        self.store.write(name, memoryview(content))
        self.age(name, age)
        return name

    def file(self, name):
        place = place_of(name)
        return self.path / place.folder / place.leaf

    def age(self, name, seconds):
        os.utime(self.file(name), (time.time() - seconds,) * 2)

    def get(self, name):
        return self.file(name).read_bytes()

    def set(self, name, content):
        self.file(name).write_bytes(content)

    def change(self, name, at, byte):
        content = bytearray(self.get(name))
        content[at] ^= byte
        self.set(name, content)

    def names(self):
        return sorted(entry.name for entry in self.store.list(""))


class SlabDisk(Disk):
    """The same with the layout ``slab``."""

    layout = "slab"
    open = partial(SlabStore, waits=Waits(lock=60.0))

    def age(self, name, seconds):
        index = self.store.slab.index
        with index.locked():
            entry = index.find(digest_of(name))
            if entry is not None:
                index.change(entry, entry._replace(time=int(time.time() - seconds)))

    def get(self, name):
        entry = self.store.slab.index.find(digest_of(name))
        content = bytearray(entry.nbytes)
        assert self.store.read_into(name, memoryview(content))
        return bytes(content)

    def set(self, name, content):
        self.store.write(name, memoryview(content))


@pytest.fixture(params=[Disk, SlabDisk], ids=["files", "slab"])
def disk(tmp_path, request):
    disk = request.param(tmp_path / "values")
    yield disk
    disk.store.close()


@pytest.fixture
def file(config, disk):
    fs = f"type: fs, path: {disk.path}, capacity: 1GiB, min_free: 0, layout: {disk.layout}"
    type(disk)(disk.path.with_name("archive")).store.close()
    return config(
        f"{{name: disk, {fs}}}",
        f"{{name: archive, {fs.replace(str(disk.path), str(disk.path.with_name('archive')))}, read_only: true}}",
        "{type: memory-async, name: peers, max_blocks: 4}",
    )


@pytest.fixture
def kvtiers(run, file):
    """Return a function that runs ``kvtiers store COMMAND TIER --config FILE ...``."""

    def invoke(command, *arguments, tier="disk", status=0):
        result = run("store", command, tier, "--config", file, *arguments)
        assert result.exit_code == status, result.output + result.stderr
        return result

    return invoke


# -- compressed values


def put_compressed(disk, number, pages=16):
    """A value as a tier with compression stores it."""
    names = names_of("prod", LLAMA)
    name = names.name(number.to_bytes(8, "big") + bytes(4))
    value = memoryview(bytearray(random.Random(number).choices(range(3, 9), k=4096 * pages)))
    seal_value(value, len(value) - 100, name, names.layout_id)
    compressed_store(disk.store, "zstd").write(name, value)
    return name


def test_compressed_values_are_verified_counted_and_pruned_like_others(kvtiers, disk):
    names = [put_compressed(disk, number) for number in range(3)]
    disk.put(9)
    document = {"release": "vLLM 0.32.0", "groups": [{"value_bytes": 4096 * 16}]}
    write_layout(disk.store, names_of("prod", LLAMA), json.dumps(document))
    found = json.loads(kvtiers("du", "--json").stdout)["models"][0]
    assert found["values"] == 4
    assert found["bytes"] < 3 * 4096 * 8 < found["uncompressed_bytes"] == 4 * 4096 * 16
    assert ": compressed from 256KiB to " in kvtiers("du").stdout
    assert json.loads(kvtiers("verify", "--json").stdout)["ok"]["values"] == 4
    disk.change(names[0], 3000, 0x20)
    disk.change(names[1], 8, 2)  # another format
    found = json.loads(kvtiers("verify", "--json", "--delete-damaged", status=1).stdout)
    assert found["damaged_names"] == names[:1]
    assert (found["ok"]["values"], found["foreign"]["values"], found["deleted"]) == (2, 1, 1)
    kvtiers("prune", "--other-formats")
    assert json.loads(kvtiers("verify", "--json").stdout)["ok"]["values"] == len(disk.names()) - 2 == 2


def test_a_compressed_value_that_says_it_is_huge_is_damaged_and_not_read(kvtiers, disk):
    name = put_compressed(disk, 1)
    content = bytearray(disk.get(name))
    content[16:24] = (1 << 50).to_bytes(8, "little")
    disk.set(name, bytes(content))
    assert json.loads(kvtiers("verify", "--json", status=1).stdout)["damaged_names"] == [name]


def test_without_the_library_a_compressed_value_cannot_be_read_and_a_line_says_what_to_install(
    kvtiers, disk, monkeypatch
):
    put_compressed(disk, 1)
    disk.put(2)
    verify._compressor.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    done = kvtiers("verify", status=1)
    assert "pip install 'kvtiers[compression]'" in done.stderr
    assert re.search(r"^ *unreadable +1 ", done.stdout, re.MULTILINE)
    verify._compressor.cache_clear()


# -- du and ls


def fill(disk):
    return {
        "fresh": disk.put(1),
        "hours": disk.put(2, age=5 * HOUR),
        "days": disk.put(3, pages=2, age=3 * DAY),
        "old": disk.put(4, model=QWEN, age=40 * DAY),
        "test": disk.put(5, namespace="test", age=10 * DAY),
        "probe": disk.raw("_check/0123", bytes(4096)),
    }


def test_du_counts_by_namespace_model_fingerprint_and_age(kvtiers, disk):
    fill(disk)
    found = json.loads(kvtiers("du", "--json").stdout)
    assert found["complete"] is True
    assert (found["total"]["values"], found["total"]["bytes"]) == (6, 7 * 4096)
    assert [(m["namespace"], m["model"], m["fingerprint"], m["values"], m["bytes"]) for m in found["models"]] == [
        ("_check", "", "", 1, 4096),
        ("prod", "llama-3.1-8b", "5f" * 12, 3, 4 * 4096),
        ("prod", "qwen-2", "a0" * 12, 1, 4096),
        ("test", "llama-3.1-8b", "5f" * 12, 1, 4096),
    ]
    assert {age: share["values"] for age, share in found["ages"].items()} == {
        "under 1h": 2,
        "under 1d": 1,
        "under 7d": 1,
        "under 30d": 1,
        "30d and more": 1,
    }


def test_du_is_plain_text_where_it_is_piped(kvtiers, disk):
    fill(disk)
    lines = [line.split() for line in kvtiers("du").stdout.splitlines()]
    assert lines[0] == ["namespace", "model", "release", "fingerprint", "values", "bytes", "oldest", "newest"]
    assert ["prod", "llama-3.1-8b", "-", "5f" * 12, "3", "16KiB", "3d", "0s"] in [[*line[:7], "0s"] for line in lines]
    assert ["total", "6", "28KiB"] in [line[:3] for line in lines]
    assert ["30d", "and", "more", "1", "4KiB"] in lines


def test_du_names_the_release_whose_engine_stored_under_a_fingerprint_and_counts_no_record(kvtiers, disk):
    disk.put(1)
    write_layout(disk.store, names_of("prod", LLAMA), json.dumps({"release": "vLLM 0.32.0"}))
    found = json.loads(kvtiers("du", "--json").stdout)
    assert [(model["release"], model["values"]) for model in found["models"]] == [("vLLM 0.32.0", 1)]
    assert "llama-3.1-8b  vLLM 0.32.0  " + "5f" * 12 in kvtiers("du").stdout
    kvtiers("prune", "--namespace", "prod")
    assert all("_layout" in name for name in disk.names()), "a record is no value"


@pytest.mark.parametrize("fingerprint", ["5f5", "x" * 24, "5f" * 13, "5f5f "])
def test_a_fingerprint_that_cannot_be_one_is_refused(kvtiers, disk, fingerprint):
    assert "4 to 24 hex digits" in kvtiers("prune", "--fingerprint", fingerprint, status=2).stderr


def test_an_empty_store_is_no_error(kvtiers, disk):
    assert json.loads(kvtiers("du", "--json").stdout)["total"]["values"] == 0
    assert kvtiers("ls").stdout == "0 values, 0B\n"
    kvtiers("du")
    kvtiers("verify")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"fresh", "hours", "days", "old", "test", "probe"}),
        (("--namespace", "prod"), {"fresh", "hours", "days", "old"}),
        (("--model", "llama-3.1-8b"), {"fresh", "hours", "days", "test"}),
        (("--model", "meta/QWEN 2"), set()),
        (("--model", "Qwen 2"), {"old"}),
        (("--model", "qwen-2-a0a0"), {"old"}),
        (("--model", "qwen-2-a0a1"), set()),
        (("--model", "llama"), set()),
        (("--older-than", "2d"), {"days", "old", "test"}),
        (("--larger-than", "4KiB"), {"days"}),
        (("--prefix", "_check/"), {"probe"}),
        (("--namespace", "prod", "--older-than", "2d", "--model", "llama-3.1-8b"), {"days"}),
        (("--namespace", "pro"), set()),
    ],
)
def test_ls_shows_the_values_that_fit_everything_that_is_given(kvtiers, disk, options, expected):
    names = fill(disk)
    found = json.loads(kvtiers("ls", "--json", *options).stdout)
    assert {value["name"] for value in found["values"]} == {names[key] for key in expected}


def test_ls_prints_size_age_and_name_and_ends_at_the_limit(kvtiers, disk):
    names = fill(disk)
    lines = kvtiers("ls", "--prefix", names["days"]).stdout.splitlines()
    assert lines[0].split() == ["8KiB", "3d", names["days"]]
    assert lines[1] == "1 value, 8KiB"
    assert len(kvtiers("ls", "--limit", "2").stdout.splitlines()) == 3


def test_looking_changes_nothing(kvtiers, disk):
    names = fill(disk)
    disk.store.close()
    before = {path: path.stat().st_mtime_ns for path in disk.path.rglob("*")}
    for command in ("ls", "du", "verify"):
        kvtiers(command)
    kvtiers("prune", "--older-than", "1h", "--dry-run")
    assert {path: path.stat().st_mtime_ns for path in disk.path.rglob("*")} == before
    disk.__init__(disk.path)
    assert sorted(names.values()) == disk.names()


# -- verify


def spoil(disk):
    """Fill the directory with whole values and with everything else that there can be."""
    expected = {disk.put(number, pages=1 + number % 3): "ok" for number in range(10, 20)}
    flipped, swapped, format2, short, empty = (disk.put(number) for number in range(1, 6))
    disk.change(flipped, 17, 1)
    disk.set(swapped, disk.get(disk.put(10)))
    disk.change(format2, 4096 - 64 + 8, 3)  # the seal's format number
    disk.set(short, b"x" * 32)
    disk.set(empty, b"")
    alien = disk.put(6, model=QWEN)
    disk.set(alien, disk.get(disk.put(6)))
    expected |= {flipped: "damaged", swapped: "damaged", short: "damaged", empty: "damaged"}
    expected |= {format2: "foreign", alien: "foreign", disk.put(6): "ok"}
    expected[disk.raw("prod/not-our-format/00", bytes(4096))] = "foreign"
    return expected


def test_verify_distinguishes_whole_values_from_damaged_and_foreign_ones(kvtiers, disk):
    expected = spoil(disk)
    found = json.loads(kvtiers("verify", "--json", status=1).stdout)
    counts = {verdict: found[verdict]["values"] for verdict in ("ok", "foreign", "damaged", "gone", "unreadable")}
    assert counts == {"ok": 11, "foreign": 3, "damaged": 4, "gone": 0, "unreadable": 0}
    assert sorted(found["damaged_names"]) == sorted(name for name, verdict in expected.items() if verdict == "damaged")
    assert found["deleted"] == 0
    assert disk.names() == sorted(expected)


def test_verify_of_a_whole_store_ends_well_and_reads_only_what_is_meant(kvtiers, disk):
    spoil(disk)
    lines = kvtiers("verify", "--larger-than", "4KiB").stdout.splitlines()
    assert [line.split() for line in lines] == [["verdict", "values", "bytes"], ["ok", "6", "60KiB"]]


def test_verify_deletes_damaged_values_and_no_others(kvtiers, disk):
    expected = spoil(disk)
    lines = kvtiers("verify", "--delete-damaged", status=1).stdout.splitlines()
    assert lines[-1] == "4 damaged values deleted"
    assert disk.names() == sorted(name for name, verdict in expected.items() if verdict != "damaged")
    kvtiers("verify")


def test_values_larger_than_the_memory_that_was_asked_for_are_verified_too(kvtiers, disk):
    for number, pages in enumerate((1, 3, 700, 2), start=1):
        disk.put(number, pages=pages)
    found = json.loads(kvtiers("verify", "--json", "--value-bytes", "4KiB").stdout)
    assert found["ok"] == {"values": 4, "bytes": 706 * 4096}


# -- prune


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (("--older-than", "4d"), {"old", "test"}),
        (("--larger-than", "4KiB"), {"days"}),
        (("--model", "llama-3.1-8b"), {"fresh", "hours", "days", "test"}),
        (("--namespace", "test"), {"test"}),
        (("--prefix", "_"), {"probe"}),
        (("--model", "llama-3.1-8b", "--older-than", "4d"), {"test"}),
        (("--to-size", "20KiB"), {"old", "test"}),
        (("--to-size", "28KiB"), set()),
        (("--namespace", "prod", "--to-size", "8KiB"), {"old", "days"}),
        (("--fingerprint", "a0a0"), {"old"}),
        (("--fingerprint", "5F" * 12, "--namespace", "test"), {"test"}),
        (("--fingerprint", "a0a1"), set()),
        (("--other-formats",), {"probe"}),
        (("--other-formats", "--older-than", "1h"), set()),
    ],
)
def test_prune_deletes_what_fits_everything_that_is_given_and_a_dry_run_says_the_same(kvtiers, disk, options, gone):
    names = fill(disk)
    doomed = {names[key] for key in gone}
    dry = kvtiers("prune", *options, "--dry-run").stdout
    assert {line.split()[2] for line in dry.splitlines() if line.endswith(tuple(names.values()))} == doomed
    assert disk.names() == sorted(names.values())
    done = kvtiers("prune", *options).stdout
    assert disk.names() == sorted(set(names.values()) - doomed)
    assert done.splitlines()[-1] == dry.splitlines()[-1].replace("would be deleted", "deleted")
    assert done.splitlines()[-1].startswith(f"deleted: {len(gone)} value")


def test_prune_finds_other_formats_by_name_and_by_seal_and_leaves_damage_alone(kvtiers, disk):
    expected = spoil(disk)
    found = json.loads(kvtiers("prune", "--other-formats", "--json").stdout)
    assert found["total"]["values"] == 3
    assert disk.names() == sorted(name for name, verdict in expected.items() if verdict != "foreign")


@pytest.mark.parametrize("options", [("--older-format",), ("--older-format", "--other-formats")])
def test_prune_finds_older_formats_alone_whatever_else_is_given(kvtiers, disk, options, monkeypatch):
    monkeypatch.setattr(verify, "SEAL_FORMATS", (SEAL_FORMAT - 1, SEAL_FORMAT))
    names = fill(disk)
    newer, older = disk.put(7), disk.put(8)
    disk.change(newer, 4096 - 64 + 8, SEAL_FORMAT ^ (SEAL_FORMAT + 1))
    disk.change(older, 4096 - 64 + 8, SEAL_FORMAT ^ (SEAL_FORMAT - 1))
    assert json.loads(kvtiers("prune", *options, "--json").stdout)["total"]["values"] == 1
    assert disk.names() == sorted([*names.values(), newer])


def fill_tenants(disk):
    return {
        "none": disk.put(1),
        "blue": disk.put(1, tenant="blue", age=DAY),
        "blues": disk.put(1, tenant="blues"),
        "qwen": disk.put(2, tenant="blue", model=QWEN, pages=2),
        "test": disk.put(1, tenant="blue", namespace="test"),
    }


def test_du_counts_by_tenant(kvtiers, disk):
    fill_tenants(disk)
    found = json.loads(kvtiers("du", "--by", "tenant", "--json").stdout)
    assert [(t["namespace"], t["tenant"], t["values"], t["bytes"]) for t in found["tenants"]] == [
        ("prod", "blue", 2, 3 * 4096),
        ("prod", "blues", 1, 4096),
        ("test", "blue", 1, 4096),
    ]
    lines = [line.split() for line in kvtiers("du", "--by", "tenant").stdout.splitlines()]
    assert lines[0] == ["namespace", "tenant", "values", "bytes", "oldest", "newest"]
    assert [line[:3] for line in lines[1:6]] == [
        ["prod", "-", "1"],
        ["prod", "blue", "2"],
        ["prod", "blues", "1"],
        ["test", "blue", "1"],
        ["total", "5", "24KiB"],
    ]


@pytest.mark.parametrize(
    ("options", "gone"), [((), {"blue", "qwen", "test"}), (("--namespace", "prod"), {"blue", "qwen"})]
)
def test_a_tenants_values_go_and_no_others_and_the_proof_says_so(kvtiers, disk, options, gone):
    names = fill_tenants(disk)
    shown = kvtiers("ls", "--tenant", "blue", *options).stdout
    assert {name for name in names.values() if name in shown} == {names[which] for which in gone}
    done = kvtiers("prune", "--tenant", "blue", "--verify", *options).stdout
    assert f"proof: listed again: 0 values; read again: 0 of {len(gone)} values" in done
    assert disk.names() == sorted(name for which, name in names.items() if which not in gone)


def test_a_delete_that_deletes_nothing_is_no_proof(kvtiers, disk, monkeypatch):
    names = fill_tenants(disk)
    monkeypatch.setattr(type(disk.store), "delete", lambda _self, _names: None)
    done = kvtiers("prune", "--tenant", "blue", "--verify", "--json", status=1)
    proof = json.loads(done.stdout)["proof"]
    assert proof == {"holds": False, "listed": 3, "asked": 3, "found": 3, "error": ""}
    done = kvtiers("prune", "--tenant", "blue", "--verify", status=1).stdout
    assert "no proof: listed again: 3 values; read again: 3 of 3 values; such as " in done
    assert len(disk.names()) == len(names)


def test_a_value_that_is_not_listed_but_can_still_be_read_is_no_proof(kvtiers, disk, monkeypatch):
    fill_tenants(disk)
    kind = type(disk.store)
    monkeypatch.setattr(kind, "exists", lambda _self, names: [False] * len(names))
    monkeypatch.setattr(kind, "read_into", lambda _self, name, dst: len(dst))
    assert "read again: 3 of 3 values" in kvtiers("prune", "--tenant", "blue", "--verify", status=1).stdout


def test_a_store_that_fails_when_it_is_read_again_is_no_proof(kvtiers, disk, monkeypatch):
    fill_tenants(disk)

    def fail(_self, _names):
        raise OSError("the disk is on fire")

    monkeypatch.setattr(type(disk.store), "exists", fail)
    done = kvtiers("prune", "--tenant", "blue", "--verify", status=1).stdout
    assert "no proof: listed again: 0 values; read again: 0 of 0 values; the store failed: OSError: the disk" in done


@pytest.mark.parametrize("options", [("--dry-run",), ("--to-size", "1KiB"), ("--older-format",)])
def test_a_proof_is_for_values_that_all_go(kvtiers, disk, options):
    assert "leave out --dry-run" in kvtiers("prune", "--tenant", "blue", "--verify", *options, status=2).stderr


def test_what_can_be_no_tenant_is_refused(kvtiers, disk):
    assert "expected 1 to 64 of a-z" in kvtiers("prune", "--tenant", "Blue/..", status=2).stderr


def test_prune_needs_a_selection(kvtiers, disk):
    names = fill(disk)
    assert "say which values: --older-than" in kvtiers("prune", status=2).stderr
    assert disk.names() == sorted(names.values())


@pytest.mark.parametrize("command", [("prune", "--older-than", "1h"), ("verify", "--delete-damaged")])
def test_a_read_only_tier_refuses_to_delete(kvtiers, disk, command):
    names = fill(disk)
    said = kvtiers(*command, tier="archive", status=2).stderr
    assert said.startswith("error: tiers.yaml: tier 'archive' is read-only, so nothing is deleted from it; ")
    assert disk.names() == sorted(names.values())
    kvtiers("du", tier="archive")


def test_pruning_and_verifying_while_an_engine_writes_and_reads(kvtiers, disk):
    stop, errors = threading.Event(), []

    def engine():
        number = 0
        while not stop.is_set():
            number = number % 250 + 1
            try:
                disk.put(number)
            except FileNotFoundError:  # pruned before its age was set: the test's own thread
                continue
            except OSError as error:
                errors.append(error)

    worker = threading.Thread(target=engine)
    worker.start()
    try:
        for _ in range(5):
            kvtiers("prune", "--prefix", "prod/")
            assert json.loads(kvtiers("verify", "--json").stdout)["damaged"]["values"] == 0
    finally:
        stop.set()
        worker.join()
    assert not errors


# -- what cannot be done


def test_a_tier_that_the_config_does_not_have_is_one_line(kvtiers, disk):
    said = kvtiers("du", tier="dsk", status=2).stderr
    assert said == "error: tiers.yaml: no tier is named 'dsk'. Did you mean 'disk'? Tiers: disk, archive, peers\n"


def test_a_tier_manager_cannot_list(kvtiers, disk):
    said = kvtiers("du", tier="peers", status=2).stderr
    assert said == "error: tier 'peers' is a tier manager (type 'memory-async'), which cannot list what it holds\n"


def test_listing_reading_and_deleting_say_where_they_are(kvtiers, disk, monkeypatch):
    monkeypatch.setattr("kvtiers.cli.store.session.show_progress", partial(show_progress, line_seconds=0.0))
    spoil(disk)
    lines = kvtiers("verify", "--delete-damaged", status=1).stderr.splitlines()
    assert re.fullmatch(r"1 values of \d+KiB found", lines[0])
    assert any(re.fullmatch(r"18 values of \S+ found", line) for line in lines)
    assert any(re.fullmatch(r"18 values of \S+ read, 4 damaged", line) for line in lines)
    assert any(re.fullmatch(r"4 values of \S+ deleted", line) for line in lines)


@pytest.mark.parametrize("command", ["ls", "du", "verify", "prune"])
def test_each_commands_help_says_its_exit_statuses(run, command):
    result = run("store", command, "--help")
    assert result.exit_code == 0
    assert "Exit status: 0 all is well, 1 " in result.output
    assert "TIER" in result.output
