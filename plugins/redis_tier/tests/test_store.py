"""What the tier asks of a server, seen from the server."""

import contextlib
import mmap
import os
import socket
import threading
import time
import tracemalloc
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.api import NotKept, make_offload_key
from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.value_run import ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers_redis.plugin import FIGURES
from kvtiers_redis.store import RedisStore

MIB = 1 << 20


@pytest.fixture
def redis(single):
    """Return a client that looks into the shared server beside the tier."""
    with single.client() as client:
        yield client


def test_a_key_a_chunk_under_its_name_behind_the_prefix(tier, single, redis, names, value):
    [name] = names(1)
    tier.open(single.url, prefix="app:").write(name, value(7))
    assert redis.get(f"app:{name}") == bytes([7]) * 4096
    assert redis.ttl(f"app:{name}") == -1


def test_stores_with_different_prefixes_or_databases_do_not_collide(tier, single, names, value, read):
    [name] = names(1)
    tier.open(single.url, prefix="a:").write(name, value(1))
    for other in (tier.open(single.url, prefix="b:"), tier.open(f"{single.url}/5", prefix="a:")):
        assert list(other.exists([name])) == [False]
        assert read(other, name) is None
    assert read(tier.open(single.url, prefix="a:", database=0), name) is not None


def test_the_database_of_the_url_or_of_the_option_is_used(tier, single, names, value):
    one, other = names(2)
    tier.open(f"{single.url}/4").write(one, value(1))
    tier.open(single.url, database=4).write(other, value(1))
    with single.client(db=4) as client:
        assert client.exists(one, other) == 2
        client.flushdb()


def test_a_value_lives_for_its_ttl(tier, single, redis, names, value):
    [name] = names(1)
    tier.open(single.url, ttl="1h").write(name, value(1))
    assert 3_590_000 < redis.pttl(name) <= 3_600_000


def test_a_value_is_gone_after_its_ttl(tier, single, redis, names, value, read):
    [name] = names(1)
    store = tier.open(single.url, ttl="1h")
    store.write(name, value(1))
    redis.pexpire(name, 1)
    while redis.exists(name):
        pass
    assert read(store, name) is None
    assert list(store.exists([name])) == [False]


@pytest.mark.parametrize(("options", "renewed"), [({"refresh_ttl": True}, True), ({}, False)])
def test_reading_renews_the_ttl_if_it_is_to(tier, single, redis, names, value, read, options, renewed):
    [name] = names(1)
    store = tier.open(single.url, ttl="1h", **options)
    store.write(name, value(1))
    redis.pexpire(name, 60_000)
    assert read(store, name) is not None
    assert (redis.pttl(name) > 3_000_000) == renewed


def test_a_read_only_tier_renews_nothing(tier, single, redis, names, value, read):
    [name] = names(1)
    redis.set(name, bytes(value(1)), px=60_000)
    assert read(tier.open(single.url, ttl="1h", refresh_ttl=True, read_only=True), name) is not None
    assert redis.pttl(name) <= 60_000


def test_a_write_renews_the_ttl(tier, single, redis, names, value):
    [name] = names(1)
    store = tier.open(single.url, ttl="1h")
    store.write(name, value(1))
    redis.pexpire(name, 60_000)
    store.write(name, value(1))
    assert redis.pttl(name) > 3_000_000


def test_with_nx_a_value_of_the_same_length_is_left_as_it_is(tier, single, redis, names, value):
    same, longer, absent = names(3)
    redis.set(same, bytes(value(1)))
    redis.set(longer, bytes(value(1, 2)))
    store = tier.open(single.url, set_nx=True, ttl="1h")
    assert list(store.write_many([same, longer, absent], [[value(2)], [value(2)], [value(2)]])) == [None, None, None]
    assert [redis.get(name) == bytes(value(2)) for name in (same, longer, absent)] == [False, True, True]
    assert redis.ttl(longer) > 3000


