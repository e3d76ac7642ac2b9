"""The primary tier in a pool's memory: it finds what the engine before it had, and leaves its own to the next one.

While its engine lives it is a primary like any other: the same table, policies and leases, in the engine's process.
Beside them it tells the pool three things, in order. Before a row is written to, that what it held is void; when a
chunk has become readable, that the row holds it; and at each use, when that was, for the next engine's eviction.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any

from kvtiers.api import OffloadKey
from kvtiers.pool.loan import PoolLoan
from kvtiers.primary.residents import Allocation
from kvtiers.primary.tier import CPUPrimaryTier, PoolState

__all__ = ["PooledPrimaryTier"]

_log = logging.getLogger("kvtiers.pool")


class PooledPrimaryTier(CPUPrimaryTier):
    """A ``CPUPrimaryTier`` over the rows of a pool, which has what the pool's last engine of this model left."""

    def __init__(self, loan: PoolLoan, row_stride: int, view: memoryview, **options: Any) -> None:
        """Take over what is there. ``options``: as of ``CPUPrimaryTier``."""
        super().__init__(loan.num_rows, row_stride, view, **options)
        self._loan = loan
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

    def prepare_load(self, keys: Sequence[OffloadKey], request_id: str) -> list[int] | None:
        """Lease the rows of these chunks to one reader."""
        rows = super().prepare_load(keys, request_id)
        if rows:
            self._loan.use(rows)
        return rows

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks as used now."""
        super().touch(keys)
        self._use(keys)

    def reset_cache(self) -> None:
        """Forget all chunks at once, in the pool, too."""
        super().reset_cache()
        self._loan.renew_all()

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget those of these chunks that are not in use, in the pool, too."""
        rows = {key: self._row_of[key] for key in keys if key in self._row_of}
        left = super().forget(keys)
        self._loan.renew([row for key, row in rows.items() if key not in self._row_of])
        return left

    def _allocate(
        self,
        keys: Sequence[OffloadKey],
        request_id: str,
        limit: int | None,
        reserve: int,
        least: int = 1,
        used: int = 0,
    ) -> Allocation | None:
        allocation = super()._allocate(keys, request_id, limit, reserve, least, used)
        if allocation is not None:
            self._loan.renew(allocation.rows)
            self._use(keys[used:])
        return allocation

    def _use(self, keys: Sequence[OffloadKey]) -> None:
        self._loan.use([row for row in map(self._row_of.get, keys) if row is not None])
