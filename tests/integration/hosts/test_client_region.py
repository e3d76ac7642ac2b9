"""Values in a client's own region: tier hosts read and write them there, and never after their call."""

import contextlib
import fcntl
import mmap
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from kvtiers import ModelIdentity, open_client
from kvtiers._log_queue import flush_logs
from kvtiers.api import StartError
from kvtiers.testing.running import run_together

PATIENCE = 60.0
SHORT = 2.0
"""The time of a call whose store hangs: a host that waits for a busy machine's processors has got it by then."""
LENGTH = 10_000
LARGE = 300_000
SEAL_FUTURE_WRITE = 0x10  # fcntl.F_SEAL_FUTURE_WRITE, which Python has from 3.13 on
PLACES = 64
IDENTITY = ModelIdentity("test/model", weights="w1")
POISON = 7


def value(number):
    return np.random.default_rng(number).integers(0, 256, LENGTH, np.uint8)


def keys(numbers):
    return [number.to_bytes(8, "big") for number in numbers]


class Pool:
    """A caller's memory in a client's region: K and V of each value lie far apart, and not on pages."""

    def __init__(self, client):
        memory = np.frombuffer(client.region, np.uint8)[24:]
        self.k, self.v = memory[: 2 * PLACES * 3_000 : 1].reshape(2, -1)[0], memory[PLACES * 6_000 :]
        self.client = client

    def views(self, place):
        return [self.k[place * 3_000 :][:3_000], self.v[place * 7_000 :][:7_000]]

    def fill(self, place, content):
        for view, part in zip(self.views(place), (content[:3_000], content[3_000:]), strict=True):
            view[:] = part

    def poison(self, *places):
        for place in places:
            self.fill(place, np.full(LENGTH, POISON, np.uint8))

    def holds(self, place):
        return np.concatenate(self.views(place))

    def is_poison(self, *places):
        return all((self.holds(place) == POISON).all() for place in places)

    def put(self, numbers, first=0, **more):
        for place, number in enumerate(numbers, first):
            self.fill(place, value(number))
        return self.client.put(keys(numbers), [self.views(first + i) for i in range(len(numbers))], **more)

    def get(self, numbers, first=0, *, host_ends=False, **more):
        """Return how many were found; every byte of those is compared.

        ``host_ends``: meanwhile, and what it was filling just then is not what it was.
        """
        places = range(first, first + len(numbers))
        self.poison(*places)
        found = self.client.get_into(keys(numbers), [self.views(place) for place in places], **more)
        for place, number, there in zip(places, numbers, found, strict=True):
            expected = value(number) if there else POISON
            assert (host_ends and not there) or (self.holds(place) == expected).all(), f"wrong bytes of value {number}"
        return sum(found)


@pytest.fixture
def opened(start):
    pools = []

    def opened(*tiers, **more):
        options = {"bounce_bytes": 1 << 18, "region_bytes": 1 << 20, **more}
        config = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": list(tiers)}
        pools.append(Pool(open_client(config, IDENTITY, LENGTH, **options)))
        return pools[-1]

    yield opened
    for pool in pools:
        pool.client.close()


@pytest.fixture
def directory(tmp_path):
    return {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0}


@pytest.fixture
def hosts_of(machine):
    before = set(machine.children())
    return lambda: set(machine.children()) - before


@pytest.fixture
def settled(machine):
    """Wait until no job of a client is in flight any more, as its figures say."""

    def settled(pool):
        def is_idle():
            tiers = pool.client.stats()["tiers"].values()
            moved = [tier["transfers"] for tier in tiers]
            return moved and not any(tier["running_jobs"] or tier["quarantined_rows"] for tier in moved)

        machine.wait_until(is_idle, "the end of the last job")

    return settled


