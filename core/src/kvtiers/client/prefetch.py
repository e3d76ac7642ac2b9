"""The request that brings values nearer: from the first tier that has each into the first one that takes stores.

::

    asked --a tier before the near one, or that one, has it--> near
          --a later tier has it--> loaded into a bounce row --stored in the near one--> near
          --none has it--> missing
"""

from collections.abc import Collection, Sequence

from kvtiers.api import LookupResult, OffloadKey, TransferJob
from kvtiers.client.requests import NO_TIER, Jobs, Transfer
from kvtiers.client.rows import RowLease
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext

__all__ = ["Prefetch"]

_CONTEXT = RequestContext("")


class Prefetch(Transfer):
    """Values to bring nearer: that of ``keys[i]``, no key twice, by row i of the lease. ``near``: those that are.

    A tier that has not answered is waited for as long as the request may last: one before it may have a value.
    """

    def __init__(self, keys: Sequence[OffloadKey], lease: RowLease, until: float) -> None:
        super().__init__(lease, until)
        self.near: set[OffloadKey] = set()
        self._row_of = dict(zip(keys, lease.rows, strict=True))
        self._unknown = list(keys)
        self._to: TierSlot | None = None
        self._running = 0

    def begin(self, jobs: Jobs) -> None:
        """Choose the near tier, and ask."""
        takers = (slot for slot in jobs.slots if not slot.options.read_only and slot.available())
        self._to = next(takers, None)
        if self._to is None:
            self.end(NO_TIER)
        else:
            self.step(jobs)

    def step(self, jobs: Jobs) -> None:
        """Load what a later tier has, as it is known; over when all is near or cannot be."""
        left, self._unknown = self._unknown, []
        for slot in jobs.slots:
            if left and slot.available():
                said = slot.ask_each(left, _CONTEXT)
                self._unknown += [key for key in left if said.get(key) is LookupResult.RETRY]
                keys = [key for key in left if said.get(key) is LookupResult.HIT]
                left = [key for key in left if said.get(key) not in (LookupResult.RETRY, LookupResult.HIT)]
                if self._to is not None and slot.index <= self._to.index:
                    self.near.update(keys)
                elif keys:
                    rows = [self._row_of[key] for key in keys]
                    self._running += jobs.submit(slot, self, keys, rows, is_load=True)
        if not self._unknown and not self._running:
            self.end()

    def job_ended(self, jobs: Jobs, slot: TierSlot, job: TransferJob, good: Collection[OffloadKey]) -> None:
        """Store what was loaded; record what was stored."""
        self._running -= 1
        if not job.is_promotion:
            self.near.update(good)
        elif good and self._to is not None and self._to.available():
            keys = [key for key in job.keys if key in good]
            rows = [self._row_of[key] for key in keys]
            self._running += jobs.submit(self._to, self, keys, rows, is_load=False)
        if len(good) < len(job.keys):
            self.error = self.error or f"{slot.name} has not {'given' if job.is_promotion else 'taken'} all values"
        self.step(jobs)
