"""``kvtiers store bump``: the record is written first, what it retires is deleted, in a pool, too; nothing else is."""

import json
import os
import socket

import pytest
from tests.pool_rig import KeeperThread, PoolEngine, chain, wait_until

from kvtiers.layout.namespace_epoch import read_epoch
from kvtiers_fs.config import FsConfig
from kvtiers_fs.slab.store import SlabStore
from kvtiers_fs.store import FsStore

MODEL = "llama-" + "5f" * 12


@pytest.fixture(params=["files", "slab"])
def layout(request):
    return request.param


@pytest.fixture
def store(tmp_path, layout):
    config = FsConfig(type="fs", path=tmp_path / "values", capacity="1GiB", min_free=0, layout=layout)
    store = FsStore(config) if layout == "files" else SlabStore(config)
    yield store
    store.close()


@pytest.fixture
def fs(tmp_path, layout):
    return f"{{type: fs, name: disk, path: {tmp_path}/values, capacity: 1GiB, min_free: 0, layout: {layout}}}"


@pytest.fixture
def pool(tmp_path):
    """A keeper's socket, where the config of these tests looks for a pool."""
    return KeeperThread(tmp_path / "pool.sock", 1 << 20).path


@pytest.fixture
def pooled(config, fs, tmp_path):
    return config(fs, capacity=f"1MiB, pool: {tmp_path}/pool.sock")


def fill(store):
    for namespace, count in (("default", 300), ("default2", 2)):
        for number in range(count):
            store.write(f"{namespace}/{MODEL}/{number:08x}", memoryview(bytes(4096)))
    store.write("default/something else", memoryview(bytes(4096)))


def names(store):
    return sorted(entry.name for entry in store.list(""))


def test_a_bump_deletes_what_is_in_the_namespace_and_each_one_has_an_epoch_of_its_own(run, config, fs, store):
    fill(store)
    file = config(fs)
    result = run("store", "bump", "--config", file)
    assert (result.exit_code, result.stdout) == (0, "disk: namespace 'default' bumped; deleted: 301 values, 1.2MiB\n")
    first = read_epoch(store, "default")
    assert names(store) == ["default/_epoch", *(f"default2/{MODEL}/{number:08x}" for number in range(2))]
    report = json.loads(run("store", "bump", "--config", file, "--json").stdout)
    assert report == {"namespace": "default", "tiers": {"disk": {"values": 0, "bytes": 0}}}
    assert first != read_epoch(store, "default") != ""
    assert run("store", "bump", "--config", file, "--namespace", "default2").exit_code == 0
    assert names(store) == ["default/_epoch", "default2/_epoch"]


def test_no_other_command_counts_or_deletes_the_record(run, config, fs, store):
    file = config(fs)
    run("store", "bump", "--config", file)
    for line in ("du disk", "verify disk --delete-damaged", "prune disk --other-formats", "prune disk --to-size 1B"):
        result = run("store", *line.split(), "--config", file)
        assert result.exit_code == 0, result.output
    assert names(store) == ["default/_epoch"]


def test_a_read_only_tier_is_refused_before_anything_is_retired(run, config, fs, store, tmp_path):
    fill(store)
    before = names(store)
    (tmp_path / "archive").mkdir(mode=0o700)
    archive = f"{{type: fs, name: archive, path: {tmp_path}/archive, capacity: 1GiB, min_free: 0, read_only: true}}"
    result = run("store", "bump", "--config", config(fs, archive))
    assert result.exit_code == 2
    assert "read-only, so nothing can be retired in it: archive" in result.stderr
    assert names(store) == before


def test_a_tier_that_cannot_be_bumped_is_named_and_the_others_are(run, config, fs, store):
    result = run("store", "bump", "--config", config("{type: memory-async, name: peers, max_blocks: 4}", fs))
    assert result.exit_code == 1
    assert "tier 'peers' is a tier manager" in result.stderr
    assert read_epoch(store, "default")


def test_a_namespace_that_cannot_be_one_is_one_line(run, config, fs):
    result = run("store", "bump", "--config", config(fs), "--namespace", "../prod")
    assert result.exit_code == 2
    assert "namespace '../prod' cannot be used" in result.stderr


def test_after_a_bump_the_next_engine_finds_nothing_in_the_pool_either(run, pooled, fs, store, pool):
    engine = PoolEngine(pool)
    engine.store(chain(1, 3))
    wait_until(engine.is_published, "it is not published")
    engine.close()
    wait_until(lambda: "no engine has it" in run("pool", "status", "--socket", str(pool)).stdout, "it is not back")
    result = run("store", "bump", "--config", pooled)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "pool: 3 chunks forgotten; each other pool needs its own 'kvtiers pool clear'\n" in result.stdout
    engine = PoolEngine(pool)
    assert engine.tier.chunks == 0


def test_a_pool_that_an_engine_has_is_not_cleared_which_is_an_error_behind_the_bump(run, pooled, fs, store, pool):
    fill(store)
    engine = PoolEngine(pool)
    engine.store(chain(1, 3))
    result = run("store", "bump", "--config", pooled)
    assert result.exit_code == 1
    assert f"error: pool: an engine has its memory (process {os.getpid()})" in result.stderr
    assert f"end the engines, then run 'kvtiers pool clear --socket {pool}'" in result.stderr
    assert "disk: namespace 'default' bumped; deleted: 301 values" in result.stdout
    result = run("store", "bump", "--config", pooled, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["tiers"]) == (1, {"disk": {"values": 0, "bytes": 0}})
    assert "an engine has its memory" in report["pool"]["error"]
    assert engine.check() == 3


def test_on_a_machine_without_the_pool_a_bump_says_so_and_is_done(run, pooled, fs, store, tmp_path):
    result = run("store", "bump", "--config", pooled, "--json")
    assert result.exit_code == 0
    path = tmp_path / "pool.sock"
    assert result.stderr.startswith(f"warning: pool: no keeper at {path} here;")
    assert json.loads(result.stdout)["pool"] == {"chunks": None}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:  # a keeper's: the next one may have its chunks
        dead.bind(str(path))
    result = run("store", "bump", "--config", pooled)
    assert result.exit_code == 1
    assert f"error: pool: no keeper serves at {path}: Connection refused" in result.stderr
