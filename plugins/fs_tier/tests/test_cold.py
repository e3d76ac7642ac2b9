"""Values that the page cache does not have are read past it, where that works; those that it has are copied from it."""

import fcntl
import os

import pytest

from kvtiers_fs.values import is_cached

PAGES = 256
"""Pages of a value that is large enough to be asked about."""


@pytest.fixture
def reads(monkeypatch):
    """Whether each of the reads of a large value went past the page cache."""
    seen = []
    original = os.readv

    def watch(fd, views):
        if len(views[0]) >= PAGES * 4096:
            seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return original(fd, views)

    monkeypatch.setattr(os, "readv", watch)
    return seen


@pytest.fixture
def answer(monkeypatch):
    """Have the system say what it has in its page cache, whatever it has."""
    return lambda cached: monkeypatch.setattr("kvtiers_fs.values.is_cached", lambda *_: cached)


@pytest.mark.parametrize(
    ("kept", "of_pages"), [(0, 16), (7, 16), (8, 16), (16, 16), (0, 4096), (1400, 4096), (2700, 4096), (4096, 4096)]
)
def test_half_of_a_file_in_the_page_cache_is_enough(tmp_path, kept, of_pages):
    file = tmp_path / "file"
    with file.open("wb") as out:
        out.write(os.urandom(kept * 4096))
        out.truncate(of_pages * 4096)  # a hole that was never read is nowhere
    fd = os.open(file, os.O_RDONLY)
    assert is_cached(fd, of_pages * 4096) == (2 * kept >= of_pages)
    os.close(fd)


def test_a_file_that_cannot_be_mapped_counts_as_cached():
    ours, theirs = os.pipe()
    assert is_cached(ours, 4096)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("direct", "cached", "past"),
    [("cold", False, True), ("cold", True, False), (False, False, False), (True, True, True)],
)
def test_a_large_value_is_read_past_the_page_cache_if_it_is_not_in_it(
    folder, value, names, read, reads, answer, direct, cached, past
):
    store = folder.open(direct=direct)
    [name] = names(1)
    store.write(name, value(7, pages=PAGES))
    answer(cached)
    assert read(store, name, pages=PAGES) == bytes(value(7, pages=PAGES))
    assert reads == [past]


def test_for_a_small_value_the_page_cache_is_not_asked(folder, value, names, read, monkeypatch):
    store = folder.open()
    [name] = names(1)
    store.write(name, value(7, pages=PAGES - 1))
    monkeypatch.setattr("kvtiers_fs.values.is_cached", lambda *_: pytest.fail("asked"))
    assert read(store, name, pages=PAGES - 1) == bytes(value(7, pages=PAGES - 1))


def test_a_cold_value_is_read_where_the_file_system_has_no_way_past_the_page_cache(
    folder, value, names, read, reads, answer, monkeypatch, caplog
):
    def refuse(fd, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return original(fd, command, flags)

    original = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    store = folder.open()
    [name] = names(1)
    store.write(name, value(7, pages=PAGES))
    answer(cached=False)
    assert read(store, name, pages=PAGES) == bytes(value(7, pages=PAGES))
    assert reads == [False]
    assert not caplog.records


def test_a_cold_value_is_read_into_memory_that_is_not_aligned(folder, value, names, reads, answer):
    store = folder.open()
    [name] = names(1)
    content = bytes(value(7, pages=PAGES))
    store.write(name, memoryview(content))
    answer(cached=False)
    memory = memoryview(bytearray(1 + len(content)))
    assert store.read_into(name, memory[1:])
    assert memory[1:] == content
    assert reads == [True, False]
