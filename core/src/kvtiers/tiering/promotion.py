"""Promotions: rows are reserved for a plan of loads when it is made, and filled from the end of the step on.

A reserved chunk is pending in the primary at once, so that every other lookup sees it and it is not loaded twice. At
the end of the step each (tier, request) becomes one batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.load_plan import Share
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, Reservation, TierSlot

__all__ = ["Promotions"]


@dataclass(slots=True)
class _Batch:
    """The chunks that a request found in one tier. ``positions[i]``: the first token of ``keys[i]`` in its prompt."""

    slot: TierSlot
    state: RequestState
    reserved: Reservation
    keys: list[OffloadKey] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class Promotions:
    """Reservations of the current step."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        jobs: JobTable,
        budget: PinBudget,
        provenance: Provenance,
        options: TieringOptions,
        cascades: Cascades,
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._budget = budget
        self._cascades = cascades
        self._provenance = provenance
        self._store_reserve = options.store_reserve
        self._batches: dict[tuple[int, str], _Batch] = {}
        self._reserved: dict[OffloadKey, RequestState] = {}
        self._shared: dict[OffloadKey, RequestState] = {}

    def set_store_reserve(self, store_reserve: float) -> None:
        """Keep another share of the rows for stores from now on."""
        self._store_reserve = store_reserve

    def __bool__(self) -> bool:
        return bool(self._batches)

    def reserve(
        self,
        run: Sequence[OffloadKey],
        shares: Mapping[TierSlot, Share],
        state: RequestState,
        *,
        is_whole: bool,
        used: int = 0,
    ) -> bool:
        """Reserve rows for a plan; False: there are none, or not for all of it where it ``is_whole``.

        ``run``: the plan's chunks among those that the request has in the primary already, in the order of its prompt.
        Those stay there: they do not make room for these. ``used``: how many of the first ones are in the primary,
        and were in the run of the last plan.
        """
        wanted = sum(len(share.keys) for share in shares.values())
        clean_before = self._primary.clean_rows
        usable = self._primary.num_rows - self._primary.retired_rows - self._primary.closed_rows
        got = self._primary.prepare_write(
            run,
            state.context.request_id,
            reserve_rows=max(1, math.ceil(self._store_reserve * usable - 1e-9)),
            max_rows=wanted,
            least=wanted if is_whole else 1,
            used=used,
        )
        row_of = {} if got is None else dict(zip(got.keys, got.rows, strict=True))
        if got is not None:
            self._provenance.forget(got.evicted)
            self._cascades.allocated(len(got.keys), got.evicted, clean_before)
        if len(row_of) < wanted:
            for slot, share in shares.items():
                dropped = state.drop(slot, [key for key in share.keys if key not in row_of])
                slot.metrics.over_store_reserve += dropped
        self._reserved.update(dict.fromkeys(row_of, state))
        for slot, (keys, positions) in shares.items():
            places = [place for place, key in enumerate(keys) if key in row_of]
            if places:
                mine = [keys[place] for place in places]
                self._add(slot, state, mine, [row_of[key] for key in mine], [positions[place] for place in places])
        return bool(row_of)

    def share(self, run: Sequence[OffloadKey], state: RequestState) -> None:
        """Share reservations: this request waits for the run too, so they are kept for both requests."""
        reserved = self._reserved
        if any(batch.state is not state for batch in self._batches.values()) and not reserved.keys().isdisjoint(run):
            self._shared.update((key, state) for key in run if reserved.get(key, state) is not state)

    def submit(self) -> None:
        """Hand the step's reservations to their tiers."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            self._jobs.submit(
                batch.reserved,
                batch.keys,
                batch.rows,
                batch.state,
                self._cascades.promoted,
                promotion=True,
                positions=batch.positions,
            )
        self._reserved.clear()
        self._shared.clear()

    def cancel_loads(self, slot: TierSlot) -> int:
        """Forget this step's reservations for one tier; return how many there were."""
        cancelled = 0
        for name in [name for name, batch in self._batches.items() if batch.slot is slot]:
            batch = self._batches.pop(name)
            for key in batch.keys:
                self._reserved.pop(key, None)
                self._shared.pop(key, None)
            cancelled += len(batch.rows)
            self._forget(batch, batch.keys, batch.rows)
        slot.metrics.cancelled_loads += cancelled
        return cancelled

    def drop(self) -> None:
        """Forget all reservations: none has reached a tier."""
        for batch in self._batches.values():
            self._forget(batch, batch.keys, batch.rows)
        self._batches.clear()
        self._reserved.clear()
        self._shared.clear()

    def request_finished(self, state: RequestState) -> None:
        """Drop the reservations of this request alone; hand the shared ones to a request that shares them."""
        if not self._batches:
            return
        for name in [name for name, batch in self._batches.items() if batch.state is state]:
            batch = self._batches.pop(name)
            unwanted: list[tuple[OffloadKey, int]] = []
            for key, row, position in zip(batch.keys, batch.rows, batch.positions, strict=True):
                sharer = self._shared.pop(key, None)
                if sharer is None or sharer.finished:
                    del self._reserved[key]
                    unwanted.append((key, row))
                    continue
                target = self._batch(batch.slot, sharer)
                batch.reserved.move(1, target.reserved)
                target.keys.append(key)
                target.rows.append(row)
                target.positions.append(position)
                self._reserved[key] = sharer
            self._forget(batch, [key for key, _ in unwanted], [row for _, row in unwanted])

    def _add(
        self, slot: TierSlot, state: RequestState, keys: list[OffloadKey], rows: list[int], positions: list[int]
    ) -> None:
        batch = self._batch(slot, state)
        batch.keys += keys
        batch.rows += rows
        batch.positions += positions
        batch.reserved.add(len(rows))
        state.load_from(slot, len(rows))
        self._provenance.expect(slot, keys)

    def _batch(self, slot: TierSlot, state: RequestState) -> _Batch:
        name = slot.index, state.context.request_id
        batch = self._batches.get(name)
        if batch is None:
            batch = self._batches[name] = _Batch(slot, state, self._budget.reserve(slot))
        return batch

    def _forget(self, batch: _Batch, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        self._primary.complete_write(rows, success=False)
        self._provenance.forget(keys)
        batch.reserved.release(len(rows))
        batch.slot.metrics.loading_chunks -= len(rows)
