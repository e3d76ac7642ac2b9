"""The tier in a host of its own, as an engine has it: hangs, crashes, foreign bytes, and what is left."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from mooncake_hosted import VALUE_BYTES, children, hosted, key_of, name_of
from mooncake_pool import Master, wait_until

from kvtiers.api import LookupResult
from kvtiers_mooncake.config import MooncakeConfig

QUICK = {"breaker": {"delay": "50ms", "max_delay": "200ms"}, "exists_ttl": "100ms", "retries": 0}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """A host has its settings by its config alone, not by a store of this process."""
    for name in [*os.environ]:
        if name.startswith(("MC_", "GLOG_")):
            monkeypatch.delenv(name)


@pytest.fixture
def master(client_library, tmp_path):
    """A master with its defaults: 10 s until it gives up a client, and 10 s for each read."""
    master = Master(tmp_path).start()
    yield master
    master.kill()


@pytest.fixture
def config(master, contribute):
    contribute()
    return MooncakeConfig(type="mooncake", master=master.address, timeout="20s", **QUICK)


@pytest.fixture
def impatient(config):
    """One that gives a call up that a busy machine's pool may well have answered."""
    return config.model_copy(update={"timeout": 1.0})


def test_rows_go_to_the_pool_and_come_back(config):
    keys = [key_of(i) for i in range(8)]
    with hosted(config) as tier:
        tier.wait_open()
        payloads = [tier.fill(row, row + 1) for row in range(8)]
        assert tier.store(keys, range(8)).success
        assert tier.load(keys, range(8, 16)).success
        assert [tier.payload(row) for row in range(8, 16)] == payloads
        assert tier.lookup(keys[3]) is LookupResult.HIT
        assert tier.figure("copied_values") == 0


def test_bytes_of_another_value_are_a_miss_and_are_removed(config, open_store):
    """What Mooncake itself may return, after two clients of one SSD directory or by a bug: whole, and wrong."""
    key, other = key_of(1), key_of(2)
    with hosted(config) as tier:
        tier.wait_open()
        tier.fill(0, 1)
        tier.fill(1, 2)
        assert tier.store([key, other], [0, 1]).success
        store = open_store(config.master)
        row = bytearray(VALUE_BYTES)
        assert store.read_into(name_of(other), memoryview(row))
        store.write(name_of(key), memoryview(bytes(row)))
        result = tier.load([key, other], [4, 5])
        assert not result.success
        assert set(result.successful_keys) == {other}
        assert tier.figure("seal_failures") == 1
        assert list(store.exists([name_of(key), name_of(other)])) == [False, True]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_client_that_crashes_ends_its_host_and_not_the_engine(config, number):
    keys = [key_of(i) for i in range(4)]
    with hosted(config) as tier:
        tier.wait_open()
        payloads = [tier.fill(row, row + 1) for row in range(4)]
        assert tier.store(keys, range(4)).success
        before = tier.host
        os.kill(before, number)
        tier.step_until(lambda: not tier.is_in_use(), "the end of the host is seen")
        tier.wait_open()
        assert tier.host != before
        assert tier.load(keys, range(4, 8)).success
        assert [tier.payload(row) for row in range(4, 8)] == payloads


def test_a_master_that_hangs_takes_the_tier_out_of_use_until_it_goes_on(impatient, master):
    keys = [key_of(i) for i in range(4)]
    with hosted(impatient) as tier:
        tier.wait_open()
        tier.fill(0, 1)
        tier.step_until(lambda: tier.is_in_use() and tier.store(keys[:1], [0]).success, "it is stored")
        master.pause()
        for _ in range(5):
            assert not tier.load(keys[:1], [1]).success
        assert not tier.is_in_use()
        master.resume()
        tier.step_until(lambda: tier.is_in_use() and tier.load(keys[:1], [2]).success, "values are read again")
        assert tier.payload(2) == tier.payload(0)


def test_a_machine_that_hangs_costs_its_values_and_the_timeout(impatient, contribute, master):
    owner = contribute()  # beside the first one
    keys = [key_of(i) for i in range(32)]
    with hosted(impatient) as tier:
        tier.wait_open()
        for row in range(32):
            tier.fill(row, row)
        tier.step_until(lambda: tier.is_in_use() and tier.store(keys, range(32)).success, "they are stored")
        owner.pause()
        result = tier.load(keys, range(32, 64))
        assert not result.success
        assert 0 < len(result.successful_keys) < 32, "values lie on both machines"
        assert result.seconds < 25
        assert tier.is_in_use(), "the other machine's values are found as before"
        # The rows of what was not read are other chunks' now: what comes late must not land there.
        late = [row for row, key in zip(range(32, 64), keys, strict=True) if key not in set(result.successful_keys)]
        others = [tier.fill(row, 200) for row in late]
        owner.resume()
        tier.step_until(lambda: tier.load([keys[late[0] - 32]], [0]).success, "the machine is read again")
        assert [tier.payload(row) for row in late] == others


def test_values_are_read_and_written_after_a_pause(config):
    """The library's TCP transport has refused all transfers after a pause of five seconds, for a minute and more."""
    keys = [key_of(i) for i in range(32)]
    with hosted(config) as tier:
        tier.wait_open()
        payloads = [tier.fill(row, row + 1) for row in range(32)]
        assert tier.store(keys[:16], range(16)).success
        time.sleep(7)
        assert tier.store(keys[16:], range(16, 32)).success
        assert tier.load(keys, range(32, 64)).success
        assert [tier.payload(row) for row in range(32, 64)] == payloads


def test_nothing_is_left_after_hosts_that_ended_or_were_killed(config):
    shared, before = set(Path("/dev/shm").iterdir()), children()
    ports: set[int] = set()
    for kill in (False, True):
        with hosted(config) as tier:
            tier.wait_open()
            tier.fill(0, 1)
            tier.store([key_of(1)], [0])
            ports |= _listening(tier.host)
            assert ports, "a client listens for its peers"
            if kill:
                os.kill(tier.host, signal.SIGKILL)
    wait_until(lambda: not _abandoned(shared), "nothing is left in shared memory")
    assert children() <= before
    wait_until(lambda: not any(_answers(port) for port in ports), "the ports are free")


def _abandoned(before: set[Path]) -> set[Path]:
    """Return what has come to lie in shared memory and no process uses: other tests have something there, too."""
    left = set(Path("/dev/shm").iterdir()) - before
    for process in Path("/proc").glob("[0-9]*") if left else ():
        with contextlib.suppress(OSError):  # it has ended
            maps, fds = (process / "maps").read_text(), [str(fd.readlink()) for fd in (process / "fd").iterdir()]
            left = {path for path in left if str(path) not in maps and str(path) not in fds}
    return left


def _listening(pid: int) -> set[int]:
    """Return the ports on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            target = str(fd.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def _answers(port: int) -> bool:
    with socket.socket() as way:
        return way.connect_ex(("127.0.0.1", port)) == 0
