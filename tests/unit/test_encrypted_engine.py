"""An engine and a client with encryption: what is stored, who finds it, what is logged, and where a key never is."""

import base64
import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.unit.secondary.conftest import wait_until
from tests.unit.test_runtime import KEYS, config, copied, round_trip, running, step_until

from kvtiers import ModelIdentity, open_client
from kvtiers.api import ConfigError
from kvtiers.cli.main import cli
from kvtiers.config import load_config
from kvtiers.control import CommandRefused
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.layout.storage_name import parse_name
from kvtiers.types import BlockSpec, PromptGroup, RequestContext
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

RAW = bytes(range(130, 162))
FORMS = [
    base64.b64encode(RAW).decode(),
    base64.b64encode(RAW).decode().rstrip("="),
    base64.urlsafe_b64encode(RAW).decode(),
    RAW.hex(),
    repr(RAW)[2:-1],
    RAW.decode("latin-1"),
]


@pytest.fixture
def disk(tmp_path):
    return {"type": "fs", "path": str(tmp_path / "store"), "capacity": "64MiB", "min_free": 0}


@pytest.fixture
def key(tmp_path):
    def make(number=0):
        file = tmp_path / f"{number}.key"
        file.write_bytes(bytes([*RAW[:-1], 200 + number]) if number else base64.b64encode(RAW))
        file.chmod(0o600)
        return {"file": str(file)}

    return make


def is_open(manager):
    return manager.stats()["tiers"]["fs"]["own"]["open"]


def names(disk):
    store = FsStore(FsConfig(type="fs", path=disk["path"], capacity="64MiB", min_free=0))
    try:
        return [entry.name for entry in store.list("") if parse_name(entry.name)]
    finally:
        store.close()


def store_one(engine):
    manager, worker, tensor = engine
    tensor[:] = 7
    step_until(manager, lambda: is_open(manager) and manager.on_schedule_end() is None)
    plan = manager.prepare_store(KEYS[:1], RequestContext("r"))
    copied(worker, worker.submit_store, BlockSpec([0], (1,), (0,)), plan.chunk_ids)
    manager.complete_store(plan)
    step_until(manager, lambda: manager.stats()["tiers"]["fs"]["stored_chunks"])


def found(engine):
    """Return how many of a chunk's copies the engine finds, in its tier alone."""
    manager, context = engine[0], RequestContext("s")
    step_until(manager, lambda: is_open(manager))
    answers = []

    def answered():
        hits = manager.reach([PromptGroup(KEYS[:1])], context).in_chunks(manager.tokens_per_chunk[0])
        manager.on_schedule_end()
        answers.append(hits.ready)
        return not hits.waits

    step_until(manager, answered)
    return answers[-1]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_chunks_go_their_whole_way_and_come_back_encrypted(disk, key, io):
    tiers = config(secondary=[disk | {"io": io, "name": "memory"}], encryption={"key": key()})
    with running(tiers) as engine:
        round_trip(*engine)
    assert len(names(disk)) == 8
    assert all(parse_name(name).key_id for name in names(disk))
    assert not any(key.hex() in name for name in names(disk) for key in KEYS)


def test_another_key_finds_nothing_and_one_line_says_why(disk, key, caplog):
    caplog.set_level("INFO", "kvtiers")
    tier = [disk | {"io": "thread"}]
    with running(config(secondary=tier, encryption={"key": key()})) as engine:
        store_one(engine)
    (one,) = re.findall(r"fs: encrypted: key ([0-9a-f]{8})$", caplog.text, re.MULTILINE)
    assert "latest values" not in caplog.text
    with running(config(secondary=tier, encryption={"key": key(1), "previous": key()})) as engine:
        assert found(engine) == 1, "while both live"
    assert "latest values" not in caplog.text
    wrong = (
        (config(secondary=tier, encryption={"key": key(1)}), f"are of key {one}, so this engine, which has key "),
        (
            config(secondary=tier),
            f"are encrypted (key {one}), so this engine, which has no 'encryption', does not find",
        ),
    )
    for tiers, words in wrong:
        caplog.clear()
        with running(tiers) as engine:
            assert found(engine) == 0
        assert caplog.text.count("latest values of this model") == caplog.text.count(words) == 1
    with running(config(secondary=tier)) as engine:
        store_one(engine)
    caplog.clear()
    with running(config(secondary=tier, encryption={"key": key()})) as engine:
        assert found(engine) == 1, "what is encrypted is found still"
    assert "latest values of this model are not encrypted, so this engine, which has key" in caplog.text


