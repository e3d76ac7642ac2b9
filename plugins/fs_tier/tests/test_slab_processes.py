"""Several processes on one slab, some of them killed at any moment."""

import contextlib
import fcntl
import hashlib
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from kvtiers.api import NotKept
from kvtiers_fs.slab.format import Row
from kvtiers_fs.slab.index import INDEX_FILE

pytestmark = pytest.mark.slow

PAGE = 4096
PAGES = 4
PATIENCE = 60.0
CAPACITY = 4 << 20

# A value has at every place whose it is, who wrote it, and when.
_WORKER = """
import hashlib, mmap, random, sys
from kvtiers.api import NotKept
from kvtiers_fs.config import FsConfig
from kvtiers_fs.slab.store import SlabStore
from kvtiers_fs.waits import Waits

waits = Waits(lock=60.0)  # also where a busy machine keeps another process, which has the lock, waiting
path, *numbers = sys.argv[1:]
capacity, pages, seed, turns = map(int, numbers)
store = SlabStore(FsConfig(type="fs", path=path, capacity=capacity, min_free=0, layout="slab"), waits=waits)
choice = random.Random(seed)
memory = memoryview(mmap.mmap(-1, 8 * 4096)), memoryview(mmap.mmap(-1, 8 * 4096))
names = [f"ns/model-{'0' * 24}/{number:064x}" for number in range(600)]

def mark(name, turn):
    return hashlib.sha256(name.encode()).digest()[:8] + seed.to_bytes(4, "little") + turn.to_bytes(4, "little")

print("ready", flush=True)
for turn in range(turns):
    number = choice.randrange(len(names))
    name, nbytes = names[number], (1 + number % pages) * 4096
    source, target = memory[0][:nbytes], memory[1][:nbytes]
    if choice.random() < 0.6:
        source[:] = mark(name, turn) * (nbytes // 16)
        try:
            store.write(name, source)
        except NotKept:
            pass
    elif choice.random() < 0.9:
        if store.read_into(name, target) == len(target):
            assert target[:8] == mark(name, 0)[:8], "a reader got another key's value"
            assert target == bytes(target[:16]) * (nbytes // 16), "a reader got a mix of two writes"
    else:
        store.delete([name])
print("done", flush=True)
sys.stdin.read()
store.close()
"""


def start(folder, seed, turns):
    command = [sys.executable, "-c", _WORKER, folder.path, CAPACITY, PAGES, seed, turns]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    worker = subprocess.Popen(list(map(str, command)), text=True, **pipes)
    assert worker.stdout.readline() == "ready\n", worker.stderr.read()
    return worker


def end(worker):
    worker.stdin.close()
    out = worker.stdout.read()  # and not communicate(): that leaves out what came along with the first line
    errors = worker.stderr.read()
    assert (out, worker.wait(timeout=120)) == ("done\n", 0), errors
    worker.stdout.close()
    worker.stderr.close()


