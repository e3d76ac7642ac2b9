"""The quota of a directory: its bytes and values by shard, without walking it.

``.usage`` in the root has the bytes and values of each shard (over all models): as they were counted last, plus what
every process has reported since. It is a hint. Each process counts what it writes and removes, and reports that now
and then under the lock on this very file (``flock``: of one process, or of one machine, at a time); the evictor counts
recounts shard after shard, so that no error lasts, such as a killed process's unreported writes. Where the file is
missing or broken, all shards are counted again, in the background.

Each write is checked against these totals: see ``Ledger.claim`` for how far the capacity can be missed.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from kvtiers.api import NotKept
from kvtiers.api.units import format_size
from kvtiers_fs.directory import Directory
from kvtiers_fs.paths import SHARDS
from kvtiers_fs.waits import USUAL_WAITS, Waits

__all__ = ["Deltas", "Index", "Ledger", "UsageFile"]

USAGE_FILE = ".usage"
_MAGIC = b"kvtfsU1\n"
_HEAD = struct.Struct("<8sdI4x")
_SHARD = struct.Struct("<qqd")
_BYTES = _HEAD.size + SHARDS * _SHARD.size + 4
_STEPS = 128
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Deltas(NamedTuple):
    """A process's writes and removals, by shard: bytes and values, negative where more was removed."""

    nbytes: list[int]
    values: list[int]

    @classmethod
    def none(cls) -> "Deltas":
        """Return deltas of nothing."""
        return cls([0] * SHARDS, [0] * SHARDS)


@dataclass
class Index:
    """The content of ``.usage``. ``counted[i]``: last count of shard i, 0 if never; ``next_count``: when to go on.

    ``cursor``: the shard with which the next eviction begins.
    """

    nbytes: list[int] = field(default_factory=lambda: [0] * SHARDS)
    values: list[int] = field(default_factory=lambda: [0] * SHARDS)
    counted: list[float] = field(default_factory=lambda: [0.0] * SHARDS)
    next_count: float = 0.0
    cursor: int = 0

    def encode(self) -> bytes:
        """Return the file's content."""
        shards = b"".join(map(_SHARD.pack, self.nbytes, self.values, self.counted))
        body = _HEAD.pack(_MAGIC, self.next_count, self.cursor) + shards
        return body + crc32(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, content: bytes) -> "Index":
        """Return the index in this content; where it is broken, one in which nothing is counted yet."""
        body = content[:-4]
        if len(content) != _BYTES or crc32(body) != int.from_bytes(content[-4:], "little"):
            return cls()
        magic, next_count, cursor = _HEAD.unpack_from(body)
        if magic != _MAGIC:
            return cls()
        nbytes, values, counted = zip(*_SHARD.iter_unpack(body[_HEAD.size :]), strict=True)
        return cls(list(nbytes), list(values), list(counted), next_count, cursor % SHARDS)

    def add(self, deltas: Deltas) -> None:
        """Add a process's report."""
        self.nbytes = [max(0, a + b) for a, b in zip(self.nbytes, deltas.nbytes, strict=True)]
        self.values = [max(0, a + b) for a, b in zip(self.values, deltas.values, strict=True)]

    def uncounted(self) -> list[int]:
        """Return the shards that were never counted."""
        return [shard for shard, when in enumerate(self.counted) if not when]

    def total(self) -> tuple[int, int]:
        """Return the bytes and the number of all values; shards that were never counted count as average ones."""
        missing = len(self.uncounted())
        share = SHARDS / (SHARDS - missing) if missing < SHARDS else 1.0
        return int(sum(self.nbytes) * share), int(sum(self.values) * share)


class UsageFile:
    """The file ``.usage``, where all processes keep the bytes in use, and the lock that they take to change it."""

    def __init__(self, directory: Directory, *, read_only: bool) -> None:
        self._fd = -1
        self.locks = True
        flags = os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        try:
            self._fd = os.open(USAGE_FILE, flags, dir_fd=directory.fd)
        except FileNotFoundError:
            if read_only:
                return
            with contextlib.suppress(OSError):  # a file system without hard links: it is made in place
                directory.publish(USAGE_FILE)
            self._fd = os.open(USAGE_FILE, flags | os.O_CREAT, directory.permissions.file, dir_fd=directory.fd)
        permissions = directory.permissions
        if not read_only and permissions.are_missing(os.fstat(self._fd), permissions.file):
            permissions.apply(self._fd, permissions.file)  # of a process that was killed when it had made it

    def replace(self, other: "UsageFile") -> None:
        """Use another's file from now on, which is closed."""
        os.dup2(other._fd, self._fd, inheritable=False)  # noqa: SLF001 -- its own class
        other.close()

    def close(self) -> None:
        """Close the file, and with it end the lock."""
        if self._fd >= 0:
            os.close(self._fd)

    def load(self) -> Index:
        """Read the index. Without the lock it may be one that is just being written, and then nothing is known."""
        return Index.decode(os.pread(self._fd, _BYTES + 1, 0)) if self._fd >= 0 else Index()

    def save(self, index: Index) -> None:
        """Write the index, in place: that needs no space, also on a full disk. Only under the lock."""
        os.pwrite(self._fd, index.encode(), 0)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Yield True while this process has the lock; False at once if another has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Without locks two evictors may run at once and remove too much: that costs hits, nothing else.
            self.locks = False
        try:
            yield True
        finally:
            if self.locks:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def now(self) -> float:
        """Return the time by the clock that sets the files' times, which on a network is another machine's."""
        os.utime(self._fd)
        return os.fstat(self._fd).st_mtime


