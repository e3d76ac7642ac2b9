"""A client with real tier hosts: every byte right from any thread, whatever happens to hosts, stores and processes."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from kvtiers import ModelIdentity, open_client
from kvtiers.testing.running import run_together

PATIENCE = 60.0
SHORT = 2.0
"""The time of a call whose store hangs: a host that waits for a busy machine's processors has got it by then."""
LENGTH = 10_000
IDENTITY = ModelIdentity("test/model", weights="w1")
KEYS = [number.to_bytes(8, "big") for number in range(64)]
# In a process of its own, driven line by line.
ELSEWHERE = """
import numpy as np
from kvtiers import ModelIdentity, open_client

def open_one(config):
    global client
    client = open_client(config, ModelIdentity("test/model", weights="w1"), 10_000, bounce_bytes=1 << 20)

def keys(numbers):
    return [number.to_bytes(8, "big") for number in numbers]

def value(number):
    return np.random.default_rng(number).integers(0, 256, 10_000, np.uint8)

def put(numbers):
    return sum(client.put(keys(numbers), [value(number) for number in numbers]).stored)

def get(numbers):
    views = [np.zeros(10_000, np.uint8) for _ in numbers]
    found = client.get_into(keys(numbers), views)
    assert all((view == value(n)).all() for view, n, there in zip(views, numbers, found) if there)
    return sum(found)
"""


def value(number):
    return np.random.default_rng(number).integers(0, 256, LENGTH, np.uint8)


def config(*tiers, **more):
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": list(tiers), **more}


def put(client, numbers, **more):
    return client.put([number.to_bytes(8, "big") for number in numbers], [value(n) for n in numbers], **more)


def get(client, numbers, **more):
    """Return how many of these were found; every byte of those is compared, and that of the others is untouched."""
    views = [np.full(LENGTH, 7, np.uint8) for _ in numbers]
    found = client.get_into([number.to_bytes(8, "big") for number in numbers], views, **more)
    for number, view, there in zip(numbers, views, found, strict=True):
        assert (view == (value(number) if there else 7)).all(), f"wrong bytes of value {number}"
    return sum(found)


@pytest.fixture
def opened(start):
    """Open clients; at the end each is closed, and no thread of it is left (hosts: see ``start``)."""
    clients = []

    def opened(*tiers, **more):
        clients.append(open_client(config(*tiers), IDENTITY, LENGTH, **{"bounce_bytes": 1 << 20, **more}))
        return clients[-1]

    yield opened
    for client in clients:
        client.close()


@pytest.fixture
def directory(tmp_path):
    return {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0}


@pytest.fixture(params=["memory", "fs"])
def tier(request, directory):
    return directory if request.param == "fs" else {"type": "memory", "capacity": "64MiB"}


def test_eight_threads_put_and_get_and_every_byte_is_right(opened, tier):
    client = opened(tier, bounce_bytes=20 * 12288)  # fewer rows than the threads want together

    def work(thread):
        rng = random.Random(thread)
        own = range(100 * thread, 100 * thread + 40)
        assert all(put(client, own).stored)
        for _ in range(10):
            numbers = rng.sample(own, 15)
            assert get(client, numbers) == 15
            get(client, [rng.randrange(800) for _ in range(5)])  # others', which may not be there yet
        assert client.exists_prefix([number.to_bytes(8, "big") for number in own]) == 40

    run_together([lambda thread=thread: work(thread) for thread in range(8)], patience=PATIENCE)
    assert client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"]
    assert client.stats()["expired_calls"] == client.stats()["failed_calls"] == 0


def test_two_hosts_of_a_tier_share_a_calls_values(opened, faulty, gates):
    client = opened(faulty(processes=2))
    assert all(put(client, range(60)).stored)
    assert get(client, range(60)) == 60
    assert client.stats()["tiers"]["faulty"]["hosts_open"] == 2


def test_what_was_deleted_is_written_again_whichever_host_gets_it(opened, faulty, gates):
    """The other host has just seen the values, and would take them for present."""
    client = opened(faulty(processes=2))
    keys = [number.to_bytes(8, "big") for number in range(60)]
    for _ in range(3):
        assert all(put(client, range(60)).stored)
        assert len(gates.values()) == 60
        assert client.delete(keys) == [True] * 60
        assert gates.values() == []
        assert get(client, range(60)) == client.exists_prefix(keys) == 0
    assert client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"]


def test_a_delete_that_the_store_fails_or_hangs_in_is_no_delete(opened, faulty, gates, machine, tmp_path):
    client = opened(faulty(deadline="60s", retries=0))
    assert all(put(client, range(4)).stored)
    gates.set("delete", "fail")
    assert client.delete(KEYS[:4]) == [False] * 4
    gates.set("delete", "hang")
    assert client.delete(KEYS[:4], timeout=SHORT) == [False] * 4
    with machine.releasing(tmp_path):
        machine.wait_until(lambda: client.delete(KEYS[:4]) == [True] * 4, "the store's next answer")
    assert gates.values() == []


