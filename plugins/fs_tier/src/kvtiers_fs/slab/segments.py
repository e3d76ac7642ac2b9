"""The segments of a slab: their files, and the one of them that this store writes to.

A store writes to a segment that it has locked (``flock`` on the segment's file), so that processes never write side by
side into one, and the system ends the claim of a process that was killed. What such a process had claimed is taken up
again where it ended: its row in the index has the end, and nothing writes to it any more.

When a segment is full, the next one is, in this order: one that was begun and is unclaimed, one without living values,
a new one while the capacity allows it, the oldest. To use it again takes one write: of a new edition into its row.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvtiers.api import NotKept
from kvtiers.api.units import format_size
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import GONE, Directory
from kvtiers_fs.evictor import free_bytes
from kvtiers_fs.root import open_root
from kvtiers_fs.slab.format import PAGE, Entry, NameRecord, Row, digest_of, is_core_record, name_records, pages_of
from kvtiers_fs.slab.index import Index, OwnedFd, allocate, open_index

__all__ = ["Claimed", "SegmentFile", "Segments", "Slab", "Taken", "TooLargeError", "Totals"]

_DIRECT = getattr(os, "O_DIRECT", 0)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_OPEN = 128
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class TooLargeError(NotKept):
    """A value is longer than a segment of this slab: to make room would not help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, full=False)


class SegmentFile:
    """One segment's files, opened. ``direct``: past the page cache, where that works."""

    def __init__(self, directory: Directory, stem: str, *, writable: bool) -> None:
        self._directory = directory
        self._stem = stem
        self._mode = os.O_RDWR if writable else os.O_RDONLY
        self._values = self._open(".values", self._mode)
        self._direct: OwnedFd | None = None
        self._opening = threading.Lock()

    def _open(self, suffix: str, flags: int) -> OwnedFd:
        return OwnedFd(self._directory.open(self._stem + suffix, flags | _FLAGS))

    @property
    def fd(self) -> int:
        """Return the values' descriptor."""
        return self._values.fd

    @property
    def direct(self) -> int:
        """Return the values' descriptor past the page cache, or the other one where the file system has no such."""
        with self._opening:  # one descriptor: a second one would end the first, which a call may be using
            if self._direct is None:
                try:
                    self._direct = self._open(".values", self._mode | _DIRECT) if _DIRECT else self._values
                except OSError as error:
                    if error.errno not in GONE and error.errno != errno.EINVAL:
                        raise
                    self._direct = self._values  # also of a file that was removed: what is open is still there
            return self._direct.fd

    def open_names(self) -> OwnedFd:
        """Open the list of names."""
        return self._open(".names", self._mode)


class Claimed:
    """The segment that this store writes to: locked by it, and by no other one."""

    def __init__(self, segment: int, row: Row, file: SegmentFile, names: OwnedFd, lock: OwnedFd) -> None:
        self.segment = segment
        self.row = row
        self.file = file
        self.names = names
        self.in_use = 0
        self._lock = lock

    def release(self) -> None:
        """Let other processes claim it."""
        fcntl.flock(self._lock.fd, fcntl.LOCK_UN)


class Taken(NamedTuple):
    """Room for values one behind the other, of these lengths."""

    claimed: Claimed
    page: int
    lengths: Sequence[int]

    def pages(self) -> Iterator[int]:
        """Yield the page at which each value begins."""
        page = self.page
        for nbytes in self.lengths:
            yield page
            page += pages_of(nbytes)


class Totals(NamedTuple):
    """The content of a slab: living values, segments, and those of them that wait to be used again."""

    nbytes: int
    values: int
    segments: int
    spare: int


