"""``kvtiers store`` over encrypted values: listed and verified by keyed names, and carried over to another key."""

import base64
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from tests.unit.encryption.keyed import random_key

from kvtiers.api import make_offload_key
from kvtiers.api.keys import with_tenant
from kvtiers.cli.main import cli
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.seal import decrypt_value, encrypt_value
from kvtiers.layout.seal import SealVerdict, seal_value
from kvtiers.layout.storage_name import StorageNames, parse_name
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

NAMES = StorageNames("prod/llama-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
PAYLOAD = 8100


class Disk:
    """An fs tier's directory, configs with one key or two, and the keys."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "disk"
        self.store = FsStore(FsConfig(type="fs", path=self.path, capacity="1GiB", min_free=0))
        self.files = {}
        for name in ("one", "two", "three"):
            self.files[name] = folder / f"{name}.key"
            self.files[name].write_bytes(base64.b64encode(os.urandom(32)))
            self.files[name].chmod(0o600)

    def sources(self, *keys):
        return {what: {"file": str(self.files[key])} for what, key in zip(("key", "previous"), keys, strict=False)}

    def config(self, *keys, **tenants):
        sources = self.sources(*keys)
        if tenants:
            sources["tenants"] = tenants
        tier = {"type": "fs", "name": "disk", "path": str(self.path), "capacity": "1GiB", "min_free": "0B"}
        document = {"version": 1, "namespace": "prod", "primary": {"capacity": "64MiB"}, "secondary": [tier]}
        file = self.folder / "tiers.yaml"
        file.write_text(json.dumps(document | ({"encryption": sources} if sources else {}) | {"tenants": {}}))
        return str(file)

    def names(self, key, names=NAMES):
        source = EncryptionConfig(key={"file": str(self.files[key])})
        return KeyedNames.of(names, open_keys(source, names.namespace).current)

    def put(self, key, offload_key, names=NAMES):
        keyed = self.names(key, names)
        value = memoryview(bytearray(8192))
        encrypt_value([memoryview(content(offload_key))], value, keyed.name(offload_key), keyed.layout_id, keyed.key)
        self.store.write(keyed.name(offload_key), value)
        return keyed.name(offload_key)

    def plain(self, offload_key):
        value, name = memoryview(bytearray(content(offload_key).ljust(8192, b"\0"))), NAMES.name(offload_key)
        seal_value(value, PAYLOAD, name, NAMES.layout_id)
        self.store.write(name, value)
        return name

    def get(self, key, offload_key, names=NAMES):
        keyed, value = self.names(key, names), memoryview(bytearray(8192))
        if not self.store.read_into(keyed.name(offload_key), value):
            return None
        verdict = decrypt_value(value, PAYLOAD, keyed.name(offload_key), keyed.layout_id, keyed.key)
        return bytes(value[:PAYLOAD]) if verdict is SealVerdict.OK else verdict

    def listed(self):
        return sorted(entry.name for entry in self.store.list(""))


def content(offload_key):
    return (offload_key * PAYLOAD)[:PAYLOAD]


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    yield disk
    disk.store.close()


@pytest.fixture
def run():
    def invoke(command, *arguments):
        result = CliRunner().invoke(cli, ["store", command, "disk", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


def counts(result):
    report = json.loads(result.stdout)
    return {what: found["values"] for what, found in report.items() if isinstance(found, dict) and found.get("values")}


def test_encrypted_values_are_listed_counted_verified_and_pruned_by_their_names(disk, run):
    keys = [random_key() for _ in range(3)]
    names = [disk.put("one", key) for key in keys]
    config = disk.config("one")
    assert sorted(
        value["name"] for value in json.loads(run("ls", "--config", config, "--json").stdout)["values"]
    ) == sorted(names)
    [origin] = json.loads(run("du", "--config", config, "--model", "llama", "--json").stdout)["models"]
    assert (origin["namespace"], origin["model"], origin["values"]) == ("prod", "llama", 3)
    assert counts(run("verify", "--config", config, "--json")) == {"ok": 3}
    assert run("prune", "--config", config, "--model", "llama").exit_code == 0
    assert disk.listed() == []


def test_verify_says_which_values_are_damaged_of_another_key_or_not_encrypted(disk, run):
    good, damaged, locked = (random_key() for _ in range(3))
    disk.put("one", good)
    name = disk.put("one", damaged)
    disk.store.delete([name])
    disk.store.write(name, memoryview(bytes(8192)))
    disk.put("three", locked)
    disk.plain(random_key())
    result = run("verify", "--config", disk.config("one"), "--json")
    assert counts(result) == {"ok": 1, "damaged": 1, "locked": 1, "foreign": 1}
    assert json.loads(result.stdout)["damaged_names"] == [name]
    assert result.exit_code == 1
    assert counts(run("verify", "--config", disk.config(), "--json")) == {"ok": 1, "locked": 3}, "without a key"
    assert run("prune", "--config", disk.config("one"), "--other-formats").exit_code == 0
    assert len(disk.listed()) == 3, "what was not encrypted is gone, and nothing else"


def test_rekey_carries_all_over_to_the_current_key_and_leaves_the_rest(disk, run):
    other_space = StorageNames("test/llama-0123456789abcdef01234567/", NAMES.layout_id)
    keys = [random_key() for _ in range(5)]
    for key in keys:
        disk.put("one", key)
    elsewhere, before, locked = (random_key() for _ in range(3))
    disk.put("one", elsewhere, other_space)
    disk.put("two", before)
    disk.put("three", locked)
    disk.plain(random_key())
    config = disk.config("two", "one")
    dry = run("rekey", "--config", config, "--dry-run", "--json")
    assert counts(dry) == {"previous": 6, "current": 1, "locked": 1, "plain": 1}
    assert "would be carried over: 6 values" in run("rekey", "--config", config, "--dry-run").stdout
    there = disk.listed()
    assert len(there) == 9, "a dry run changes nothing"
    done = run("rekey", "--config", config, "--json")
    assert done.exit_code == 0, done.output
    assert counts(done) == {"rekeyed": 6, "current": 1, "locked": 1, "plain": 1}
    for key in keys:
        assert disk.get("two", key) == content(key)
        assert disk.get("one", key) is None, "nothing is left under the old name"
    assert disk.get("two", elsewhere, other_space) == content(elsewhere)
    assert disk.get("three", locked) == content(locked)
    assert len(disk.listed()) == 9
    assert counts(run("rekey", "--config", config, "--json")) == {"current": 7, "locked": 1, "plain": 1}


def test_a_value_that_the_listing_comes_by_again_under_its_new_name_counts_once(disk, run, monkeypatch):
    for key in (random_key() for _ in range(3)):
        disk.put("one", key)
    disk.put("two", random_key())
    at_first = FsStore.list

    def listed_twice(store, prefix):
        before = {entry.name: entry for entry in at_first(store, prefix)}
        yield from before.values()
        until = time.monotonic() + 60
        while not (after := [entry for entry in at_first(store, prefix) if entry.name not in before]):
            assert time.monotonic() < until, "nothing is carried over while the listing goes on"
        yield from after

    monkeypatch.setattr(FsStore, "list", listed_twice)
    assert counts(run("rekey", "--config", disk.config("two", "one"), "--json")) == {"rekeyed": 3, "current": 1}


def test_rekey_never_makes_a_value_of_what_was_not_sealed_with_the_previous_key(disk, run):
    """A forgery must not become sound by it."""
    good, flipped, swapped, plain = (random_key() for _ in range(4))
    names = [disk.put("one", key) for key in (good, flipped, swapped, plain)]
    value = memoryview(bytearray(8192))
    assert disk.store.read_into(names[0], value)
    forgeries = [bytes(value[:-1]) + b"?", bytes(value)]
    seal_value(value, PAYLOAD, names[3], NAMES.layout_id)
    for name, forged in zip(names[1:], [*forgeries, bytes(value)], strict=True):
        disk.store.delete([name])
        disk.store.write(name, memoryview(forged))
    result = run("rekey", "--config", disk.config("two", "one"), "--json")
    assert counts(result) == {"rekeyed": 1, "damaged": 3}
    assert result.exit_code == 1
    assert disk.get("two", good) == content(good)
    assert [disk.get("two", key) for key in (flipped, swapped, plain)] == [None] * 3


def test_rekey_without_two_keys_is_one_line(disk, run):
    for config in (disk.config("one"), disk.config()):
        result = run("rekey", "--config", config)
        assert result.exit_code == 2
        assert "no two live keys; expected 'encryption: {key: ..., previous: ...}'" in result.output


def test_tenants_with_keys_of_their_own_are_verified_and_rekeyed_by_them(disk, run):
    """Blue leaves the namespace's key, red's is rotated, and green's key is gone."""
    blue, red, green, plain = (
        with_tenant(make_offload_key(os.urandom(32), 0), tenant) for tenant in ("blue", "red", "green", "")
    )
    for key, offload_key in (("one", blue), ("two", red), ("three", green), ("one", plain)):
        disk.put(key, offload_key)
    gone = {"key": {"command": ["sh", "-c", "echo key is destroyed >&2; exit 1"]}}
    own = {"blue": disk.sources("three", "one"), "red": disk.sources("three", "two"), "green": gone}
    config = disk.config("one", **own)
    checked = run("verify", "--config", config, "--json")
    assert counts(checked) == {"ok": 3, "locked": 1}
    assert checked.exit_code == 0
    assert checked.stderr.count("encryption.tenants.green.key.command: 'sh' failed with exit status 1: key is des") == 1
    by_tenant = json.loads(run("du", "--config", config, "--by", "tenant", "--json").stdout)["tenants"]
    assert {one["tenant"]: one["values"] for one in by_tenant} == {"blue": 1, "red": 1, "green": 1}
    without_own = disk.config("one", blue=disk.sources("three"))
    assert counts(run("verify", "--config", without_own, "--json")) == {"ok": 1, "locked": 3}, "by its own keys alone"
    config = disk.config("one", **own)
    assert counts(run("rekey", "--config", config, "--dry-run", "--json")) == {"previous": 2, "current": 1, "locked": 1}
    assert counts(run("rekey", "--config", config, "--tenant", "red", "--json")) == {"rekeyed": 1}
    assert counts(run("rekey", "--config", config, "--json")) == {"rekeyed": 1, "current": 2, "locked": 1}
    for offload_key in (blue, red):
        assert disk.get("three", offload_key) == content(offload_key)
    assert [disk.get("one", blue), disk.get("two", red)] == [None, None]
    assert disk.get("one", plain) == content(plain)
    assert len(disk.listed()) == 4


def test_tenants_that_are_not_listed_are_verified_and_rekeyed_by_the_keys_of_their_own(disk, run):
    """Blue leaves the namespace's key, red has had its own from the start, and green has none."""
    keys = {tenant: with_tenant(make_offload_key(os.urandom(32), 0), tenant) for tenant in ("blue", "red", "green", "")}
    (disk.folder / "old").mkdir()
    for name, key in (("blue", "three"), ("red", "two"), ("old/blue", "one")):
        (disk.folder / f"{name}.tenant").symlink_to(disk.files[key])
    for tenant, key in (("blue", "one"), ("red", "two"), ("green", "one"), ("", "one")):
        disk.put(key, keys[tenant])
    folders = {"key": disk.folder / "{tenant}.tenant", "previous": disk.folder / "old" / "{tenant}.tenant"}
    config = disk.config("one", **{"*": {what: {"file": str(path)} for what, path in folders.items()}})
    checked = run("verify", "--config", config, "--json")
    assert counts(checked) == {"ok": 3, "locked": 1}
    assert checked.stderr.count("encryption.tenants.*.key.file: cannot read") == 1
    assert counts(run("rekey", "--config", config, "--json")) == {"rekeyed": 1, "current": 2, "locked": 1}
    assert disk.get("three", keys["blue"]) == content(keys["blue"])
    assert disk.get("one", keys["blue"]) is None


def test_rekey_goes_on_after_kill_9_and_loses_nothing(disk, run):
    """It is killed when the first values are under their new names, and the old ones are not deleted yet."""
    keys = [random_key() for _ in range(300)]
    for key in keys:
        disk.put("one", key)
    config = disk.config("two", "one")
    program = f"""
import os, signal
from kvtiers.cli.main import main
from kvtiers_fs.store import FsStore
calls = 0
delete = FsStore.delete
def kill_in_the_second(self, names):
    global calls
    calls += 1
    if calls == 2:
        delete(self, names[:7])
        os.kill(os.getpid(), signal.SIGKILL)
    delete(self, names)
FsStore.delete = kill_in_the_second
import sys
sys.argv = ["kvtiers", "store", "rekey", "disk", "--config", {config!r}]
main()
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = {parse_name(name).key_id for name in disk.listed()}
    assert len(found) == 2, "it was in the middle of it"
    assert all(disk.get("two", key) or disk.get("one", key) for key in keys), (
        "each value is there under one key or both"
    )
    again = run("rekey", "--config", config, "--json")
    assert again.exit_code == 0, again.output
    assert len(disk.listed()) == len(keys)
    assert all(disk.get("two", key) == content(key) for key in keys)
