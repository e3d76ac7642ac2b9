"""Transfer plans: row leases for GPU copies. Each is completed once, by the engine, when all workers have ended.

A plan that failed because a rank was lost keeps its rows until nothing of that rank can touch them any more.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.api import OffloadKey
from kvtiers.api.keys import count_in_group, first_misfit
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.engine_side import EngineSide
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.types import LoadPlan, StorePlan

__all__ = ["Plans"]


@dataclass(slots=True, eq=False)
class _Open:
    """A plan in flight: its rows are leased until it is completed."""

    keys: Sequence[OffloadKey]
    rows: list[int]
    state: RequestState


class Plans:
    """The plans in flight; runs on the engine's thread."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        cascades: Cascades,
        provenance: Provenance,
        engine: EngineSide,
        metrics: EngineMetrics,
        prefix_group: int,
    ) -> None:
        self._primary = primary
        self._cascades = cascades
        self._provenance = provenance
        self._engine = engine
        self._metrics = metrics
        self._prefix_group = prefix_group
        self._ids = itertools.count(1)
        self._stores: dict[int, _Open] = {}
        self._loads: dict[int, _Open] = {}
        self.orphans: list[tuple[bool, list[int]]] = []
        """Rows of failed plans that something of a lost rank may still touch; True: of a store."""

    @property
    def newest_store(self) -> int:
        """The number of the newest store that is in flight, 0 if there is none."""
        return next(reversed(self._stores), 0)

    def has_store_until(self, plan_id: int) -> bool:
        """Return whether a store with this number or a smaller one is in flight."""
        return next(iter(self._stores), math.inf) <= plan_id

    def prepare_store(self, keys: Sequence[OffloadKey], state: RequestState) -> StorePlan | None:
        """Lease rows for those of the keys that are not in the primary and worth it; None: no room."""
        if first_misfit(keys) is not None:
            self._metrics.misuse += 1
            return None
        clean_before = self._primary.clean_rows
        prepared = self._primary.prepare_store(keys, state.context.request_id)
        if prepared is None:
            self._metrics.refused_stores += len(keys)
            if state.trace is not None:
                state.trace.planned_store(keys, None)
            return None
        new, rows, evicted = prepared
        self._metrics.declined_stores = self._primary.declined
        self._provenance.forget(evicted)
        self._cascades.allocated(len(new), evicted, clean_before)
        if state.whole and len(new) < len(keys):
            fresh = set(new)
            self._cascades.offered_again([key for key in keys if key not in fresh], state)
        plan = StorePlan(next(self._ids), new, np.asarray(rows, np.int32), evicted)
        self._stores[plan.plan_id] = _Open(new, rows, state)
        state.open_stores += 1
        if state.trace is not None:
            state.trace.planned_store(keys, plan)
        return plan

    def complete_store(self, plan: StorePlan, *, success: bool) -> RequestState | None:
        """End a store: its chunks become readable and cascade, or are gone. Return its request; None: a misuse."""
        leased = self._stores.pop(plan.plan_id, None)
        if leased is None:
            self._metrics.misuse += 1
            return None
        if leased.state.trace is not None:
            leased.state.trace.completed(plan, success=success)
        if success:
            self._make_readable(leased)
        else:
            self._metrics.failed_gpu_stores += len(leased.rows)
            if self._engine.dma_may_run():
                self._primary.abandon(leased.rows)
                self.orphans.append((True, leased.rows))
            else:
                self._primary.complete_store(leased.rows, success=False)
        leased.state.open_stores -= 1
        return leased.state

    def prepare_load(self, keys: Sequence[OffloadKey], state: RequestState) -> LoadPlan | None:
        """Pin readable chunks; None, with nothing pinned, if one of them is not readable."""
        rows = self._primary.prepare_load(keys, state.context.request_id)
        if rows is None:
            return None
        self._count_hits(keys, state)
        self._cascades.read(keys, state)
        plan = LoadPlan(next(self._ids), keys, np.asarray(rows, np.int32))
        self._loads[plan.plan_id] = _Open(keys, rows, state)
        if state.trace is not None:
            state.trace.planned_load(plan)
        return plan

    def complete_load(self, plan: LoadPlan, *, success: bool) -> None:
        """End a load: its chunks are no longer pinned by it."""
        leased = self._loads.pop(plan.plan_id, None)
        if leased is None:
            self._metrics.misuse += 1
            return
        if leased.state.trace is not None:
            leased.state.trace.completed(plan, success=success)
        if not success:
            self._metrics.failed_gpu_loads += len(leased.rows)
            if self._engine.dma_may_run():
                self.orphans.append((False, leased.rows))
                return
        self._primary.complete_load(leased.rows)

    def release_orphans(self) -> None:
        """Free the rows of failed plans, once nothing of a lost rank can touch them."""
        if self.orphans and not self._engine.dma_may_run():
            for is_store, rows in self.orphans:
                if is_store:
                    self._primary.complete_store(rows, success=False)
                else:
                    self._primary.complete_load(rows)
            self.orphans.clear()

    def _make_readable(self, leased: _Open) -> None:
        rows = leased.rows
        if not rows:
            return
        reserved = self._cascades.reserve(len(rows))
        readable = self._primary.complete_store(rows, success=True, readers=len(reserved))
        if not readable:  # a reset came between
            for taken in reserved:
                taken.release()
            return
        assert len(readable) == len(rows), "a store's chunks become readable together"
        self._metrics.stored_chunks += len(rows)
        self._cascades.stored(leased.keys, rows, reserved, leased.state)

    def _count_hits(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Count the chunks that the request reads first, for the tier of their origin or for the primary."""
        counted = state.counted_hits
        fresh = keys if counted.isdisjoint(keys) else [key for key in keys if key not in counted]
        brought = 0
        for slot, chunks in self._provenance.served(fresh).items():
            brought += len(chunks)
            slot.metrics.hits += len(chunks)
            slot.metrics.prefix_hits += count_in_group(chunks, self._prefix_group)
        self._metrics.primary_hits += len(fresh) - brought
        counted.update(fresh)