class Segments:
    """The segments of one slab, and this store's own. Safe to use from several threads.

    ``has_room(nbytes)``: whether the disk may get another segment.
    """

    def __init__(
        self,
        directory: Directory,
        index: Index,
        capacity: int,
        has_room: Callable[[int], bool],
        woken: Callable[[], None],
        *,
        writable: bool,
    ) -> None:
        self._directory = directory
        self._index = index
        self._capacity = capacity
        self._has_room = has_room
        self._woken = woken
        self._writable = writable
        self._files: OrderedDict[tuple[int, int], SegmentFile] = OrderedDict()
        self._files_lock = threading.Lock()
        self._writing = threading.Lock()
        self._claimed: Claimed | None = None
        self.evicted_values = self.evicted_bytes = 0

    @property
    def most(self) -> int:
        """Return how many segments the capacity has."""
        return min(max(1, self._capacity // self._index.header.segment_bytes), self._index.header.rows)

    def stem(self, birth: int) -> str:
        """Return the first part of a segment's file names."""
        return f"slab-{self._index.header.ident:08x}-{birth:08x}"

    def file(self, segment: int, birth: int) -> SegmentFile:
        """Return a segment's files, which stay open for the next call."""
        key = (segment, birth)
        with self._files_lock:
            found = self._files.get(key)
            if found is not None:
                self._files.move_to_end(key)
                return found
        made = SegmentFile(self._directory, self.stem(birth), writable=self._writable)
        with self._files_lock:
            self._files[key] = made
            while len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
        return made

    # -- this store's writes

    def take(self, lengths: Sequence[int]) -> Taken:
        """Take room for as many of these values as one segment has it, which ``give_back`` ends.

        NotKept: there is none for the first one; TooLargeError: nor will there ever be.
        """
        pages = pages_of(lengths[0])
        if pages * PAGE > self._index.header.segment_bytes:
            segment = format_size(self._index.header.segment_bytes)
            raise TooLargeError(
                f"a value of {format_size(lengths[0])} is larger than a segment, which has {segment}; "
                "in another directory the slab is made for such values"
            )
        with self._writing:
            claimed = self._claimed
            if claimed is None or not self._fits(claimed.row, pages):
                claimed = self._next(pages)
            count = 1
            while count < len(lengths) and self._fits(claimed.row, pages + pages_of(lengths[count])):
                pages += pages_of(lengths[count])
                count += 1
            page = claimed.row.pages
            self._set(claimed, pages=page + pages)
            claimed.in_use += 1
            return Taken(claimed, page, lengths[:count])

    def _fits(self, row: Row, pages: int) -> bool:
        return (row.pages + pages) * PAGE <= self._index.header.segment_bytes

    def _set(self, claimed: Claimed, **fields: int) -> None:
        claimed.row = claimed.row._replace(**fields)
        self._index.set_row(claimed.segment, claimed.row)

    def finish(self, taken: Taken, records: Sequence[NameRecord], insert: Callable[[], None]) -> None:
        """Record values whose bytes are in place: their names, then their entries, by ``insert``."""
        claimed = taken.claimed
        with self._writing:
            data = b"".join(record.encode() for record in records)
            at = claimed.row.names_bytes
            if os.pwrite(claimed.names.fd, data, at) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            row = claimed.row
            # First the counts: a value is never counted as dead before it was counted.
            self._set(
                claimed,
                names_bytes=at + len(data),
                values=row.values + len(records),
                nbytes=row.nbytes + sum(taken.lengths),
            )
            insert()

    def give_back(self, taken: Taken) -> None:
        """End what ``take`` began. Room that was not used stays empty until its segment is used again."""
        claimed = taken.claimed
        with self._writing:
            claimed.in_use -= 1
            if claimed is not self._claimed and not claimed.in_use:
                claimed.release()

    def _next(self, pages: int) -> Claimed:
        with self._index.locked():
            before, self._claimed = self._claimed, None
            if before is not None:
                self._fill(before)
                if not before.in_use:
                    before.release()
            self._claimed = self._begun(pages) or self._empty() or self._new() or self._oldest()
        self._woken()
        if self._claimed is None:
            raise NotKept("no room: the disk has none for another segment, and others write to all that there are")
        return self._claimed

    def _fill(self, claimed: Claimed) -> None:
        self._set(claimed, filled=self.next_edition(self._index.rows()))

    def _begun(self, pages: int) -> Claimed | None:
        for segment, row in enumerate(self._index.rows()):
            if row.birth and not row.filled and (claimed := self.claim(segment, row)):
                if not claimed.row.filled and self._fits(claimed.row, pages):
                    return claimed
                if not claimed.row.filled:  # of a process that has ended, and too full for such a value
                    self._fill(claimed)
                claimed.release()
        return None

    def _empty(self) -> Claimed | None:
        rows = self._index.rows()
        for segment, (row, dead) in enumerate(zip(rows, self._index.deads(rows), strict=True)):
            if row.birth and row.values <= dead.values and (claimed := self.claim(segment, row)):
                if claimed.row.values <= self._index.dead(segment, claimed.row.edition).values:
                    self.renew(claimed)
                    return claimed
                claimed.release()
        return None

    def _new(self) -> Claimed | None:
        rows = self._index.rows()
        # Read again: a row in use may not be overwritten because it was just being written.
        free = (segment for segment, row in enumerate(rows) if not row.birth and not self._index.row(segment).birth)
        unused = next(free, None)
        nbytes = self._index.header.segment_bytes
        if unused is None or sum(1 for row in rows if row.birth) >= self.most or not self._has_room(nbytes):
            return None
        birth = self.next_edition(rows)
        while True:
            try:
                self._make_files(self.stem(birth), nbytes)
                break
            except FileExistsError:  # of a process that was killed; or a row could not be read, and these are in use
                birth += 1
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                return None
        row = Row(birth, birth)
        self._index.set_row(unused, row)
        return self.claim(unused, row)

    def _make_files(self, stem: str, nbytes: int) -> None:
        permissions, made = self._directory.permissions, list[str]()
        try:
            for suffix, length in ((".names", 0), (".values", nbytes)):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
                fd = OwnedFd(os.open(stem + suffix, flags, permissions.file, dir_fd=self._directory.fd))
                made.append(suffix)
                permissions.apply(fd.fd, permissions.file)
                if length:
                    allocate(fd.fd, length)
        except OSError:
            self.unlink(stem, made)
            raise

    def unlink(self, stem: str, suffixes: Sequence[str] = (".values", ".names")) -> None:
        """Remove a segment's files."""
        for suffix in suffixes:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(stem + suffix, dir_fd=self._directory.fd)

    def _oldest(self) -> Claimed | None:
        claimed = self.oldest()
        if claimed is not None:
            self.evict(claimed)
        return claimed

    # -- what the evictor does, too; all of it within the index's lock

    def by_age(self) -> Iterator[Claimed]:
        """Claim one segment after the other, the one that was full first; the caller releases it."""
        rows = self._index.rows()
        for segment in sorted(range(len(rows)), key=lambda segment: rows[segment].age):
            if rows[segment].birth and (claimed := self.claim(segment, rows[segment])):
                yield claimed

    def oldest(self) -> Claimed | None:
        """Claim the oldest segment that has no record of core's, or the oldest one if all have.

        Records wait for the evictor, which copies them on.
        """
        for with_records in (False, True):
            for claimed in self.by_age():
                if with_records or not self._has_records(claimed):
                    return claimed
                claimed.release()
        return None

    def _has_records(self, claimed: Claimed) -> bool:
        if b"/_" not in os.pread(claimed.names.fd, claimed.row.names_bytes, 0):
            return False
        return any(is_core_record(record.name) for record, _ in self.living(claimed.segment, claimed.row))

    def claim(self, segment: int, row: Row) -> Claimed | None:
        """Lock a segment for this store; None if another one has it, or its files are gone."""
        if self._claimed is not None and self._claimed.segment == segment:
            return None
        birth = row.birth
        try:
            file = self.file(segment, birth)
            lock = OwnedFd(self._directory.open(self.stem(birth) + ".values", os.O_RDWR | _FLAGS))
            names = file.open_names()
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in GONE:
                raise
            return None
        # Read again: its owner may have changed it until it lost the lock.
        row = self._index.row(segment)
        return Claimed(segment, row, file, names, lock) if birth and row.birth == birth else None

    def next_edition(self, rows: list[Row]) -> int:
        """Return a number that no segment had, also if a power cut took the newest rows: the time counts on."""
        return max(max(max(row.edition, row.filled) for row in rows) + 1, int(time.time())) & 0xFFFFFFFF

    def renew(self, claimed: Claimed) -> None:
        """Forget all values of a segment: one write."""
        claimed.row = Row(self.next_edition(self._index.rows()), claimed.row.birth)
        self._index.set_row(claimed.segment, claimed.row)

    def evict(self, claimed: Claimed) -> None:
        """Forget all values of a segment for room, and count them."""
        row, dead = claimed.row, self._index.dead(claimed.segment, claimed.row.edition)
        self.evicted_values += max(0, row.values - dead.values)
        self.evicted_bytes += max(0, row.nbytes - dead.nbytes)
        self.renew(claimed)

    def discard(self, claimed: Claimed) -> None:
        """Give a claimed segment's room back to the disk. Its row keeps an edition: the next one is higher."""
        birth = claimed.row.birth
        self._index.set_row(claimed.segment, Row(self.next_edition(self._index.rows())))
        os.ftruncate(claimed.file.fd, 0)  # now, whatever processes still have it open
        claimed.release()
        self.unlink(self.stem(birth))

    def forget(self, segment: int, row: Row) -> None:
        """Take a segment out of the index whose files are gone, as by ``rm``."""
        if self._index.row(segment) == row:
            self._index.set_row(segment, Row(self.next_edition(self._index.rows())))

    def living(self, segment: int, row: Row) -> Iterator[tuple[NameRecord, Entry]]:
        """Yield the values of a segment that its list names and the index still has there."""
        try:
            names = self.file(segment, row.birth).open_names()
        except OSError as error:
            if error.errno in GONE:
                return
            raise
        for record in name_records(os.pread(names.fd, row.names_bytes, 0), row.edition):
            entry = self._index.find(digest_of(record.name))
            if entry and entry[1:3] == (record.edition, segment) and entry.page == record.page:
                yield record, entry

    def totals(self) -> "Totals":
        """Return what the slab holds."""
        rows = self._index.rows()
        pairs = list(zip(rows, self._index.deads(rows), strict=True))
        return Totals(
            sum(max(0, row.nbytes - dead.nbytes) for row, dead in pairs),
            sum(max(0, row.values - dead.values) for row, dead in pairs),
            sum(1 for row in rows if row.birth),
            sum(1 for row, dead in pairs if row.birth and row.values <= dead.values and (row.filled or not row.pages)),
        )

    def close(self) -> None:
        """Release this store's segment, which the next store goes on with, and close the files."""
        with self._writing:
            if self._claimed is not None:
                self._claimed.release()
                self._claimed = None
        with self._files_lock:
            self._files.clear()


class Slab:
    """What is open of one slab: its directory, index and segments, which end together."""

    def __init__(
        self,
        config: FsConfig,
        value_bytes: int,
        *,
        read_only: bool,
        woken: threading.Event,
        lock_seconds: float,
        directory: Directory | None = None,
    ) -> None:
        root = open_root(config, read_only=read_only)
        if directory is not None:  # calls that use it end in the one or the other
            directory.replace(root)
        self.directory = directory or root
        self._min_free = config.min_free
        try:
            self.index = open_index(
                self.directory,
                read_only=read_only,
                capacity=config.capacity,
                value_bytes=value_bytes,
                lock_seconds=lock_seconds,
            )
            if self.index is not None:
                self.segments = Segments(
                    self.directory, self.index, config.capacity, self._has_room, woken.set, writable=not read_only
                )
        except BaseException:
            if directory is None:
                root.close()
            raise

    @property
    def opened_index(self) -> Index:
        """Return the index; there is one wherever the slab may be changed."""
        assert self.index is not None, "a read-only slab may have none"
        return self.index

    def _has_room(self, nbytes: int) -> bool:
        return free_bytes(self.directory.fd) - nbytes >= self._min_free
