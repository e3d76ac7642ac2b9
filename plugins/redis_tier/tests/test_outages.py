"""Servers that end, come back, hang or lie: calls fail in time, or say so, and the next ones are right."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from redis_scripted import Scripted
from redis_servers import PATIENCE, Server, wait_until
from redis_traffic import Cuts

from kvtiers.api import TierUnavailable
from kvtiers_redis.store import RedisStore

TRANSIENT = RedisStore.transient_errors
LONG = {"timeout": "1h", "connect_timeout": "1h", "deadline": "1h"}  # a call that waited that long would never end here
PAGES = 4
BYTES = PAGES * 4096


@pytest.fixture
def scripted():
    servers = []

    def start(*scripts, **options):
        servers.append(Scripted(*scripts, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_server_that_restarts_empty_costs_its_values_and_nothing_else(tier, start, names, value, read):
    server = start()
    store = tier.open(server.url)
    [name] = names(1)
    store.write(name, value(1))
    server.stop()
    server.start()
    assert read(store, name) is None, "the idle connection is dead, and the call is not to notice"
    store.write(name, value(2))
    assert read(store, name) == bytes(value(2))


def test_a_server_that_was_demoted_behind_its_name_is_left(tier, start, names, value, tmp_path):
    """As managed services fail over: the name leads to the new master, and the old one lives on as its replica."""
    old, new = (start(Server, "--unixsocket", str(tmp_path / name)) for name in ("old", "new"))
    name = tmp_path / "name"
    name.symlink_to(tmp_path / "old")
    store = tier.open(f"unix://{name}")
    store.write(names(1)[0], value(1))
    old.call("REPLICAOF", "127.0.0.1", new.port)
    name.unlink()
    name.symlink_to(tmp_path / "new")
    with pytest.raises(TierUnavailable, match="READONLY"):
        store.write(names(2)[1], value(2))
    store.write(names(2)[1], value(2))
    assert new.call("DBSIZE") == 1


def test_while_a_server_is_gone_calls_fail_at_once_and_then_work_again(tier, start, names, value, read):
    server = start()
    store = tier.open(server.url, **LONG)
    [name] = names(1)
    store.write(name, value(1))
    server.kill()
    for call in (lambda: read(store, name), lambda: store.write(name, value(1)), lambda: store.exists([name])):
        with pytest.raises(TRANSIENT, match=str(server.port)):
            call()
    server.start()
    store.write(name, value(3))
    assert read(store, name) == bytes(value(3))


def test_a_server_that_hangs_fails_a_call_within_the_timeout(tier, start, names, value, read):
    server = start()
    store = tier.open(server.url, timeout="2s", connect_timeout="2s")
    [name] = names(1)
    store.write(name, value(1))
    server.pause()
    with pytest.raises(TRANSIENT):
        read(store, name)
    with pytest.raises(TRANSIENT):
        read(store, name)
    server.resume()
    assert read(store, name) == bytes(value(1))


def gives_up_connecting(tier, url) -> bool:
    begin = time.monotonic()
    with pytest.raises(TRANSIENT):
        tier.open(url, **{**LONG, "connect_timeout": "1s"})
    return 0.9 < time.monotonic() - begin < PATIENCE


def test_a_server_that_accepts_no_client_is_given_up_within_the_connect_timeout(tier, start):
    server = start()
    server.pause()
    assert gives_up_connecting(tier, server.url)


def test_a_server_that_takes_no_connection_is_given_up_within_the_connect_timeout(tier):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # more than may wait; who comes then hears nothing
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        assert gives_up_connecting(tier, f"redis://127.0.0.1:{listener.getsockname()[1]}")


def test_a_late_reply_is_never_taken_for_another_calls(tier, start, names, value, read):
    """What a paused server answers when it goes on belongs to a connection that is not read any more."""
    server = start()
    store = tier.open(server.url, timeout="2s")
    one, other = names(2)
    store.write(one, value(1))
    store.write(other, value(2))
    for _ in range(5):
        server.pause()
        with pytest.raises(TRANSIENT):
            read(store, one)
        server.resume()
        assert read(store, other) == bytes(value(2))


def test_the_deadline_of_the_tier_bounds_the_timeout(tier, start, names, value, read):
    server = start()
    store = tier.open(server.url, timeout="1h", connect_timeout="1h", deadline="2s")
    server.pause()
    for _ in range(2):  # on an idle connection, then while a new one logs in
        with pytest.raises(TRANSIENT):
            read(store, names(1)[0])
    server.resume()


def test_a_connection_that_is_reset_in_the_middle_of_a_window_fails_the_whole_batch(tier, scripted, names):
    whole = b"$%d\r\n" % BYTES + bytes(BYTES) + b"\r\n"
    server = scripted([whole, whole[:5000]])
    store = tier.open(server.url)
    with pytest.raises(TRANSIENT):
        store.read_many_into(names(3), [[memoryview(bytearray(BYTES))] for _ in range(3)])


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02", b"*3\r\n", b"\n" * 9999]
)
def test_what_is_no_redis_is_a_failure_and_the_connection_is_not_used_again(tier, scripted, names, garbage):
    whole = b"$%d\r\n" % BYTES + b"a" * BYTES + b"\r\n"
    server = scripted([garbage], [whole], close=False)
    store = tier.open(server.url, timeout="2s")
    row = bytearray(BYTES)
    with pytest.raises(TRANSIENT):
        store.read_many_into(names(1), [[memoryview(row)]])
    assert store.read_many_into(names(1), [[memoryview(row)]]) == [BYTES]
    assert row == b"a" * BYTES
    assert server.connections == 2


def test_after_a_failure_the_next_call_has_a_new_connection(tier, start, names, value, read):
    server = start()
    store = tier.open(server.url)
    [name] = names(1)
    store.write(name, value(1))
    server.call("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
    assert read(store, name) == bytes(value(1))
    assert store.stats()["connects"] == 2


def test_after_a_failure_no_idle_connection_is_trusted(tier, start):
    """Others to the same server are as dead, most likely, and would each cost a caller its time-out."""
    server = start()
    store = tier.open(server.url)
    (master,) = store._topology.masters()
    with master.link(), master.link(), master.link():
        pass
    with server.client() as client:
        assert len(client.client_list()) == 4
        with pytest.raises(TimeoutError), master.link():
            raise TimeoutError
        wait_until(lambda: len(client.client_list()) == 1, "all of them are closed")


_WRITE_A_LARGE_VALUE = """
import sys
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.store import RedisStore
store = RedisStore(RedisConfig(type="redis", url=sys.argv[1], timeout="1h", deadline="1h"))
print("open", flush=True)
sys.stdin.readline()
store.write(sys.argv[2], memoryview(bytes(64 << 20)))
"""


def unsent_bytes(port: int) -> int:
    """Return how many bytes wait in this machine's connections to the port for a server that does not take them."""
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(queues.partition(":")[0], 16) for _, _, far, _, queues, *_ in fields if far.endswith(f":{port:04X}"))


