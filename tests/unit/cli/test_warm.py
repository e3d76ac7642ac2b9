"""``kvtiers warm``: where its keys come from, what it prints, how it ends; over the sockets of an engine that steps."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tests.unit.tiering.harness import ROW_BYTES, Bench, chain

from kvtiers import ModelIdentity, open_client
from kvtiers.api.keys import with_tenant
from kvtiers.cli.main import cli
from kvtiers.cli.progress import show_progress
from kvtiers.cli.warm import _batches, _listed, _of_fingerprint
from kvtiers.control import CommandRefused
from kvtiers.control_actions import EngineActions
from kvtiers.layout.storage_name import StorageNames
from kvtiers.status import Troubles, answer_status
from kvtiers_replay.trace import read_trace

KEYS = chain("a", 20)


def about(_, figures):
    return {"off": "", "shared": True, "tokens": 0}


@pytest.fixture
def engine():
    """An engine that steps, of 64 rows and a tier "a" without values, and answers on its sockets; its commands."""
    bench, over = Bench(rows=64), threading.Event()

    def steps():
        while not over.wait(0.0005):
            with bench.manager.lock:
                bench.step(0.0005)

    thread = threading.Thread(target=steps)
    thread.start()
    control = answer_status(
        "test", "m", Troubles([]), bench.manager.stats, about, actions=EngineActions(bench.manager, "m").actions()
    )

    def run(*arguments, engine=None):
        words = [*arguments, "--engine", engine or os.getpid()]
        return CliRunner().invoke(cli, ["warm", *map(str, words)])

    yield SimpleNamespace(bench=bench, run=run, control=control)
    control.close()
    over.set()
    thread.join(60)


def write(folder, *lines):
    path = folder / "keys.txt"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_a_file_of_keys_is_loaded_and_the_result_is_one_line(engine, tmp_path):
    engine.bench.tier["a"].put(KEYS)
    name = f"prod/some-model-0123456789abcdef01234567/{KEYS[2].hex()}"
    listed = f"4.1MiB  3h  {name}"  # as 'kvtiers store ls' prints it
    keys = write(
        tmp_path, "# the system prompt", KEYS[0].hex(), KEYS[1].hex().upper(), "", listed, chain("b", 1)[0].hex()
    )
    done = engine.run("--from", "a", "--keys", keys)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"3 of 4 chunks loaded, {3 * ROW_BYTES}B in ")
    assert done.stdout.endswith("; 0 were in memory, 1 are not in a, 0 failed; done\n")
    (again,) = json.loads(engine.run("--from", "a", "--keys", keys, "--json").stdout)
    assert {name: again[name] for name in ("pid", "loaded", "resident", "missing", "ended", "keys")} == {
        "pid": os.getpid(),
        "loaded": 0,
        "resident": 3,
        "missing": 1,
        "ended": "done",
        "keys": 4,
    }
    assert [note["command"].split()[0] for note in engine.control.latest] == ["warm", "warm-end"] * 2, (
        "the keys are none"
    )


def test_a_name_of_a_tenants_value_is_a_key_with_the_tenant_and_one_that_is_hidden_is_refused(engine, tmp_path):
    names = StorageNames("prod/some-model-0123456789abcdef01234567/", bytes(8))
    key = with_tenant(KEYS[0], "blue")
    engine.bench.tier["a"].put([key])
    done = engine.run("--from", "a", "--keys", write(tmp_path, names.name(key)))
    assert done.stdout.startswith("1 of 1 chunks loaded"), done.output
    hidden = f"{names.prefix}k{'0' * 88}"
    refused = engine.run("--from", "a", "--keys", write(tmp_path, hidden))
    assert refused.exit_code != 0
    assert "keys.txt:1: the names of encrypted values hide their keys" in refused.stderr
    refused = engine.run("--from", "a", "--keys", write(tmp_path, names.name(bytes(48))))
    assert refused.exit_code != 0
    assert "keys.txt:1: a name with 'h' has a hash of a long key; expected the key itself" in refused.stderr


def test_a_full_primary_ends_it_and_says_how_many_keys_were_left(engine, tmp_path):
    many = chain("m", 100)
    engine.bench.tier["a"].put(many)
    done = engine.run("--from", "a", "--keys", write(tmp_path, *(key.hex() for key in many)))
    assert done.exit_code == 0
    assert done.stdout.startswith("57 of 100 chunks loaded")
    assert done.stdout.endswith("the primary is full; 43 keys were left\n")


def test_an_engine_whose_ranks_have_not_joined_is_said_to_wait_for_them(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kvtiers.cli.warm.show_progress", partial(show_progress, line_seconds=0.0)
    )  # a line for each answer
    engine.bench.tier["a"].put(KEYS)
    engine.bench.engine.all_joined = False
    keys, prefetches = write(tmp_path, *(key.hex() for key in KEYS)), engine.bench.manager._prefetches.all

    def join():
        wait_until(lambda: prefetches and prefetches[0].given)
        heard_at = prefetches[0].heard_at
        wait_until(lambda: prefetches[0].heard_at > heard_at)  # so the first answer has been given
        engine.bench.engine.all_joined = True

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        done = engine.run("--from", "a", "--keys", keys)
        joining.result()
    assert done.stdout.startswith("20 of 20 chunks loaded"), done.output
    first, *_, last = [
        line for line in done.stderr.splitlines() if "no answer: " not in line
    ]  # of other tests' engines
    assert first.startswith("0 chunks, 0B loaded; it waits for the engine's ranks, which have not all joined")
    assert "waits" not in last


def test_most_and_rate_bound_it(engine, tmp_path):
    engine.bench.tier["a"].put(KEYS)
    keys = write(tmp_path, *(key.hex() for key in KEYS))
    done = engine.run("--from", "a", "--keys", keys, "--most", 5 * ROW_BYTES, "--rate", "1MiB/s")
    assert done.stdout.startswith("5 of 20 chunks loaded"), done.output
    assert "as much as was asked for is loaded; 15 keys were left" in done.stdout


def test_the_prefixes_of_a_trace_are_loaded_the_latest_request_first(engine, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 48, "hash_ids": [1, 2, 3], "tokens_per_block": 16},
        {"timestamp": 1, "input_length": 48, "hash_ids": [1, 2, 9], "tokens_per_block": 16},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    first, last = ([each + bytes(4) for each in one.block_hashes] for one in read_trace(trace).requests)
    engine.bench.tier["a"].put([*first, *last])
    (done,) = json.loads(engine.run("--from", "a", "--trace", trace, "--json").stdout)
    assert (done["keys"], done["loaded"]) == (4, 4)
    asked = [keys[0] for keys in engine.bench.tier["a"].asked]
    assert asked[:4] == [*last, first[2]]
    trace.write_text(json.dumps(lines[0] | {"tokens_per_block": 7, "hash_ids": [1, 2, 3, 4, 5, 6]}) + "\n", "utf-8")
    refused = engine.run("--from", "a", "--trace", trace)
    assert refused.exit_code == 1
    assert "its blocks have 7 tokens, the engine's chunks 16; expected a multiple" in refused.stdout


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["ab" * 20, "nonsense"], ":2: 'nonsense' is no key; expected 10 to 4096 hexadecimal digits"),
        (["abc" * 5], ":1: 'abcabcabcabcabc' is no key"),
        (["# nothing"], ": there is no key in it"),
    ],
)
def test_a_file_that_holds_something_else_is_one_clear_line(engine, tmp_path, lines, problem):
    done = engine.run("--from", "a", "--keys", write(tmp_path, *lines))
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path}/keys.txt{problem}")
    assert engine.run("--from", "a", "--keys", tmp_path / "none").stderr.endswith(
        "cannot be read: No such file or directory\n"
    )


def test_what_cannot_be_is_said_in_one_line(engine, tmp_path):
    keys = write(tmp_path, KEYS[0].hex())
    assert "there is no tier 'b'; this engine has a" in engine.run("--from", "b", "--keys", keys).stdout
    assert "give one of --keys, --trace and --config" in engine.run("--from", "a").stderr
    assert (
        "no engine with kvtiers runs here as process 1 " in engine.run("--from", "a", "--keys", keys, engine=1).stderr
    )
    assert "expected more than 0" in engine.run("--from", "a", "--keys", keys, "--rate", "0").stderr


def test_each_key_is_sent_once_in_lines_that_an_engine_takes_and_prefixes_stay_whole():
    prefixes = [chain("long", 3000), chain("short", 2), [b"k" * 2048] * 30]
    batches = list(_batches(prefixes))
    joined, goes_on = [], False
    for batch in batches:
        assert sum(map(len, batch.prefixes)) <= 1024
        assert len(json.dumps([[key.hex() for key in keys] for keys in batch.prefixes])) < 60_000
        first, *others = batch.prefixes
        if goes_on:
            joined[-1] += first
            joined += others
        else:
            joined += batch.prefixes
        goes_on = batch.continues
    assert joined == prefixes
    assert [batch.is_last for batch in batches] == [False] * (len(batches) - 1) + [True]


def test_ctrl_c_ends_it_with_what_was_loaded_so_far_and_a_kill_ends_it_too(engine, tmp_path):
    engine.bench.tier["a"].put(KEYS)
    keys = write(tmp_path, *(key.hex() for key in KEYS))
    words = ["warm", "--from", "a", "--keys", keys, "--rate", str(ROW_BYTES), "--engine", os.getpid()]
    prefetches = engine.bench.manager._prefetches.all
    for number in (signal.SIGINT, signal.SIGKILL):
        before = engine.bench.primary.chunks
        process = subprocess.Popen(
            [sys.executable, "-c", "from kvtiers.cli.main import main; main()", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda before=before: engine.bench.primary.chunks > before)
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
        if number == signal.SIGINT:
            assert process.returncode == 130, error
            assert "stopped; " in out
            assert " keys were left" in out
        else:
            with engine.bench.manager.lock:
                engine.bench.clock.now += 20.0  # in which nothing is heard
        wait_until(lambda: not prefetches)
    ctx = engine.bench.request()
    with engine.bench.manager.lock:
        assert engine.bench.lookup(KEYS[:1], ctx)[0] == 1, "what was loaded stays"


def wait_until(holds, seconds=60.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.005)


def test_what_a_store_lists_is_taken_by_the_engines_fingerprint_the_newest_first(tmp_path):
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "io": "thread", "capacity": "1GiB"}
    config = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": [tier]}
    (path := tmp_path / "tiers.yaml").write_text(json.dumps(config), "utf-8")
    for weights, letters in (("w1", b"ab"), ("w2", b"c")):
        identity = ModelIdentity(name="some-model", weights=weights, engine="test", kv_layout="pages")
        with open_client(config, identity, 1000) as client:
            for letter in letters:
                assert client.put([bytes([letter]) * 8], [bytes(1000)]).stored == [True]
    for number, name in enumerate([b"b" * 8, b"a" * 8]):  # files of one second would have no order
        (file,) = (each for each in (tmp_path / "fs").rglob("*") if f"{name.hex()}{'0' * 8}" in each.name)
        os.utime(file, (10**9 - number, 10**9 - number))
    listed = _listed(str(path), "fs", 1 << 20)
    assert sorted(map(len, listed.values())) == [1, 2]
    (two,) = (fingerprint for fingerprint, keys in listed.items() if len(keys) == 2)
    assert _of_fingerprint(listed, "fs", two) == [[b"b" * 8 + bytes(4), b"a" * 8 + bytes(4)]]
    with pytest.raises(CommandRefused, match="fs has no values of this engine's fingerprint, 0123; it has "):
        _of_fingerprint(listed, "fs", "0123")
