"""Locks on bytes of a shared file: between all engines that may write it, dropped by the kernel, never waited for."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtiers.tiering.machine_locks import FileLocks, SocketLocks

A, B = b"a" * 20, b"b" * 20
CONTENT = b"what made it\n"
HOLDER = """
import os, sys, threading
from pathlib import Path
from kvtiers.tiering.machine_locks import FileLocks

locks = FileLocks(Path(sys.argv[1]))
while locks.are_usable(0.0) is None:
    for thread in threading.enumerate():
        if thread.name == "kvtiers-locks":
            thread.join()
assert locks.lock(b"a" * 20)
if os.fork() == 0:
    print("forked", flush=True)
sys.stdin.read()
"""


def wait_opened():
    for thread in threading.enumerate():
        if thread.name == "kvtiers-locks":
            thread.join(60)


def is_usable(locks, now=0.0):
    """Whether locks can be taken, as soon as that has been found out."""
    while (answer := locks.are_usable(now)) is None:
        wait_opened()
    return answer


def open_descriptors(path):
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(link.readlink()).startswith(str(path))
    return found


@pytest.fixture
def path(tmp_path):
    (path := tmp_path / "file").write_bytes(CONTENT)
    return path


@pytest.fixture
def opened():
    """Return a function that opens locks on a file, which are closed at the test's end."""
    made = []

    def open_one(path):
        made.append(FileLocks(path))
        return made[-1]

    yield open_one
    wait_opened()
    for one in made:
        one.close()


def test_a_name_is_locked_by_one_engine_at_a_time_by_whatever_path_and_the_file_stays_as_it_is(path, opened):
    (path.parent / "link").symlink_to(path.parent)
    one, other = opened(path), opened(path.parent / "link" / path.name)
    before = path.stat()
    assert is_usable(one)
    assert is_usable(other)
    assert one.lock(A)
    assert not other.lock(A)
    assert other.lock(B)
    one.unlock(B)
    assert not one.lock(B), "it was the other's to unlock"
    one.unlock(A)
    assert other.lock(A)
    other.close()
    assert one.lock(A)
    assert one.lock(B)
    assert path.read_bytes() == CONTENT
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_blocks) == (before.st_size, before.st_mtime_ns, before.st_blocks)
    assert {found.name for found in path.parent.iterdir()} == {"file", "link"}


def test_a_killed_engine_has_no_lock_any_more_even_if_a_child_of_it_lives(path, opened):
    """The child, forked without exec, has all descriptors of its parent."""
    locks = opened(path)
    assert is_usable(locks)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "forked\n"
        assert not locks.lock(A)
        holder.kill()
        holder.wait(60)
        new = opened(path)
        assert is_usable(new)
        assert new.lock(A)
        holder.stdin.close()
        assert holder.stdout.read() == "", "the child has ended, too"


def test_an_engine_locks_the_file_that_has_taken_the_place_of_a_removed_one(path, opened):
    one, other = opened(path), opened(path)
    assert is_usable(one)
    assert one.lock(A)
    path.unlink()
    assert one.are_usable(1.0) in {None, False}
    assert not is_usable(one, 1.0)
    path.touch()
    assert is_usable(other)
    assert other.lock(A)
    assert not is_usable(one, 5.0), "it is tried again ten seconds later"
    assert is_usable(one, 11.0)
    assert not one.lock(A)
    one.unlock(A)
    assert not one.lock(A)


@pytest.mark.parametrize("what", ["nothing", "a pipe", "a folder", "a link", "another's", "on no local file system"])
def test_a_file_that_cannot_be_locked_is_one_line_of_the_log(what, tmp_path, opened, caplog):
    path = tmp_path / "file"
    user = os.geteuid()
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    elif what == "a link":
        path.symlink_to(tmp_path / "target")
        (tmp_path / "target").touch()
    elif what == "another's":
        path.touch()
        path.chmod(0)
        tmp_path.chmod(0o700)
    elif what == "on no local file system":
        path = Path("/proc/self/comm")
    locks = opened(path)
    if what == "another's" and not user:
        os.seteuid(65534)  # root may open everything
    try:
        assert not is_usable(locks)
        assert not is_usable(locks, 20.0)
    finally:
        os.seteuid(user)
    (record,) = caplog.records
    reason = {
        "nothing": "No such file or directory",
        "a pipe": "it is not a regular file",
        "a folder": "Is a directory",
        "a link": "Too many levels of symbolic links",
        "another's": "Permission denied",
        "on no local file system": "it is on a file system of type 0x9fa0, not on a local one",
    }[what]
    assert record.getMessage().startswith(f"{path} cannot be used for locks: {reason}; engines of other containers")
    assert not open_descriptors(path)


def test_a_file_that_takes_long_to_open_is_waited_for_by_no_call_and_used_when_it_is_open(path, opened):
    locks = opened(path)
    with locks._handover:  # as if the file system hung
        assert locks.are_usable(0.0) is None
        assert locks.are_usable(0.9) is None
        assert locks.are_usable(1.0) is False
    wait_opened()
    assert locks.are_usable(1.1)


def test_no_descriptor_is_left_whenever_it_is_closed(path, opened):
    locks = opened(path)
    for turn in range(50):
        locks.are_usable(0.0)
        if turn % 2:
            wait_opened()
        locks.close()
    wait_opened()
    assert not open_descriptors(path)
    assert is_usable(locks)
    assert open_descriptors(path) == 1


def test_names_of_sockets_are_locked_by_one_engine_at_a_time_as_well():
    name, one, other = os.urandom(20), SocketLocks(), SocketLocks()
    assert one.lock(name)
    assert not other.lock(name)
    other.unlock(name)
    assert not other.lock(name)
    one.unlock(name)
    assert other.lock(name)
    other.unlock(name)