def test_a_process_that_is_killed_in_the_middle_of_a_write_leaves_no_half_value(tier, start, names, value, read):
    server = start()
    [name] = names(1)
    command = [sys.executable, "-c", _WRITE_A_LARGE_VALUE, server.url, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout.readline() == "open\n"
            server.pause()
            writer.stdin.write("go on\n")
            writer.stdin.flush()
            wait_until(lambda: unsent_bytes(server.port), "a part of the value is in flight")
        finally:
            writer.kill()
    server.resume()
    wait_until(lambda: server.info("clients")["connected_clients"] == 1, "the server has seen the connection end")
    store = tier.open(server.url)
    assert list(store.exists([name])) == [False]
    store.write(name, value(1))
    assert read(store, name) == bytes(value(1))


def test_loading_is_a_state_that_passes(tier, scripted, names):
    server = scripted([b"-LOADING Redis is loading the dataset in memory\r\n"])
    store = tier.open(server.url)
    with pytest.raises(TierUnavailable, match="LOADING"):
        store.read_many_into(names(1), [[memoryview(bytearray(BYTES))]])


def test_clients_killed_under_load_never_yield_wrong_bytes(tier, start, names):
    """Connections die at any moment of a window; what is read is right or is not read."""
    server = start()
    store = tier.open(server.url, window="64KiB")
    many = names(64)
    content = [bytes([i]) * BYTES for i in range(64)]
    wrong, right, failed = [], [0], [0]
    stop = threading.Event()

    def work(turn: int) -> None:
        backs = [bytearray(BYTES) for _ in many]
        while not stop.is_set():
            try:
                store.write_many(many, [[memoryview(c)] for c in content])
                found = store.read_many_into(many, [[memoryview(back)] for back in backs])
            except TRANSIENT:
                failed[0] += 1
                continue
            for back, expected, there in zip(backs, content, found, strict=True):
                right[0] += there > 0
                if there and back != expected:
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    cuts = Cuts(server, 300)
    wait_until(lambda: cuts.make() >= 100 and failed[0] and right[0], "cuts, failures and values", 4 * PATIENCE)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
