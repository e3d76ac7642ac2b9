"""Which chunks are in the primary, which of them could leave, and how room is made.

A chunk is *evictable* if it is ready, nobody reads it and it is not a protected promotion; the policy is told of
every change of that, and of nothing else about rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction import EvictionPolicy
from kvtiers.primary.protection import Protection
from kvtiers.primary.row_table import RowTable

__all__ = ["Allocation", "Residents"]


class Allocation(NamedTuple):
    """Rows leased to a writer: ``rows[i]`` is for ``keys[i]``; ``evicted`` left to make room."""

    keys: list[OffloadKey]
    rows: list[int]
    evicted: list[OffloadKey]


class Residents:
    """The chunks that have a row, pending or ready. Keeps the row table, the policy and the protection in step."""

    def __init__(self, rows: RowTable, policy: EvictionPolicy, unread: Protection) -> None:
        self.row_of: dict[OffloadKey, int] = {}
        self.rows = rows
        self.policy = policy
        self.unread = unread
        self.clean: set[OffloadKey] = set()
        self.evictable = 0

    def allocate(
        self, keys: Sequence[OffloadKey], request_id: str, limit: int | None, reserve: int, clock: Callable[[], float]
    ) -> Allocation | None:
        """Lease rows for those of these keys that are not here; None, and no change, if that is not possible.

        Without a limit all of them, or None. With a limit as many of the first ones as it allows and as leave
        ``reserve`` rows free or evictable, or None if that is none.
        """
        offered = keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))
        row_of = self.row_of
        present = [] if row_of.keys().isdisjoint(offered) else [key for key in offered if key in row_of]
        missing = [key for key in offered if key not in row_of] if present else list(offered)
        if not missing:
            self.policy.access(present, request_id)
            return Allocation([], [], [])
        self.policy.on_store_miss(missing, request_id)
        wanted = len(missing) if limit is None else min(limit, len(missing))
        kept: list[OffloadKey] = []
        free = self.rows.free
        if wanted > free - reserve:
            if self.unread.keys:
                self.unlock_idle(self.unread.expire(clock()))
            if present:
                kept = self._unprotected(self.rows.idle_keys([row_of[key] for key in present]))
            room = free + self.evictable - max(reserve, len(kept))
            if room < wanted and limit is None:
                return None
            wanted = min(wanted, room)
        if wanted <= 0:
            return None
        evicted = self._evict(wanted - free, kept) if wanted > free else []
        if evicted is None:
            return None
        if wanted < len(missing):
            offered = offered[: offered.index(missing[wanted])]
            del missing[wanted:]
        rows = self.rows.allocate(missing)
        row_of.update(zip(missing, rows, strict=True))
        self.policy.access(offered, request_id, missing)
        return Allocation(missing, rows, evicted)

    def pin(self, keys: Sequence[OffloadKey]) -> tuple[list[int], list[OffloadKey]] | None:
        """Add a reader to each of these chunks; return their rows, and the keys that had no reader before.

        None, and no change, if one is not here or not ready.
        """
        try:
            rows = list(map(self.row_of.__getitem__, keys))
        except KeyError:
            return None
        if self.rows.any_pending(rows):
            return None
        first = self.rows.pin(rows)
        if first:
            self._lock(self._unprotected(first))
        return rows, first

    def unpin(self, rows: Sequence[int]) -> None:
        """Take one reader from each of these rows."""
        last = self.rows.unpin(rows)
        if last:
            self.unlock(self._unprotected(last))

    def unlock(self, keys: Sequence[OffloadKey]) -> None:
        """Make these chunks evictable."""
        if keys:
            self.policy.mark_evictable(keys)
            self.evictable += len(keys)

    def unlock_idle(self, keys: Sequence[OffloadKey]) -> None:
        """Make those of these chunks evictable that nobody reads."""
        if keys:
            self.unlock(self.rows.idle_keys([self.row_of[key] for key in keys]))

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Drop these chunks, none of which has ever been ready."""
        if keys:
            self.policy.remove(keys)
            for key in keys:
                del self.row_of[key]

    def forget_all(self) -> None:
        """Drop all chunks, and all that was learnt about them."""
        self.row_of.clear()
        self.policy.clear()
        self.unread.clear()
        self.clean.clear()
        self.rows.forget_all()
        self.evictable = 0

    def _evict(self, count: int, kept: Sequence[OffloadKey]) -> list[OffloadKey] | None:
        """Evict this many chunks, but none of ``kept``; None, and no change, if the policy refuses."""
        self._lock(kept)
        victims = self.policy.evict(count)
        self.unlock(kept)
        if victims is None:
            return None
        assert len(victims) == count, "the policy evicted another number than it was asked for"
        self.rows.evict(list(map(self.row_of.pop, victims)))
        if self.clean:
            self.clean.difference_update(victims)
        self.evictable -= count
        return victims

    def _lock(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self.policy.mark_pinned(keys)
            self.evictable -= len(keys)

    def _unprotected(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        protected = self.unread.keys
        return [key for key in keys if key not in protected] if protected else keys