@pytest.mark.parametrize("kind", ["memory", "fs", "faulty", "parts"])
def test_values_in_the_region_come_back_and_pass_no_bounce_row(opened, directory, faulty, gates, kind):
    tiers = {
        "memory": lambda: {"type": "memory", "capacity": "64MiB"},
        "fs": lambda: directory,
        "faulty": faulty,
        "parts": lambda: faulty(parts=True),
    }
    pool = opened(tiers[kind]())
    client = pool.client
    assert all(pool.put(range(40)).stored)
    assert pool.get(range(50)) == 40
    assert client.stats()["direct_values"] == 90
    elsewhere = [np.zeros(LENGTH, np.uint8) for _ in range(40)]
    assert client.get_into(keys(range(40)), elsewhere) == [True] * 40, "they are values like any others"
    assert all((view == value(number)).all() for number, view in enumerate(elsewhere))
    assert all(client.put(keys(range(50, 54)), [value(number) for number in range(50, 54)]).stored)
    assert pool.get(range(50, 54)) == 4
    assert client.stats()["direct_values"] == 94
    assert client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"]
    assert client.stats()["failed_calls"] == client.stats()["expired_calls"] == 0


def test_values_of_which_only_some_lie_in_the_region_are_moved_in_one_call(opened, directory):
    pool = opened(directory)
    outside = np.zeros(7_000, np.uint8)
    views = [pool.views(0), value(1), [pool.views(2)[0], outside], pool.views(3)]
    pool.fill(0, value(0))
    pool.fill(2, value(2))
    outside[:] = value(2)[3_000:]
    pool.fill(3, value(3))
    assert pool.client.put(keys(range(4)), views).stored == [True] * 4
    pool.poison(0, 2, 3)
    outside[:] = POISON
    back = [pool.views(0), np.zeros(LENGTH, np.uint8), [pool.views(2)[0], outside], pool.views(3)]
    assert pool.client.get_into(keys(range(4)), back) == [True] * 4
    assert [(np.concatenate(np.atleast_2d(v) if v is back[1] else v) == value(n)).all() for n, v in enumerate(back)]
    assert (pool.holds(0) == value(0)).all()
    assert (outside == value(2)[3_000:]).all()
    assert pool.client.stats()["direct_values"] == 4
    twice = pool.client.get_into(keys([3, 3]), [pool.views(5), pool.views(6)])
    assert twice == [True, True]
    assert (pool.holds(5) == value(3)).all()
    assert (pool.holds(6) == value(3)).all()


@pytest.mark.parametrize("parts", [False, True])
def test_memory_that_changes_after_a_put_has_ended_is_stored_under_no_key(
    opened, faulty, gates, machine, tmp_path, settled, parts
):
    """The host hangs in the write: with parts it has the caller's memory itself there, and reads it afterwards."""
    pool = opened(faulty(deadline="60s", parts=parts))
    gates.set("write", "hang")
    assert not any(pool.put(range(4), timeout=SHORT).stored)
    pool.poison(*range(4))
    with machine.releasing(tmp_path):
        settled(pool)
    # One of them hung. What it wrote afterwards was a copy of before; or the memory itself, and is removed at once.
    assert pool.get(range(4), first=8) == len(gates.values()) == 4 - parts
    assert pool.client.stats()["tiers"]["faulty"]["seal_failures"] == 0
    assert pool.client.stats()["tiers"]["faulty"]["errors"] == 0, "no failure of the store"
    assert all(pool.put(range(4)).stored)
    machine.wait_until(lambda: pool.get(range(4)) == 4, "the end of what is believed about them")


