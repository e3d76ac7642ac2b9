"""Trouble: damage, tiers that are gone or hang, a close in the middle, many at once: results always come."""

import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtiers.api import ConfigError
from kvtiers.testing.ports import free_port

from .conftest import config_of, redis_server
from .parts import Layout, content, keys_of

SLOW_TO_BREAK = {"delay": "20ms", "max_delay": "50ms"}


def values(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size == 36_864)


def flip(path: Path, _: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[1234] ^= 1
    path.write_bytes(damaged)


def cut(path: Path, _: Path) -> None:
    os.truncate(path, 20_000)


def swap(path: Path, other: Path) -> None:
    """Another key's sound value under this name."""
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip, cut, swap], ids=["a bit", "the end", "another value"])
def test_a_damaged_value_is_a_miss_and_is_stored_again(serve, tmp_path, damage):
    server = serve()
    keys = keys_of(4)
    stored = server.store(keys)
    files = values(tmp_path)
    assert len(files) == 4
    damage(*files[:2])
    assert server.lookup(keys) == [True] * 4
    objects = server.memory.filled(4, server.layout, 9)
    before = content(objects)
    loaded = server.load(keys, objects)
    server.adapter.submit_unlock(keys)
    assert sorted(loaded) == [False, True, True, True]
    for is_loaded, now, old, right in zip(loaded, content(objects), before, stored, strict=True):
        assert now == (right if is_loaded else old)
    assert server.store(keys) == stored
    assert server.fetch(keys) == stored


def test_a_server_that_is_killed_and_comes_back_is_used_again(serve, tmp_path):
    port = free_port()
    tier = {"type": "redis", "url": f"redis://127.0.0.1:{port}/0", "breaker": SLOW_TO_BREAK, "exists_ttl": "1ms"}
    server = serve(config=config_of(tier))
    keys, objects = keys_of(4), server.memory.filled(4, server.layout, 1)
    with redis_server(port, tmp_path) as process:
        assert server.put(keys, objects).is_successful()
        process.send_signal(signal.SIGKILL)
        process.wait()
        for _ in range(6):
            assert server.fetch(keys) == [None] * 4
            assert not server.put(keys_of(4, first=10), objects).is_successful()
    assert server.adapter.get_usage().total_bytes_used > 0, "what is not reachable is not gone"
    with redis_server(port, tmp_path):
        until = time.monotonic() + 60
        while not server.put(keys, objects).is_successful():
            assert time.monotonic() < until, server.adapter.report_status()
        assert server.fetch(keys) == content(objects)
    assert server.adapter.report_status()["is_healthy"]


def test_a_tier_that_hangs_uses_up_a_tasks_deadline_and_no_more(serve, unanswered):
    tier = {"type": "redis", "url": f"redis://127.0.0.1:{unanswered}/0"}
    times = {"lookup_deadline": "200ms", "deadline": "300ms", "store_deadline": "400ms"}
    server = serve(config={**config_of(tier), "start_wait": "0s"}, **times)
    objects = server.memory.filled(2, server.layout, 1)
    begin = time.monotonic()
    tasks = [server.adapter.submit_store_task(keys_of(2), objects) for _ in range(6)]
    assert server.fetch(keys_of(2)) == [None, None]
    assert server.load(keys_of(2), objects) == [False, False]
    assert [server.stored(task).is_successful() for task in tasks[-1:]] == [False]
    assert time.monotonic() - begin < 60


def test_a_folder_that_is_not_there_yet_is_a_miss_until_it_is(serve, tmp_path):
    (tmp_path / "fs").write_text("in the way")
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0, "breaker": SLOW_TO_BREAK}
    server = serve(config={**config_of(tier), "start_wait": "0s"})
    objects = server.memory.filled(2, server.layout, 1)
    assert not server.put(keys_of(2), objects).is_successful()
    assert server.fetch(keys_of(2)) == [None, None]
    (tmp_path / "fs").unlink()
    until = time.monotonic() + 60
    while not server.put(keys_of(2), objects).is_successful():
        assert time.monotonic() < until
    assert server.fetch(keys_of(2)) == content(objects)