@pytest.mark.parametrize("what", ["put", "get"])
def test_a_host_that_is_killed_in_the_middle_of_a_call_fails_it_soon_and_the_next_one_succeeds(
    opened, faulty, gates, machine, what
):
    client = opened(faulty(breaker={"delay": "10ms", "failures": 1000, "min_calls": 1000}))
    assert all(put(client, range(8)).stored)
    gates.set("read" if what == "get" else "write", "kill")
    if what == "get":
        assert get(client, range(8)) < 8
    else:
        result = put(client, range(10, 18))
        assert not all(result.stored)
        assert result.error
    machine.wait_until(lambda: get(client, range(8)) == 8, "the host's next life")
    assert all(put(client, range(20, 28)).stored)
    assert get(client, range(20, 28)) == 8


def test_hosts_that_are_killed_again_and_again_never_give_a_wrong_byte(opened, faulty, machine):
    client = opened(faulty(breaker={"delay": "10ms", "failures": 1000, "min_calls": 1000}), deadline=PATIENCE)
    own = set(machine.children())
    kills = []

    def kill():
        for pid in set(machine.children()) & own:
            os.kill(pid, signal.SIGKILL)
            kills.append(pid)

    def work(thread):
        for turn in range(15):
            numbers = range(1000 * thread + turn, 1000 * thread + turn + 10)
            put(client, numbers)
            get(client, numbers)
            if turn % 5 == 2 and thread == 0:
                own.update(machine.children())
                kill()

    run_together([lambda thread=thread: work(thread) for thread in range(4)], patience=PATIENCE)
    assert kills
    machine.wait_until(lambda: put(client, range(5)).stored == [True] * 5, "its coming back")
    assert get(client, range(5)) == 5
    machine.wait_until(lambda: client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"], "the last row")


@pytest.mark.parametrize("what", ["put", "get", "exists"])
def test_a_call_ends_in_its_time_though_the_store_hangs(opened, faulty, gates, machine, what, tmp_path):
    client = opened(faulty(deadline="60s"))
    assert all(put(client, range(4)).stored)
    gates.set({"put": "write", "get": "read", "exists": "exists"}[what], "hang")
    begin = time.monotonic()
    if what == "put":
        assert not all(put(client, range(10, 14), timeout=SHORT).stored)
    elif what == "get":
        assert get(client, range(4), timeout=SHORT) < 4
    else:
        assert client.exists_prefix([bytes([9]) * 8], timeout=SHORT) == 0
    assert 0.9 * SHORT < time.monotonic() - begin < 50
    if what != "exists":
        assert client.stats()["free_bounce_rows"] < client.stats()["bounce_rows"], "the store may still touch them"
    with machine.releasing(tmp_path):
        machine.wait_until(
            lambda: client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"], "the release of the rows"
        )
    assert get(client, range(4)) == 4


def test_a_first_tier_that_hangs_leaves_a_get_the_time_for_the_next_one(opened, faulty, gates, machine, tmp_path, tier):
    client = opened(faulty(), tier, bounce_bytes=64 * 12288)
    assert all(put(client, range(4)).stored)
    gates.set("read", "hang")
    with machine.winding(client, 1.1 * PATIENCE, lambda: gates.reached("read")):
        assert get(client, range(4), timeout=2 * PATIENCE) == 4, "the second tier has them, and half of the time"
    with machine.releasing(tmp_path):
        machine.wait_until(
            lambda: client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"], "the release of the rows"
        )


def test_a_store_that_hangs_for_good_costs_its_host_and_no_row(opened, faulty, gates, machine, log):
    client = opened(faulty(deadline="1s", grace="100ms", threads=1))
    machine.wait_until(lambda: all(put(client, range(4)).stored), "values in time, on a busy machine")
    gates.set("read", "hang")
    assert get(client, range(4)) == 0
    machine.wait_until(lambda: client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"], "the last row")
    machine.wait_until(lambda: get(client, range(4)) == 4, "the host's next life")


def test_damage_is_a_miss_and_is_counted(opened, faulty, gates):
    client = opened(faulty())
    assert all(put(client, range(4)).stored)
    for name in gates.values()[:3]:
        path = gates.root / "values" / name
        stored = bytearray(path.read_bytes())
        stored[random.Random(name).randrange(LENGTH)] ^= 1
        path.write_bytes(stored)
    assert get(client, range(4)) == 1
    assert client.stats()["tiers"]["faulty"]["seal_failures"] == 3
    assert all(put(client, range(4)).stored), "it is stored again"
    assert get(client, range(4)) == 4


def test_a_value_that_an_engine_has_stored_never_comes_back_through_a_client(start, opened, faulty, gates, machine):
    engine = start(faulty())
    engine.until_available()
    engine.store(machine.keys(0, 4))
    stored = gates.values()
    assert len(stored) == 4
    bench = machine.bench
    hashes = [key[:-4] for key in machine.keys(0, 4)]
    tier = engine.config["secondary"][0]
    with open_client(config(tier), bench.LAYOUT.model, bench.PAYLOAD, bounce_bytes=1 << 16) as client:
        views = [np.full(bench.PAYLOAD, 7, np.uint8) for _ in hashes]
        assert client.get_into(hashes, views) == [False] * 4
        assert client.exists_prefix(hashes) == 0
        assert all((view == 7).all() for view in views)
        assert all(client.put(hashes, views).stored)
    assert len(gates.values()) == 8
    engine.forget()
    assert engine.load(machine.keys(0, 4)) == 4, "nor the client's through the engine"


def test_two_processes_share_what_either_has_put(opened, party, directory):
    there = party()
    there.do(ELSEWHERE + f"\nopen_one({config(directory)!r})")
    here = opened(directory)
    assert all(put(here, range(10)).stored)
    assert there.do("get(range(10))") == 10
    assert there.do("put(range(10, 20))") == 10
    assert get(here, range(20)) == 20


def test_a_client_whose_process_is_killed_leaves_no_host_and_no_memory(party, faulty, gates, machine):
    there = party()
    there.do(ELSEWHERE + f"\nopen_one({config(faulty())!r})")
    assert there.do("put(range(10))") == 10
    hosts = there.hosts()
    assert hosts
    holders = machine.holders("client")
    assert any(str(there.pid) in line for line in holders)
    there.process.kill()
    for pid in hosts:
        machine.await_end(pid)
    machine.wait_until(
        lambda: not any(f"process {pid} " in line for line in machine.holders("client") for pid in (there.pid, *hosts)),
        "the end of the last mapping",
    )


def test_in_a_forked_child_a_client_finds_and_closes_nothing(party, directory):
    there = party()
    there.do(ELSEWHERE + f"\nopen_one({config(directory)!r})")
    assert there.do("put(range(4))") == 4
    found = there.do(
        "import os\n"
        "ours, theirs = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.write(theirs, b'%d %d %d' % (get(range(4)), put(range(4)), client.exists_prefix(keys(range(4)))))\n"
        "    client.close()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "os.read(ours, 99).decode()"
    )
    assert found == "0 0 0"
    assert there.do("get(range(4))") == 4
    assert there.do("put(range(4, 8))") == 4


@pytest.mark.parametrize("closes_within", [0.3, PATIENCE])
def test_a_close_with_calls_in_flight_ends_them_and_leaves_nothing(
    opened, faulty, gates, machine, tmp_path, closes_within
):
    client = opened(faulty(deadline="60s"))
    assert all(put(client, range(4)).stored)
    gates.set("read", "hang" if closes_within < 1 else "sleep 0.3")
    found = []
    thread = threading.Thread(target=lambda: found.append(get(client, range(4))))
    thread.start()
    machine.wait_until(lambda: gates.reached("read"), "the call")
    begin = time.monotonic()
    client.close(closes_within)
    assert time.monotonic() - begin < 50
    thread.join(PATIENCE)
    assert found == ([4] if closes_within == PATIENCE else found)
    assert found[0] <= 4
    assert not any(put(client, range(4)).stored)


def test_calls_from_many_threads_beside_a_close_neither_raise_nor_hang(opened, tier):
    client = opened(tier)
    put(client, range(10))
    begun = threading.Semaphore(0)

    def work(thread):
        begun.release()
        for turn in range(50):
            put(client, range(thread * 100 + turn, thread * 100 + turn + 5))
            get(client, range(10))
            client.exists_prefix(KEYS)
            client.stats()

    def close():
        for _ in range(4):
            begun.acquire(timeout=PATIENCE)
        client.close()

    run_together([*(lambda thread=thread: work(thread) for thread in range(4)), close], patience=PATIENCE)


def test_a_tier_that_comes_late_is_used_when_it_is_there(opened, faulty, gates, machine):
    options = faulty()
    gates.set("open", "always fail")
    client = opened({**options, "breaker": {"delay": "10ms", "max_delay": "20ms"}}, deadline=5.0)
    assert put(client, range(4)).error == "no tier is usable"
    gates.lift("open")
    machine.wait_until(lambda: all(put(client, range(4)).stored), "the tier's opening")
    assert get(client, range(4)) == 4


def test_a_host_that_ends_while_nothing_is_called_is_noticed(opened, faulty, machine, log):
    before = set(machine.children())
    client = opened(faulty())
    assert all(put(client, range(4)).stored)
    for pid in set(machine.children()) - before:
        os.kill(pid, signal.SIGKILL)
    assert log("faulty: out of use: its host ended")
    assert log("faulty: answers again; back in use")
