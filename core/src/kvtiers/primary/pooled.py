"""The primary tier in a pool's memory: it finds what the engine before it had, and leaves its own to the next one.

While its engine lives it is a primary like any other: the same table, policies and leases, in the engine's process.
Beside them it tells the pool three things, in order. Before a row is written to, that what it held is void; when a
chunk has become readable, that the row holds it; and at each use, when that was, for the next engine's eviction.

In a pool of several engines each evicts and writes rows of its own, and reads those of all. A chunk of another engine's
is *borrowed* when it is looked up: its row is pinned, the chunk is pending until it was checked, then readable, and it
is given back when nobody here reads it any more. So R replicas keep one copy of what they share.
"""

import logging
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.pool.loan import PoolLoan
from kvtiers.pool.neighbours import Checked
from kvtiers.primary.residents import Allocation
from kvtiers.primary.tier import CPUPrimaryTier, PoolState

__all__ = ["PooledPrimaryTier"]

_log = logging.getLogger("kvtiers.pool")
_BORROWED_SHARE = 0.5
"""Of as many rows as this engine has: so many of others are borrowed at most. They need rows that they may evict."""
_BORROW_SECONDS = 5.0  # a chunk that was looked up and not read is given back


class PooledPrimaryTier(CPUPrimaryTier):
    """A ``CPUPrimaryTier`` over the rows of a pool, which has what the pool's last engine of this model left."""

    def __init__(self, loan: PoolLoan, row_stride: int, view: memoryview, **options: Any) -> None:
        """Take over what is there. ``options``: as of ``CPUPrimaryTier``."""
        super().__init__(loan.num_rows, row_stride, view, own_rows=loan.own, **options)
        self._loan = loan
        self._neighbours = loan.meet_neighbours(view)
        self._borrowed: dict[int, float] = {}
        """Rows of other engines that are bound here, and until when they are without being read."""
        self._most_borrowed = int(_BORROWED_SHARE * len(loan.own))
        self._lent: set[int] = set()
        """Rows of this engine's with a reader for the others that have them pinned."""
        self._aside: list[int] = []
        """Rows that others pinned just before they were to be written to."""
        self._chunks.adopt(loan.residents())
        self.adopted = len(self._row_of)
        """Chunks that were there at the start."""
        _log.info("pool: %d chunks from before, in %d rows", self.adopted, self.num_rows)
        self._note(list(self._row_of), removed=False)

    def figures(self) -> dict[str, int]:
        """Return the primary's figures, with whether there is a keeper now."""
        return super().figures() | {"pool": int(PoolState.HELD if self._loan.has_keeper else PoolState.ALONE)}

    def complete_store(self, rows: Sequence[int], success: bool, *, readers: int = 0) -> list[OffloadKey]:
        """End a GPU store, and publish what became readable."""
        return self._publish(super().complete_store(rows, success, readers=readers))

    def complete_write(
        self,
        rows: Sequence[int],
        success: bool,
        landed: Collection[OffloadKey] | None = None,
        *,
        protects: bool = True,
    ) -> list[OffloadKey]:
        """End a promotion, and publish what became readable."""
        return self._publish(super().complete_write(rows, success, landed, protects=protects))

    def _publish(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        held = [key for key in keys if key in self._row_of]  # but for those that had to leave at once
        self._loan.publish(held, [self._row_of[key] for key in held])
        return keys

    def close(self) -> None:
        """Release the view of the region, so that it can be unmapped."""
        if self._neighbours is not None:
            self._neighbours.close()
            self._borrowed.clear()  # the pins end with this engine's processes, which may read on
        super().close()

    def find(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Do ``lookup`` for each key."""
        self._borrow(keys)
        return super().find(keys)

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether none of these chunks is here, or may be borrowed."""
        may_be = self._neighbours is not None and self._neighbours.may_have(keys)
        return super().lacks_all(keys) and not may_be

    def absent(self, keys: Sequence[OffloadKey], first: int = 0) -> Sequence[int]:
        """Return the places of those of these keys that are not here; ``first`` is the place of the first key."""
        self._borrow(keys)
        return super().absent(keys, first)

    def present(self, keys: Sequence[OffloadKey], besides: Collection[OffloadKey] = ()) -> list[OffloadKey]:
        """Return those of these keys that are here, and those that are in ``besides``."""
        self._borrow(keys)
        return super().present(keys, besides)

    def not_ready(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of these chunks are not readable."""
        self._borrow(keys)
        return super().not_ready(keys)

    def resident_run(self, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Return how many of the leading keys are here, up to the first MISS, and how many of those are pending."""
        self._borrow_run(keys)
        return super().resident_run(keys)

    def ready_run(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys are readable."""
        self._borrow_run(keys)
        return super().ready_run(keys)

    def prepare_load(self, keys: Sequence[OffloadKey], request_id: str) -> list[int] | None:
        """Lease the rows of these chunks to one reader."""
        rows = super().prepare_load(keys, request_id)
        if rows is None:  # it may have been given back since it was looked up
            self._borrow(keys)
            rows = super().prepare_load(keys, request_id)
        if rows:
            self._loan.use(rows)
        return rows

    def prepare_read(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """Lease the rows of these chunks to one cascade; if others have them, once they are borrowed and checked."""
        rows = super().prepare_read(keys)
        if rows is None:
            self._borrow(keys)
            rows = super().prepare_read(keys)
        return rows

    def to_offer(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of these chunks that are this engine's to offer, and those that ``take_left`` has named."""
        own = set(super().to_offer(keys))
        return [key for key in keys if key in own or self._is_left(key)]

    def _is_left(self, key: OffloadKey) -> bool:
        neighbours = self._neighbours
        return (
            neighbours is not None
            and neighbours.is_left(key)
            and (key in self._row_of or neighbours.may_have([key]))  # being checked, or not known to be damaged
        )

    def take_left(self) -> list[OffloadKey]:
        """Return chunks in the part of an engine that has ended, which this one is to offer to tiers."""
        return [] if self._neighbours is None else self._neighbours.take_left()

    def complete_load(self, rows: Sequence[int]) -> None:
        """End one lease to a reader of each of these rows."""
        super().complete_load(rows)
        self._give_back(rows)

    def complete_read(self, rows: Sequence[int]) -> None:
        """End one cascade's lease of each of these rows."""
        super().complete_read(rows)
        self._give_back(rows)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks as used now."""
        super().touch(keys)
        self._use(keys)

    def reset_cache(self) -> None:
        """Forget all chunks at once, in this engine's part of the pool, too."""
        super().reset_cache()
        self._give_back(list(self._borrowed))
        self._loan.renew_all()
        if self._neighbours is not None:  # what others have left is there still
            self._neighbours.list_again()

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget those of these chunks that are not in use, in the pool, too."""
        rows = {key: self._row_of[key] for key in keys if self._is_own(key)}
        left = super().forget(keys)
        self._loan.renew([row for key, row in rows.items() if key not in self._row_of])
        return [key for key in left if key in rows]

    def poll(self) -> None:
        """Take in what the other engines have, and which of the borrowed chunks have been checked."""
        if self._neighbours is None:
            return
        for came, gone in self._neighbours.take_news():
            self.changes += 1
            self._note([key for key in gone if not self._is_own(key)], removed=True)
            self._note([key for key in came if not self._is_own(key)], removed=False)
        for checked in self._neighbours.take_checked():
            self._end_check(checked)

    def release_expired(self, now: float) -> None:
        """End what has waited too long, and take in what the other engines use of this one's."""
        super().release_expired(now)
        if self._neighbours is None:
            return
        self._give_back(list(takewhile(lambda row: self._borrowed[row] < now, self._borrowed)))
        if touched := self._loan.take_touched():
            self.touch(self._rows.keys_of(touched))
        self._lend(self._neighbours.lent())
        if self._aside:
            held = set(self._neighbours.held(self._aside))
            self._rows.complete_write([row for row in self._aside if row not in held], False)
            self._aside = list(held)

    # Rows of other engines.

    def _borrow(self, keys: Sequence[OffloadKey]) -> None:
        """Bind those of these chunks that are not here to the rows of other engines that have them."""
        neighbours = self._neighbours
        if neighbours is None or (places := neighbours.places).keys().isdisjoint(keys):
            return
        row_of, borrowed = self._row_of, self._borrowed
        # A row whose chunk was reset while it was read here is borrowed still.
        wanted = [
            key
            for key in dict.fromkeys(keys)
            if key not in row_of and (place := places.get(key)) is not None and place.row not in borrowed
        ]
        del wanted[max(0, self._most_borrowed - len(borrowed)) :]
        if not wanted:
            return
        keys, found = neighbours.pin(wanted)
        if not keys:
            return
        self.changes += 1
        self._chunks.borrow(keys, [place.row for place in found])
        until = self._clock() + _BORROW_SECONDS
        self._borrowed.update((place.row, until) for place in found)
        self._end_check(neighbours.check(keys, found))

    def _borrow_run(self, keys: Sequence[OffloadKey]) -> None:
        """Borrow of the leading keys, up to the first that is nowhere."""
        if self._neighbours is not None:
            places, row_of = self._neighbours.places, self._row_of
            self._borrow(list(takewhile(lambda key: key in row_of or key in places, keys)))

    def _end_check(self, checked: Checked) -> None:
        """Let borrowed chunks that were found sound be read, and give the others back."""
        rows = [place.row for place in checked.places]
        if rows:
            self.changes += 1
            _, lost = self._rows.complete_write(rows, False, set(checked.sound), readers=1)
            self._chunks.forget(lost)
            self._let_go([row for row in rows if self._rows.is_free(row)])

    def _give_back(self, rows: Sequence[int]) -> None:
        """Give back those of these rows that are borrowed and that nobody here reads."""
        if self._borrowed and (some := [row for row in dict.fromkeys(rows) if row in self._borrowed]):
            self._let_go(self._chunks.give_back(some))

    def _let_go(self, rows: Sequence[int]) -> None:
        if rows:
            self.changes += 1
            for row in rows:
                del self._borrowed[row]
            assert self._neighbours is not None
            self._neighbours.unpin(rows)

    def _lend(self, pinned: Sequence[int]) -> None:
        """Let each of these rows that holds a chunk have a reader, and the others of ``_lent`` none any more."""
        now = set(pinned)
        keys = self._rows.keys_of(row for row in now - self._lent if self._rows.is_ready(row))
        found = self._chunks.pin(keys)
        self._lent.update(found[0] if found is not None else ())
        over = self._lent - now
        self._lent -= over
        self.complete_read(list(over))

    def _allocate(
        self,
        keys: Sequence[OffloadKey],
        request_id: str,
        limit: int | None,
        reserve: int,
        least: int = 1,
        used: int = 0,
    ) -> Allocation | None:
        self._borrow(keys[used:])
        allocation = super()._allocate(keys, request_id, limit, reserve, least, used)
        if allocation is None or not allocation.rows:
            return allocation
        self._loan.renew(allocation.rows)
        if self._neighbours is not None and (held := self._neighbours.held(allocation.rows)):
            allocation = self._up_to(held, allocation, max(1, least))
        self._use(keys[used:])
        return allocation

    def _up_to(self, held: Sequence[int], allocation: Allocation, least: int) -> Allocation | None:
        """Return what an allocation has before the first row that others have pinned, None for fewer than ``least``.

        Those rows are set aside until nobody reads them; the rest are free again.
        """
        keys, rows, evicted = allocation
        aside = set(held)
        if (most := min(map(rows.index, aside))) < least:
            most = 0
        self.abandon(rows[most:])
        self._rows.complete_write([row for row in rows[most:] if row not in aside], False)
        self._aside += held
        return Allocation(keys[:most], rows[:most], evicted) if most else None

    def _is_own(self, key: OffloadKey) -> bool:
        row = self._row_of.get(key)
        return row is not None and row in self._loan.own

    def _note(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if removed and self._neighbours is not None:
            keys = [key for key in keys if key not in self._neighbours.places]
        super()._note(keys, removed=removed)

    def _use(self, keys: Sequence[OffloadKey]) -> None:
        self._loan.use([row for row in map(self._row_of.get, keys) if row is not None])
