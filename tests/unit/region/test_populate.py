import mmap
import os
import subprocess
import sys

import pytest

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
