"""The index of a slab: one file that all processes of a machine read and change, and the lock on it.

It is read and written by system calls, never mapped: a disk without room, or a file that was cut short, then fails a
call and does not end the process. What was written is in the system's memory at once, so that it survives a killed
process and others see it. Readers take no lock; a change takes ``flock`` for a few calls' length, which ends with the
process that holds it. A record that was being changed fails its checksum: then nothing is there.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from kvtiers_fs.config import FEWEST_SEGMENTS
from kvtiers_fs.directory import Directory
from kvtiers_fs.slab.format import (
    BUCKET_BYTES,
    BUCKET_ENTRIES,
    DEAD_BYTES,
    ENTRY_BYTES,
    PAGE,
    PLACES,
    ROW_BYTES,
    Dead,
    Entry,
    Header,
    Row,
)

__all__ = ["INDEX_FILE", "Index", "LockBusyError", "OwnedFd", "allocate", "open_index"]

INDEX_FILE = "slab-index"
_log = logging.getLogger("kvtiers_fs")
_EDITIONS = struct.Struct(f"<I{ROW_BYTES - 4}x")
_EMPTY = bytes(ENTRY_BYTES)
_NO_ROW = bytes(ROW_BYTES)
_FEW = 8
_TRIES = 3  # a record that fails its checksum may be one that is just being written
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 2e-3
_SEGMENT_LEAST, _SEGMENT_MOST = 16 << 20, 1 << 30
_SEGMENTS = 64  # of a capacity between these two
_BYTES_PER_ENTRY = 64 << 10  # the index has room for values of this length, or of the longest one if that is less
_FEWEST_BUCKETS = 16
_LOAD = 0.63  # of a bucket; one in some 100,000 has more than it can hold then


class LockBusyError(TimeoutError):
    """Another process has held the lock on the index for too long: it is stopped."""


class OwnedFd:
    """A descriptor that is closed with the last reference to it, so that no call in progress loses its file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it now: there is no call in progress."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def allocate(fd: int, nbytes: int) -> None:
    """Give a file its length, with the room for it where the file system can promise that. OSError: there is none."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)


def segment_bytes_of(capacity: int, value_bytes: int) -> int:
    """Return how long a segment is: a 64th of the capacity within 16 MiB and 1 GiB, and room for some values."""
    wanted = min(max(capacity // _SEGMENTS, _SEGMENT_LEAST, 4 * value_bytes), _SEGMENT_MOST)
    return max(1, min(wanted, capacity // FEWEST_SEGMENTS) // PAGE) * PAGE


def open_index(
    directory: Directory, *, read_only: bool, capacity: int, value_bytes: int, lock_seconds: float
) -> "Index | None":
    """Open the directory's index, made if there is none that can be used; None: there is none, and it is read-only."""
    while True:
        try:
            fd = OwnedFd(directory.open(INDEX_FILE, os.O_RDONLY if read_only else os.O_RDWR))
        except FileNotFoundError:
            if read_only:
                return None
            _make(directory, capacity, value_bytes)
            continue
        header = Header.decode(os.pread(fd.fd, PAGE, 0))
        if header is not None and os.fstat(fd.fd).st_size >= header.index_bytes:
            return Index(fd, header, lock_seconds)
        if read_only:
            return None
        # The values behind it cannot be found any more.
        _log.warning("the index of the slab was damaged, or of another format: the cache is cold")
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(INDEX_FILE, dir_fd=directory.fd, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(fd.fd)):  # or another process was sooner, and has made it again
                os.unlink(INDEX_FILE, dir_fd=directory.fd)


