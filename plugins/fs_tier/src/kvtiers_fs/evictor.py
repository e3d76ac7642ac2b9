"""The evictor: keeps the directory within its capacity, maximum age and free-space floor; one thread a store.

The thread reports what its process has written, and, holding the lock on ``.usage``, does the work for all processes,
in rounds of a fraction of a second, so that the others get their turn to report::

    count   recount shard after shard, slowly; delete values that are too old, and temporary files of killed writers
    evict   the least recently used of the next shards, whose values are a sample of the ages in the whole directory;
            in a directory with few values, of all shards at once, in exact order

Reads, lookups and writes take no lock of the evictor's.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvtiers_fs.directory import Directory, Found, Head
from kvtiers_fs.limits import Limits
from kvtiers_fs.paths import SHARDS, shard_folder
from kvtiers_fs.quota import Index, Ledger, UsageFile

__all__ = ["Evictor", "free_bytes"]

_log = logging.getLogger("kvtiers_fs")
_HIGH, _LOW = 0.95, 0.94
_BATCH_VALUES = 4096
_BATCH_SHARE = 10  # the tenth of a batch that is the oldest, if the batch is not the whole directory
_TICK_SECONDS = 1.0
_IDLE_SECONDS = 60.0
_BUSY_SECONDS = 0.02
_FLOOR_SECONDS = 5.0  # some file systems take a while to give back what was removed
_UNLIMITED = 1 << 62  # for a file system that does not say how large it is
_LONGEST_PAUSE = 7 * 86400.0
_VALUES_PER_SECOND = 64  # recounted, all processes together: a million in four hours
_AHEAD_SECONDS = 3600.0  # by which machines' clocks may differ
_ORPHAN_SECONDS = 600.0  # longer than a write may take
_WARN_SECONDS = 60.0

_COUNTED = ("evicted_values", "evicted_bytes", "expired_values", "reclaimed_files")  # figures from the start on


class _View(NamedTuple):
    """The folders that there are, and what this process had done to each shard just before they were listed."""

    heads: list[Head]
    changes: list[int]


def free_bytes(fd: int) -> int:
    """Return how many bytes a process that is not root can still write to this file system."""
    about = os.fstatvfs(fd)
    return about.f_bavail * about.f_frsize if about.f_blocks else _UNLIMITED


class Evictor:
    """The thread, and the rounds that it makes, each of ``round_seconds``. ``ledger`` is set before ``start``."""

    ledger: Ledger

    def __init__(
        self,
        directory: Directory,
        usage: UsageFile,
        limits: Limits,
        *,
        capacity: int,
        max_age: float | None,
        min_free: int,
        round_seconds: float,
    ) -> None:
        self._directory = directory
        self._usage = usage
        self._limits = limits
        self._capacity = capacity
        self._max_age = max_age
        self._min_free = min_free
        self._round_seconds = round_seconds
        self._woken = threading.Event()
        self._stopping = False
        self._disk_is_full = False
        self.turn = threading.Lock()
        """Held for the length of a round."""
        self._next_warning = self._next_floor = 0.0
        self._stuck_shards = 0  # shards in a row of which nothing could be removed
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._figures: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kvtiers-fs-evictor", daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End after a last report; False if the file system does not let it end in time."""
        self._stopping = True
        self._woken.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """Ask for a round now."""
        self._woken.set()

    def disk_is_full(self) -> None:
        """Record that the disk, or a quota on it, refused a write; the free space may not show it."""
        self._disk_is_full = True
        self._woken.set()

    def figures(self) -> Mapping[str, float]:
        """Return the figures of the last round, and the removals since the start. Does no I/O."""
        return self._figures

    def _run(self) -> None:
        due = 0.0
        while not self._stopping:
            woken = self._woken.wait(min(_TICK_SECONDS, max(0.0, due - time.monotonic())))
            if woken or time.monotonic() >= due or self.ledger.has_events():
                self._woken.clear()
                due = time.monotonic() + self._safe_round()
        until = time.monotonic() + _TICK_SECONDS
        while self.ledger.has_events() and time.monotonic() < until:
            time.sleep(min(_BUSY_SECONDS, self._safe_round()))

    def _safe_round(self) -> float:
        try:
            return self.round()
        except Exception as error:  # noqa: BLE001 -- without this thread nothing would ever be removed again
            if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + _WARN_SECONDS
                _log.warning("the directory cannot be kept within its limits now: %s: %s", type(error).__name__, error)
            return _TICK_SECONDS

    def round(self) -> float:
        """Report, and do a part of the work if it is this process's turn; return the seconds until the next round."""
        self._limits.look()
        with self.turn, self._usage.locked() as is_mine:
            if not is_mine:
                return _BUSY_SECONDS
            index = self._usage.load()
            index.add(self.ledger.take())
            self._usage.save(index)
            self.ledger.publish(index.total()[0])  # first: writes wait for no more than this report
            until = time.monotonic() + self._round_seconds
            try:
                uncounted = self._count(index, until)
                more = self._evict(index, until) or uncounted
            finally:
                self._usage.save(index)
                self._publish(index)
            if self._disk_is_full:
                return max(_BUSY_SECONDS, self._next_floor - time.monotonic())
            return _BUSY_SECONDS if more else _IDLE_SECONDS

    def _publish(self, index: Index) -> None:
        nbytes, values = index.total()
        self.ledger.publish(nbytes)
        free = float(free_bytes(self._directory.fd))
        skipped = len(self._directory.skipped)
        self._figures = {
            "bytes": nbytes, "values": values, "free_bytes": free, "skipped": skipped, **self._counts
        }  # fmt: skip

    def _count(self, index: Index, until: float) -> bool:
        """Count the shards that are due; True if some were never counted."""
        now = self._usage.now()
        unknown = index.uncounted()
        # A time far ahead is no plan of ours: some clock was wrong.
        if not unknown and 0 < index.next_count - now < _LONGEST_PAUSE:
            return False
        self._reclaim_in_root(now)
        view, seen = self._look(), 0
        for shard in unknown or sorted(range(SHARDS), key=index.counted.__getitem__):
            seen += 1 + len(self._count_shard(index, view, shard, now))
            if time.monotonic() >= until or (not unknown and seen >= _VALUES_PER_SECOND * _IDLE_SECONDS):
                break
        index.next_count = now + seen / _VALUES_PER_SECOND
        return bool(index.uncounted())

    def _look(self) -> _View:
        changes = self.ledger.changes()  # first: a folder that is made from now on is not among the heads'
        return _View(list(self._directory.heads()), changes)

    def _count_shard(self, index: Index, view: _View, shard: int, now: float) -> list[tuple[int, Found]]:
        """Count one shard over all heads, and remove expired values and stale temporary files; return what stays.

        A shard that this process has changed since that look keeps the figures it had: it is counted another time.
        """
        kept: list[tuple[int, Found]] = []
        for head in view.heads:
            if shard not in head.shards:
                continue
            files = [self._of_today(file, now) for file in self._directory.files(head.folder, shard)]
            kept += [(shard, file) for file in files if not self._is_reclaimed(file, now)]
            if not files:
                self._directory.remove_empty(shard_folder(head.folder, shard))
        if self.ledger.was_counted(shard, view.changes[shard]):
            values = [file.nbytes for _, file in kept if file.last is not None]
            index.nbytes[shard], index.values[shard], index.counted[shard] = sum(values), len(values), now
        return kept

    def _of_today(self, file: Found, now: float) -> Found:
        """Give a file that is from when some clock was ahead the time of now: it would be the last to go till then."""
        if file.modified <= now + _AHEAD_SECONDS:
            return file
        self._directory.touch(file.folder, file.leaf)
        return file._replace(modified=now)

    def _is_reclaimed(self, file: Found, now: float) -> bool:
        age = now - file.modified
        if file.last is None:
            what, is_due = "reclaimed_files", age > _ORPHAN_SECONDS
        elif file.nbytes > self._capacity:  # no store with these limits wrote it: a file with holes, it may be
            what, is_due = "evicted_values", True
        else:
            what, is_due = "expired_values", self._max_age is not None and age > self._max_age
        if not is_due:
            return False
        self._counts[what] += bool(self._remove(file))
        return True

    def _remove(self, file: Found) -> bool | None:
        """Remove a file; return whether it was there. None if it cannot be removed, which costs no other file."""
        try:
            return self._directory.remove(file.folder, file.leaf) is not None
        except OSError as error:
            self._directory.skip(f"{file.folder}/{file.leaf}", error)
            return None

    def _reclaim_in_root(self, now: float) -> None:
        for file in self._directory.root_temps():
            self._is_reclaimed(self._of_today(file, now), now)

    def _evict(self, index: Index, until: float) -> bool:
        """Remove values until there is room again; True if that is not done yet."""
        need = self._need(index)
        now = self._usage.now()
        while need > 0:
            freed = self._evict_batch(index, self._look(), need, now, until)
            need = min(need - freed, index.total()[0])
            if need > 0 and not freed and self._stuck_shards >= SHARDS:
                self._stuck_shards = 0
                return False  # nothing that is left can be removed by this process
            if need > 0 and (time.monotonic() >= until or self._stopping):
                return True
        return False

    def _need(self, index: Index) -> int:
        used, _ = index.total()
        need = used - int(_LOW * self._capacity) if used > _HIGH * self._capacity else 0
        now = time.monotonic()
        if now >= self._next_floor:
            short = self._min_free - free_bytes(self._directory.fd)
            if short > 0 or self._disk_is_full:
                self._disk_is_full = False
                self._next_floor = now + _FLOOR_SECONDS
                need = max(need, max(0, short) + self._capacity // 100, 1)
        return min(need, used)

    def _evict_batch(self, index: Index, view: _View, need: int, now: float, until: float) -> int:
        """Remove the oldest of the next shards' values; return their bytes."""
        batch: list[tuple[int, Found]] = []
        shards = 0
        while shards < SHARDS and len(batch) < _BATCH_VALUES and (not shards or time.monotonic() < until):
            batch += self._count_shard(index, view, index.cursor, now)
            index.cursor = (index.cursor + 1) % SHARDS
            shards += 1
        values = [(shard, file) for shard, file in batch if file.last is not None]
        quota = need if shards == SHARDS else min(need, 1 + sum(file.nbytes for _, file in values) // _BATCH_SHARE)
        freed = 0
        for shard, file in sorted(values, key=lambda pair: (pair[1].modified, pair[1].leaf)):
            if freed >= quota:
                break
            was_there = self._remove(file)
            if was_there is None:
                continue
            freed += file.nbytes
            index.nbytes[shard] = max(0, index.nbytes[shard] - file.nbytes)
            index.values[shard] = max(0, index.values[shard] - 1)
            if was_there:
                self._counts["evicted_values"] += 1
                self._counts["evicted_bytes"] += file.nbytes
        self._stuck_shards = 0 if freed else self._stuck_shards + shards
        return freed
