"""The store of the layout ``slab``: values in segments, found by an index that all processes of a machine share."""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtiers.api import ChunkStore, ConfigError, Finding, NotKept, StoreEntry, TierUnavailable
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import GONE, TOO_LARGE, Directory
from kvtiers_fs.limits import Limits
from kvtiers_fs.slab.diagnosis import diagnose_slab, expect_local
from kvtiers_fs.slab.evictor import SlabEvictor
from kvtiers_fs.slab.format import PAGE, Entry, NameRecord, Row, digest_of
from kvtiers_fs.slab.index import Index, LockBusyError
from kvtiers_fs.slab.segments import SegmentFile, Slab, Taken, TooLargeError
from kvtiers_fs.values import LEAST_COLD, behind, front, is_cached, try_direct
from kvtiers_fs.waits import USUAL_WAITS, Waits

__all__ = ["SlabStore"]

_log = logging.getLogger("kvtiers_fs")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFRESH_SECONDS = 3600  # as each first use, this writes to the index
_LONGEST_NAME = 512
_TRIES = 3
_DELETED_AT_ONCE = 64
_MOST_PARTS = 1024  # of one call (IOV_MAX)


class SlabStore(ChunkStore):
    """Values in the slab of one directory. ``value_bytes``: the longest value that will come, for a new slab."""

    batch_values = 32

    def __init__(
        self, config: FsConfig, value_bytes: int = 4096, *, read_only: bool = False, waits: Waits = USUAL_WAITS
    ) -> None:
        self._waits = waits
        self._config = config
        self._value_bytes = value_bytes
        self._read_only = read_only
        self._woken = threading.Event()
        self._making = threading.Lock()
        self._dropped = 0
        self._evictor: SlabEvictor | None = None
        self._closed = False
        expect_local(config)
        try:
            self._slab = self._open()
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                raise TierUnavailable(f"path {str(config.path)!r}: {error.strerror}") from None
            raise ConfigError(
                f"path {str(config.path)!r} cannot be written by uid {os.geteuid()}: {error}; give it the right to, or "
                "set 'read_only: true'"
            ) from None
        self._limits = Limits(config, self._slab.directory, waits.look)
        self._direct = config.direct
        if self._direct is True and not read_only and (problem := try_direct(self._slab.directory)):
            self._direct = False
            _log.warning("O_DIRECT does not work in this directory (%s): values go through the page cache", problem)
        if not read_only:
            self._evictor = SlabEvictor(lambda: self.slab, self.move, config, self._limits, self._woken)
            self._evictor.start()

    def _open(self, directory: Directory | None = None) -> Slab:
        return Slab(
            self._config,
            self._value_bytes,
            read_only=self._read_only,
            woken=self._woken,
            lock_seconds=self._waits.lock,
            directory=directory,
        )

    @property
    def slab(self) -> Slab:
        """Return what is open; another one after the directory was removed, which this notices."""
        slab = self._slab
        if slab.index is None or slab.index.is_removed():
            return self._open_again(slab)
        return slab

    def _open_again(self, slab: Slab) -> Slab:
        with self._making:
            if slab is not self._slab or self._closed:
                return self._slab
            try:
                self._slab = self._open(slab.directory)
            except (ConfigError, TierUnavailable):
                if not self._read_only:
                    raise
                return slab  # there is nothing to read
            if slab.index is not None:
                slab.segments.close()
                if self._slab.index is not None:
                    path = self._config.path
                    _log.warning("%s was removed while it was in use; it was made again, and is empty", path)
        return self._slab

    # -- reads

    def read_into(self, name: str, dst: memoryview) -> int:
        """Fill the start of ``dst`` from its place in a segment, if that was not used again meanwhile."""
        return self.read_many_into([name], [[dst]])[0]

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> list[int]:
        """Fill each from its place; what lies one behind the other is read in one call."""
        slab, found = self.slab, [0] * len(names)
        if slab.index is None:
            for name in names:
                _digest(name)
            return found
        wanted = {number: _digest(name) for number, name in enumerate(names)}
        for _ in range(_TRIES):
            if not wanted:
                break
            used_again = self._read_some(slab, slab.index, wanted, dsts, found)
            wanted = {number: wanted[number] for number in used_again}
        return found

    def _read_some(
        self,
        slab: Slab,
        index: Index,
        wanted: Mapping[int, bytes],
        dsts: Sequence[Sequence[memoryview]],
        found: list[int],
    ) -> list[int]:
        """Read what the index has; return those whose segments were used for others meanwhile.

        What was moved before that is in another place now.
        """
        entries = self._entries(index, wanted, dsts)
        segments = {entry.segment for entry in entries.values()}
        rows = index.rows_of(segments)
        read: list[int] = []
        cut_short: list[int] = []
        for run in runs_of(entries):
            first = entries[run[0]]
            file = self._file_of(slab, first, rows.get(first.segment))
            if file is not None:
                views = [view for number in run for view in front(dsts[number], entries[number].nbytes)]
                done = self._fill(file, first.at, views)
                for number in run:
                    done -= entries[number].nbytes
                    (read if done >= 0 else cut_short).append(number)
        rows = index.rows_of(segments)
        current = {number for number, e in entries.items() if rows[e.segment].edition == e.edition}
        for number in read:
            found[number] = entries[number].nbytes if number in current else 0
        self._note_uses(index, [entries[number] for number in read if number in current])
        self._drop(index, [entries[number] for number in cut_short if number in current])
        return [number for number in (*read, *cut_short) if number not in current]

    def _entries(
        self, index: Index, wanted: Mapping[int, bytes], dsts: Sequence[Sequence[memoryview]]
    ) -> dict[int, Entry]:
        entries: dict[int, Entry] = {}
        for number, digest in wanted.items():
            entry = index.find(digest)
            if entry is not None and not self._is_expired(entry) and entry.nbytes <= sum(map(len, dsts[number])):
                entries[number] = entry
        return entries

    def _file_of(self, slab: Slab, entry: Entry, row: Row | None) -> SegmentFile | None:
        if row is None or row.edition != entry.edition or not row.birth:
            return None
        try:
            return slab.segments.file(entry.segment, row.birth)
        except OSError as error:
            if error.errno not in GONE:
                raise
        if not self._read_only:
            with contextlib.suppress(LockBusyError), slab.opened_index.locked():
                slab.segments.forget(entry.segment, row)
        return None

    def _drop(self, index: Index, entries: Sequence[Entry]) -> None:
        """Forget values whose file was cut short."""
        if entries and not self._read_only:
            with contextlib.suppress(LockBusyError), index.locked():
                for entry in entries:
                    index.remove(entry.digest)

    def _fill(self, file: SegmentFile, at: int, dsts: Sequence[memoryview]) -> int:
        """Read into these views what begins there; return how many bytes there were."""
        fd, nbytes = file.fd, sum(map(len, dsts))
        if self._direct is True or (self._direct == "cold" and nbytes >= LEAST_COLD and not is_cached(fd, nbytes, at)):
            fd = file.direct
        done = 0
        while done < nbytes:
            views = list(behind(dsts, done))[:_MOST_PARTS]
            try:
                more = os.preadv(fd, views, at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or fd == file.fd:
                    raise
                fd = file.fd  # memory or lengths that are not aligned
                continue
            finally:
                for view in views:
                    view.release()
            if not more:
                break
            done += more
        return done

    def _is_expired(self, entry: Entry) -> bool:
        return self._config.max_age is not None and entry.time < time.time() - self._config.max_age

    def _note_uses(self, index: Index, entries: Sequence[Entry]) -> None:
        """Mark values as used, once, and each hour: a lock that is not free at once is not waited for."""
        now = int(time.time())
        unmarked = [entry for entry in entries if not entry.used or abs(now - entry.time) >= _REFRESH_SECONDS]
        if unmarked and not self._read_only:
            with contextlib.suppress(OSError), index.locked(once=True):  # LockBusyError is one, too
                for entry in unmarked:
                    index.change(entry, entry._replace(used=1, time=now))

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask the index."""
        index = self.slab.index
        digests = list(map(_digest, names))
        if index is None:
            return [False] * len(digests)
        entries = list(map(index.find, digests))
        editions = index.editions()
        return [entry is not None and editions.has(entry) and not self._is_expired(entry) for entry in entries]

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Read the segments' lists of names, the oldest first; ``modified`` is a value's last use."""
        slab = self.slab
        if slab.index is None:
            return
        listed: set[int] = set()
        # What is replaced or moved meanwhile is in a segment that was not full before, or is begun: so none is missed.
        while rest := [
            pair for pair in enumerate(slab.index.rows()) if pair[1].birth and pair[1].edition not in listed
        ]:
            segment, row = min(rest, key=lambda pair: pair[1].age)
            listed.add(row.edition)
            for record, entry in slab.segments.living(segment, row):
                if record.name.startswith(prefix):
                    yield StoreEntry(record.name, entry.nbytes, float(entry.time))

    # -- changes

    def write(self, name: str, src: memoryview) -> None:
        """Write the value into this store's segment, then its entry. NotKept where no segment can be had.

        Not full, but refused, where the file system has become read-only.
        """
        slab, digest = self._writable(), _digest(name)
        with self._refusing():
            self._write_run(slab, [(name, digest)], [[src]])

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> Sequence[NotKept | None]:
        """Write the values, as many as there is room for one behind the other in one call."""
        slab, kept = self._writable(), list[NotKept | None]()
        pairs = [(name, _digest(name)) for name in names]
        while len(kept) < len(pairs):
            at = len(kept)
            try:
                with self._refusing():
                    kept += [None] * self._write_run(slab, pairs[at:], srcs[at:])
            except TooLargeError as error:
                kept.append(error)
            except NotKept as error:  # a lock or a disk, which is the same for all
                kept += [error] * (len(pairs) - at)
                self._dropped += len(pairs) - at - 1  # the first has been counted
        return kept

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise what says that a write is dropped, in the place of the system's errors that mean it."""
        try:
            yield
        except LockBusyError as error:
            self._dropped += 1
            raise NotKept(str(error)) from None
        except NotKept:
            self._dropped += 1
            raise
        except OSError as error:
            if error.errno not in _FULL and error.errno != errno.EROFS:
                raise
            self._dropped += 1
            if error.errno == errno.EROFS:
                path = str(self._config.path)
                raise NotKept(f"the file system of {path!r} has become read-only", full=False) from None
            if error.errno == errno.EFBIG:
                raise NotKept(TOO_LARGE.format(what="a segment")) from None
            raise NotKept(f"the disk has no room: {error.strerror}") from None

    def _write_run(self, slab: Slab, names: Sequence[tuple[str, bytes]], srcs: Sequence[Sequence[memoryview]]) -> int:
        """Write the first of these values, as many as fit behind each other; return how many."""
        lengths = [sum(map(len, views)) for views in srcs]
        uneven = next((number for number, nbytes in enumerate(lengths) if nbytes % PAGE), len(lengths))
        taken = slab.segments.take(lengths[: max(1, uneven)])
        count = len(taken.lengths)
        try:
            self._pour(taken, [view for views in srcs[:count] for view in views])
            now = int(time.time())
            entries = [
                Entry(digest, taken.claimed.row.edition, taken.claimed.segment, 0, page, nbytes, now)
                for (_, digest), page, nbytes in zip(names, taken.pages(), taken.lengths, strict=False)
            ]

            def insert() -> None:
                with slab.opened_index.locked():
                    slab.opened_index.insert(entries)

            self._finish(slab, taken, [name for name, _ in names[:count]], entries, insert)
        finally:
            slab.segments.give_back(taken)
        self._limits.record(names[0][0])
        return count

    def _finish(
        self, slab: Slab, taken: Taken, names: Sequence[str], entries: Sequence[Entry], insert: Callable[[], None]
    ) -> None:
        """Make values whose bytes are in place values that are found."""
        claimed = taken.claimed
        if self._config.fsync:
            os.fdatasync(claimed.file.fd)
        records = [
            NameRecord(entry.edition, entry.page, entry.nbytes, entry.time, name)
            for name, entry in zip(names, entries, strict=True)
        ]
        slab.segments.finish(taken, records, insert)
        if self._config.fsync:
            os.fdatasync(claimed.names.fd)
            slab.opened_index.sync()

    def _pour(self, taken: Taken, srcs: Sequence[memoryview]) -> None:
        file = taken.claimed.file
        fd = file.direct if self._direct is True else file.fd
        at, nbytes, done = taken.page * PAGE, sum(taken.lengths), 0
        while done < nbytes:
            views = list(behind(srcs, done))[:_MOST_PARTS]
            try:
                done += os.pwritev(fd, views, at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or fd == file.fd:
                    raise
                fd = file.fd
            finally:
                for view in views:
                    view.release()

    def move(self, slab: Slab, name: str, entry: Entry, value: memoryview) -> None:
        """Write a value again, in a younger segment, in the place of an entry that still leads to it."""
        taken = slab.segments.take([entry.nbytes])
        claimed, index = taken.claimed, slab.opened_index
        moved = entry._replace(edition=claimed.row.edition, segment=claimed.segment, page=taken.page, used=0)

        def insert() -> None:
            with index.locked():
                if not index.change(entry, moved):
                    index.count_dead(moved)

        try:
            self._pour(taken, [value])
            self._finish(slab, taken, [name], [moved], insert)
        finally:
            slab.segments.give_back(taken)

    def _writable(self) -> Slab:
        if self._read_only:
            raise PermissionError(errno.EROFS, "this tier is read-only", str(self._config.path))
        return self.slab

    def delete(self, names: Sequence[str]) -> None:
        """Remove the values' entries; their room is used again when their segment is."""
        slab = self._writable()
        assert slab.index is not None
        there = [digest for digest in map(_digest, names) if slab.index.find(digest) is not None]
        for start in range(0, len(there), _DELETED_AT_ONCE):  # others write in between
            with slab.index.locked():
                for digest in there[start : start + _DELETED_AT_ONCE]:
                    slab.index.remove(digest)

    # -- figures, and the end

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the file system and the slab: whether it is local, what it supports, whether values fit."""
        return diagnose_slab(self._config, self.slab, value_bytes, None if self._read_only else self._limits)

    def stats(self) -> Mapping[str, float]:
        """Return the evictor's last figures; does no I/O."""
        figures = self._evictor.figures() if self._evictor else {}
        return {**figures, "dropped_values": self._dropped, "direct": float(self._direct is True)}

    def close(self) -> None:
        """End the thread, release this store's segment, close the files."""
        if self._evictor is not None and not self._evictor.stop(self._waits.close):
            return  # the file system hangs: its thread still uses the descriptors, which end with the process
        with self._making:
            self._closed = True
        if self._slab.index is not None:
            self._slab.segments.close()
            self._slab.index.close()
        self._slab.directory.close()


def _digest(name: str) -> bytes:
    if len(name) > _LONGEST_NAME or not all(name.split("/")):
        raise ValueError(f"not a storage name (at most {_LONGEST_NAME} characters, no empty parts): {name!r}")
    return digest_of(name)


def runs_of(entries: Mapping[int, Entry]) -> Iterator[list[int]]:
    """Yield the numbers of entries whose values lie one behind the other, in that order."""
    run: list[int] = []
    for number in sorted(entries, key=lambda number: (*entries[number][1:3], entries[number].page)):
        entry = entries[number]
        if run:
            before = entries[run[-1]]
            is_next = (entry.edition, entry.segment, entry.page * PAGE) == (*before[1:3], before.at + before.nbytes)
            if not is_next or len(run) == _MOST_PARTS:
                yield run
                run = []
        run.append(number)
    if run:
        yield run