def check_all(store, read):
    """Read each value that is listed: it is its own, and whole."""
    entries = list(store.list(""))
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        content = read(store, entry.name, entry.nbytes // PAGE)
        assert content is not None, "a value is listed that is not there"
        assert content[:8] == hashlib.sha256(entry.name.encode()).digest()[:8]
        assert content == content[:16] * (entry.nbytes // 16)
    assert all(store.exists([entry.name for entry in entries]))
    return len(entries)


def test_processes_that_write_read_delete_and_evict_together_keep_whole_values(slab_folder, read):
    workers = [start(slab_folder, seed, 2500) for seed in range(3)]
    for worker in workers:
        end(worker)
    store = slab_folder.open(CAPACITY)
    assert check_all(store, read) > 100
    assert slab_folder.segments() <= CAPACITY // store.slab.index.header.segment_bytes
    slab_folder.settle(store)
    store._evictor.stop(120)  # what it moves while it is listed would be listed twice
    assert store.stats()["values"] >= check_all(store, read)


def test_a_slab_survives_processes_that_are_killed_at_any_moment(slab_folder, read, value):
    choice = random.Random(11)
    store = slab_folder.open(CAPACITY)
    survivor = start(slab_folder, 99, 4000)
    for turn in range(8):
        worker = start(slab_folder, turn, 1 << 30)
        time.sleep(choice.uniform(0.0, 0.12))  # the moment of the kill
        worker.kill()
        worker.communicate()
    end(survivor)
    assert check_all(store, read) > 100
    # What the killed ones had begun is gone on with: no segment is lost to them.
    again = slab_folder.open(CAPACITY)
    assert check_all(again, read) > 100
    assert slab_folder.segments() <= CAPACITY // store.slab.index.header.segment_bytes
    for number in range(200):
        again.write(f"ns/after/{number:064x}", value(number % 251, 4))
    after = again.exists([f"ns/after/{number:064x}" for number in range(200)])
    others = sum(not entry.name.startswith("ns/after/") for entry in again.list(""))
    # What was read above is in use: a quarter of each evicted segment is copied on, and takes the place of the oldest
    # of these. Of eight segments, with room for 32 each, either store may hold one ready and another that is not full.
    assert after == sorted(after)
    assert sum(after) > 100
    assert sum(after) + others >= 4 * 32


def test_the_segment_of_a_killed_process_is_written_on_where_it_ended(slab_folder, read, value):
    worker = start(slab_folder, 1, 60)
    assert worker.stdout.readline() == "done\n"
    store = slab_folder.open(CAPACITY)
    worker.kill()
    worker.communicate()
    begun = {number: row for number, row in enumerate(store.slab.index.rows()) if row.birth and not row.filled}
    before = check_all(store, read)
    store.write("ns/a", value(7))
    (number,) = begun
    row = store.slab.index.row(number)
    assert (row.edition, row.pages) == (begun[number].edition, begun[number].pages + 1)
    assert sum(entry.name != "ns/a" for entry in store.list("")) == before
    assert read(store, "ns/a") == bytes(value(7))


def test_what_one_store_writes_or_deletes_another_sees_at_once_and_a_later_one_too(slab_folder, read, value):
    one, other = slab_folder.open(CAPACITY), slab_folder.open(CAPACITY)
    one.write("ns/a", value(1))
    assert other.exists(["ns/a"]) == [True]
    assert read(other, "ns/a") == bytes(value(1))
    other.write("ns/a", value(2, pages=2))
    assert read(one, "ns/a", 2) == bytes(value(2, pages=2))
    assert read(one, "ns/a", 1) is None
    one.write("ns/b", value(3))
    one.delete(["ns/a"])
    assert other.exists(["ns/a", "ns/b"]) == [False, True]
    slab_folder.close()
    later = slab_folder.open(CAPACITY)
    assert later.exists(["ns/a", "ns/b"]) == [False, True]
    assert read(later, "ns/b") == bytes(value(3))


def test_a_process_that_is_stopped_with_the_lock_costs_writes_and_no_reads(slab_folder, read, value):
    slab_folder.open(CAPACITY).write("ns/a", value(1))
    store = slab_folder.open(CAPACITY, waits=replace(slab_folder.waits, lock=0.05))
    with (slab_folder.path / INDEX_FILE).open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert read(store, "ns/a") == bytes(value(1))
        assert store.exists(["ns/a"]) == [True]
        with pytest.raises(NotKept, match="locked"):
            store.write("ns/b", value(2))
        with pytest.raises(TimeoutError):
            store.delete(["ns/a"])
    until = time.monotonic() + PATIENCE
    while store.exists(["ns/b"]) == [False]:
        assert time.monotonic() < until
        with contextlib.suppress(NotKept):  # an evictor has the lock, on a busy machine for longer
            store.write("ns/b", value(2))
    assert read(store, "ns/b") == bytes(value(2))


# -- a row that is read while its owner writes it


def torn_once(monkeypatch, index):
    """Let the next look at all rows come in the middle of a write to the first one."""
    table = index._table

    def torn():
        monkeypatch.setattr(index, "_table", table)
        data = bytearray(table())
        data[12] ^= 1
        return bytes(data)

    monkeypatch.setattr(index, "_table", torn)


def quiet(monkeypatch, store):
    """Let the store's thread do nothing by itself."""
    monkeypatch.setattr(store._evictor, "round", lambda: None)


def test_a_row_that_is_being_written_is_read_again(slab_folder, value, monkeypatch):
    one = slab_folder.open(CAPACITY)
    quiet(monkeypatch, one)
    one.write("ns/a", value(1))
    index = one.slab.index
    torn_once(monkeypatch, index)
    assert index.rows()[0] == index.row(0)
    assert index.row(0).values == 1


def test_a_row_that_looks_unused_for_a_moment_is_not_overwritten(slab_folder, read, value, monkeypatch):
    one, other = slab_folder.open(CAPACITY), slab_folder.open(CAPACITY)
    for store in (one, other):
        quiet(monkeypatch, store)
    one.write("ns/a", value(1))
    index, birth = other.slab.index, one.slab.index.row(0).birth
    rows, calls = index.rows, []
    # The first two looks are for segments that were begun, or are empty; the third is for an unused row.
    monkeypatch.setattr(
        index, "rows", lambda: [Row(), *rows()[1:]] if (calls.append(1), len(calls))[1] <= 3 else rows()
    )
    other.write("ns/b", value(2))
    one.write("ns/c", value(3))
    assert one.slab.index.row(0).birth == birth
    assert [read(one, f"ns/{name}") for name in "abc"] == [bytes(value(number)) for number in (1, 2, 3)]


def test_a_claim_by_a_row_of_other_files_fails_and_holds_nothing(slab_folder, value, monkeypatch):
    one, other = slab_folder.open(CAPACITY), slab_folder.open(CAPACITY)
    for store in (one, other):
        quiet(monkeypatch, store)
    one.write("ns/a", value(1))
    segments, birth = other.slab.segments, one.slab.index.row(0).birth
    segments._make_files(segments.stem(birth + 7), 1 << 19)
    assert segments.claim(0, Row(birth + 7, birth + 7)) is None
    path = slab_folder.path / f"{segments.stem(birth + 7)}.values"
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_list_of_names_is_not_removed_because_its_row_was_being_written(slab_folder, value, monkeypatch):
    one, other = slab_folder.open(CAPACITY), slab_folder.open(CAPACITY)
    for store in (one, other):
        quiet(monkeypatch, store)
    one.write("ns/a", value(1))
    (names,) = slab_folder.path.glob("slab-*.names")
    os.utime(names, (1, 1))
    torn_once(monkeypatch, other.slab.index)
    other._evictor._remove_orphans(other.slab)
    assert names.exists()