def test_what_a_store_gives_too_late_never_lands_in_the_callers_memory(
    opened, faulty, gates, machine, tmp_path, settled, hosts_of
):
    pool = opened(faulty(deadline="60s"))
    assert all(pool.put(range(4)).stored)
    before = hosts_of()
    gates.set("read", "hang")
    begin = time.monotonic()
    found = pool.get(range(4), first=8, timeout=SHORT)
    assert found < 4
    assert time.monotonic() - begin < 50
    pool.poison(*range(8, 12))
    assert hosts_of() == before, "a host whose store hangs has answered"
    with machine.releasing(tmp_path):
        settled(pool)
    assert pool.is_poison(*range(8, 12))
    assert pool.client.stats()["tiers"]["faulty"]["errors"] == 0, "a call's short time is no failure of the store"
    machine.wait_until(lambda: pool.get(range(4)) == 4, "the end of what is believed about them")


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_host_that_does_not_give_memory_back_is_killed_before_the_call_ends(
    opened, faulty, gates, machine, hosts_of, what, parts
):
    """Stopped, it cannot say that it neither writes there any more nor stores what it finds there later."""
    breaker = {"delay": "10ms", "failures": 1000, "min_calls": 1000}
    pool = opened(faulty(deadline="60s", grace="60s", parts=parts, breaker=breaker))
    assert all(pool.put(range(4), timeout=PATIENCE).stored)
    before = hosts_of()
    gates.set(what, "stop")
    begin = time.monotonic()
    if what == "read":
        assert pool.get(range(4), first=8, timeout=SHORT, host_ends=True) < 4
    else:
        assert not any(pool.put(range(4, 8), first=8, timeout=SHORT).stored)
    assert time.monotonic() - begin < 50
    pool.poison(*range(8, 12))
    assert not any(machine.state_of(pid) not in {"", "Z"} for pid in before), "its host may still use the memory"
    machine.wait_until(lambda: pool.get(range(4), timeout=1.0) == 4, "the host's next life")
    assert pool.is_poison(*range(8, 12))
    pool.get(range(4, 8))  # each is right, or not there


def test_a_second_tier_gives_what_hangs_in_the_first_and_only_that_arrives(
    opened, faulty, gates, machine, tmp_path, directory, settled
):
    pool = opened(faulty(), directory)
    assert all(pool.put(range(4)).stored)
    gates.set("read", "hang")
    with machine.winding(pool.client, 1.1 * PATIENCE, lambda: gates.reached("read")):
        assert pool.get(range(4), first=8, timeout=2 * PATIENCE) == 4, "the second tier has half of the time"
    pool.poison(*range(8, 12))
    with machine.releasing(tmp_path):
        settled(pool)
    assert pool.is_poison(*range(8, 12))


def test_calls_whose_time_is_over_at_any_moment_neither_take_nor_give_a_wrong_byte(opened, directory):
    """Each call's memory is used for something else the moment that it has ended."""
    breaker = {"delay": "10ms", "failures": 1000, "min_calls": 1000}
    pool = opened({**directory, "threads": 4, "breaker": breaker})
    assert all(pool.put(range(16)).stored)
    ended = []

    def work(thread):
        rng, first = random.Random(thread), 16 + thread * 8
        places = range(first, first + 8)
        for turn in range(30):
            timeout = rng.choice([0.0005, 0.002, 0.005, 0.02, PATIENCE])
            if turn % 3 == 2:
                result = pool.put([1000 * thread + 8 * turn + i for i in range(8)], first, timeout=timeout)
                ended.append(sum(result.stored))
            else:
                ended.append(pool.get(rng.sample(range(16), 8), first, timeout=timeout))
            pool.poison(*places)
            time.sleep(rng.random() * 0.003)
            assert pool.is_poison(*places), "late bytes"

    run_together([lambda thread=thread: work(thread) for thread in range(4)], patience=PATIENCE)
    assert set(ended) & {8}
    for thread in range(4):
        for turn in range(2, 30, 3):
            pool.get([1000 * thread + 8 * turn + i for i in range(8)])  # each is right, or not there


def test_a_close_in_the_middle_of_a_call_ends_it_and_nothing_lands_later(opened, faulty, gates, machine):
    pool = opened(faulty(deadline="60s", parts=True))
    assert all(pool.put(range(4)).stored)
    gates.set("read", "hang")
    found = []
    thread = threading.Thread(target=lambda: found.append(pool.get(range(4), first=8, host_ends=True)))
    thread.start()
    machine.wait_until(lambda: gates.reached("read"), "the call")
    pool.client.close(0.2)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert found[0] < 4
    pool.poison(*range(8, 12))
    assert pool.is_poison(*range(8, 12)), "the caller's memory is still there"
    assert not any(pool.put(range(4)).stored)


