"""The directory of a store: its folders, files and their permissions.

Everything goes through the root's descriptor, and no symbolic link is followed, on the way or at the end. Linux does
that in one call, ``openat2`` with ``RESOLVE_NO_SYMLINKS`` (5.6 and newer); elsewhere, and where a container forbids
that call, every directory on the way is opened by itself.
"""

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from kvtiers_fs.config import FORMAT_FILE
from kvtiers_fs.paths import LONGEST_NAME, is_piece_folder, name_part, shard_folder, shard_number

__all__ = [
    "GONE", "TEMP_PREFIX", "TOO_LARGE", "Directory", "Found", "Head", "Permissions", "RootRemovedError",
    "open_by_parts", "opener",
]  # fmt: skip

TEMP_PREFIX = ".tmp-"
"""The prefix of files that are being written; no value's file name begins with a dot."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""Error numbers that mean: there is no value. A link where a folder or a file should be is none of ours."""

TOO_LARGE = "{what} is a larger file than the file system or this process may have (ulimit -f, LimitFSIZE=)"

_log = logging.getLogger("kvtiers_fs")
_T = TypeVar("_T")
_LIST = os.O_RDONLY | os.O_DIRECTORY
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # say nothing about the folder
_MOST_NOTED, _MOST_LINES = 1000, 5
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

    @property
    def are_shared(self) -> bool:
        """Whether other users may have a part in what is made: then the umask does not decide about it."""
        return self.gid >= 0 or bool(self.file & 0o077)

    def are_missing(self, about: os.stat_result, mode: int) -> bool:
        """Return whether a file or folder of this process's user lacks these, as a killed process may leave it."""
        is_ours = self.are_shared and about.st_uid == os.geteuid()
        has_mode = not mode & 0o077 or stat.S_IMODE(about.st_mode) & 0o777 == mode
        return is_ours and not (has_mode and self.gid in {-1, about.st_gid})

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
    """Folders and files below one descriptor, which it owns. Safe to use from several threads.

    ``read_only``: nothing is changed, not even permissions.
    """

    def __init__(self, fd: int, permissions: Permissions, *, by_parts: bool = False, read_only: bool = False) -> None:
        self.fd = fd
        self.permissions = permissions
        self._read_only = read_only
        self._open = open_by_parts if by_parts else opener()
        self._shaping = threading.Lock()
        self._skipped: dict[str, str] = {}

    @property
    def skipped(self) -> dict[str, str]:
        """The files and folders that were passed over when they were last met, and why; 1,000 of them at most."""
        return self._skipped.copy()

    def skip(self, path: str, error: OSError) -> None:
        """Record that a file or folder cannot be listed, used or removed: that costs it alone. Logged for the first."""
        if path not in self._skipped and len(self._skipped) < _MOST_NOTED:
            self._skipped[path] = reason = error.strerror or str(error)
            if len(self._skipped) <= _MOST_LINES:
                _log.warning("%r in the directory is passed over: %s", path[:200], reason)

    def skip_closed(self, path: str, error: OSError) -> None:
        """Do ``skip`` for what this user may not use; raise the error if it is another, or the root is closed as well.

        So a folder of another user's costs itself alone, and a mount whose rights have ended is a failure all the same.
        """
        if error.errno not in {errno.EACCES, errno.EPERM}:
            raise error
        os.close(self.open(".", _LIST))
        self.skip(path, error)

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
                try:
                    inner = os.open(part, FOLDER, dir_fd=at)
                except FileNotFoundError:
                    self._make_one(part, at)
                    inner = os.open(part, FOLDER, dir_fd=at)
                before, at = at, inner
                os.close(before)
        except FileNotFoundError:
            pass  # removed while it was being made: create tries again
        finally:
            os.close(at)

    def _make_one(self, part: str, at: int) -> None:
        """Make a folder. One that is shared gets its name last: one of half the permissions would shut others out."""
        if self.permissions.are_shared:
            temp = f"{TEMP_PREFIX}folder-{secrets.token_hex(8)}"
            os.mkdir(temp, self.permissions.folder, dir_fd=self.fd)
            try:
                self._own(temp, self.fd)
                os.rename(temp, part, src_dir_fd=self.fd, dst_dir_fd=at)
            except OSError:  # another process was sooner; or it is on a file system of its own, so it is made in place
                os.rmdir(temp, dir_fd=self.fd)
            else:
                return
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, self.permissions.folder, dir_fd=at)
            self._own(part, at)

    def _own(self, part: str, at: int) -> None:
        fd = os.open(part, _LIST | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            self.permissions.apply(fd, self.permissions.folder)
        finally:
            os.close(fd)

    def publish(self, leaf: str, fill: Callable[[int], None] | None = None) -> None:
        """Make a file in the root, unless it is there: it gets its name when it is filled and has its permissions."""
        temp = f"{TEMP_PREFIX}root-{secrets.token_hex(8)}"
        fd = os.open(temp, os.O_RDWR | _NEW, self.permissions.file, dir_fd=self.fd)
        try:
            self.permissions.apply(fd, self.permissions.file)
            if fill is not None:
                fill(fd)
            with contextlib.suppress(FileExistsError):  # another process was sooner
                os.link(temp, leaf, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        finally:
            os.close(fd)
            os.unlink(temp, dir_fd=self.fd)

    def put(self, leaf: str, content: bytes) -> None:
        """Write a small file in the root. It is renamed: others see it whole, with its permissions, or not at all."""
        temp = f"{TEMP_PREFIX}root-{secrets.token_hex(8)}"
        fd = os.open(temp, os.O_WRONLY | _NEW, self.permissions.file, dir_fd=self.fd)
        try:
            try:
                self.permissions.apply(fd, self.permissions.file)
                os.write(fd, content)
            finally:
                os.close(fd)
            os.rename(temp, leaf, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            os.unlink(temp, dir_fd=self.fd)
            raise

    def touch(self, folder: str, leaf: str) -> None:
        """Set a file's time of modification to now, if it is there."""
        with contextlib.suppress(OSError), self.folder(folder) as at:
            os.utime(leaf, dir_fd=at, follow_symlinks=False)

    def remove(self, folder: str, leaf: str) -> int | None:
        """Remove a file, or an empty folder; return its length, or None if it was not there."""
        try:
            with self.folder(folder) as at:
                about = os.stat(leaf, dir_fd=at, follow_symlinks=False)
                (os.rmdir if stat.S_ISDIR(about.st_mode) else os.unlink)(leaf, dir_fd=at)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        return about.st_size

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
        rest = [("", "", "")]
        while rest:
            folder, name, pieces = rest.pop()
            shards: set[int] = set()
            entries = self._scan(folder, lambda entry: (entry.name, entry.is_dir(follow_symlinks=False)))
            if folder and any(entry == FORMAT_FILE for entry, _ in entries):
                continue  # the directory of another tier, whose values are not ours to count or evict
            for entry, is_folder in entries:
                number = shard_number(entry)
                if not is_folder or entry.startswith("."):
                    continue
                if number is not None and not pieces:
                    shards.add(number)
                elif is_piece_folder(entry):
                    rest.append((f"{folder}{entry}/", name, pieces + entry))
                elif (part := name_part(pieces + entry)) is not None:
                    inner = f"{name}{part}/"
                    is_wanted = inner.startswith(prefix) or prefix.startswith(inner)
                    if is_wanted and len(inner) < LONGEST_NAME:  # others may nest their folders without an end
                        rest.append((f"{folder}{entry}/", inner, ""))
            if shards:
                yield Head(folder, name, frozenset(shards))

    def _scan(self, folder: str, look: Callable[["os.DirEntry[str]"], _T]) -> list[_T]:
        """Return what ``look`` makes of each entry; none of a folder that is gone, or that cannot be listed.

        A folder of this user's gets the permissions that it lacks: it is from a process that was killed.
        """
        try:
            fd = self.open(folder.rstrip("/") or ".", _LIST)
            try:
                about = os.fstat(fd)
                if folder and not self._read_only and self.permissions.are_missing(about, self.permissions.folder):
                    self.permissions.apply(fd, self.permissions.folder)
                with os.scandir(fd) as entries:
                    found = [look(entry) for entry in entries]
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in GONE:
                return []
            if not folder or error.errno in _OURS:
                raise
            self.skip(folder, error)
            return []
        self._skipped.pop(folder, None)
        return found

    def root_temps(self) -> list[Found]:
        """Return what is being made in the root itself, or was once: files, and folders before they have a place."""
        found = []
        for leaf in self._scan("", lambda entry: entry.name):
            if leaf.startswith(TEMP_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    about = os.stat(leaf, dir_fd=self.fd, follow_symlinks=False)
                    found.append(Found(".", leaf, None, about.st_size, about.st_mtime))
        return found

    def files(self, head: str, shard: int) -> list[Found]:
        """Return the files of one shard of this head, in no order."""
        found: list[Found] = []
        rest = [(shard_folder(head, shard), "")]
        while rest:
            folder, pieces = rest.pop()
            for leaf, about in self._scan(folder, _with_status):
                if about is None:
                    continue
                if stat.S_ISDIR(about.st_mode) and is_piece_folder(leaf):
                    rest.append((f"{folder}/{leaf}", pieces + leaf))
                elif stat.S_ISREG(about.st_mode):
                    is_temp = leaf.startswith(TEMP_PREFIX)
                    last = None if is_temp else name_part(pieces + leaf)
                    if is_temp or last is not None:
                        found.append(Found(folder, leaf, last, about.st_size, about.st_mtime))
        return found


def _with_status(entry: "os.DirEntry[str]") -> tuple[str, os.stat_result | None]:
    try:
        return entry.name, entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return entry.name, None


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
            fd: int = syscall(_OPENAT2, root, os.fsencode(path), ctypes.addressof(how), ctypes.sizeof(how))
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
