"""Values between processes, lengths, removal under readers, and the registered rows."""

import contextlib
import mmap
import os
import subprocess
import sys
import threading

import pytest
from mooncake_pool import PATIENCE, Master, wait_until

from kvtiers.api import ConfigError
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_mooncake.memory import RegisteredMemory, address_of
from kvtiers_mooncake.store import MooncakeStore

PAGE = 4096
_OTHER = """
import sys
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_mooncake.store import MooncakeStore
store = MooncakeStore(MooncakeConfig(type="mooncake", master=sys.argv[1]), region=memoryview(b""))
row = bytearray(8192)
assert store.read_into("ns/shared/1", memoryview(row)) and bytes(row) == b"1" * 8192
assert not store.read_into("ns/shared/2", memoryview(row))
store.write("ns/shared/1", memoryview(b"3" * 8192))
store.write("ns/shared/2", memoryview(b"2" * 8192))
store.close()
"""


def test_two_processes_share_their_values(shared_master, open_store):
    store = open_store(shared_master.address)
    row = bytearray(8192)
    store.write("ns/shared/1", memoryview(b"1" * 8192))
    subprocess.run([sys.executable, "-c", _OTHER, shared_master.address], check=True, timeout=PATIENCE)
    assert list(store.exists(["ns/shared/1", "ns/shared/2"])) == [True, True]
    for name, digit in (("ns/shared/1", b"3"), ("ns/shared/2", b"2")):
        assert store.read_into(name, memoryview(row))
        assert bytes(row) == digit * 8192


def test_a_value_that_is_longer_is_a_miss_and_is_counted(shared_master, open_store):
    store = open_store(shared_master.address)
    store.write("ns/lengths", memoryview(bytes(3 * PAGE)))
    for pages in (1, 2):
        row = bytearray(b"x" * (pages * PAGE))
        assert not store.read_into("ns/lengths", memoryview(row))
    assert store.stats()["wrong_lengths"] == 2


