"""The directory of a store: its folders, files and their permissions.

Everything goes through the root's descriptor, and no symbolic link is followed, on the way or at the end. Linux does
that in one call, ``openat2`` with ``RESOLVE_NO_SYMLINKS`` (5.6 and newer); elsewhere, and where a container forbids
that call, every directory on the way is opened by itself.
"""

import contextlib
import ctypes
import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtiers_fs.paths import name_part, shard_folder, shard_number

__all__ = [
    "GONE", "TEMP_PREFIX", "Directory", "Found", "Head", "Permissions", "RootRemovedError", "open_by_parts", "opener",
]  # fmt: skip

TEMP_PREFIX = ".tmp-"
"""The prefix of files that are being written; no value's file name begins with a dot."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""Error numbers that mean: there is no value. A link where a folder or a file should be is none of ours."""

_LIST = os.O_RDONLY | os.O_DIRECTORY
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_SECONDS = 5.0  # a try fails only if another process removes the folder, as empty, at that very moment

Opener = Callable[[int, str, int], int]
"""(directory's descriptor, path below it, flags) -> a new descriptor. OSError, ELOOP or ENOTDIR at a link."""

FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory to reach what is in it, not to list it."""

_OPENAT2 = 437
_RESOLVE_NO_SYMLINKS = 0x04
_AGAIN = (errno.EINTR, errno.EAGAIN)


class Permissions(NamedTuple):
    """Permissions of files and folders; ``gid`` -1: the process's own group."""

    file: int
    gid: int = -1

    @property
    def folder(self) -> int:
        """The mode of a folder: who may read files may also search it."""
        return self.file | (self.file & 0o444) >> 2

    def apply(self, fd: int, mode: int) -> None:
        """Set mode and group of a file or folder that was just made, independent of the umask."""
        if self.gid >= 0:
            os.fchown(fd, -1, self.gid)
        if mode & 0o077:
            os.fchmod(fd, mode)


class RootRemovedError(OSError):
    """The root was removed while it was open, as by ``rm -r``."""


class Head(NamedTuple):
    """One directory of values: its folder (empty, or ending in ``/``), the names' first parts, its shards."""

    folder: str
    name: str
    shards: frozenset[int]


class Found(NamedTuple):
    """One file of a shard. ``last``: the last part of its value's name, None for a file that is being written."""

    folder: str
    leaf: str
    last: str | None
    nbytes: int
    modified: float


