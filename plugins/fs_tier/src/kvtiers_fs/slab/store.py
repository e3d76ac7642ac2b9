"""The store of the layout ``slab``: values in segments, found by an index that all processes of a machine share."""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from kvtiers.api import ChunkStore, ConfigError, Finding, StoreEntry, StoreFull, TierUnavailable, WritesRefused
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import GONE, Directory
from kvtiers_fs.slab.diagnosis import diagnose_slab, expect_local
from kvtiers_fs.slab.evictor import SlabEvictor
from kvtiers_fs.slab.format import PAGE, Entry, NameRecord, digest_of
from kvtiers_fs.slab.index import Index, LockBusyError
from kvtiers_fs.slab.segments import LOCK_SECONDS, SegmentFile, Slab, Taken
from kvtiers_fs.values import LEAST_COLD, behind, is_cached, try_direct

__all__ = ["SlabStore"]

_log = logging.getLogger("kvtiers_fs")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFRESH_SECONDS = 3600  # as each first use, this writes to the index
_CLOSE_SECONDS = 5.0
_LONGEST_NAME = 512
_TRIES = 3
_MOST_PARTS = 1024  # of one call (IOV_MAX)


class SlabStore(ChunkStore):
    """Values in the slab of one directory. ``value_bytes``: the longest value that will come, for a new slab."""

    def __init__(self, config: FsConfig, value_bytes: int = 4096, *, read_only: bool = False) -> None:
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
        self._direct = config.direct
        if self._direct is True and not read_only and (problem := try_direct(self._slab.directory)):
            self._direct = False
            _log.warning("O_DIRECT does not work in this directory (%s): values go through the page cache", problem)
        if not read_only:
            self._evictor = SlabEvictor(lambda: self.slab, self.move, config, self._woken)
            self._evictor.start()

    def _open(self, directory: Directory | None = None) -> Slab:
        return Slab(self._config, self._value_bytes, read_only=self._read_only, woken=self._woken, directory=directory)

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

    def read_into(self, name: str, dst: memoryview) -> bool:
        """Fill ``dst`` from its place in a segment, if that was not used again meanwhile."""
        digest = _digest(name)
        slab = self.slab
        if slab.index is None:
            return False
        for _ in range(_TRIES):
            entry = slab.index.find(digest)
            if entry is None or entry.nbytes != len(dst) or self._is_expired(entry):
                return False
            file = self._file_of(slab, entry)
            if file is None:
                return False
            is_whole = self._fill(file, entry, dst)
            if slab.index.row(entry.segment).generation == entry.generation:
                if is_whole:
                    self._note_use(slab.index, entry)
                    return True
                if not self._read_only:  # the file was cut short
                    with contextlib.suppress(LockBusyError), slab.index.locked(LOCK_SECONDS):
                        slab.index.remove(digest)
                return False
            # Its segment is used for others. What was moved before is in another place now.
        return False

    def _file_of(self, slab: Slab, entry: Entry) -> SegmentFile | None:
        row = slab.index.row(entry.segment) if slab.index is not None else None
        if row is None or row.generation != entry.generation or not row.birth:
            return None
        try:
            return slab.segments.file(entry.segment, row.birth)
        except OSError as error:
            if error.errno not in GONE:
                raise
        if not self._read_only:
            with contextlib.suppress(LockBusyError), slab.opened_index.locked(LOCK_SECONDS):
                slab.segments.forget(entry.segment, row)
        return None

    def _fill(self, file: SegmentFile, entry: Entry, dst: memoryview) -> bool:
        fd = file.fd
        if self._direct is True or (
            self._direct == "cold" and len(dst) >= LEAST_COLD and not is_cached(fd, len(dst), entry.at)
        ):
            fd = file.direct
        done = 0
        while done < len(dst):
            with dst[done:] as rest:
                try:
                    more = os.preadv(fd, [rest], entry.at + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or fd == file.fd:
                        raise
                    fd = file.fd  # memory or lengths that are not aligned
                    continue
            if not more:
                return False
            done += more
        return True

    def _is_expired(self, entry: Entry) -> bool:
        return self._config.max_age is not None and entry.time < time.time() - self._config.max_age

    def _note_use(self, index: Index, entry: Entry) -> None:
        """Mark a value as used, once, and each hour: a lock that is not free at once is not waited for."""
        now = int(time.time())
        if self._read_only or (entry.used and abs(now - entry.time) < _REFRESH_SECONDS):
            return
        with contextlib.suppress(OSError), index.locked(0):  # LockBusyError is one, too
            index.change(entry, entry._replace(used=1, time=now))

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask the index."""
        index = self.slab.index
        digests = list(map(_digest, names))
        if index is None:
            return [False] * len(digests)
        entries = list(map(index.find, digests))
        generations = index.generations()
        return [entry is not None and generations.has(entry) and not self._is_expired(entry) for entry in entries]

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Read the segments' lists of names, the oldest first; ``modified`` is a value's last use."""
        slab = self.slab
        if slab.index is None:
            return
        listed: set[int] = set()
        # What is replaced or moved meanwhile is in a segment that was not full before, or is begun: so none is missed.
        while rest := [
            pair for pair in enumerate(slab.index.rows()) if pair[1].birth and pair[1].generation not in listed
        ]:
            segment, row = min(rest, key=lambda pair: pair[1].age)
            listed.add(row.generation)
            for record, entry in slab.segments.living(segment, row):
                if record.name.startswith(prefix):
                    yield StoreEntry(record.name, entry.nbytes, float(entry.time))

    # -- changes

    def write(self, name: str, src: memoryview) -> None:
        """Write the value into this store's segment, then its entry. StoreFull where no segment can be had.

        WritesRefused where the file system has become read-only.
        """
        self.write_parts(name, [src])

    def write_parts(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write the value out of its parts, which the system gathers."""
        digest = _digest(name)
        slab = self._writable()
        try:
            self._write(slab, name, digest, parts)
        except LockBusyError as error:
            self._dropped += 1
            raise StoreFull(str(error)) from None
        except StoreFull:
            self._dropped += 1
            raise
        except OSError as error:
            if error.errno not in _FULL and error.errno != errno.EROFS:
                raise
            self._dropped += 1
            if error.errno == errno.EROFS:
                path = str(self._config.path)
                raise WritesRefused(f"the file system of {path!r} has become read-only") from None
            raise StoreFull(f"the disk has no room: {error.strerror}") from None

    def _write(self, slab: Slab, name: str, digest: bytes, parts: Sequence[memoryview]) -> None:
        nbytes = sum(map(len, parts))
        taken = slab.segments.take(nbytes)
        try:
            self._pour(taken.claimed.file, parts, taken)
            self._finish(slab, taken, name, digest)
        finally:
            slab.segments.give_back(taken)

    def _finish(
        self, slab: Slab, taken: Taken, name: str, digest: bytes, instead_of: Entry | None = None, when: int = 0
    ) -> None:
        """Make a value whose bytes are in place one that is found; with ``instead_of``, if that is still there."""
        index, claimed = slab.index, taken.claimed
        assert index is not None
        if self._config.fsync:
            os.fdatasync(claimed.file.fd)
        now, generation = when or int(time.time()), claimed.row.generation
        entry = Entry(digest, generation, claimed.segment, 0, taken.page, taken.nbytes, now)

        def insert() -> None:
            with index.locked(LOCK_SECONDS):
                if instead_of is None:
                    index.insert(entry)
                elif not index.change(instead_of, entry):
                    index.count_dead(entry)

        slab.segments.finish(taken, NameRecord(generation, taken.page, taken.nbytes, now, name), insert)
        if self._config.fsync:
            os.fdatasync(claimed.names.fd)
            index.sync()

    def _pour(self, file: SegmentFile, parts: Sequence[memoryview], taken: Taken) -> None:
        fd = file.direct if self._direct is True else file.fd
        at, done = taken.page * PAGE, 0
        while done < taken.nbytes:
            views = list(behind(parts, done))[:_MOST_PARTS]
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
        taken = slab.segments.take(entry.nbytes)
        try:
            self._pour(taken.claimed.file, [value], taken)
            self._finish(slab, taken, name, entry.digest, entry, entry.time)
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
        for name in names:
            digest = _digest(name)
            if slab.index.find(digest) is not None:
                with slab.index.locked(LOCK_SECONDS):
                    slab.index.remove(digest)

    # -- figures, and the end

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the file system and the slab: whether it is local, what it supports, whether values fit."""
        return diagnose_slab(self._config, self.slab, value_bytes, read_only=self._read_only)

    def stats(self) -> Mapping[str, float]:
        """Return the evictor's last figures; does no I/O."""
        figures = self._evictor.figures() if self._evictor else {}
        return {**figures, "dropped_values": self._dropped, "direct": float(self._direct is True)}

    def close(self) -> None:
        """End the thread, release this store's segment, close the files."""
        if self._evictor is not None and not self._evictor.stop(_CLOSE_SECONDS):
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