def test_a_client_whose_process_is_killed_leaves_no_memory_of_its_region(party, faulty, gates, machine):
    there = party()
    config = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [faulty(parts=True)]}
    there.do(
        "import numpy as np, threading\n"
        "from kvtiers import ModelIdentity, open_client\n"
        f"client = open_client({config!r}, ModelIdentity('m', weights='w'), 4096, region_bytes=1 << 20)\n"
        "pool = np.frombuffer(client.region, np.uint8).reshape(-1, 4096)\n"
        "assert all(client.put([b'a', b'b'], [pool[0], pool[1]]).stored)"
    )
    gates.set("read", "hang")
    there.do("threading.Thread(target=lambda: client.get_into([b'a'], [pool[3]]), daemon=True).start()")
    machine.wait_until(lambda: gates.reached("read"), "the call")
    hosts = there.hosts()
    there.process.kill()
    for pid in hosts:
        machine.await_end(pid)
    machine.wait_until(
        lambda: not any(f"process {pid} " in line for line in machine.holders("client") for pid in (there.pid, *hosts)),
        "the end of the last mapping",
    )


def test_memory_that_the_caller_has_shared_by_itself_is_used_as_the_clients_own(
    opened, faulty, gates, machine, hosts_of, settled, tmp_path
):
    fd = os.memfd_create("callers")
    os.ftruncate(fd, 3 << 20)
    mapped = mmap.mmap(fd, 1 << 20, mmap.MAP_SHARED, offset=1 << 20)
    breaker = {"delay": "10ms", "failures": 1000, "min_calls": 1000}
    pool = opened(faulty(parts=True, deadline="60s", breaker=breaker), region_bytes=0, region=(fd, mapped))
    os.close(fd)
    assert all(pool.put(range(8)).stored)
    assert pool.get(range(8)) == 8
    assert np.shares_memory(np.frombuffer(mapped, np.uint8), pool.k)
    assert pool.client.stats()["direct_values"] == 16
    for pid in hosts_of():
        os.kill(pid, signal.SIGKILL)
    machine.wait_until(lambda: pool.get(range(8)) == 8, "the host's next life")
    gates.set("read", "hang")
    assert pool.get(range(4), first=8, timeout=SHORT) < 4
    pool.poison(*range(8, 12))
    with machine.releasing(tmp_path):
        settled(pool)
    assert pool.is_poison(*range(8, 12))


@pytest.mark.parametrize("required", [True, False])
def test_memory_that_tier_hosts_cannot_map_is_refused_or_values_in_it_pass_bounce_rows(
    opened, directory, hosts_of, caplog, required
):
    """Sealed after the caller has mapped it, which no host can do any more."""
    fd = os.memfd_create("callers", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    mapped = mmap.mmap(fd, 1 << 20, mmap.MAP_SHARED)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
    client = None
    try:
        with pytest.raises(StartError, match="Operation not permitted") if required else contextlib.nullcontext():
            client = open_client(
                {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [directory]},
                IDENTITY,
                LARGE,
                region=(fd, mapped),
                region_required=required,
            )
        assert (client is None) == required
        if client is None:
            assert hosts_of() == set()
            return
        assert client.put([b"key"], [memoryview(mapped)[:LARGE]]).stored == [True]
        assert client.get_into([b"key"], [memoryview(mapped)[LARGE : 2 * LARGE]]) == [True]
        assert client.stats()["direct_values"] == 0
        flush_logs(PATIENCE)
        (line,) = [line for line in caplog.messages if "is not mapped" in line]
        assert "Operation not permitted" in line
    finally:
        os.close(fd)
        if client is not None:
            client.close()


def test_with_a_tier_in_this_process_values_in_the_region_pass_bounce_rows(opened):
    pool = opened({"type": "memory", "capacity": "64MiB", "io": "thread"})
    assert all(pool.put(range(8)).stored)
    assert pool.get(range(8)) == 8
    assert pool.client.stats()["direct_values"] == 0