def test_no_mistake_of_a_caller_raises_or_loses_a_result(serve):
    server = serve()
    objects = server.memory.filled(2, server.layout, 0)
    assert not server.put(keys_of(3), objects).is_successful()
    assert server.load(keys_of(3), objects) == [False] * 3
    assert server.found(server.adapter.submit_lookup_and_lock_task(keys_of(2), None), 2) == [False] * 2
    assert server.put([], []).is_successful()
    assert server.lookup([]) == []
    assert server.adapter.query_load_result(12_345) is None
    assert server.adapter.query_lookup_and_lock_result(12_345) is None
    server.adapter.delete(["no key"])
    assert server.adapter.report_status()["failed_tasks"] == {"store": 1, "lookup": 1, "load": 1}
    assert server.adapter.report_status()["locked_keys"] == 0


def test_a_listener_that_raises_loses_no_result(serve):
    server = serve()

    def fail(*_):
        raise RuntimeError("a bug of LMCache's")

    server.events.on_l2_keys_stored = server.events.on_l2_keys_accessed = server.events.on_l2_keys_deleted = fail
    stored = server.store(keys_of(2))
    assert server.fetch(keys_of(2)) == stored
    server.adapter.delete(keys_of(2))
    assert server.fetch(keys_of(2)) == [None, None]


@pytest.mark.parametrize("answers", [True, False], ids=["a folder", "a tier that hangs"])
def test_every_queued_task_has_its_result_after_a_close(serve, config, unanswered, answers):
    if not answers:
        config = {**config_of({"type": "redis", "url": f"redis://127.0.0.1:{unanswered}/0"}), "start_wait": "0s"}
    server = serve(config=config)
    adapter = server.adapter
    objects = server.memory.filled(2, server.layout, 3)
    fds = [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]
    ours = [os.dup(fd) for fd in fds]
    try:
        stores = [adapter.submit_store_task(keys_of(2, first=2 * n), objects) for n in range(40)]
        lookups = [adapter.submit_lookup_and_lock_task(keys_of(2), {0: server.layout.desc}) for _ in range(40)]
        loads = [adapter.submit_load_task(keys_of(2), objects) for _ in range(40)]
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 40
        assert len(select.select(ours, [], [], 0)[0]) == 3
    finally:
        for fd in ours:
            os.close(fd)
    assert sorted(adapter.pop_completed_store_tasks()) == stores
    assert all(adapter.query_lookup_and_lock_result(task) is not None for task in lookups)
    assert all(adapter.query_load_result(task) is not None for task in loads)
    late = adapter.submit_store_task(keys_of(1), objects[:1])
    assert not adapter.pop_completed_store_tasks()[late].is_successful()
    assert adapter.query_load_result(adapter.submit_load_task(keys_of(1), objects[:1])).popcount() == 0
    task = adapter.submit_lookup_and_lock_task(keys_of(1), {0: server.layout.desc})
    assert adapter.query_lookup_and_lock_result(task).popcount() == 0
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_many_threads_store_look_up_load_and_delete_the_same_keys(serve, tier):
    """Whichever thread is first, what is loaded is what belongs to its key."""
    server = serve(Layout((1, 2, 16, 32)), config=config_of(tier))
    keys = keys_of(12)
    right = {}
    for place, key in enumerate(keys):
        objects = server.memory.filled(1, server.layout, place)
        right[key] = objects[0], content(objects)[0]
    into = [server.memory.take(12, server.layout) for _ in range(3)]
    lane, errors = threading.Lock(), []

    def run(worker: int) -> None:
        rng = np.random.default_rng(worker)
        try:
            for _ in range(12):
                some = [keys[place] for place in rng.permutation(12)[:6]]
                task = server.adapter.submit_store_task(some, [right[key][0] for key in some])
                with lane:
                    server.stored_tasks.add(task)
                task = server.adapter.submit_lookup_and_lock_task(some, {0: server.layout.desc})
                while (found := server.adapter.query_lookup_and_lock_result(task)) is None:
                    time.sleep(0.001)
                there = [key for place, key in enumerate(some) if found.test(place)]
                task = server.adapter.submit_load_task(there, into[worker][: len(there)])
                while (loaded := server.adapter.query_load_result(task)) is None:
                    time.sleep(0.001)
                for place, key in enumerate(there):
                    if loaded.test(place):
                        assert bytes(into[worker][place].byte_array) == right[key][1]
                server.adapter.submit_unlock(there)
                server.adapter.delete(some[:2])
        except BaseException as error:
            errors.append(error)
            raise

    server.stored_tasks = set()
    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors
    ended: set[int] = set()
    until = time.monotonic() + 60
    while ended != server.stored_tasks:
        ended |= set(server.adapter.pop_completed_store_tasks())
        assert time.monotonic() < until
    assert server.adapter.report_status()["locked_keys"] == 0
    usage = server.adapter.get_usage()
    assert usage.total_bytes_used == len(server.adapter.list_l2_keys().entries) * 2048