def _make(directory: Directory, capacity: int, value_bytes: int) -> None:
    segment_bytes = segment_bytes_of(capacity, value_bytes)
    rows = min(2 * (capacity // segment_bytes) + 64, 0xFFFF)
    per_entry = min(max(value_bytes, PAGE), _BYTES_PER_ENTRY)
    buckets = max(_FEWEST_BUCKETS, int(capacity / per_entry / (BUCKET_ENTRIES * _LOAD)))
    header = Header(secrets.randbits(32), segment_bytes, rows, buckets)

    def fill(fd: int) -> None:
        allocate(fd, header.index_bytes)
        os.pwrite(fd, header.encode(), 0)

    directory.publish(INDEX_FILE, fill)


class Index:
    """The open index. Safe to use from several threads; what changes it is called within ``locked``.

    ``lock_seconds``: how long its lock is waited for.
    """

    def __init__(self, fd: OwnedFd, header: Header, lock_seconds: float) -> None:
        self._lock_seconds = lock_seconds
        self.header = header
        self._fd = fd
        self._mine = threading.Lock()

    def is_removed(self) -> bool:
        """Return whether the file was removed while it was open."""
        return os.fstat(self._fd.fd).st_nlink == 0

    def close(self) -> None:
        """Close the file."""
        self._fd.close()

    def changed_at(self) -> int:
        """Return when the file was changed last, in ns by the system's clock for files."""
        return os.fstat(self._fd.fd).st_mtime_ns

    def sync(self) -> None:
        """Wait until what was changed would survive a power cut."""
        os.fdatasync(self._fd.fd)

    @contextlib.contextmanager
    def locked(self, *, once: bool = False) -> Iterator[None]:
        """Hold the lock; LockBusyError if it cannot be had in time. ``once``: try once."""
        seconds = 0.0 if once else self._lock_seconds
        until = time.monotonic() + seconds
        if not self._mine.acquire(timeout=seconds) if seconds else not self._mine.acquire(blocking=False):
            raise LockBusyError("the slab's index is locked")
        try:
            pause = _FIRST_PAUSE
            while True:
                try:
                    fcntl.flock(self._fd.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise LockBusyError("the slab's index is locked by another process, which is stopped") from None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                yield
            finally:
                fcntl.flock(self._fd.fd, fcntl.LOCK_UN)
        finally:
            self._mine.release()

    def _bucket_at(self, digest: bytes) -> int:
        number = int.from_bytes(digest[:8], "little") % self.header.buckets
        return self.header.buckets_at + number * PAGE

    def find(self, digest: bytes) -> Entry | None:
        """Return the entry of this name, whether its segment is still of that edition or not."""
        at = self._bucket_at(digest)
        for _ in range(_TRIES):
            bucket = os.pread(self._fd.fd, PAGE, at)
            place = _place_in(bucket, digest)
            if place < 0:
                return None
            if (entry := Entry.decode(bucket, place)) is not None:
                return entry
        return None

    def row(self, segment: int) -> Row:
        """Return a segment's row."""
        row = Row()
        for _ in range(_TRIES):
            row = Row.decode(os.pread(self._fd.fd, ROW_BYTES, PAGE + segment * ROW_BYTES), 0)
            if row.edition:
                break
        return row

    def rows(self) -> list[Row]:
        """Return the rows of all segments. One that was just being written is read again."""
        table, found = self._table(), list[Row]()
        for segment, at in enumerate(range(0, len(table), ROW_BYTES)):
            row = Row.decode(table, at) if table[at : at + 4] != b"\0\0\0\0" else Row()
            is_torn = not row.edition and table[at : at + ROW_BYTES] != _NO_ROW
            found.append(self.row(segment) if is_torn else row)
        return found

    def rows_of(self, segments: Collection[int]) -> dict[int, Row]:
        """Return the rows of these segments."""
        if len(segments) <= _FEW:
            return {segment: self.row(segment) for segment in segments}
        rows = self.rows()
        return {segment: rows[segment] if segment < len(rows) else Row() for segment in segments}

    def editions(self) -> "Editions":
        """Return the present editions, for asking about many entries."""
        return Editions(self._table())

    def _table(self) -> bytes:
        return os.pread(self._fd.fd, self.header.rows * ROW_BYTES, PAGE)

    def set_row(self, segment: int, row: Row) -> None:
        """Write a segment's row."""
        os.pwrite(self._fd.fd, row.encode(), PAGE + segment * ROW_BYTES)

    def dead(self, segment: int, edition: int) -> Dead:
        """Return what died in a segment."""
        found = Dead.decode(os.pread(self._fd.fd, DEAD_BYTES, self.header.dead_at + segment * DEAD_BYTES), 0)
        return found if found.edition == edition else Dead(edition)

    def deads(self, rows: list[Row]) -> list[Dead]:
        """Return what died in each segment."""
        table = os.pread(self._fd.fd, self.header.rows * DEAD_BYTES, self.header.dead_at)
        found = [
            Dead.decode(table, at) if table[at : at + 4] != b"\0\0\0\0" else Dead()
            for at in range(0, len(table), DEAD_BYTES)
        ]
        pairs = zip(rows, found, strict=True)
        return [dead if dead.edition == row.edition else Dead(row.edition) for row, dead in pairs]

    def insert(self, entries: Iterable[Entry]) -> None:
        """Put each entry into its bucket.

        It takes the place of the name's older entry, or one that is empty or dead, or that of the oldest in the bucket.
        """
        editions = [number for (number,) in _EDITIONS.iter_unpack(self._table())]
        for entry in entries:
            at = self._bucket_at(entry.digest)
            bucket = os.pread(self._fd.fd, PAGE, at)
            place, lost = _place_in(bucket, entry.digest), None
            if place >= 0:
                lost = Entry.decode(bucket, place)
            else:
                place, lost = _place_for(entry, bucket, editions)
            os.pwrite(self._fd.fd, entry.encode(), at + place)
            self.count_dead(lost)

    def remove(self, digest: bytes) -> Entry | None:
        """Remove the entry of a name; return the one whose value is lost by that."""
        at = self._bucket_at(digest)
        bucket = os.pread(self._fd.fd, PAGE, at)
        place = _place_in(bucket, digest)
        if place < 0:
            return None
        entry = Entry.decode(bucket, place)
        os.pwrite(self._fd.fd, _EMPTY, at + place)
        return self.count_dead(entry)

    def change(self, entry: Entry, changed: Entry) -> bool:
        """Put ``changed`` in the place of an entry of the same name, if that is still there."""
        at = self._bucket_at(entry.digest)
        bucket = os.pread(self._fd.fd, PAGE, at)
        place = _place_in(bucket, entry.digest)
        found = Entry.decode(bucket, place) if place >= 0 else None
        if found is None or not found.is_at(entry):
            return False
        os.pwrite(self._fd.fd, changed.encode(), at + place)
        if not changed.is_at(entry):
            self.count_dead(entry)
        return True

    def count_dead(self, entry: Entry | None) -> Entry | None:
        """Count a value as dead whose entry is gone; None if it was not alive."""
        if entry is None or self.row(entry.segment).edition != entry.edition:
            return None
        dead = self.dead(entry.segment, entry.edition)
        dead = dead._replace(values=dead.values + 1, nbytes=dead.nbytes + entry.nbytes)
        os.pwrite(self._fd.fd, dead.encode(), self.header.dead_at + entry.segment * DEAD_BYTES)
        return entry


class Editions:
    """The editions of all segments, as they were a moment ago."""

    def __init__(self, table: bytes) -> None:
        self._table = table
        self._found: dict[int, int] = {}

    def has(self, entry: Entry) -> bool:
        """Return whether an entry's segment is of the entry's edition."""
        segment = entry.segment
        if segment not in self._found:
            at = segment * ROW_BYTES
            self._found[segment] = Row.decode(self._table, at).edition if at < len(self._table) else 0
        return self._found[segment] == entry.edition


def _place_for(entry: Entry, bucket: bytes, editions: Sequence[int]) -> tuple[int, Entry | None]:
    """Return a place whose entry is empty or dead, or the place and the entry of the oldest value.

    The search begins anywhere, so that it does not pass over those that were found by it last time.
    """
    start = entry.digest[-1] % BUCKET_ENTRIES
    oldest, found = 1 << 32, 0
    turned = bucket[start * ENTRY_BYTES : BUCKET_BYTES] + bucket[: start * ENTRY_BYTES]
    for number, (edition, segment) in enumerate(PLACES.iter_unpack(turned), start):
        if not edition or segment >= len(editions) or editions[segment] != edition:
            return number % BUCKET_ENTRIES * ENTRY_BYTES, None
        if edition < oldest:
            oldest, found = edition, number
    place = found % BUCKET_ENTRIES * ENTRY_BYTES
    return place, Entry.decode(bucket, place)


def _place_in(bucket: bytes, digest: bytes) -> int:
    place = bucket.find(digest)
    while place >= 0 and place % ENTRY_BYTES:
        place = bucket.find(digest, place + 1)
    return place
