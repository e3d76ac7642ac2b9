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
    """Have the page cache forget these files, so that whoever reads them next reads the disk."""
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
    """Return how long the disk itself needs for these files: past the page cache, the best of several queue depths."""
    return min(_disk_seconds(files, depth) for depth in _DEPTHS)


def _disk_seconds(files: Sequence[Path], depth: int) -> float:
    """The same for so many reads at a time, of pieces."""
    drop_pages(files)
    buffers = [memoryview(mmap.mmap(-1, _PIECE_BYTES)) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = bytes(_PIECE_BYTES)  # its pages are there
    sizes = {_open_past_cache(file): file.stat().st_size for file in files}
    pieces = [(fd, at) for fd, size in sizes.items() for at in range(0, size, _PIECE_BYTES)]

    def read(thread: int) -> None:
        for fd, at in pieces[thread::depth]:
            wanted = min(_PIECE_BYTES, sizes[fd] - at)
            assert os.preadv(fd, [buffers[thread][:wanted]], at) == wanted

    try:
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(lambda _: None, range(depth)))  # the threads are there
            begin = time.perf_counter()
            list(pool.map(read, range(depth)))
            return time.perf_counter() - begin
    finally:
        for fd in sizes:
            os.close(fd)


def _open_past_cache(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system that cannot: there is no page cache to go past, or no way
        return os.open(file, os.O_RDONLY)