def test_a_value_that_is_read_elsewhere_is_removed_and_replaced_without_touching_the_reader(shared_master, open_store):
    """Two clients: what one replaces or deletes all the time, another one gets whole or not at all."""
    writer, reader = open_store(shared_master.address), open_store(shared_master.address)
    nbytes = 1 << 20
    ended = threading.Event()
    whole = mixed = 0

    def read_all_the_time() -> None:
        nonlocal whole, mixed
        row = bytearray(nbytes)
        while not ended.is_set():
            if reader.read_into("ns/race", memoryview(row)) == nbytes:  # a shorter one is what is left of it
                if bytes(row) == bytes(row[:8]) * (nbytes // 8):
                    whole += 1
                else:
                    mixed += 1

    thread = threading.Thread(target=read_all_the_time)
    thread.start()
    try:
        number = 0
        while whole < 200 and number < 2000:
            number += 1
            writer.write("ns/race", memoryview(number.to_bytes(8, "little") * (nbytes // 8)))
            if number % 3 == 0:
                writer.delete(["ns/race"])
    finally:
        ended.set()
        thread.join(PATIENCE)
    assert not mixed
    assert whole >= 200, "the reader has found some"
    assert writer.stats()["removed_in_use"] > 0
    writer.delete(["ns/race"])
    assert list(reader.exists(["ns/race"])) == [False]


def test_values_in_the_registered_rows_move_without_a_copy(shared_master, monkeypatch):
    monkeypatch.setattr(RegisteredMemory, "places", _as_a_device(RegisteredMemory.places))
    region = memoryview(mmap.mmap(-1, 8 * PAGE))
    config = MooncakeConfig(type="mooncake", master=shared_master.address)
    store = MooncakeStore(config, region=region)
    try:
        region[: 2 * PAGE] = b"r" * (2 * PAGE)
        assert store.write_many(["ns/r/1"], [[region[: 2 * PAGE].toreadonly()]]) == [None]
        assert store.read_many_into(["ns/r/1"], [[region[4 * PAGE : 6 * PAGE]]]) == [2 * PAGE]
        assert region[4 * PAGE : 6 * PAGE] == b"r" * (2 * PAGE)
        assert store.stats()["copied_values"] == 0
        row = bytearray(2 * PAGE)  # beside the region, between two that are in it
        three = [[region[: 2 * PAGE]], [memoryview(row)], [region[6 * PAGE :]]]
        assert store.read_many_into(["ns/r/1", "ns/r/1", "ns/r/none"], three) == [2 * PAGE, 2 * PAGE, 0]
        assert bytes(row) == b"r" * (2 * PAGE)
        row[:] = b"s" * len(row)
        assert store.write_many(["ns/r/2"], [[memoryview(row).toreadonly()]]) == [None]
        assert store.read_many_into(["ns/r/2"], [[region[: 2 * PAGE]]]) == [2 * PAGE]
        assert region[: 2 * PAGE] == b"s" * (2 * PAGE)
        assert store.stats()["copied_values"] == 2
    finally:
        store.close()


def _as_a_device(places):
    """Have memory used as a device does, which reads and writes nothing that was not registered."""

    def of_a_device(self, views, *, filled):
        self._direct = False
        return places(self, views, filled=filled)

    return of_a_device


def test_the_address_of_a_view_is_where_its_bytes_are():
    import ctypes

    memory = mmap.mmap(-1, 4 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address_of(memoryview(memory)) == start
    assert address_of(memoryview(memory)[PAGE:].toreadonly()) == start + PAGE


@pytest.fixture
def ssd(client_library, tmp_path, monkeypatch):
    """A master that lets values go down to an SSD, and the options of a process with a directory for them."""
    monkeypatch.setenv("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")  # a close waits for one
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", str(16 << 20))  # 1.25 GiB otherwise
    master = Master(tmp_path / "master", "--enable_offload=true", "--default_kv_lease_ttl=200").start()
    directory = tmp_path / "ssd"
    directory.mkdir()
    yield MooncakeConfig(
        type="mooncake", master=master.address, master_http=master.http, segment="16MiB", offload=directory
    )
    master.kill()


def test_a_directory_for_the_ssd_belongs_to_one_process(ssd):
    for _ in range(2):  # the second one after a close
        first = MooncakeStore(ssd, region=memoryview(b""))
        with contextlib.closing(first), pytest.raises(ConfigError, match=f"is used by process {os.getpid()}"):
            MooncakeStore(ssd, region=memoryview(b""))


def test_what_memory_has_no_room_for_comes_back_from_the_ssd(ssd, monkeypatch):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend")
    with contextlib.closing(MooncakeStore(ssd, region=memoryview(b""))) as store:
        names, mib = [f"ns/ssd/{number}" for number in range(24)], 1 << 20  # in 16 MiB of memory
        values = [memoryview(bytes([number + 1]) * mib) for number in range(24)]

        for name, value in zip(names, values, strict=True):
            wait_until(lambda name=name, value=value: store.write_many([name], [[value]]) == [None], "there is room")
        wait_until(lambda: sum(store.exists(names)) > 16, "more is there than memory has room for", 20)
        found = [bytearray(mib) for _ in names]
        answers = [store.read_into(name, memoryview(row)) for name, row in zip(names, found, strict=True)]
        assert sum(answer > 0 for answer in answers) > 16
        assert all(found[i] == values[i] for i in range(24) if answers[i])
        listed = {entry.name: entry.nbytes for entry in store.list("ns/ssd/")}
        assert len(listed) > 16, "what is on the SSD alone is listed, too"
        assert set(listed.values()) == {mib}


def test_an_ssd_that_the_master_does_not_use_is_named(shared_master, ssd):
    config = ssd.model_copy(update={"master": shared_master.address})
    with pytest.raises(ConfigError, match="--enable_offload=true"):
        MooncakeStore(config, region=memoryview(b""))


def test_a_client_that_is_not_installed_is_named(shared_master):
    code = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from kvtiers_mooncake.client import load_library\n"
        "from kvtiers_mooncake.config import MooncakeConfig\n"
        "load_library(MooncakeConfig(type='mooncake', master='localhost'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "ConfigError: Mooncake's client cannot be loaded" in done.stderr
    assert "pip install mooncake-transfer-engine-non-cuda" in done.stderr
