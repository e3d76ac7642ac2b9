import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from kvtiers.api import NotKept
from kvtiers_fs.evictor import free_bytes
from kvtiers_fs.plugin import FIGURES, FsConfig
from kvtiers_fs.store import FsStore

PAGE = 4096
DAY = 86400.0


def fill(store, names, value, *, pages=1):
    """Write all names; one that is refused while the evictor works is written again."""
    until = time.monotonic() + 60
    for name in names:
        while True:
            try:
                store.write(name, value(1, pages))
                break
            except NotKept:
                assert time.monotonic() < until, "there is never room"


def test_those_not_used_for_longest_go_first(folder, value, names):
    store = folder.open(capacity=100 * PAGE)
    written = names(90)
    for age, name in enumerate(random.Random(3).sample(written, 90)):
        store.write(name, value(1))
        folder.age(name, 1000.0 * (1 + age))
    oldest = sorted(written, key=lambda name: folder.file(name).stat().st_mtime)
    fill(store, names(8), value)
    folder.settle(store)
    left = set(folder.names(store))
    gone = [name for name in oldest if name not in left]
    assert gone == oldest[: len(gone)]
    assert gone
    assert len(left) <= 95


def test_a_read_value_stays_and_one_that_was_only_asked_for_goes(folder, value, names, read):
    store = folder.open(capacity=20 * PAGE)
    written = names(18)
    for name in written:
        store.write(name, value(1))
        folder.age(name, DAY)
    assert read(store, written[0])
    assert store.exists(written) == [True] * 18
    fill(store, names(15), value)
    folder.settle(store)
    assert store.exists(written[:1]) == [True]
    assert not all(store.exists(written[1:]))


@pytest.mark.slow
def test_the_capacity_is_never_passed_and_stays_in_use(folder, value, names):
    store = folder.open(capacity=200 * PAGE)
    written, most = names(1500), 0
    for number, name in enumerate(written):
        fill(store, [name], value)
        if number % 5 == 0:
            most = max(most, folder.held())
    assert most <= 200 * PAGE
    folder.settle(store)
    held = folder.held()
    assert 0.9 * 200 * PAGE <= held <= 0.95 * 200 * PAGE
    stats = store.stats()
    assert set(stats) == set(FIGURES) - {"segments", "kept_values"}
    assert stats["bytes"] == held
    assert stats["values"] == held // PAGE
    assert stats["evicted_values"] == 1500 - held // PAGE
    assert stats["evicted_bytes"] == stats["evicted_values"] * PAGE


def test_usage_is_known_after_a_restart_and_the_capacity_still_holds(folder, value, names):
    fill(folder.open(capacity=100 * PAGE), names(80), value)
    folder.close()
    store = folder.open(capacity=100 * PAGE)
    assert (store.stats()["values"], store.stats()["bytes"]) == (80, 80 * PAGE)
    fill(store, names(40), value)
    folder.settle(store)
    assert len(folder.files()) <= 95


def test_a_smaller_capacity_is_kept_from_the_next_start_on(folder, value, names):
    fill(folder.open(capacity=100 * PAGE), names(90), value)
    folder.close()
    folder.settle(folder.open(capacity=50 * PAGE))
    assert 40 < len(folder.files()) <= 47


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "flipped", "of another kind"])
def test_a_usage_file_that_is_gone_or_broken_is_made_again(folder, value, names, harm):
    fill(folder.open(capacity=100 * PAGE), names(60), value)
    folder.close()
    usage = folder.path / ".usage"
    content = usage.read_bytes()
    if harm == "missing":
        usage.unlink()
    else:
        flipped = bytes([content[0]]) + bytes([content[1] ^ 1]) + content[2:]
        usage.write_bytes({"empty": b"", "cut": content[:100], "flipped": flipped}.get(harm, b"x" * len(content)))
    store = folder.open(capacity=100 * PAGE)
    folder.settle(store)
    assert (store.stats()["values"], store.stats()["bytes"]) == (60, 60 * PAGE)
    fill(store, names(60), value)
    folder.settle(store)
    assert len(folder.files()) <= 95


def test_a_mistake_in_the_usage_is_found_by_counting(folder, value, names):
    store = folder.open(capacity=1000 * PAGE)
    fill(store, names(50), value)
    folder.settle(store)
    for path in folder.files()[:20]:
        path.unlink()  # behind the store's back
    with folder.index_of(store) as index:
        index.next_count = 0.0  # it is time to count on
    folder.settle(store)
    assert store.stats()["values"] == 30