def test_after_a_rekey_an_engine_with_the_new_key_finds_all_and_has_nothing_to_say(disk, key, caplog, tmp_path):
    tier = [disk | {"io": "thread"}]
    with running(config(secondary=tier, encryption={"key": key()})) as engine:
        store_one(engine)
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(config(secondary=tier, encryption={"key": key(1), "previous": key()})))
    done = CliRunner().invoke(cli, ["store", "rekey", "fs", "--config", str(file)])
    assert done.exit_code == 0, done.output
    caplog.clear()
    with running(config(secondary=tier, encryption={"key": key(1)})) as engine:
        assert found(engine) == 1
    assert "latest values" not in caplog.text


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_tenant_with_a_key_of_its_own_has_its_values_under_it_and_its_engines_alone_read_them(disk, key, io):
    tiers = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": [disk | {"io": io}]}
    tiers["tenants"] = {}
    value = np.arange(4032, dtype=np.uint8)

    def found(**keys):
        """Return whether an engine with these keys finds what blue, red and one without a tenant have stored."""
        with open_client(tiers | {"encryption": keys}, ModelIdentity("m", weights="w"), 4032) as client:
            answers = []
            for tenant in ("blue", "red", ""):
                row = np.zeros(4032, np.uint8)
                answers.append(client.get_into(KEYS[:1], [row], tenant=tenant)[0])
                assert np.array_equal(row, value) or not answers[-1]
        return [bool(answer) for answer in answers]

    keys = {"key": key(1), "tenants": {"blue": {"key": key(2)}, "red": {"key": {"command": ["cat", key(3)["file"]]}}}}
    with open_client(tiers | {"encryption": keys}, ModelIdentity("m", weights="w"), 4032) as client:
        for tenant in ("blue", "red", ""):
            assert all(client.put(KEYS[:1], [value], tenant=tenant).stored)
    assert len({parse_name(name).key_id for name in names(disk)}) == 3
    assert found(key=key(2)) == [True, False, False], "blue's own engine"
    if io == "process":  # the rest is the same on whatever side of the socket pair
        return
    assert found(**keys) == [True, True, True]
    assert found(key=key(1)) == [False, False, True]
    assert found(key=key(1), tenants={"blue": {"key": key(4), "previous": key(2)}}) == [True, False, True]
    gone = {"blue": keys["tenants"]["blue"], "red": {"key": {"command": ["cat", "/nowhere/red.key"]}}}
    assert found(key=key(1), tenants=gone) == [True, False, True]


def test_a_key_that_cannot_be_had_at_the_start_is_one_line_and_the_engine_runs(disk, caplog):
    tiers = config(secondary=[disk], encryption={"key": {"command": ["sh", "-c", "echo no access >&2; exit 4"]}})
    with running(tiers) as (manager, _, _):
        step_until(manager, lambda: "exit status 4" in caplog.text)
        assert (
            manager.reach([PromptGroup(KEYS[:1])], RequestContext("s")).in_chunks(manager.tokens_per_chunk[0]).tokens
            == 0
        )
    (line,) = {line for line in caplog.text.splitlines() if "exit status 4" in line}
    assert "fs: out of use: encryption.key.command: 'sh' failed with exit status 4: no access" in line


