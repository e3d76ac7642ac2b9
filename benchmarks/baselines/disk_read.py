"""Plain reading of files, for comparison with a tier that brings the same values."""

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_DEPTHS = (4, 16, 32)
_PIECE_BYTES = 1 << 20


def files_of(folder: Path, least_bytes: int) -> set[Path]:
    """Return the files in a folder that are large enough for a value."""
    return {path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= least_bytes}


def write_back(files: Sequence[Path]) -> None:
    """Have what was written reach the disk, so that its pages can be dropped."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def drop_pages(files: Sequence[Path]) -> None:
    """Have the page cache forget these files, so that their next reader reads the disk."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_seconds(files: Sequence[Path], threads: int) -> float:
    """Return how long so many threads take to read all bytes of these files, each into one buffer of its own."""
    largest = max(file.stat().st_size for file in files)
    buffers = [memoryview(bytearray(largest)) for _ in range(threads)]

    def read(thread: int) -> None:
        for file in files[thread::threads]:
            fd = os.open(file, os.O_RDONLY)
            wanted = os.fstat(fd).st_size
            got = 0
            while got < wanted:
                got += os.readv(fd, [buffers[thread][got:wanted]])
            os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # the threads are there
        begin = time.perf_counter()
        list(pool.map(read, range(threads)))
        return time.perf_counter() - begin


def least_disk_seconds(files: Sequence[Path]) -> float:
    """Return how long the disk itself needs for these files: past the page cache, the best of several queue depths.

    Into memory for all of them, shared as a tier's rows are: a few buffers that stay in the processor's cache are
    filled faster than any tier's.
    """
    sizes = {file: file.stat().st_size for file in files}
    pieces = [(file, at) for file, size in sizes.items() for at in range(0, size, _PIECE_BYTES)]
    with mmap.mmap(-1, len(pieces) * _PIECE_BYTES) as memory, memoryview(memory) as view:
        view[:: mmap.PAGESIZE] = bytes(len(view) // mmap.PAGESIZE)  # its pages are there
        return min(_disk_seconds(sizes, pieces, view, depth) for depth in _DEPTHS)


def _disk_seconds(sizes: dict[Path, int], pieces: Sequence[tuple[Path, int]], view: memoryview, depth: int) -> float:
    """Return the same for so many reads at a time."""
    drop_pages([*sizes])
    opened = {file: _open_past_cache(file) for file in sizes}

    def read(thread: int) -> None:
        for number in range(thread, len(pieces), depth):
            file, at = pieces[number]
            wanted = min(_PIECE_BYTES, sizes[file] - at)
            start = number * _PIECE_BYTES
            assert os.preadv(opened[file], [view[start : start + wanted]], at) == wanted

    try:
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(lambda _: None, range(depth)))  # the threads are there
            begin = time.perf_counter()
            list(pool.map(read, range(depth)))
            return time.perf_counter() - begin
    finally:
        for fd in opened.values():
            os.close(fd)


def _open_past_cache(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system that cannot: there is no page cache to go past, or no way
        return os.open(file, os.O_RDONLY)
