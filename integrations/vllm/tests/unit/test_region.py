"""The file behind mapped memory is found and compared; anything else is refused with its reason."""

import mmap
import os
from pathlib import Path

import pytest

from kvtiers_vllm.own_tiering.region import address_of, open_mapped_file

PAGE = mmap.PAGESIZE


@pytest.fixture
def shm():
    path = Path(f"/dev/shm/kvtiers-test-{os.getpid()}-{id(object())}")
    path.write_bytes(bytes(8 * PAGE))
    yield path
    path.unlink(missing_ok=True)


def mapped(path, nbytes=8 * PAGE, offset=0, flags=mmap.MAP_SHARED):
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), nbytes, flags=flags, offset=offset)


def test_what_is_written_through_the_descriptor_is_in_the_memory(shm):
    memory = mapped(shm)
    found = open_mapped_file(address_of(memoryview(memory)), 8 * PAGE)
    try:
        os.pwrite(found.fd, b"here", 5 * PAGE)
        assert memory[5 * PAGE : 5 * PAGE + 4] == b"here"
        assert found.nbytes == 8 * PAGE
        assert not os.get_inheritable(found.fd)
    finally:
        os.close(found.fd)
    assert shm.stat().st_size == 8 * PAGE


def refused(view, nbytes, reason):
    with pytest.raises(OSError, match=reason):
        open_mapped_file(address_of(view), nbytes)


def test_memory_without_a_file_is_refused():
    refused(memoryview(mmap.mmap(-1, PAGE)), PAGE, "there is no file behind it|is another file by now|No such file")


def test_a_private_mapping_is_refused(shm):
    refused(memoryview(mapped(shm, flags=mmap.MAP_PRIVATE)), PAGE, "mapped privately")


def test_memory_that_does_not_begin_where_the_file_does_is_refused(shm):
    refused(memoryview(mapped(shm, nbytes=4 * PAGE, offset=PAGE)), PAGE, "does not begin where")
    refused(memoryview(mapped(shm))[PAGE:], PAGE, "does not begin where")


def test_a_mapping_that_is_too_short_is_refused(shm):
    refused(memoryview(mapped(shm, nbytes=2 * PAGE)), 3 * PAGE, f"{2 * PAGE} bytes of .* expected {3 * PAGE}")


def test_another_file_under_the_same_name_is_refused(shm, monkeypatch):
    """The name in the kernel's table follows a rename, so the table is as it was a moment before."""
    memory = mapped(shm)
    maps = shm.parent / f"{shm.name}.maps"
    maps.write_text(Path("/proc/self/maps").read_text())
    monkeypatch.setattr("kvtiers_vllm.own_tiering.region._MAPS", maps)
    shm.unlink()
    shm.write_bytes(bytes(8 * PAGE))
    try:
        refused(memoryview(memory), 8 * PAGE, "is another file by now")
    finally:
        maps.unlink()


def test_a_file_that_was_removed_is_refused(shm):
    memory = mapped(shm)
    shm.unlink()
    refused(memoryview(memory), 8 * PAGE, "No such file")


def test_a_file_that_was_cut_off_is_refused(shm):
    memory = mapped(shm)
    os.truncate(shm, PAGE)
    refused(memoryview(memory), 8 * PAGE, "is another file by now")


def test_memory_that_is_not_mapped_is_refused():
    with pytest.raises(OSError, match="not mapped"):
        open_mapped_file(1, PAGE)
