"""The resident chunks of the primary: which chunks have a row, which of them are evictable, and eviction.

A chunk is *evictable* if it is ready, has no readers and is not a protected promotion. Every change of that is passed
on to the policy, which sees nothing else of rows.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction import EvictionPolicy, HintedPolicy, TenantShares
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

    def __init__(
        self,
        rows: RowTable,
        policy: EvictionPolicy,
        unread: Protection,
        shares: TenantShares | None = None,
    ) -> None:
        """Take the parts. ``shares``: the policy itself, or what it evicts by, where tenants have shares."""
        self.row_of: dict[OffloadKey, int] = {}
        self.rows = rows
        self.policy = policy
        self.unread = unread
        self._shares = shares
        self.hints: HintedPolicy | TenantShares | None = shares
        """What takes hints, once there are some: the policy, or what it evicts by."""
        self.clean: set[OffloadKey] = set()
        self.evictable = 0
        self.may_decline = True
        self.declined = 0
        """Chunks that were offered and not stored, since what would have left is worth more."""

    def allocate(
        self,
        keys: Sequence[OffloadKey],
        request_id: str,
        limit: int | None,
        reserve: int,
        clock: Callable[[], float],
        least: int = 1,
        used: int = 0,
    ) -> Allocation | None:
        """Lease rows for the absent ones of these keys; None, and no change, if that is not possible.

        Without a limit all or none of those that the policy says are worth it. With a limit the first ones only: at
        most ``limit``, and such that ``reserve`` rows stay free or evictable; None if that leaves fewer than ``least``.
        ``used``: the length of the leading part of ``keys`` that is resident and was passed to the policy's ``access``
        for this request.
        """
        offered = _each_once(keys[used:] if used else keys)
        row_of = self.row_of
        present = [] if row_of.keys().isdisjoint(offered) else [key for key in offered if key in row_of]
        missing = [key for key in offered if key not in row_of] if present else list(offered)
        if not missing:
            self.policy.access(present, request_id)
            return Allocation([], [], [])
        self.policy.on_store_miss(missing, request_id)
        wanted = len(missing) if limit is None else min(limit, len(missing))
        evicted: list[OffloadKey] = []
        if limit is None and wanted > self.rows.free:
            offered, present, missing = self._worth_storing(offered, present, missing, request_id)
            wanted = len(missing)
            if not missing:
                self.policy.access(present, request_id)
                return Allocation([], [], [])
        if wanted > self.rows.free - reserve:
            self.rows.want(wanted + reserve)
            if self.unread.keys:
                self.unlock_idle(self.unread.expire(clock()))
            least = wanted if limit is None else least
            # Where tenants have shares, no prompt evicts its own head; but by way of rows a tier gets all of it.
            shares = self._shares if limit is None else None
            spared = keys[:used] if shares is None else shares.used_by(request_id)
            may_take_own = shares is not None and not self.may_decline
            wanted, evicted = self._make_room(
                wanted, least, reserve, present, spared, request_id, may_take_own=may_take_own
            )
        if wanted <= 0:
            return None
        if wanted < len(missing):
            offered = offered[: offered.index(missing[wanted])]
            del missing[wanted:]
        rows = self.rows.allocate(missing)
        row_of.update(zip(missing, rows, strict=True))
        self.policy.access(offered, request_id, missing)
        return Allocation(missing, rows, evicted)

    def adopt(self, found: Iterable[tuple[list[OffloadKey], list[int]]]) -> None:
        """Begin with these chunks in these rows, ready: a use each, the oldest first. Before any other call."""
        for keys, rows in found:
            self.row_of.update(zip(keys, rows, strict=True))
            self.policy.access(keys, "", keys)
            self.unlock(keys)
        self.rows.adopt(self.row_of)

    def borrow(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Take in chunks in rows of another engine, pending. They are never evictable, and leave by ``give_back``."""
        self.rows.borrow(keys, rows)
        self.row_of.update(zip(keys, rows, strict=True))
        self.policy.access(keys, "", keys)

    def give_back(self, rows: Sequence[int]) -> list[int]:
        """Drop the chunks in those of these borrowed rows that nobody reads; return the rows."""
        gone, keys = self.rows.give_back(rows)
        self.clean.difference_update(keys)
        self.forget(keys)
        return gone

    def keep(self, keys: Sequence[OffloadKey], until: float, *, high: bool) -> None:
        """Keep these chunks, resident or not, until this time."""
        idle = self._evictable_of([key for key in keys if key in self.row_of])
        self._lock(idle)
        if self.hints is not None:
            self.hints.keep(keys, until, high=high)
        self.unlock(idle)

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
            self.evictable += len(keys)
            self.policy.mark_evictable(keys)

    def unlock_idle(self, keys: Sequence[OffloadKey]) -> None:
        """Make those of these chunks evictable that have no readers."""
        if keys:
            self.unlock(self.rows.idle_keys([self.row_of[key] for key in keys]))

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Drop these chunks, none of which counts as evictable any more."""
        if keys:
            self.policy.remove(keys)
            for key in keys:
                del self.row_of[key]

    def leave(self) -> list[OffloadKey]:
        """Drop the chunks of retired rows that are not in use; return their keys."""
        return self._drop(self.rows.idle_keys(self.rows.leaving))

    def drop_idle(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Drop those of these chunks that are here and not in use; return their keys."""
        row_of = self.row_of
        return self._drop(self.rows.idle_keys([row_of[key] for key in keys if key in row_of]))

    def _drop(self, idle: list[OffloadKey]) -> list[OffloadKey]:
        self._lock(self._unprotected(idle))
        self.unread.end(idle)
        self.clean.difference_update(idle)
        self.rows.evict([self.row_of[key] for key in idle])
        self.forget(idle)
        return idle

    def forget_all(self) -> None:
        """Drop all chunks, and the policy's statistics about them."""
        self.row_of.clear()
        self.policy.clear()
        self.unread.clear()
        self.clean.clear()
        self.rows.forget_all()
        self.evictable = 0

    def _worth_storing(
        self, offered: Sequence[OffloadKey], present: list[OffloadKey], missing: list[OffloadKey], request_id: str
    ) -> tuple[Sequence[OffloadKey], list[OffloadKey], list[OffloadKey]]:
        """Return the head of these keys that the policy finds worth what would leave for it, and count the others."""
        low = 0 if self.hints is None else self.hints.first_out
        if not self.may_decline or len(missing) <= self.rows.free + low:
            return offered, present, missing
        worth = max(0, self.policy.worth_storing(offered, request_id))
        if worth >= len(offered):
            return offered, present, missing
        offered = offered[:worth]
        absent = [key for key in offered if key not in self.row_of]
        self.declined += len(missing) - len(absent)
        return offered, [key for key in offered if key in self.row_of], absent

    def _make_room(
        self,
        wanted: int,
        least: int,
        reserve: int,
        present: Sequence[OffloadKey],
        used: Collection[OffloadKey],
        request_id: str,
        *,
        may_take_own: bool,
    ) -> tuple[int, list[OffloadKey]]:
        """Evict what it takes to have ``wanted`` rows, or fewer, and ``reserve`` left.

        Return how many rows there are, and what was evicted: 0, and nothing, if there cannot be ``least``. None of
        ``present`` and ``used`` leaves; the latter are chunks passed to the policy for this request. With
        ``may_take_own`` these do leave, when there is nothing else.
        """
        free, kept = self.rows.free, self._evictable_of(present)
        obtainable = self.evictable if self._shares is None else self._shares.obtainable()
        room = free + obtainable - max(reserve, len(kept) + (0 if may_take_own else len(used)))
        if room < wanted and used and not may_take_own:
            # Only now is it worth the time to see which of these could leave.
            if self._shares is None:
                kept, used = self._evictable_of([*present, *used]), ()
                spared = len(kept)
            else:
                spared = self._shares.spared(request_id, kept)
            room = free + obtainable - max(reserve, spared)
        wanted = min(wanted, room)
        if wanted < least:
            return 0, []
        if wanted <= free:
            return wanted, []
        count = wanted - free
        evicted = self._evict(count, kept, request_id, unused=True) if used else []
        if len(evicted) < count:
            kept = self._evictable_of([*present, *used]) if used and not may_take_own else kept
            evicted += self._evict(count - len(evicted), kept, request_id)
        assert not evicted or free + len(evicted) >= least, "the policy evicted fewer than it could"
        return (free + len(evicted) if evicted else 0), evicted

    def _evict(
        self, count: int, kept: Sequence[OffloadKey], request_id: str, *, unused: bool = False
    ) -> list[OffloadKey]:
        """Evict this many chunks, but none of ``kept``, which are evictable; none if the policy refuses.

        ``unused``: fewer where the policy cannot say at once that this request does not use them.
        """
        self._lock(kept)
        try:
            victims = self.policy.evict_unused(count, request_id) if unused else self.policy.evict(count) or []
        finally:
            self.unlock(kept)
        self.rows.evict(list(map(self.row_of.pop, victims)))
        if self.clean:
            self.clean.difference_update(victims)
        self.evictable -= len(victims)
        return victims

    def _evictable_of(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return self._unprotected(
            self.rows.idle_keys([self.row_of[key] for key in dict.fromkeys(keys) if key in self.row_of])
        )

    def _lock(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self.evictable -= len(keys)
            self.policy.mark_pinned(keys)

    def _unprotected(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        protected = self.unread.keys
        return [key for key in keys if key not in protected] if protected else keys


def _each_once(keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    return list(dict.fromkeys(keys)) if len(set(keys)) < len(keys) else keys