@pytest.mark.parametrize("in_region", [False, True])
def test_a_client_s_values_come_back_from_wherever_they_lie(disk, key, in_region):
    tiers = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": [disk]}
    values = np.random.default_rng(5).integers(0, 256, (8, 9000), np.uint8)
    region = {"region_bytes": 16 * 9000} if in_region else {}
    with open_client(
        tiers | {"encryption": {"key": key()}}, ModelIdentity("m", weights="w"), 9000, bounce_bytes=1 << 16, **region
    ) as client:
        memory = (
            np.frombuffer(client.region, np.uint8).reshape(16, 9000) if in_region else np.zeros((16, 9000), np.uint8)
        )
        memory[:8] = values
        assert all(client.put(KEYS, list(memory[:8])).stored)
        assert all(client.get_into(KEYS, list(memory[8:])))
        assert np.array_equal(memory[8:], values)
        assert np.array_equal(memory[:8], values), "it stays in clear where it was"
        del memory
    content = b"".join(path.read_bytes() for path in Path(disk["path"]).rglob("*") if path.is_file())
    assert values[0].tobytes()[:64] not in content


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
import numpy as np
import kvtiers
from kvtiers.cli.main import main
from kvtiers import CacheLayout, KVGroup, KVTensor, ModelIdentity
layout = CacheLayout(ModelIdentity("m", weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, 4000),))
manager = kvtiers.open_manager(sys.argv[1], layout)
worker = kvtiers.open_worker(sys.argv[1], layout, [np.zeros((64, 4000), np.uint8)], engine_id=manager.engine_id)
manager.wait_ready(30)
while not manager.stats()["tiers"]["fs"]["own"]["open"]:
    manager.on_schedule_end()