def test_more_kinds_than_there_can_be_are_refused(serve, said):
    server = serve()
    stored = server.store(keys_of(1))
    for number in range(1, 16):
        server.layout = Layout((1, 2, 16, 32 * number))
        assert server.put(keys_of(1), server.memory.filled(1, server.layout, 0)).is_successful()
    server.layout = Layout((1, 2, 16, 32 * 16))
    assert not server.put(keys_of(1), server.memory.filled(1, server.layout, 0)).is_successful()
    assert server.lookup(keys_of(1)) == [False]
    server.layout = Layout()
    assert server.fetch(keys_of(1)) == stored
    assert len(said()) == 1
    assert "the most there can be" in said()[0]


def test_the_ledger_forgets_the_oldest_keys_when_it_is_full(serve):
    from kvtiers_lmcache.ledger import Ledger

    server = serve()
    server.adapter._ledger = Ledger(most=3)
    stored = server.store(keys_of(5))
    assert [it.key.to_object_key() for it in server.adapter.list_l2_keys().entries] == keys_of(3, first=2)
    assert server.events.deleted == keys_of(2)
    assert server.adapter.get_usage().total_bytes_used == 3 * 32_768
    assert server.fetch(keys_of(5)) == stored, "it is only counted no more"


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({}, "'config': Field required"),
        ({"config": "/no/such/file.yaml"}, "/no/such/file.yaml"),
        ({"config": {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [{"type": "no-such"}]}}, "no-such"),
        ({"config": {}, "deadlines": "1s"}, "'deadlines': Extra inputs are not permitted"),
        ({"config": {}, "weights": 3}, "'weights'"),
        ({"config": {}, "deadline": "0s"}, "'deadline'"),
    ],
)
def test_wrong_options_stop_the_start_with_their_line(memory, params, line):
    from .parts import Server

    with pytest.raises(ConfigError, match=line):
        Server(params, memory)


KILLED = """
import json, sys
from tests.conftest import params_of
from tests.parts import Memory, Server, keys_of
server = Server(params_of(json.loads(sys.argv[1])), Memory())
server.store(keys_of(3), seed=5)
print("stored", flush=True)
objects = server.memory.filled(3, server.layout, 1)
while True:
    server.put(keys_of(3, first=10), objects)
    server.adapter.delete(keys_of(3, first=10))
"""


@pytest.mark.parametrize("tier", ["fs"], indirect=True)
def test_after_a_kill_nothing_is_left_behind_and_the_values_are_there(serve, tier):
    import json

    folder = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, json.dumps(config_of(tier))]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.PIPE
    ) as process:
        assert any(line == b"stored\n" for line in process.stdout)
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        hosts = [int(pid) for path in children for pid in path.read_text().split()]
        assert hosts
        mapped = {line.split()[-1] for pid in (process.pid, *hosts) for line in maps(pid) if "/dev/shm/" in line}
        assert any("memfd:kvtiers-client" in line for line in maps(hosts[0])), "it has no name"
        process.kill()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in hosts):
        assert time.monotonic() < until, "a tier host has outlived its server"
    assert not [name for name in mapped if Path(name).exists()]
    assert None not in serve(config=config_of(tier)).fetch(keys_of(3))


def maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True


ELSEWHERE = """
import hashlib, json, sys
from tests.conftest import params_of
from tests.parts import Memory, Server, keys_of
for config, options in json.loads(sys.stdin.read()):
    server = Server(params_of(config, **options), Memory())
    found = server.fetch(keys_of(3))
    server.close()
    print("found", json.dumps([it and hashlib.sha256(it).hexdigest() for it in found]))
"""


def elsewhere(*servers):
    """Run servers, one after the other, in another process; return digests of what each has found."""
    import json

    folder = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE],
        input=json.dumps(servers).encode(),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    lines = [line.partition(b" ")[2] for line in done.stdout.splitlines() if line.startswith(b"found ")]
    return [json.loads(line) for line in lines]


def test_processes_share_a_folder_and_redis_and_other_weights_do_not(serve, config, redis_url):
    configs = [config, config_of({"type": "redis", "url": redis_url})]
    stored = [[hashlib.sha256(it).hexdigest() for it in serve(config=one).store(keys_of(3), 5)] for one in configs]
    loaded = elsewhere(*[(one, options) for one in configs for options in ({}, {"weights": "other"})])
    assert loaded[::2] == stored
    assert loaded[1::2] == [[None] * 3] * 2
