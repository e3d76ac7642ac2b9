import ctypes
import errno
import mmap
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtiers._process import hand_over, spawn_bare
from kvtiers.region import populate
from kvtiers.region.populate import Populator

PAGES = 64
BYTES = PAGES * mmap.PAGESIZE


@pytest.fixture
def memfd():
    fd = os.memfd_create("kvtiers-unit-test")
    os.ftruncate(fd, BYTES)
    yield fd
    os.close(fd)


def allocated(fd):
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("advice", [populate.MADV_POPULATE_WRITE, 9999])
@pytest.mark.parametrize("piece", [mmap.PAGESIZE, 7 * mmap.PAGESIZE, 2 * BYTES])
def test_all_pages_are_there_and_the_last_report_says_so(memfd, advice, piece, monkeypatch):
    lines = []
    monkeypatch.setattr(populate, "say", lines.append)
    assert allocated(memfd) == 0
    Populator(memfd, BYTES, piece, advice).work()
    assert allocated(memfd) == BYTES
    assert lines[-1] == f"populated {BYTES}"


@pytest.mark.parametrize("advice", [populate.MADV_POPULATE_WRITE, 9999])
def test_the_kernel_does_not_drop_a_populated_page_again(memfd, advice, monkeypatch):
    """A page that was only read is clean, and under memory pressure the kernel takes clean pages back."""
    monkeypatch.setattr(populate, "say", lambda line: None)
    Populator(memfd, BYTES, BYTES, advice).work()
    mapping = mmap.mmap(memfd, BYTES)
    assert not any(mapping[:: mmap.PAGESIZE])  # maps the pages
    mapping.madvise(21)  # MADV_PAGEOUT: take back what can be taken without loss
    assert os.lseek(memfd, 0, os.SEEK_HOLE) == BYTES  # swapped out is not dropped


def test_only_an_unbroken_run_from_the_start_is_reported(memfd, monkeypatch):
    lines = []
    monkeypatch.setattr(populate, "say", lines.append)
    populator = Populator(memfd, BYTES, BYTES // 4, 23)
    for piece in (1, 3, 0, 2):
        populator._report(piece * BYTES // 4)
    assert lines == ["populated 0", "populated 0", f"populated {BYTES // 2}", f"populated {BYTES}"]


def test_touching_never_writes(memfd):
    """Another process may be writing to the same page: putting its byte back would undo that write."""
    populator = Populator(memfd, BYTES, BYTES, 9999)
    populator._region = mmap.mmap(memfd, BYTES, prot=mmap.PROT_READ)
    populator._address = 0  # madvise is refused there
    populator._touch(0, BYTES)
    assert allocated(memfd) == BYTES


def test_an_error_that_is_not_an_old_kernel_is_reported_with_its_place(memfd):
    populator = Populator(memfd, BYTES, BYTES, 23)
    os.ftruncate(memfd, 0)
    populator.work()
    assert populator.failure.startswith(f"at byte 0 of {BYTES}: [Errno 14]")


HUGE = 2 << 20


@pytest.fixture
def large():
    fd = os.memfd_create("kvtiers-unit-test")
    os.ftruncate(fd, 8 * HUGE)
    yield fd
    os.close(fd)


def in_huge_pages(address):
    """Bytes of the mapping at this address that are mapped by huge pages."""
    _, _, rest = Path("/proc/self/smaps").read_text().partition(f"{address:08x}-")
    return next(int(line.split()[1]) << 10 for line in rest.splitlines() if line.startswith("ShmemPmdMapped:"))


def has_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


def test_memory_is_in_huge_pages_where_the_kernel_has_them(large):
    populator = Populator(large, 8 * HUGE, 4 * HUGE, populate.MADV_POPULATE_WRITE, collapse=populate.MADV_COLLAPSE)
    populator.work()
    assert (populator.failure, allocated(large)) == ("", 8 * HUGE)
    if has_huge_pages():
        assert in_huge_pages(populator._address) == 8 * HUGE


class Refusing:
    """A kernel that refuses to make huge pages, after so many seconds."""

    def __init__(self, libc, number, clock=None, seconds=0.0):
        self.libc, self.number, self.clock, self.seconds, self.asked = libc, number, clock, seconds, 0

    def madvise(self, address, nbytes, advice):
        if advice != populate.MADV_COLLAPSE:
            return self.libc.madvise(address, nbytes, advice)
        self.asked += 1
        if self.clock is not None:
            self.clock.now += self.seconds
        ctypes.set_errno(self.number)
        return -1 if self.number else 0


@pytest.mark.parametrize(
    ("number", "asked"),
    [(errno.EINVAL, 1), (errno.ENOMEM, 4), (errno.EAGAIN, 4)],
    ids=["an older kernel", "fragmented memory", "busy pages"],
)
def test_what_the_kernel_makes_no_huge_pages_of_is_in_small_ones(large, number, asked):
    populator = Populator(large, 8 * HUGE, HUGE, populate.MADV_POPULATE_WRITE, collapse=populate.MADV_COLLAPSE)
    populator._libc = Refusing(populator._libc, number)
    populator.work()
    assert (populator.failure, allocated(large)) == ("", 8 * HUGE)
    assert populator._libc.asked == asked, "after some refusals it is not asked again"


def test_huge_pages_that_take_long_to_be_found_are_given_up(large, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(populate, "time", SimpleNamespace(monotonic=lambda: clock.now))
    populator = Populator(large, 8 * HUGE, HUGE, populate.MADV_POPULATE_WRITE, collapse=populate.MADV_COLLAPSE)
    populator._libc = Refusing(populator._libc, 0, clock, seconds=0.05)
    populator.work()
    assert (populator._libc.asked, allocated(large)) == (4, 8 * HUGE)


def test_the_program_needs_the_standard_library_only_and_little_of_it(memfd):
    code = (
        "import runpy, sys; sys.argv[1:] = sys.argv[2:]; import os; os.dup2(os.open('/dev/zero', os.O_RDONLY), 0)\n"
        f"runpy.run_path({populate.__file__!r}, run_name='populate')\n"
        "heavy = {'kvtiers', 'numpy', 'pydantic', 'subprocess', 'asyncio', 'logging'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_program_ends_with_its_standard_input(memfd):
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({populate.__file__!r})['end_with_parent']()"],
        stdin=subprocess.PIPE,
    )
    process.stdin.close()
    assert process.wait(60) == 1


def test_the_program_has_no_memory_until_it_is_tied_to_its_parent():
    ours, theirs = socket.socketpair()
    arguments = [str(number) for number in (os.getpid(), HUGE, HUGE, 1, populate.MADV_POPULATE_WRITE, 0, HUGE)]
    memory = os.memfd_create("kvtiers-unit-test")
    os.set_inheritable(memory, True)
    os.ftruncate(memory, HUGE)
    with ours, spawn_bare(Path(populate.__file__), arguments, stdin=theirs.fileno()) as process:
        theirs.close()
        links = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert not [link for link in links if "memfd" in link]
        assert hand_over(ours, [memory])
        assert b"done" in process.stdout.read()
    assert os.fstat(memory).st_blocks * 512 == HUGE
    os.close(memory)


def test_a_program_whose_parent_has_ended_before_it_was_tied_ends_without_a_word():
    ours, theirs = socket.socketpair()
    with ours, spawn_bare(Path(populate.__file__), ["1", *["0"] * 6], stdin=theirs.fileno()) as process:
        theirs.close()
        assert process.stdout.read() == b""
        assert process.wait(60) == 1