print("LOADED", "cryptography" in sys.modules)
print("CONFIG", kvtiers.config.load_config(sys.argv[1]))
print("STATUS", __import__("json").dumps(manager.stats(), default=str))
worker.shutdown()
manager.shutdown(10)
"""


def test_no_key_is_in_a_log_a_status_a_text_of_the_config_or_a_report(disk, key, tmp_path, monkeypatch):
    file, source = tmp_path / "tiers.yaml", key()
    encryption = {"key": key(1), "tenants": {"blue": {"key": source}}}
    document = config(secondary=[disk], encryption=encryption) | {"start_wait": "30s", "tenants": {}}
    file.write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, timeout=120, check=True
    )
    said = done.stdout + done.stderr
    assert "LOADED False" in said, "ciphers run in the tier host alone"
    assert f"file='{source['file']}'" in said
    log = tmp_path / "engine.log"
    log.write_text(said + "".join(f"kvtiers: a library prints {form}\n" for form in FORMS[:-1]))
    monkeypatch.chdir(tmp_path)
    report = CliRunner().invoke(cli, ["report", str(file), "--log", str(log), "--yes"])
    assert report.exit_code == 0, report.output
    assert f"file: {source['file']}" in report.output, "where it is from is no secret"
    assert "a library prints ***" in report.output
    checked = CliRunner().invoke(cli, ["check", str(file)])
    for whose in ("namespace 'default'", "tenant 'blue'"):
        assert re.search(rf"ok +encryption +key [0-9a-f]{{8}} of {whose}", checked.output), checked.output
    assert re.search(r"own: tenants 'blue': key [0-9a-f]{8}$", said, re.MULTILINE), said
    for text in (said, report.output, checked.output, (tmp_path / "kvtiers-report.txt").read_text()):
        assert not [form for form in FORMS if form in text]


def test_a_tier_is_not_attached_in_clear_where_its_file_says_encryption(disk, key, tmp_path):
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(config(secondary=[disk | {"io": "thread"}], encryption={"key": key()})))
    with running(config(secondary=[])) as (manager, _, _):
        with pytest.raises(CommandRefused, match="has another 'encryption' than this engine"):
            manager.live.attach("fs", str(file), lambda work: work())
        assert manager.stats()["tiers"] == {}


WAITS_FOR_A_KEY = """
import sys, time, kvtiers
from kvtiers import CacheLayout, KVGroup, KVTensor, ModelIdentity
layout = CacheLayout(ModelIdentity("m", weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, 4000),))
manager = kvtiers.open_manager(sys.argv[1], layout)
time.sleep(600)
"""


def test_a_key_command_ends_with_an_engine_that_is_killed(disk, tmp_path):
    file, pid_file = tmp_path / "tiers.yaml", tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"]
    file.write_text(json.dumps(config(secondary=[disk], encryption={"key": {"command": command}})))
    engine = subprocess.Popen([sys.executable, "-c", WAITS_FOR_A_KEY, str(file)])
    try:
        wait_until(pid_file.exists, "the command's start")
        descriptor = os.pidfd_open(int(pid_file.read_text()))
    finally:
        engine.kill()
        engine.wait()
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    assert ended.poll(60_000), "it runs on without an engine"
    os.close(descriptor)


def test_a_config_that_gets_its_encryption_after_it_was_loaded_stores_nothing_in_clear():
    clear = load_config(config(secondary=[{"type": "memory-async", "max_blocks": 8}]))
    changed = clear.model_copy(update={"encryption": EncryptionConfig(key={"command": ["true"]})})
    with pytest.raises(ConfigError, match="memory-async: its values cannot be encrypted, since it"):
        open_client(changed, ModelIdentity("test/model", weights="w1"), 4032)


def test_check_says_why_there_is_no_key_and_which_tier_is_in_clear(disk, key, tmp_path):
    file, source = tmp_path / "tiers.yaml", key()
    Path(source["file"]).chmod(0o644)
    for encryption, tiers, status, words in (
        ({"key": {"command": ["sh", "-c", "exit 5"]}}, [], 1, ["'sh' failed with exit status 5"]),
        ({"key": source}, [disk | {"encrypt": False}], 0, ["default'; in clear: fs", "(mode 0644). Fix: chmod 600 it"]),
        (
            {"key": key(1), "tenants": {"blue": {"key": {"command": ["false"]}}, "red": {"key": key(1)}}},
            [],
            1,
            ["encryption.tenants.blue.key.command: 'false' failed", "tenant 'red' and requests without a tenant have"],
        ),
        (
            {"key": key(1), "tenants": {"*": {"key": {"file": str(tmp_path / "{tenant}.key")}}}},
            [],
            1,
            ["encryption.tenants.*.key.file: cannot read", "green.key"],
        ),
    ):
        named = {"named": {"green": {}}}
        file.write_text(json.dumps(config(secondary=tiers, encryption=encryption) | {"tenants": named}))
        checked = CliRunner().invoke(cli, ["check", str(file)])
        assert all(said in " ".join(checked.output.split()) for said in words), checked.output
        assert checked.exit_code == status, checked.output


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("{key: {env: KV_KEY}}", "env: KV_KEY"),
        ("{key: {command: [kms, --token, SECRET-1]}, previous: {env: KV_KEY}}", "- kms"),
        ("{key: SECRET-1}", "key: '***'"),
        ("{previous: {file: SECRET-2}}", "previous: '***'"),
        ("SECRET-2", "encryption: '***'"),
        ("{key: {env: X}, tenants: {blue: {key: {env: KV_KEY}, previous: {command: [kms, SECRET-1]}}}}", "env: KV_KEY"),
        ("{key: {env: X}, tenants: {blue: SECRET-1, SECRET-2: {key: {env: X}}}}", "blue: '***'"),
    ],
)
def test_a_report_shows_where_keys_are_from_and_no_key(tmp_path, monkeypatch, written, shown):
    from kvtiers.cli.redaction import Redaction

    monkeypatch.setenv("KV_KEY", FORMS[0])
    redaction = Redaction()
    original, written = written, written.replace("SECRET-1", "canary-5d0e7").replace("SECRET-2", FORMS[0])
    lines = "\n".join(redaction.config(f"version: 1\nencryption: {written}\n"))
    assert shown in lines
    assert "canary-5d0e7" not in lines
    assert FORMS[0] not in lines
    said = redaction.apply(f"it prints canary-5d0e7, {FORMS[0]} and {FORMS[3]}")
    assert ("canary-5d0e7" in said) == ("SECRET-1" not in original)
    assert (FORMS[0] in said) == ("SECRET-2" not in original and "KV_KEY" not in original)
