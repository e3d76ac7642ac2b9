import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from kvtiers.api import ConfigError, NotKept

HOUR = 3600.0


def test_files_and_folders_are_the_owners_alone_whatever_the_umask(folder, value, names):
    before = os.umask(0o022)
    try:
        store = folder.open()
        [name] = names(1)
        store.write(name, value(1))
        folder.close()
    finally:
        os.umask(before)
    for path in [folder.path, *folder.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_with_a_mode_and_a_group_its_members_can_use_everything(folder, value, names, group):
    before = os.umask(0o077)
    try:
        store = folder.open(mode="0660", group=str(group))
        store.write(names(1)[0], value(1))
        folder.close()
    finally:
        os.umask(before)
    for path in [folder.path, *folder.path.rglob("*")]:
        about = path.stat()
        assert stat.S_IMODE(about.st_mode) == (0o770 if path.is_dir() else 0o660), path
        assert about.st_gid == group, path


def test_a_read_refreshes_a_value_that_was_not_used_for_an_hour_and_no_other(folder, value, names, read):
    store = folder.open()
    old, recent, asked = names(3)
    for name in (old, recent):
        store.write(name, value(1))
    store.write(asked, value(1, pages=2))
    folder.age(old, 1.1 * HOUR)
    folder.age(recent, 0.9 * HOUR)
    folder.age(asked, 1.1 * HOUR)
    assert read(store, old)
    assert read(store, recent)
    assert store.exists([asked]) == [True]
    assert read(store, asked) is None, "it is longer"
    ages = [time.time() - folder.file(name).stat().st_mtime for name in (old, recent, asked)]
    assert ages[0] < 60
    assert ages[1] > 0.8 * HOUR
    assert ages[2] > HOUR


def test_a_value_past_its_age_is_absent_and_one_that_was_read_in_time_is_not(folder, value, names, read):
    store = folder.open(max_age="3h")
    kept, gone = names(2)
    for name in (kept, gone):
        store.write(name, value(1))
        folder.age(name, 2 * HOUR)
    assert read(store, kept)
    for name in (kept, gone):
        if name == gone:
            folder.age(name, 4 * HOUR)
    assert store.exists([kept, gone]) == [True, False]
    assert read(store, gone) is None
    assert read(store, kept)


def test_a_file_that_was_cut_short_is_absent(folder, value, names, read):
    store = folder.open()
    [name] = names(1)
    store.write(name, value(1, pages=4))
    os.truncate(folder.file(name), 2 * 4096)
    assert read(store, name, pages=4) is None


def test_a_read_only_store_changes_nothing(folder, value, names, read):
    store = folder.open()
    [name] = names(1)
    store.write(name, value(1))
    folder.close()
    folder.age(name, 2 * HOUR)
    before = {path: path.stat().st_mtime_ns for path in [folder.path, *folder.path.rglob("*")]}
    threads = set(threading.enumerate())
    store = folder.open(read_only=True)
    assert set(threading.enumerate()) <= threads
    assert read(store, name) == bytes(value(1))
    assert folder.names(store) == [name]
    assert store.stats()["values"] == 1
    with pytest.raises(PermissionError, match="read-only"):
        store.write(name, value(2))
    with pytest.raises(PermissionError, match="read-only"):
        store.delete([name])
    folder.close()
    assert before == {path: path.stat().st_mtime_ns for path in [folder.path, *folder.path.rglob("*")]}


def test_a_read_only_store_of_an_empty_directory_is_empty(folder, names, read):
    folder.path.mkdir(0o700)
    store = folder.open(read_only=True)
    assert folder.names(store) == []
    assert read(store, names(1)[0]) is None
    assert list(folder.path.iterdir()) == []


def test_folders_that_a_delete_empties_are_removed(folder, value, names):
    store = folder.open()
    one, other = names(1, namespace="one")[0], names(1, namespace="other")[0]
    long = "long/" + "0123456789abcdef" * 20
    for name in (one, other, long):
        store.write(name, value(1))
    store.delete([one, long])
    assert sorted(path.name for path in folder.path.iterdir() if path.is_dir()) == ["other"]
    assert folder.names(store) == [other]


def test_a_folder_that_is_removed_while_values_are_written_is_made_again(folder, value, names, read):
    store = folder.open()
    busy, stop = names(1)[0], threading.Event()

    def remove():
        while not stop.is_set():
            store._directory.remove_empty(folder.file(busy).parent.relative_to(folder.path).as_posix())

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for turn in range(200):
            store.write(busy, value(turn))
            assert read(store, busy) == bytes(value(turn))
            store.delete([busy])
    finally:
        stop.set()
        remover.join()


def test_a_listing_by_prefix_opens_no_folder_of_another_model(folder, value, names):
    store = folder.open()
    mine, others = names(3, model="mine-" + "0" * 24), names(3, model="others-" + "1" * 24)
    for name in (*mine, *others):
        store.write(name, value(1))
    shut = folder.path / "ns" / ("others-" + "1" * 24)
    listed = []
    original, asking = store._directory._open, threading.current_thread()

    def watch(root, path, flags):
        if threading.current_thread() is asking:  # the evictor's thread looks at every folder
            listed.append(path)
        return original(root, path, flags)

    store._directory._open = watch
    assert sorted(entry.name for entry in store.list("ns/mine-")) == sorted(mine)
    assert [path for path in listed if path.startswith("ns/mine-")]
    assert not [path for path in listed if path.startswith(f"ns/{shut.name}")]


def test_a_value_larger_than_the_capacity_is_dropped_at_once(folder, value, names, monkeypatch):
    store = folder.open(capacity=3 * 4096)
    waits = []
    monkeypatch.setattr(store._ledger, "_wait", waits.append)
    with pytest.raises(NotKept, match="larger than the capacity"):
        store.write(names(1)[0], value(1, pages=4))
    assert not waits
    assert store.stats()["dropped_values"] == 1


@pytest.fixture
def read_only_disk(monkeypatch):
    """Return a function that makes the file system read-only, as the kernel does after an error of the disk."""
    original = os.open

    def read_only(path, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return original(path, flags, *args, **options)

    return lambda: monkeypatch.setattr(os, "open", read_only)


def test_a_disk_that_becomes_read_only_refuses_what_is_new_and_is_read_all_the_same(
    folder, value, names, read, read_only_disk
):
    store = folder.open()
    first, second = names(2)
    store.write(first, value(1))
    read_only_disk()
    with pytest.raises(NotKept, match="has become read-only") as raised:  # an error would take the tier out of use
        store.write(second, value(2))
    assert not raised.value.full
    assert read(store, first) == bytes(value(1))
    assert list(store.exists([first, second])) == [True, False]
    assert store.stats()["dropped_values"] == 1


def test_a_disk_that_is_read_only_at_the_start_says_what_to_set(folder, read_only_disk):
    folder.open()
    folder.close()
    read_only_disk()
    with pytest.raises(ConfigError, match=r"cannot be written by .*Read-only file system.*set 'read_only: true'"):
        folder.open()
    assert folder.open(read_only=True)


def test_direct_io_falls_back_where_the_file_system_refuses_it(folder, mounted, caplog, value, names, read):
    mounted("ramfs", "mode=0700")
    store = folder.open(direct=True)
    [name] = names(1)
    store.write(name, value(5, pages=3))
    assert read(store, name, pages=3) == bytes(value(5, pages=3))
    assert [record.getMessage() for record in caplog.records if "O_DIRECT" in record.getMessage()] == [
        "O_DIRECT does not work in this directory (Invalid argument): values go through the page cache"
    ]
    assert store.stats()["direct"] == 0
    assert not folder.temps()


def test_direct_io_takes_memory_that_is_not_aligned(folder, names, read):
    store = folder.open(direct=True)
    [name] = names(1)
    content = os.urandom(2 * 4096)
    memory = memoryview(bytearray(b"x" + content))
    store.write(name, memory[1:].toreadonly())
    assert read(store, name, pages=2) == content
    back = memoryview(bytearray(1 + len(content)))
    assert store.read_into(name, back[1:])
    assert back[1:] == content


def test_with_fsync_each_value_and_its_folder_is_synced_before_the_write_returns(folder, value, names, monkeypatch):
    store, synced = folder.open(fsync=True), []
    original = os.fsync

    def watch(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        original(fd)

    monkeypatch.setattr(os, "fsync", watch)
    [name] = names(1)
    store.write(name, value(1))
    place = folder.file(name)
    assert [path.startswith(f"{place.parent}/.tmp-") for path in synced] == [True, False]
    assert synced[1] == str(place.parent)


def test_a_value_of_more_parts_than_one_call_takes_is_written_whole(folder, names, read):
    whole = bytes(range(256)) * 32  # two pages
    view, [name] = memoryview(whole), names(1)
    assert folder.open().write_many([name], [[view[at : at + 3] for at in range(0, len(view), 3)]]) == [None]
    assert read(folder.open(), name, pages=2) == whole
    assert not folder.temps()


def test_a_read_that_the_system_ends_early_is_gone_on_with(folder, names, value, read, monkeypatch):
    store, readv = folder.open(), os.readv
    [name] = names(1)
    store.write(name, value(7, pages=3))
    monkeypatch.setattr(os, "readv", lambda fd, views: readv(fd, [views[0][:4096]]))
    assert read(store, name, pages=3) == bytes(value(7, pages=3))