def test_values_past_their_age_are_removed(folder, value, names):
    store = folder.open(max_age="2d")
    old, young = names(5), names(5)
    for name in (*old, *young):
        store.write(name, value(1))
    for name in old:
        folder.age(name, 3 * DAY)
    folder.count_again(store)
    assert folder.names(store) == sorted(young)
    assert store.stats()["expired_values"] == 5
    assert len(folder.files()) == 5


def test_orphaned_temporary_files_are_reclaimed_and_those_being_written_are_not(folder, value, names):
    store = folder.open()
    [name] = names(1)
    store.write(name, value(1))
    shard = folder.file(name).parent
    orphans = [shard / ".tmp-dead-0", folder.path / ".tmp-direct-dead"]
    busy = [shard / ".tmp-busy-0", folder.path / ".tmp-format-busy"]
    for path in (*orphans, *busy):
        path.write_bytes(b"x" * PAGE)
    for path in orphans:
        os.utime(path, (time.time() - 700, time.time() - 700))
    assert folder.names(store) == [name]
    folder.count_again(store)
    assert sorted(folder.temps()) == sorted(busy)
    assert store.stats()["reclaimed_files"] == 2
    assert folder.names(store) == [name]


def test_empty_folders_of_models_that_are_gone_are_removed(folder, value, names):
    store = folder.open()
    gone, kept = names(3, model="gone-" + "0" * 24), names(1)
    for name in (*gone, *kept):
        store.write(name, value(1))
    for name in gone:
        folder.file(name).unlink()
    folder.count_again(store)
    assert [path.name for path in (folder.path / "ns").iterdir()] == ["model-0123456789abcdef01234567"]


def test_files_that_are_not_ours_are_neither_listed_nor_counted_nor_removed(folder, value, names):
    store = folder.open(max_age="1d")
    [name] = names(1)
    store.write(name, value(1))
    foreign = [folder.file(name).parent / "README.TXT", folder.path / "notes.txt", folder.file(name).parent / "A%41"]
    for path in foreign:
        path.write_text("x")
        os.utime(path, (0, 0))
    folder.count_again(store)
    assert all(path.exists() for path in foreign)
    assert folder.names(store) == [name]
    assert store.stats()["values"] == 1


def test_a_full_disk_drops_the_write_leaves_nothing_of_it_and_makes_room(folder, mounted, value, names, read):
    mounted("tmpfs", "size=4m,mode=0700")
    store = folder.open(capacity="64MiB")
    written, dropped = names(3000), 0
    for number, name in enumerate(written):
        try:
            store.write(name, value(number % 251))
        except NotKept:
            dropped += 1
    assert dropped
    assert not folder.temps()
    for number, name in enumerate(written):
        assert read(store, name) in (None, bytes(value(number % 251)))
    assert store.stats()["dropped_values"] == dropped
    store._evictor._next_floor = 0.0
    had_room = wrote(store, names(1)[0], value)
    folder.settle(store)
    assert not had_room or store.stats()["evicted_values"]
    assert wrote(store, names(1)[0], value)


def wrote(store, name, value) -> bool:
    try:
        store.write(name, value(1))
    except NotKept:
        return False
    return True


def room(folder):
    """What the file system has for others."""
    fd = os.open(folder.path, os.O_RDONLY)
    try:
        return free_bytes(fd)
    finally:
        os.close(fd)


def test_the_free_space_floor_is_kept_and_values_give_way_to_others(folder, mounted, value, names):
    mounted("tmpfs", "size=8m,mode=0700")
    store = folder.open(capacity="64MiB", min_free="4MiB")
    lowest = 1 << 60
    for name in names(2000):
        wrote(store, name, value)
        lowest = min(lowest, room(folder))
    assert lowest >= 4 << 20
    store._evictor._next_floor = 0.0
    folder.settle(store)  # what the refused writes asked for is done
    held = len(folder.files())
    assert held > 300
    (folder.path / "others").write_bytes(b"x" * (2 << 20))
    assert room(folder) < 4 << 20
    store._evictor._next_floor = 0.0
    folder.settle(store)
    assert room(folder) >= 4 << 20
    assert len(folder.files()) < held


_TOO_LARGE = """
import resource, sys
from kvtiers.api import NotKept
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store = FsStore(FsConfig(type="fs", path=sys.argv[1], capacity="1GiB", min_free=0))
store.write("ns/m/small", memoryview(bytes(8192)))
try:
    store.write("ns/m/large", memoryview(bytes(16384)))
except NotKept as error:
    print(error)
print(sorted(entry.name for entry in store.list("")))
"""


