"""Values as files: written whole or not at all, read straight into the caller's memory.

A value is written under a temporary name in its own folder and renamed over the old one. Both ways the caller's memory
is the buffer: no copy is made on the way to the kernel. A file's time of modification is the value's last use.

A large value that is not in the page cache is read past it: filling pages and copying them takes a processor longer
than the disk takes, and the value is in the primary afterwards.
"""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from kvtiers_fs.directory import GONE, TEMP_PREFIX, Directory
from kvtiers_fs.paths import Place

__all__ = ["LEAST_COLD", "ValueFiles", "behind", "front", "is_cached", "try_direct"]

_log = logging.getLogger("kvtiers_fs")
_PAGE = 4096
_REFRESH_SECONDS = 3600.0  # each use as a write of its own would cost more than the order is worth
_DIRECT = getattr(os, "O_DIRECT", 0)
LEAST_COLD = 1 << 20  # of less, asking what the page cache has costs as much as copying it
_MOST_PARTS = 1024  # of one call (IOV_MAX of Linux and macOS)
_READ = os.O_RDONLY | os.O_NONBLOCK  # without it, opening a pipe at this path would wait for a writer
_LOOK = getattr(os, "O_PATH", _READ)  # what may be looked at but not read is there
_MOST_PAGES = 256  # that are all asked about
_SAMPLES, _SAMPLE_PAGES = 8, 8  # of more than that: so many places, and pages side by side in each
_MAP_FAILED = ctypes.c_void_p(-1).value
_HERE = b"\x01"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class ValueFiles:
    """Reads and writes the value files of one directory. Safe to use from several threads.

    ``direct``: values move past the page cache; "cold": large ones that are read and not in it.
    ``max_age``: seconds after which a value that was not used is absent. ``refresh``: a read counts as use.
    """

    def __init__(
        self, directory: Directory, *, direct: Literal["cold"] | bool, fsync: bool, max_age: float | None, refresh: bool
    ) -> None:
        self._directory = directory
        self._fsync = fsync
        self._direct = _DIRECT if direct is True else 0
        self._least_cold = LEAST_COLD if direct == "cold" and _DIRECT else sys.maxsize
        self._max_age = max_age
        self._refresh = refresh
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        if self._direct and refresh and (problem := try_direct(directory)):
            self._direct = 0
            _log.warning("O_DIRECT does not work in this directory (%s): values go through the page cache", problem)

    @property
    def is_direct(self) -> bool:
        """Return whether all values move past the page cache."""
        return bool(self._direct)

    def is_there(self, place: Place) -> bool:
        """Return whether there is a value of any length. Follows no link, as a read: ``os.stat`` would, on the way."""
        try:
            fd = self._directory.open(f"{place.folder}/{place.leaf}", _LOOK)
            try:
                about = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in GONE:
                self._directory.skip_closed(place.folder, error)
            return False
        return stat.S_ISREG(about.st_mode) and not self._is_expired(about)

    def _is_expired(self, about: os.stat_result) -> bool:
        return self._max_age is not None and about.st_mtime < time.time() - self._max_age

    def read(self, place: Place, parts: Sequence[memoryview]) -> int:
        """Fill the start of the parts, one behind the other; return the value's length, 0: there is none, or longer."""
        nbytes = sum(map(len, parts))
        try:
            fd = self._open(f"{place.folder}/{place.leaf}")
        except OSError as error:
            if error.errno not in GONE:
                self._directory.skip_closed(f"{place.folder}/{place.leaf}", error)
            return 0
        try:
            about = os.fstat(fd)
            if not self._is_value(about, nbytes):
                return 0
            if about.st_size != nbytes:
                nbytes = about.st_size
                parts = [*front(parts, nbytes)]
            if nbytes >= self._least_cold and not is_cached(fd, nbytes):
                _begin_direct(fd)
            if not _fill(fd, parts, nbytes):
                return 0
            self._note_use(fd, about)
        except OSError as error:
            if error.errno == errno.ESTALE:  # another machine removed the file while it was read
                return 0
            raise
        finally:
            os.close(fd)
        return nbytes

    def _is_value(self, about: os.stat_result, room: int) -> bool:
        return 0 < about.st_size <= room and stat.S_ISREG(about.st_mode) and not self._is_expired(about)

    def _note_use(self, fd: int, about: os.stat_result) -> None:
        # Also of a file that is from when a clock was ahead: it would seem to be in use until then.
        if self._refresh and abs(about.st_mtime - time.time()) > _REFRESH_SECONDS:
            with contextlib.suppress(OSError):  # another member of the group's: not ours to touch
                os.utime(fd)

    def _open(self, path: str) -> int:
        try:
            return self._directory.open(path, _READ | self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        return self._directory.open(path, _READ)

    def write(self, place: Place, parts: Sequence[memoryview]) -> int | None:
        """Write a value, its parts one behind the other.

        Return the length of the one that it replaced, None if there was none.
        """
        temp = f"{TEMP_PREFIX}{self._token}-{next(self._numbers)}"
        fd, folder = self._directory.create(place.folder, temp, os.O_WRONLY | self._direct)
        try:
            try:
                _pour(fd, parts)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)  # network file systems say here what they could not write
            before = _length(place.leaf, folder)
            os.rename(temp, place.leaf, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp, dir_fd=folder)
            raise
        finally:
            os.close(folder)
        if self._fsync:
            self._sync_folder(place.folder)
        return before

    def _sync_folder(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # emptied and removed meanwhile: there is nothing to keep
            fd = self._directory.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _fill(fd: int, parts: Sequence[memoryview], nbytes: int) -> bool:
    done = _read_some(fd, parts[:_MOST_PARTS])
    while 0 < done < nbytes:
        with contextlib.ExitStack() as cut:
            rest = itertools.islice(behind(parts, done), _MOST_PARTS)
            more = _read_some(fd, [cut.enter_context(part) for part in rest])
        if not more:
            return False
        done += more
    return done == nbytes


def _pour(fd: int, parts: Sequence[memoryview]) -> None:
    done, total = _write_some(fd, parts[:_MOST_PARTS]), sum(map(len, parts))
    while done < total:
        with contextlib.ExitStack() as cut:
            rest = itertools.islice(behind(parts, done), _MOST_PARTS)
            done += _write_some(fd, [cut.enter_context(part) for part in rest])


def front(parts: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    """Yield views of the first ``nbytes`` bytes."""
    for part in parts:
        if nbytes:
            yield part[:nbytes]
        nbytes = max(0, nbytes - len(part))


def behind(parts: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """Yield views of what lies behind the first ``done`` bytes."""
    for part in parts:
        if done < len(part):
            yield part[done:]
        done = max(0, done - len(part))


def _read_some(fd: int, views: Sequence[memoryview]) -> int:
    try:
        return os.readv(fd, views)
    except OSError as error:
        if error.errno != errno.EINVAL or not _end_direct(fd):
            raise
    return os.readv(fd, views)


def _write_some(fd: int, views: Sequence[memoryview]) -> int:
    try:
        return os.writev(fd, views)
    except OSError as error:
        if error.errno != errno.EINVAL or not _end_direct(fd):
            raise
    return os.writev(fd, views)


def _begin_direct(fd: int) -> None:
    """Make this file's reads bypass the page cache, if its file system can do that."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)


def _end_direct(fd: int) -> bool:
    """Make this file use the page cache, as unaligned memory or lengths need it; False if it does already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)
    return True


def _length(leaf: str, folder: int) -> int | None:
    try:
        return os.stat(leaf, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None


def is_cached(fd: int, nbytes: int, at: int = 0) -> bool:
    """Return whether at least half of the ``nbytes`` from ``at`` on is in the page cache; True where no one can say.

    The system answers only those who may write the file, and reports to others that everything is cached. Of many pages
    some are asked about: to ask about each takes half as long as to copy them.
    """
    if not hasattr(_libc, "mincore"):
        return True
    # Mapped and never touched: nothing is read. A read that must not wait (RWF_NOWAIT) would begin to read ahead.
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, at)
    if address == _MAP_FAILED:
        return True
    try:
        count = -(-nbytes // mmap.PAGESIZE)
        asked = count if count <= _MOST_PAGES else _SAMPLE_PAGES
        starts = [0] if asked == count else [number * (count - asked) // (_SAMPLES - 1) for number in range(_SAMPLES)]
        pages, here = ctypes.create_string_buffer(asked), 0
        for start in starts:
            place = ctypes.c_void_p(address + start * mmap.PAGESIZE)
            if _libc.mincore(place, ctypes.c_size_t(min(asked * mmap.PAGESIZE, nbytes)), pages):
                return True
            here += pages.raw.count(_HERE)
        return 2 * here >= asked * len(starts)
    finally:
        _libc.munmap(address, nbytes)


def try_direct(directory: Directory) -> str:
    """Write and read one page with O_DIRECT; return why it does not work, or ''."""
    if not _DIRECT:
        return "this system has no O_DIRECT"
    temp = f"{TEMP_PREFIX}direct-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | _DIRECT
    with mmap.mmap(-1, 2 * _PAGE) as memory, memoryview(memory) as pages, pages[:_PAGE] as out, pages[_PAGE:] as back:
        out[:] = os.urandom(_PAGE)
        try:
            fd = os.open(temp, flags, 0o600, dir_fd=directory.fd)
            try:
                os.write(fd, out)
                os.lseek(fd, 0, os.SEEK_SET)
                os.readv(fd, [back])
            finally:
                os.close(fd)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with contextlib.suppress(OSError):  # some systems make the file and then refuse to open it
                os.unlink(temp, dir_fd=directory.fd)
        return "" if out == back else "it reads back other bytes than were written"