@pytest.mark.parametrize("set_nx", [True, False])
def test_a_value_of_the_right_length_that_is_not_ours_is_replaced_by_the_next_store(tier, single, redis, set_nx):
    key, rows = make_offload_key(os.urandom(32), 0), memoryview(mmap.mmap(-1, 4096))
    rows[:4000] = b"k" * 4000
    names = StorageNames("ns/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
    store = tier.open(single.url, set_nx=set_nx)
    mover = ValueMover(store, ValueViews(rows, 4096), MoverOptions([(4000, 4096)]), threading.Event())
    run = ValueRun(names, [key], [0], time.monotonic() + 60)
    assert list(mover.store(run).statuses) == [Status.DONE]
    foreign = bytearray(redis.get(names.name(key)))
    foreign[4096 - 64 + 32] ^= 1  # of another layout
    redis.set(names.name(key), bytes(foreign))
    assert list(mover.load(run).statuses) == [Status.MISSING]
    rows[:4000] = b"k" * 4000
    assert list(mover.store(replace(run, overwrites=b"\1")).statuses) == [Status.DONE]
    assert list(mover.load(run).statuses) == [Status.DONE]


def test_a_key_of_another_type_is_no_value(tier, single, redis, names, value, read):
    [name] = names(1)
    redis.rpush(name, "a")
    store = tier.open(single.url)
    assert read(store, name) is None
    store.write(name, value(3))
    assert read(store, name) == bytes(value(3))


def test_deleting_is_left_to_the_servers_own_thread(tier, single, redis, names, value):
    [name] = names(1)
    store = tier.open(single.url)
    store.write(name, value(1))
    before = redis.info("commandstats").get("cmdstat_unlink", {}).get("calls", 0)
    store.delete([name])
    after = redis.info("commandstats")
    assert after["cmdstat_unlink"]["calls"] == before + 1
    assert "cmdstat_del" not in after


def test_questions_go_out_together(tier, single, redis, names):
    """256 names cost one turn of the server's event loop or a few, not 256."""
    store = tier.open(single.url)
    store.exists(names(1))
    asked = names(256)
    before = redis.info("stats")
    store.exists(asked)
    after = redis.info("stats")
    assert after["total_commands_processed"] - before["total_commands_processed"] >= 256
    assert after["total_reads_processed"] - before["total_reads_processed"] < 16


def test_connections_are_named_and_few(tier, single, redis, names, value):
    store = tier.open(single.url, client_name="my-tier")
    for name in names(20):
        store.write(name, value(1))
        store.exists([name])
    assert [client["name"] for client in redis.client_list()].count("my-tier") == 1
    assert store.stats()["connects"] == 1
    assert set(store.stats()) == set(FIGURES)


def test_connections_are_kept_for_as_many_threads_as_there_are(tier, single):
    store = tier.open(single.url, threads=24)
    [server] = store._topology.masters()
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            for _ in range(25):
                stack.enter_context(server.link())
    assert store.stats()["connects"] == 25


def test_an_idle_connection_is_probed_after_so_long(tier, single):
    store = tier.open(single.url, keepalive="45s")
    (master,) = store._topology.masters()
    connected = master._idle[0].connection._sock
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 45
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 15


def test_only_what_leaves_this_machine_is_paced_as_the_system_says(tier, single, monkeypatch):
    def of_a_connection() -> str:
        (master,) = tier.open(single.url)._topology.masters()
        connected = master._idle[0].connection._sock
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    assert of_a_connection() == "reno"
    monkeypatch.setattr("kvtiers_redis.servers.is_loopback", lambda _: False)
    assert of_a_connection() == Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def test_a_batch_larger_than_all_windows_comes_back(tier, single, names, value):
    store = tier.open(single.url, window="64KiB")
    many = names(700)
    assert store.write_many(many, [[value(i % 250)] for i in range(700)]) == [None] * 700
    backs = [memoryview(bytearray(4096)) for _ in many]
    assert store.read_many_into(many, [[back] for back in backs]) == [4096] * 700
    assert [back[17] for back in backs] == [i % 250 for i in range(700)]


def test_nothing_of_a_values_size_is_made_on_the_way(tier, single, names):
    """Rows go out and come in without a copy in this process."""
    size = 8 * MIB
    src, dst = memoryview(bytearray(size)), memoryview(bytearray(size))
    store = tier.open(single.url)
    [name] = names(1)
    store.write(name, src)
    tracemalloc.start()
    try:
        store.write_many([name] * 3, [[src]] * 3)
        assert all(store.read_many_into([name] * 3, [[dst]] * 3))
        assert tracemalloc.get_traced_memory()[1] < MIB // 4
    finally:
        tracemalloc.stop()
        store.delete([name])


def test_a_key_that_a_scan_names_twice_is_listed_once(tier, single, redis, names, value, monkeypatch):
    [name] = names(1)
    store = tier.open(single.url)
    store.write(name, value(1))
    (master,) = store._topology.masters()
    pages = iter([(7, [name.encode()]), (0, [name.encode(), name.encode()])])
    monkeypatch.setattr(master.client, "scan", lambda *_, **__: next(pages))
    assert [entry.name for entry in store.list("ns/")] == [name]


def test_a_listing_looks_at_no_more_keys_a_second_than_it_may(tier, start, names):
    server = start()
    many = names(2500)
    with server.client() as client:
        client.mset(dict.fromkeys(many, b"x"))
    store = tier.open(server.url, scan_rate=5000)
    begin = time.monotonic()
    assert sorted(entry.name for entry in store.list("ns/")) == sorted(many)
    assert time.monotonic() - begin > 0.4
    assert server.info("commandstats")["cmdstat_scan"]["calls"] >= 3


VOLATILE = ["volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"]


@pytest.mark.parametrize("policy", ["noeviction", *VOLATILE])
def test_a_full_server_drops_writes_and_is_read_all_the_same(tier, start, names, value, read, policy):
    server = start()
    store = tier.open(server.url)
    first, *more = names(600)
    store.write(first, value(1, 16))
    server.call("CONFIG SET", "maxmemory-policy", policy)
    server.call("CONFIG SET", "maxmemory", server.info("memory")["used_memory"] + 4 * MIB)
    kept = [answer for name in more for answer in store.write_many([name], [[value(2, 16)]])]
    dropped = [answer for answer in kept if answer is not None]
    assert kept.count(None) > 8
    assert len(dropped) > 8
    assert all(answer.full for answer in dropped)
    assert read(store, first, 16) == bytes(value(1, 16))
    with pytest.raises(NotKept):  # what the server counts as used moves a little, so one more may fit
        deque((store.write(name, value(2, 16)) for name in more), maxlen=0)
    assert store.stats()["dropped_values"] == len(dropped) + 1
    store.delete([first])


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", *VOLATILE])
def test_a_server_that_evicts_takes_every_write(tier, start, names, value, read, policy):
    server = start()
    server.call("CONFIG SET", "maxmemory-policy", policy)
    server.call("CONFIG SET", "maxmemory", server.info("memory")["used_memory"] + 8 * MIB)
    store = tier.open(server.url, **({"ttl": "1h"} if policy in VOLATILE else {}))
    many = names(400)
    for name in many:
        store.write(name, value(2, 16))
    assert 8 < list(store.exists(many)).count(True) < 300
    # Reading takes memory too, so that some more may go meanwhile.
    found = [read(store, name, 16) for name in many]
    assert set(found) == {None, bytes(value(2, 16))}


def cannot_save(server):
    server.call("CONFIG SET", "save", "1 1")
    (server.folder / "dump.rdb").mkdir()  # what cannot be replaced by a file
    with server.client() as client:
        client.bgsave()
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            pass


def lacks_replicas(server):
    server.call("CONFIG SET", "min-replicas-to-write", "1")


@pytest.mark.parametrize("refresh", [{}, {"ttl": "1h", "refresh_ttl": True}], ids=["plain", "refresh_ttl"])
@pytest.mark.parametrize("refuses_writes", [cannot_save, lacks_replicas])
def test_a_server_that_takes_no_writes_drops_them_and_is_read(tier, start, names, value, read, refuses_writes, refresh):
    server = start()
    store = tier.open(server.url, **refresh)
    one, other = names(2)
    store.write(one, value(1))
    refuses_writes(server)
    with pytest.raises(NotKept):
        store.write(other, value(1))
    [refused] = store.write_many([other], [[value(1)]])
    assert not refused.full
    assert refused.reason.startswith("MISCONF " if refuses_writes is cannot_save else "NOREPLICAS "), "and not: full"
    assert store.stats()["dropped_values"] == 2
    assert read(store, one) == bytes(value(1))
    assert read(store, other) is None


def test_a_server_that_cannot_be_reached_is_said_so_at_open(tier, start):
    server = start()
    server.kill()
    with pytest.raises(RedisStore.transient_errors, match=str(server.port)):
        tier.open(server.url)


def test_a_list_that_the_user_may_not_make_raises_and_is_not_empty(tier, start, names, value):
    server = start()
    server.call("ACL SETUSER", "half", "on", ">half", "~*", "+set", "+scan", "+ping")
    store = tier.open(server.url, username="half", password="half")
    store.write(names(1)[0], value(1))
    with pytest.raises(Exception, match=r"NOPERM.*strlen"):
        list(store.list("ns/"))


def test_a_list_leaves_out_what_is_no_string(tier, start, names, value):
    server = start()
    store = tier.open(server.url)
    [name] = names(1)
    store.write(name, value(1))
    server.call("RPUSH", "ns/no-string", "x")
    assert [entry.name for entry in store.list("ns/")] == [name]