class Ledger:
    """The writes and removals of this process since its last report, and the check whether a write fits.

    ``wake`` asks the evictor to report, and to make room. Safe to use from several threads. Only a write that does not
    fit waits here: for the evictor's I/O. ``patience``: how long a call that writes waits for reports, in seconds.
    """

    def __init__(
        self, capacity: int, known: int, wake: Callable[[], None], patience: float, waits: Waits = USUAL_WAITS
    ) -> None:
        self._waits = waits
        self._capacity = capacity
        self._patience = patience
        self._wake = wake
        self._changed = threading.Condition()
        self._known = known
        self._deltas = Deltas.none()
        self._net = 0
        self._written = 0
        self._in_flight = 0
        self._changing = [0] * SHARDS  # changes in flight: on the disk already, or not yet, and not counted
        self._changes = [0] * SHARDS
        self._refuse_until = 0.0
        self._step = capacity // _STEPS

    def waits_until(self) -> float:
        """Return until when a call that begins now may wait for the evictor, by monotonic time: for all its writes."""
        return time.monotonic() + self._patience

    def claim(self, nbytes: int, until: float) -> None:
        """Reserve room for one write, which ``settle`` releases; wait for the evictor until then, else NotKept.

        Not full, but refused, where there is room and only the report of earlier writes is missing.

        No process writes more than a step (1/128 of the capacity), or one value if that is more, without a report of
        its own, and without the reports of the others. So the capacity is exceeded by at most a step, or a value, for
        each process that writes at that moment, and only if evicting, which begins 5 % below it, does not keep up.
        """
        if nbytes > self._capacity:
            raise NotKept(f"a value of {format_size(nbytes)} is larger than the capacity")
        with self._changed:
            if not self._fits(nbytes):
                self._wait(nbytes, until)
            self._in_flight += nbytes

    def _wait(self, nbytes: int, until: float) -> None:
        self._wake()
        now = time.monotonic()
        if now >= self._refuse_until:
            most = self._patience if self._has_room(nbytes) else self._waits.room
            if self._changed.wait_for(lambda: self._fits(nbytes), max(0.0, min(most, until - now))):
                return
            self._refuse_until = time.monotonic() + self._waits.refusals * most
        if self._has_room(nbytes):
            behind = "the lock on .usage is another process's, or the disk or the machine is too busy for the report"
            raise NotKept(f"earlier writes are not reported to other processes yet: {behind}", full=False)
        raise NotKept(f"no room: {format_size(self._known + self._net)} of {format_size(self._capacity)} are in use")

    def _fits(self, nbytes: int) -> bool:
        unreported = self._written + self._in_flight
        if unreported and unreported + nbytes > self._step:
            return False
        return self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self._known + self._net + self._in_flight + nbytes <= self._capacity

    def settle(self, claimed: int) -> None:
        """Release the room of a write that has ended."""
        with self._changed:
            self._in_flight -= claimed
            self._changed.notify_all()

    @contextlib.contextmanager
    def changing(self, shard: int) -> Iterator[None]:
        """Bracket a change of a shard and the ``count`` of it, so that no recount has it twice or not at all."""
        with self._changed:
            self._changing[shard] += 1
        try:
            yield
        finally:
            with self._changed:
                self._changing[shard] -= 1
                self._changes[shard] += 1  # here: a listing that began before may or may not have it

    def changes(self) -> list[int]:
        """Return a number for each shard to give to ``was_counted``, before anything of it is listed."""
        return self._changes.copy()

    def was_counted(self, shard: int, changes: int) -> bool:
        """Return whether a listing of the shard, begun at this number, has all that this process did there.

        If so, what was not reported of it yet is forgotten: the listing has it. If not, the listing says nothing.
        """
        with self._changed:
            if self._changing[shard] or self._changes[shard] != changes:
                return False
            self._net -= self._deltas.nbytes[shard]
            self._deltas.nbytes[shard] = self._deltas.values[shard] = 0
            return True

    def count(self, shard: int, nbytes: int, values: int) -> None:
        """Record what was written (or removed: less than 0), within ``changing``."""
        with self._changed:
            self._deltas.nbytes[shard] += nbytes
            self._deltas.values[shard] += values
            self._net += nbytes
            self._written += max(0, nbytes)
            due = self._written >= self._step // 2
        if due:
            self._wake()

    def has_events(self) -> bool:
        """Return whether there is something to report."""
        return self._written > 0 or self._net != 0

    def take(self) -> Deltas:
        """Return the deltas since the last call, and start from 0."""
        with self._changed:
            taken, self._deltas = self._deltas, Deltas.none()
            self._known += self._net
            self._net = self._written = 0
            return taken

    def restart(self) -> None:
        """Begin again with a directory that is empty: what was not reported of the one before it is gone with it."""
        self.take()
        self.publish(0)

    def publish(self, known: int) -> None:
        """Record how much the directory holds, reports of all processes included."""
        with self._changed:
            self._known = known
            self._changed.notify_all()
