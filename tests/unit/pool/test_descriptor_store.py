"""A pool's memory in the service manager's descriptor store: what the next keeper takes back, and what never."""

import logging
import mmap
import os
import socket
from pathlib import Path

import pytest
from tests.pool_rig import (
    LAYOUT,
    PREFIX,
    KeeperThread,
    PoolEngine,
    ServiceManager,
    chain,
    pool_figures,
    sleeping,
    wait_until,
    watch,
)

from kvtiers.api import StartError
from kvtiers.pool import keeper_memory
from kvtiers.pool import loan as loan_module
from kvtiers.pool.arena import arena_name
from kvtiers.pool.descriptor_store import DescriptorStore, descriptor_store
from kvtiers.pool.memory import Index, Plane, Shape
from kvtiers.pool.messages import POOL_FORMAT, Hello, Status, encode
from kvtiers.region.memfd import create_memfd
from kvtiers.testing.running import descriptors_left_since, open_descriptors

ROWS = 100
SIZE = ROWS * LAYOUT.row_stride
KEYS = chain(1, 30)
HELLO, INDEX, PLANE = (f"kvtiers-{of}-{arena_name(LAYOUT)}" for of in ("hello", "index", "plane"))
MEMORY = [HELLO, INDEX, PLANE, "kvtiers-rows"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.sock"


@pytest.fixture
def manager(tmp_path):
    return ServiceManager(tmp_path / "notify")


@pytest.fixture
def start(path, manager):
    """Start the next keeper as the manager's service, after the end of the one before it."""
    running = []

    def start(size=SIZE, **options):
        while running:
            running.pop().stop()
        running.append(KeeperThread(path, size, manager=manager, **options))
        return running[-1]

    return start


def leave(path, keys=KEYS):
    """Have an engine store a prompt, and end; return which chunk is in which row."""
    engine = PoolEngine(path)
    engine.store(keys)
    wait_until(engine.is_published, "it is not published")
    return end(path, engine)


def found(path):
    """What an engine finds, of which each byte was compared."""
    engine = PoolEngine(path)
    engine.check()
    return end(path, engine)


def end(path, engine):
    """End an engine, until the keeper has its memory back; return which chunk was in which row."""
    rows = dict(engine.tier._row_of)
    engine.close()
    wait_until(lambda: not pool_figures(path)["lent"], "it is not taken back")
    return rows


def kept(manager, name):
    return dict(manager.kept())[name]


def replace(manager, name, fd):
    manager.remove(name)
    DescriptorStore(manager.address).keep(name, fd)
    os.close(fd)


def test_a_keeper_finds_what_the_one_before_it_had_and_populates_nothing(path, manager, start):
    start()
    rows = leave(path)
    assert manager.names() == MEMORY
    for _ in range(3):
        keeper = start()
        assert found(path) == rows
        figures = keeper.figures()
        assert figures | {"populate_seconds": 0.0, "damaged": 0} == figures
        assert figures["checked"] >= 30, "before the next engine got them"
    assert manager.names() == MEMORY


def test_memory_that_was_never_lent_need_not_be_populated_again(path, manager, start):
    wait_until(start().figures, "it does not serve")
    wait_until(lambda: manager.names() == MEMORY[-1:], "it is not kept")
    keeper = start()
    assert found(path) == {}
    assert keeper.figures()["populate_seconds"] == 0.0


def test_a_row_whose_bytes_have_changed_meanwhile_is_not_found(path, manager, start, caplog):
    start()
    rows = leave(path)
    start().stop()
    with mmap.mmap(kept(manager, "kvtiers-rows"), SIZE) as memory:
        memory[rows[KEYS[7]] * LAYOUT.row_stride + 123] ^= 1
    with caplog.at_level(logging.WARNING):
        keeper = start()
        assert set(found(path)) == set(KEYS) - {KEYS[7]}
    assert keeper.figures()["damaged"] == 1
    assert "1 of them damaged" in caplog.text


def test_an_entry_of_which_a_part_was_written_is_not_found(path, manager, start):
    """Of the first its edition has been written and nothing else, of the second all but the edition."""
    start()
    rows = leave(path)
    start().stop()
    shape = Shape(SIZE, LAYOUT.row_stride)
    index = Index(os.dup(kept(manager, INDEX)), shape, writable=True)
    plane = Plane(os.dup(kept(manager, PLANE)), shape, writable=True)
    first, second = (next(row for row in range(at, ROWS) if row not in rows.values()) for at in (0, 60))
    plane.renew([first, second])
    index.editions[first] = plane.edition(first)
    index.write(second, plane.edition(second), chain(2, 1)[0], b"x" * 16)
    index.void(second)
    plane.renew([rows[KEYS[3]]])
    for each in (index, plane):
        each.close()
    keeper = start()
    assert set(found(path)) == set(KEYS) - {KEYS[3]}
    assert keeper.figures()["damaged"] == 1


@pytest.mark.parametrize("missing", MEMORY[:-1])
def test_of_memory_that_was_kept_in_part_no_chunk_is_found(path, manager, start, missing):
    start()
    leave(path)
    start().stop()
    manager.remove(missing)
    start()
    assert found(path) == {}
    rows = leave(path, chain(2, 20))
    assert manager.names() == MEMORY
    start()
    assert found(path) == rows


def test_without_its_rows_nothing_is_kept(path, manager, start):
    start()
    leave(path)
    start().stop()
    manager.remove("kvtiers-rows")
    start()
    assert found(path) == {}


def memory_of(data):
    fd = create_memfd("other", len(data))
    os.pwrite(fd, data, 0)
    return fd


OTHERS = {
    "hello of another format": (HELLO, encode(Hello(POOL_FORMAT + 1, PREFIX, LAYOUT.to_json()))),
    "no hello": (HELLO, encode(Status())),
    "no message": (HELLO, b"\xc1"),
    "nothing": (HELLO, b"\x00"),
    "no layout": (HELLO, encode(Hello(POOL_FORMAT, PREFIX, "{}"))),
    "another index": (INDEX, bytes(4096 + ROWS * 128)),
    "a short index": (INDEX, b"kvtPOOL\n"),
    "a short plane": (PLANE, bytes(8)),
    "no process": ("kvtiers-process-0", bytes(8)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_a_pools_memory_is_let_go_in_a_line(path, manager, start, caplog, what):
    start()
    leave(path)
    start().stop()
    name, data = OTHERS[what]
    replace(manager, name, memory_of(data))
    start()
    assert found(path) == {}
    (line,) = [record for record in caplog.records if "is let go" in record.message]
    assert line.levelno == logging.WARNING
    rows = leave(path, chain(2, 20))
    assert manager.names() == MEMORY
    start()
    assert found(path) == rows


def test_memory_of_the_format_before_is_let_go_in_a_line(path, manager, start, caplog):
    """Which had one arena, without a name."""
    start()
    leave(path)
    start().stop()
    for name in MEMORY[:-1]:
        fd = os.dup(kept(manager, name)) if name != HELLO else memory_of(encode(Hello(2, "", LAYOUT.to_json())))
        manager.remove(name)
        DescriptorStore(manager.address).keep(name.rpartition("-")[0], fd)
        os.close(fd)
    start()
    assert found(path) == {}
    assert "is let go: it is of another format than 3" in caplog.text
    assert manager.names() == MEMORY


def test_memory_of_another_size_is_let_go_in_a_line(path, manager, start, caplog):
    start()
    leave(path)
    start(2 * SIZE)
    assert found(path) == {}
    assert "is let go: it has 400KiB in pages of 4KiB, and 800KiB in pages of 4KiB are asked for" in caplog.text
    assert manager.names() == MEMORY
    assert os.fstat(kept(manager, "kvtiers-rows")).st_size == 2 * SIZE


def test_memory_with_other_pages_is_let_go_in_a_line(path, manager, start, caplog, monkeypatch):
    start()
    leave(path)
    start().stop()
    monkeypatch.setattr(keeper_memory, "HUGE_PAGE_BYTES", {"off": 8192})  # as if these were asked for
    start()
    assert found(path) == {}
    assert "is let go: it has 400KiB in pages of 4KiB, and 400KiB in pages of 8KiB are asked for" in caplog.text
    assert manager.names() == MEMORY


@pytest.mark.parametrize("name", MEMORY)
def test_of_what_was_kept_twice_nothing_is_used(path, manager, start, caplog, name):
    start()
    leave(path)
    start().stop()
    manager.keep_again(name)
    start()
    assert found(path) == {}
    assert f"is let go: there are two of {name}" in caplog.text
    assert manager.names() == MEMORY


def test_chunks_of_other_weights_are_not_found_and_those_stored_since_are(path, manager, start):
    keeper = start()
    leave(path)
    engine = PoolEngine(path)
    engine.tier.reset_cache()
    prefix = PREFIX.replace("default", "other")
    engine.loan.rename(prefix)
    engine.store(chain(2, 10))
    wait_until(lambda: keeper.figures()["chunks"] == 10, "it is not published")
    engine.close()
    wait_until(lambda: not keeper.figures()["lent"], "it is not taken back")
    keeper = start()
    wait_until(lambda: keeper.figures()["checked"] == 10, "its rows are not checked")
    engine = PoolEngine(path, prefix=prefix)
    assert engine.check() == 10


def test_an_engine_that_lives_on_keeps_its_memory_from_others(path, manager, start):
    start()
    engine = PoolEngine(path)
    engine.store(KEYS)
    wait_until(engine.is_published, "it is not published")
    assert manager.names() == sorted([*MEMORY, "kvtiers-process-0--1"])
    with engine.loan._sending:  # it comes late
        keeper = start()
        wait_until(lambda: keeper.figures()["engine"] == os.getpid(), "it is not known who has it")
        with pytest.raises(StartError, match=f"process {os.getpid()} has its memory"):
            PoolEngine(path, in_use_seconds=0.2)
    wait_until(lambda: keeper.figures()["engine_connected"], "the memory is not brought")
    engine.store(chain(2, 20))
    wait_until(engine.is_published, "it is not published")
    figures = keeper.figures()
    assert figures | {"engines": 1, "watched": 1} == figures
    rows = end(path, engine)
    assert found(path) == rows
    assert manager.names() == MEMORY


@pytest.mark.parametrize(("name", "nbytes"), [(PLANE, 14 * ROWS), (INDEX, (1 << 14) + 128 * ROWS)])
def test_an_engine_that_lives_on_knows_better_than_what_was_kept(path, manager, start, name, nbytes):
    """Else the keeper watches a plane that nobody writes: a row leased again while it is hashed has an entry."""
    start()
    engine = PoolEngine(path)
    engine.store(KEYS)
    wait_until(engine.is_published, "it is not published")
    start().stop()
    other = bytearray(nbytes)
    if name == INDEX:
        other[:32] = Shape(SIZE, LAYOUT.row_stride).head()
    replace(manager, name, memory_of(bytes(other)))
    keeper = start()
    wait_until(lambda: keeper.figures()["engine_connected"], "the memory is not brought")
    assert keeper.figures()["chunks"] == 30
    engine.store(chain(2, 20))
    wait_until(engine.is_published, "it is not published")
    rows = end(path, engine)
    assert found(path) == rows
    start()
    assert found(path) == rows


def test_the_processes_of_an_engine_that_lives_on_are_those_that_it_names(path, manager, start):
    keeper = start()
    with sleeping() as gone, sleeping() as before, sleeping() as rank:
        engine = PoolEngine(path)
        watch(engine, 0, before)
        watch(engine, 1, gone)
        wait_until(lambda: keeper.figures()["watched"] == 3, "the ranks are not watched")
        keeper.stop()
        engine.loan.unwatch(1)
        watch(engine, 0, rank)
        keeper = start()
        wait_until(lambda: keeper.figures()["engine_connected"], "the memory is not brought")
        processes = [{"pid": os.getpid(), "rank": -1}, {"pid": rank.pid, "rank": 0}]
        assert keeper.figures()["processes"] == processes
        keeper.stop()
        manager.remove("kvtiers-process-0--1")
        engine.close()
        keeper = start()
        assert keeper.figures()["processes"] == processes[1:]


def test_memory_of_an_engine_that_ended_without_a_keeper_is_lent_after_the_last_rank_has_ended(path, manager, start):
    keeper = start()
    engine = PoolEngine(path)
    engine.store(KEYS)
    wait_until(engine.is_published, "it is not published")
    with sleeping() as rank:
        watch(engine, 0, rank)
        wait_until(lambda: keeper.figures()["watched"] == 2, "the rank is not watched")
        keeper.stop()
        engine.close()
        manager.remove("kvtiers-process-0--1")  # the engine's own process, as it were
        keeper = start()
        figures = keeper.figures()
        assert figures | {"lent": True, "engine": 0, "processes": [{"pid": rank.pid, "rank": 0}]} == figures
        assert figures["checked"] == 0, "its copies may go on"
    assert len(found(path)) == 30
    assert manager.names() == MEMORY


def test_memory_that_somebody_unknown_has_open_is_not_lent(path, manager, start):
    keeper = start()
    engine = PoolEngine(path)
    engine.store(KEYS)
    wait_until(engine.is_published, "it is not published")
    rows = engine.loan.take_rows()
    keeper.stop()
    engine.close()
    manager.remove("kvtiers-process-0--1")
    keeper = start()
    with pytest.raises(StartError, match="the engine of another keeper has its memory"):
        PoolEngine(path, deadline=0.1)
    os.close(rows)
    assert len(found(path)) == 30


def test_a_keeper_that_took_memory_back_takes_no_other(path, manager, start, caplog):
    """An engine whose keeper was another one long ago must not cost the chunks of all since."""
    alone = KeeperThread(path, SIZE)
    engine = PoolEngine(path)
    engine.store(KEYS)
    wait_until(engine.is_published, "it is not published")
    with engine.loan._sending:  # it comes late
        alone.stop()
        start()
        rows = leave(path, chain(2, 20))
        keeper = start()
        wait_until(lambda: keeper.figures()["checked"] == 20, "its rows are not checked")
    wait_until(lambda: "this keeper has other memory by now" in caplog.text, "it does not ask")
    engine.close()
    assert found(path) == rows


def test_the_process_of_an_engine_that_has_given_up_is_not_kept(path, manager, start, monkeypatch):
    def refused(*_):
        raise StartError("it has given up")

    start()
    with monkeypatch.context() as patched:
        patched.setattr(loan_module.PoolLoan, "__init__", refused)
        with pytest.raises(StartError, match="given up"):
            PoolEngine(path)
    wait_until(lambda: manager.names() == MEMORY, "it is kept")


def test_a_keeper_goes_on_without_its_service_manager(path, manager, start, caplog):
    start()
    place = Path(manager.address)
    hidden = place.rename(place.with_name("not"))
    leave(path)
    assert found(path)
    assert "the service manager cannot be told" in caplog.text
    hidden.rename(place)


def test_a_service_manager_that_takes_nothing_is_waited_for_once(tmp_path, caplog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        store = DescriptorStore(str(tmp_path / "notify"), seconds=0.05)
        for _ in range(10_000):
            store.drop("kvtiers-rows")
        store.settle()
    assert caplog.text.count("the service manager takes nothing") == 1


def test_nothing_is_left_behind(path, manager, start):
    before = open_descriptors()
    start()
    leave(path)
    start().stop()
    start(2 * SIZE).stop()
    for name in manager.names():
        manager.remove(name)
    assert descriptors_left_since(before) == []


# -- the environment


def test_descriptors_of_another_process_are_not_taken():
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b", "OTHER": "x"}
    assert descriptor_store(environment).found == []
    assert environment == {"OTHER": "x"}, "a child could take them for its own"


@pytest.mark.parametrize("address", ["", "vsock:1:2"])
def test_where_there_is_no_service_manager_nothing_is_kept(address):
    store = descriptor_store({"NOTIFY_SOCKET": address})
    store.keep("kvtiers-rows", 0)
    store.is_ready()
    store.settle()


def test_an_abstract_socket_is_told_too():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0kvtiers-test-{os.getpid()}")
        descriptor_store({"NOTIFY_SOCKET": f"@kvtiers-test-{os.getpid()}"}).is_ready()
        assert sock.recv(100) == b"READY=1"