class Directory:
    """Folders and files below one descriptor, which it owns. Safe to use from several threads."""

    def __init__(self, fd: int, permissions: Permissions, *, by_parts: bool = False) -> None:
        self.fd = fd
        self.permissions = permissions
        self._open = open_by_parts if by_parts else opener()
        self._shaping = threading.Lock()

    def close(self) -> None:
        """Close the root."""
        os.close(self.fd)

    def is_removed(self) -> bool:
        """Return whether the root itself was removed: nothing can be made in it any more."""
        return os.fstat(self.fd).st_nlink == 0

    def replace(self, other: "Directory") -> None:
        """Use another's root from now on, which is closed. Calls in progress end in the one or the other."""
        os.dup2(other.fd, self.fd, inheritable=False)
        other.close()

    def open(self, path: str, flags: int) -> int:
        """Open an existing file or folder."""
        return self._open(self.fd, path, flags)

    @contextlib.contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """Yield a descriptor of an existing folder, for access to its files."""
        fd = self._open(self.fd, path, FOLDER)
        try:
            yield fd
        finally:
            os.close(fd)

    def create(self, folder: str, temp: str, flags: int) -> tuple[int, int]:
        """Make a new file for writing, and its folders where they are missing; return (file, folder) descriptors."""
        with contextlib.suppress(FileNotFoundError):
            return self._create(folder, temp, flags)
        until = time.monotonic() + _FOLDER_SECONDS
        with self._shaping:  # this process removes no folder meanwhile; another one may, again and again
            while True:
                self._make(folder)
                try:
                    return self._create(folder, temp, flags)
                except FileNotFoundError:
                    if self.is_removed():
                        raise RootRemovedError(errno.ENOENT, "the directory was removed") from None
                    if time.monotonic() >= until:
                        raise

    def _create(self, folder: str, temp: str, flags: int) -> tuple[int, int]:
        at = self._open(self.fd, folder, FOLDER)
        try:
            fd = os.open(temp, flags | _NEW, self.permissions.file, dir_fd=at)
        except BaseException:
            os.close(at)
            raise
        try:
            self.permissions.apply(fd, self.permissions.file)
        except BaseException:
            os.close(fd)
            os.unlink(temp, dir_fd=at)
            os.close(at)
            raise
        return fd, at

    def _make(self, path: str) -> None:
        at = os.dup(self.fd)
        try:
            for part in path.split("/"):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.mkdir(part, self.permissions.folder, dir_fd=at)
                    self._own(part, at)
                before, at = at, os.open(part, FOLDER, dir_fd=at)
                os.close(before)
        except FileNotFoundError:
            pass  # removed while it was being made: create tries again
        finally:
            os.close(at)

    def _own(self, part: str, at: int) -> None:
        fd = os.open(part, _LIST | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            self.permissions.apply(fd, self.permissions.folder)
        finally:
            os.close(fd)

    def touch(self, folder: str, leaf: str) -> None:
        """Set a file's time of modification to now, if it is there."""
        with contextlib.suppress(OSError), self.folder(folder) as at:
            os.utime(leaf, dir_fd=at, follow_symlinks=False)

    def remove(self, folder: str, leaf: str) -> int | None:
        """Remove a file; return its length, or None if it was not there."""
        try:
            with self.folder(folder) as at:
                nbytes = os.stat(leaf, dir_fd=at, follow_symlinks=False).st_size
                os.unlink(leaf, dir_fd=at)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        return nbytes

    def remove_empty(self, folder: str) -> None:
        """Remove this folder if it is empty, and those above it that are then empty."""
        while folder:
            above, _, last = folder.rpartition("/")
            try:
                with self._shaping, self.folder(above or ".") as at:
                    os.rmdir(last, dir_fd=at)
            except FileNotFoundError:
                pass  # another process removes it; folders above it may remain for this one
            except OSError:
                return  # it is in use
            folder = above

    def heads(self, prefix: str = "") -> Iterator[Head]:
        """Yield the directories that have values whose names may begin with ``prefix``."""
        yield from self._heads("", "", "", prefix)

    def _heads(self, folder: str, name: str, pieces: str, prefix: str) -> Iterator[Head]:
        if not (name.startswith(prefix) or prefix.startswith(name)):
            return
        shards: set[int] = set()
        inner: list[str] = []
        for entry, is_folder in self._listed(folder):
            number = shard_number(entry)
            if is_folder and number is not None and not pieces:
                shards.add(number)
            elif is_folder and not entry.startswith("."):
                inner.append(entry)
        if shards:
            yield Head(folder, name, frozenset(shards))
        for entry in inner:
            if entry.endswith("+"):
                yield from self._heads(f"{folder}{entry}/", name, pieces + entry, prefix)
            elif (part := name_part(pieces + entry)) is not None:
                yield from self._heads(f"{folder}{entry}/", f"{name}{part}/", "", prefix)

    def _listed(self, folder: str) -> list[tuple[str, bool]]:
        try:
            fd = self.open(folder.rstrip("/") or ".", _LIST)
        except OSError as error:
            if error.errno in GONE:
                return []
            raise
        try:
            with os.scandir(fd) as entries:
                return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        finally:
            os.close(fd)

    def root_temps(self) -> list[Found]:
        """Return the files in the root itself that are being written, or were once."""
        found = []
        for leaf, _ in self._listed(""):
            if leaf.startswith(TEMP_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    about = os.stat(leaf, dir_fd=self.fd, follow_symlinks=False)
                    found.append(Found(".", leaf, None, about.st_size, about.st_mtime))
        return found

    def files(self, head: str, shard: int) -> list[Found]:
        """Return the files of one shard of this head, in no order."""
        found: list[Found] = []
        self._files(shard_folder(head, shard), "", found)
        return found

    def _files(self, folder: str, pieces: str, found: list[Found]) -> None:
        try:
            fd = self.open(folder, _LIST)
        except OSError as error:
            if error.errno in GONE:
                return
            raise
        inner: list[str] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    leaf = entry.name
                    if stat.S_ISDIR(about.st_mode) and leaf.endswith("+"):
                        inner.append(leaf)
                    elif stat.S_ISREG(about.st_mode):
                        is_temp = leaf.startswith(TEMP_PREFIX)
                        last = None if is_temp else name_part(pieces + leaf)
                        if is_temp or last is not None:
                            found.append(Found(folder, leaf, last, about.st_size, about.st_mtime))
        finally:
            os.close(fd)
        for leaf in inner:
            self._files(f"{folder}/{leaf}", pieces + leaf, found)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_by_parts(root: int, path: str, flags: int) -> int:
    """Open ``path`` below ``root`` one part after the other, none of them a link."""
    *folders, last = path.split("/")
    at = root
    try:
        for folder in folders:
            before, at = at, os.open(folder, FOLDER, dir_fd=at)
            if before != root:
                os.close(before)
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    finally:
        if at != root:
            os.close(at)


def opener() -> Opener:
    """Return the fastest way to open beneath a directory that this system has."""
    if not sys.platform.startswith("linux"):
        return open_by_parts
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    hows: dict[int, _OpenHow] = {}

    def open_beneath(root: int, path: str, flags: int) -> int:
        how = hows.get(flags)
        if how is None:
            how = hows[flags] = _OpenHow(flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
        while True:
            fd: int = syscall(_OPENAT2, root, path.encode(), ctypes.addressof(how), ctypes.sizeof(how))
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number not in _AGAIN:
                raise OSError(number, os.strerror(number), path)

    top = os.open("/", FOLDER)
    try:
        os.close(open_beneath(top, ".", FOLDER))
    except OSError:  # an old kernel, or a container that forbids it
        return open_by_parts
    finally:
        os.close(top)
    return open_beneath