def test_a_limit_that_the_system_sets_in_the_middle_of_a_value_drops_it(folder):
    command = [sys.executable, "-c", _TOO_LARGE, str(folder.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, left = done.stdout.splitlines()
    assert said.startswith("a value of 16384 bytes is a larger file than the file system or this process may have")
    assert left == "['ns/m/small']"
    assert not folder.temps()


def test_an_error_of_the_disk_is_an_error_and_not_a_full_store(folder, value, names, monkeypatch):
    store = folder.open()

    def broken(*_args, **_kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", broken)
        with pytest.raises(OSError, match="Input/output error"):
            store.write(names(1)[0], value(1))
    assert not folder.temps()
    store.write(names(1)[0], value(1))


def test_writers_are_not_kept_waiting_while_another_process_holds_the_lock(folder, value, names, read, monkeypatch):
    store = folder.open(capacity=256 * PAGE, deadline="400ms", waits=replace(folder.waits, refusals=DAY))
    [name] = names(1)
    store.write(name, value(1))
    folder.settle(store)
    waits, wait_for = [], store._ledger._changed.wait_for
    monkeypatch.setattr(store._ledger._changed, "wait_for", lambda *of: waits.append(of) or wait_for(*of))
    with (folder.path / ".usage").open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        written = [wrote(store, other, value) for other in names(300)]
        assert read(store, name)
        assert store.exists([name]) == [True]
    # What fits without a report is written; then one write waits a moment, and the others are refused at once.
    assert 0 < sum(written) < 10
    [(_, seconds)] = waits
    assert seconds <= 0.1, "a quarter of the deadline, or the engine would take it for a store that hangs"
    folder.settle(store)
    assert wrote(store, names(1)[0], value)


def test_a_write_waits_for_the_report_and_not_for_the_count_that_comes_after_it(folder, value, names, monkeypatch):
    store = folder.open(capacity=256 * PAGE)  # of which a step is two pages
    first, second, third = names(3)
    folder.settle(store)
    counts, goes_on, waits = threading.Event(), threading.Event(), threading.Event()
    wait_for = store._ledger._changed.wait_for
    monkeypatch.setattr(store._ledger._changed, "wait_for", lambda *of: waits.set() or wait_for(*of))
    try:
        with (folder.path / ".usage").open() as holder:
            with store._evictor.turn:  # else a round that counts could have the lock, for ever
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                monkeypatch.setattr(store._evictor, "_count", lambda *_: counts.set() or goes_on.wait())
            store.write(first, value(1))
            store.write(second, value(2))
            writer = threading.Thread(target=store.write, args=[third, value(3)])
            writer.start()
            assert waits.wait(60)
        writer.join(60)
        assert not writer.is_alive()
        assert counts.wait(60)
        assert store.exists([third]) == [True]
    finally:
        goes_on.set()


def test_while_the_file_system_hangs_figures_are_reported_and_the_end_does_not_wait_for_it(
    folder, value, names, monkeypatch
):
    store = folder.open(waits=replace(folder.waits, close=0.5))
    store.write(names(1)[0], value(1))
    folder.settle(store)
    hangs, goes_on = threading.Event(), threading.Event()

    def hanging(_fd):
        hangs.set()
        goes_on.wait()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("kvtiers_fs.evictor.free_bytes", hanging)
    try:
        store.write(names(2)[1], value(2))
        store._evictor.wake()
        assert hangs.wait(60)
        assert store.stats()["values"] == 1
        store.close()
        os.fstat(store._directory.fd)  # its thread still uses the descriptor
    finally:
        goes_on.set()
    assert store._evictor.stop(60)
    store.close()
    folder.stores.remove(store)


def test_values_from_when_a_clock_was_ahead_do_not_stay_for_ever(folder, value, names):
    store = folder.open(capacity=100 * PAGE)
    ahead = names(90)
    for name in ahead:
        store.write(name, value(1))
        folder.age(name, -365 * DAY)
    later = names(200)
    fill(store, later, value)
    folder.settle(store)
    left = set(folder.names(store))
    assert not left & set(ahead), "what was written when the clock was ahead is never the oldest"
    assert set(later[-50:]) <= left


def test_a_read_puts_the_time_of_a_value_right_that_is_from_when_a_clock_was_ahead(folder, value, names, read):
    store = folder.open()
    [name] = names(1)
    store.write(name, value(1))
    folder.age(name, -365 * DAY)
    assert read(store, name)
    assert folder.file(name).stat().st_mtime < time.time() + DAY


def test_a_killed_writers_file_from_when_a_clock_was_ahead_is_reclaimed(folder, value, names):
    store = folder.open()
    [name] = names(1)
    store.write(name, value(1))
    left = folder.file(name).with_name(".tmp-of-a-killed-writer")
    left.write_bytes(b"half")
    folder.age_file(left, -365 * DAY)
    folder.count_again(store)
    assert left.stat().st_mtime < time.time() + DAY, "its time is put right; it may be in use"
    folder.age_file(left, 3600)
    folder.count_again(store)
    assert not left.exists()


NESTED = 1400


def _nest(path, part):
    at = os.open(path, os.O_RDONLY)
    for _ in range(NESTED):
        os.mkdir(part, dir_fd=at)
        before, at = at, os.open(part, os.O_RDONLY, dir_fd=at)
        os.close(before)
    os.close(at)


@pytest.mark.parametrize(
    "foreign",
    [b"\xff+", b"\xff.txt", b".tmp-folder", b"abc+", b"a", b"a" * 200 + b"+", b"@00"],
    ids=lambda name: repr(name)[:9],
)
def test_a_foreign_folder_costs_no_eviction_and_no_listing(folder, value, names, foreign):
    """Neither one that is nested too deep, nor one whose name is no UTF-8, nor one in a temporary file's place."""
    folder.path.mkdir(0o700)
    store = folder.open(capacity=100 * PAGE)
    inner = folder.path / os.fsdecode(foreign)
    inner.mkdir()
    if foreign.startswith(b"a"):
        _nest(inner, foreign.decode())
    else:
        (inner / os.fsdecode(b"\xfe")).write_bytes(b"x")
        folder.age_file(inner, DAY)
    fill(store, names(300), value)
    folder.settle(store)
    assert store.stats()["evicted_values"] >= 200
    assert len(folder.names(store)) == store.stats()["values"] <= 95
    assert store.stats()["skipped"] <= 1, "which is not empty, or longer than a path may be"
    subprocess.run(["rm", "-rf", str(inner)], check=True)


def test_a_temporary_folder_of_a_killed_writer_is_removed(folder):
    store = folder.open()
    left = folder.path / ".tmp-folder-0123"
    left.mkdir()
    folder.settle(store)
    assert left.exists(), "it may be just being made"
    folder.age_file(left, DAY)
    folder.count_again(store)
    assert not left.exists()
    assert store.stats()["reclaimed_files"] == 1


def test_a_file_that_cannot_be_removed_costs_no_other_its_eviction(folder, value, names, monkeypatch):
    store = folder.open(capacity=100 * PAGE)
    kept = names(20)
    fill(store, kept, value)
    for name in kept:
        folder.age(name, DAY)
    shut = {folder.file(name).name for name in kept}
    original = os.unlink

    def refuse(leaf, **where):
        if leaf in shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        original(leaf, **where)

    monkeypatch.setattr(os, "unlink", refuse)
    fill(store, names(300), value)
    folder.settle(store)
    assert set(kept) <= set(folder.names(store))
    assert store.stats()["evicted_values"] >= 200
    assert store.stats()["values"] <= 95
    assert store.stats()["skipped"] == 20


def test_a_file_with_holes_that_is_larger_than_the_capacity_costs_no_value(folder, value, names):
    store = folder.open(capacity=100 * PAGE)
    written = names(90)
    fill(store, written, value)
    for name in written:
        folder.age(name, DAY)
    planted = folder.file(written[0]).with_name(names(1)[0].rpartition("/")[2])
    with planted.open("wb") as file:
        file.truncate(1 << 40)
    folder.count_again(store)
    assert store.exists(written) == [True] * 90
    assert not planted.exists()
    assert store.stats()["bytes"] == 90 * PAGE


def test_a_tiers_directory_inside_anothers_keeps_its_values(folder, value, names):
    outer = folder.open(capacity=100 * PAGE)
    fill(outer, names(80), value)
    config = FsConfig(type="fs", path=folder.path / "inner", capacity=100 * PAGE, min_free=0)
    inner = FsStore(config, waits=folder.waits)
    folder.stores.append(inner)
    kept = names(60)
    fill(inner, kept, value)
    for name in kept:
        path = config.path / folder.file(name).relative_to(folder.path)
        folder.age_file(path, DAY)
    folder.count_again(outer)
    fill(outer, names(200), value)
    folder.settle(outer)
    assert inner.exists(kept) == [True] * 60
    assert not any(name.startswith("inner/") for name in folder.names(outer))
    assert outer.stats()["values"] <= 95
