"""The evictor of a slab: keeps a segment ready to be written to, and the slab within its limits; one thread a store.

Segments are evicted whole, in the order in which they were begun. That is one write to the index, however many values
go, and no file is removed, so that readers do not notice. A value of it that was read since it was written is copied
into a younger segment first (a *second chance*), and so is a record of core's own, read or not, as long as those make
up no more than a quarter of the segment: that bounds what is written beside new values. What the age of a value then
is, the index has: no order is kept for reads.

A list in order of use, as an LRU has, would have to be written at each read, or kept by one process for all. Holes of
single values would have to be filled by copying the others. Both cost reads something; the wrong choice of a value that
this makes at times costs one recomputation.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvtiers.api import NotKept
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import TEMP_PREFIX, Directory
from kvtiers_fs.evictor import free_bytes
from kvtiers_fs.limits import Limits
from kvtiers_fs.slab.format import Entry, NameRecord, is_core_record
from kvtiers_fs.slab.index import LockBusyError, OwnedFd
from kvtiers_fs.slab.segments import Claimed, Slab, Totals

__all__ = ["SlabEvictor"]

_log = logging.getLogger("kvtiers_fs")
_TICK_SECONDS = 1.0
_WARN_SECONDS = 60.0
_FLOOR_SECONDS = 5.0  # some file systems take a while to give back what was removed
_IDLE_SECONDS = 10.0  # between two rounds while nothing changes
_SWEEP_SECONDS = 60.0  # between two looks for expired values and for files of killed processes
_ORPHAN_SECONDS = 600.0
_KEPT_SHARE = 4  # a quarter of a segment's bytes
_BATCH = 64
_PAUSE_SECONDS = 0.001
_FILE = re.compile(r"(slab-[0-9a-f]{8}-[0-9a-f]{8})\.(values|names)")

Move = Callable[[Slab, str, Entry, memoryview], None]
"""(slab, name, entry, value): write a value again in the place of an entry that still leads to it."""


class SlabEvictor:
    """The thread, and the rounds that it makes."""

    def __init__(
        self, slab: Callable[[], Slab], move: Move, config: FsConfig, limits: Limits, woken: threading.Event
    ) -> None:
        self._slab = slab
        self._move = move
        self._config = config
        self._limits = limits
        self._woken = woken
        self._stopping = False
        self._next_warning = self._next_floor = self._next_sweep = self._next_round = 0.0
        self._changed_at = -1
        self._counts = Counter(
            dict.fromkeys(
                ("evicted_values", "evicted_bytes", "expired_values", "reclaimed_files", "kept_values"),
                0,
            )
        )
        self._figures: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kvtiers-fs-evictor", daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End; False if the file system does not let it end in time."""
        self._stopping = True
        self._woken.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def figures(self) -> Mapping[str, float]:
        """Return the figures of the last round. Does no I/O."""
        return self._figures

    def _run(self) -> None:
        while not self._stopping:
            woken = self._woken.wait(_TICK_SECONDS)
            self._woken.clear()
            try:
                changed_at = self._slab().opened_index.changed_at()
                if woken or changed_at != self._changed_at or time.monotonic() >= self._next_round:
                    self._changed_at, self._next_round = changed_at, time.monotonic() + _IDLE_SECONDS
                    self.round()
            except Exception as error:  # noqa: BLE001 -- without this thread the limits would never hold again
                if time.monotonic() >= self._next_warning:
                    self._next_warning = time.monotonic() + _WARN_SECONDS
                    _log.warning("the slab cannot be kept within its limits now: %s: %s", type(error).__name__, error)

    def round(self) -> None:
        """Do what is due. Of several processes each does it; what one has in hand is locked for the others."""
        slab = self._slab()
        self._limits.look()
        totals = slab.segments.totals()
        self._shrink(slab, totals)
        self._keep_spare(slab, totals)
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS
            self._remove_orphans(slab)
            self._expire(slab)
        totals = slab.segments.totals()
        self._figures = {
            "bytes": totals.nbytes,
            "values": totals.values,
            "segments": totals.segments,
            "free_bytes": float(free_bytes(slab.directory.fd)),
            "skipped": float(len(slab.directory.skipped)),
            **self._counts,
        }
        self._figures["evicted_values"] += slab.segments.evicted_values
        self._figures["evicted_bytes"] += slab.segments.evicted_bytes

    def _shrink(self, slab: Slab, totals: Totals) -> None:
        """Give segments back to the disk that are beyond the capacity, or that the free-space floor needs."""
        surplus = totals.segments - slab.segments.most
        short = self._config.min_free - free_bytes(slab.directory.fd)
        if short > 0 and time.monotonic() >= self._next_floor:
            self._next_floor = time.monotonic() + _FLOOR_SECONDS
            surplus = max(surplus, -(-short // slab.opened_index.header.segment_bytes))
        while surplus > 0 and not self._stopping:
            with slab.opened_index.locked():
                claimed = slab.segments.oldest()
                if claimed is None:
                    return
                slab.segments.evict(claimed)
                slab.segments.discard(claimed)
            surplus -= 1

    def _keep_spare(self, slab: Slab, totals: Totals) -> None:
        """See to it that a segment is ready when the one that is written to is full."""
        if totals.spare or totals.segments < slab.segments.most or totals.segments < _KEPT_SHARE:
            return
        with slab.opened_index.locked():
            claimed = next(slab.segments.by_age(), None)
        if claimed is None:
            return
        try:
            if self._save_used(slab, claimed):
                with slab.opened_index.locked():
                    slab.segments.evict(claimed)
        finally:
            claimed.release()

    def _save_used(self, slab: Slab, claimed: Claimed) -> bool:
        """Copy what was read since it was written, the last used first, up to the share of the segment.

        Core's own records come before that: an engine that finds the epoch of its namespace gone is without its tier.
        False: one of them has yet to be copied.
        """
        used = []
        for number, pair in enumerate(slab.segments.living(claimed.segment, claimed.row), start=1):
            if pair[1].used or is_core_record(pair[0].name):
                used.append(pair)
            if not number % _BATCH:
                time.sleep(_PAUSE_SECONDS)  # reads in this process want the interpreter, too
        room = slab.opened_index.header.segment_bytes // _KEPT_SHARE
        for record, entry in sorted(used, key=lambda pair: (not is_core_record(pair[0].name), -pair[1].time)):
            if self._stopping:
                return not is_core_record(record.name)  # none: they are first
            if self._is_expired(entry):
                continue
            room -= entry.nbytes
            if room < 0:
                break
            if not self._copy(slab, claimed, record, entry):
                return not is_core_record(record.name)
        return True

    def _copy(self, slab: Slab, claimed: Claimed, record: NameRecord, entry: Entry) -> bool:
        with mmap.mmap(-1, entry.nbytes) as memory, memoryview(memory) as value:
            if os.preadv(claimed.file.fd, [value], entry.at) == entry.nbytes:
                try:
                    self._move(slab, record.name, entry, value)
                except (NotKept, LockBusyError):
                    return False
                self._counts["kept_values"] += 1
        return True

    def _is_expired(self, entry: Entry) -> bool:
        return self._config.max_age is not None and entry.time < time.time() - self._config.max_age

    def _expire(self, slab: Slab) -> None:
        """Remove the entries of values that are too old; their room is used again when all of a segment are."""
        if self._config.max_age is None:
            return
        for segment, row in enumerate(slab.opened_index.rows()):
            # An edition is at least the time at which its segment was begun.
            if not row.birth or row.edition > time.time() - self._config.max_age:
                continue
            old = [entry for _, entry in slab.segments.living(segment, row) if self._is_expired(entry)]
            for start in range(0, len(old), _BATCH):
                if self._stopping:
                    return
                with slab.opened_index.locked():
                    for entry in old[start : start + _BATCH]:
                        found = slab.opened_index.find(entry.digest)
                        if found is not None and found.is_at(entry) and self._is_expired(found):
                            slab.opened_index.remove(entry.digest)
                            self._counts["expired_values"] += 1

    def _remove_orphans(self, slab: Slab) -> None:
        """Remove segments that this index does not have, and temporary files, which killed processes left."""
        stems = {slab.segments.stem(row.birth) for row in slab.opened_index.rows() if row.birth}
        for name in os.listdir(slab.directory.fd):  # noqa: PTH208 -- a descriptor has no path
            match = _FILE.fullmatch(name)
            if (match is None or match[1] in stems) and not name.startswith(TEMP_PREFIX):
                continue
            try:
                about = os.stat(name, dir_fd=slab.directory.fd, follow_symlinks=False)
                if abs(time.time() - about.st_mtime) > _ORPHAN_SECONDS:
                    _remove_unlocked(slab.directory, name)
                    self._counts["reclaimed_files"] += 1
            except (FileNotFoundError, BlockingIOError):
                continue
            except OSError as error:  # it costs no other file
                slab.directory.skip(name, error)


def _remove_unlocked(directory: Directory, name: str) -> None:
    try:
        fd = OwnedFd(directory.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        fcntl.flock(fd.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: a process still writes to it
    except OSError as error:
        # A link; or a file of another user's who was killed before it had its permissions: nobody writes to it.
        if error.errno not in {errno.ELOOP, errno.EACCES}:
            raise
    directory.remove(".", name)
