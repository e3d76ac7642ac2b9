"""Promotions: rows are reserved when a lookup finds chunks in a tier, and filled from the end of the step on.

A reserved chunk is pending in the primary at once, so that every other lookup sees it and it is not loaded twice. At
the end of the step each (tier, request) becomes one batch. Reservations past the shortest hit of the request's KV
groups are dropped then, unless another request shares them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from kvtiers.api import OffloadKey, group_of
from kvtiers.primary.tier import Allocation, CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, Reservation, TierSlot

__all__ = ["Found", "Promotions"]


class Found(NamedTuple):
    """Chunks of a run that this tier has and the primary lacks, by their places in the run."""

    slot: TierSlot
    places: Sequence[int]


@dataclass(slots=True)
class _Batch:
    """The chunks that a request found in one tier.

    ``starts[i]``: the first token of ``keys[i]`` in the run; ``positions[i]``: in the prompt.
    """

    slot: TierSlot
    state: RequestState
    reserved: Reservation
    keys: list[OffloadKey] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
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
        self._walks: dict[RequestState, dict[int, tuple[int, OffloadKey]]] = {}
        """How long the run was that a request last reserved rows for, and its last key, by group."""

    def set_store_reserve(self, store_reserve: float) -> None:
        """Keep another share of the rows for stores from now on."""
        self._store_reserve = store_reserve

    def __bool__(self) -> bool:
        return bool(self._batches)

    def reserve(
        self, run: Sequence[OffloadKey], found: Sequence[Found], state: RequestState, tokens_per_chunk: int
    ) -> int:
        """Reserve rows for what was found for a run, head first; return how long the run is with what got one.

        The run's other chunks are in the primary, and stay there: they do not make room for these.
        """
        wanted = sum([len(share.places) for share in found])
        clean_before = self._primary.clean_rows
        first = found[0].places[0]
        usable = self._primary.num_rows - self._primary.retired_rows - self._primary.closed_rows
        got = self._primary.prepare_write(
            run,
            state.context.request_id,
            reserve_rows=max(1, math.ceil(self._store_reserve * usable - 1e-9)),
            max_rows=wanted,
            used=min(first, self._walked(run, state)),
        )
        if got is None:
            for slot, places in found:
                slot.metrics.over_store_reserve += state.drop(slot, [run[place] for place in places])
            return first
        self._provenance.forget(got.evicted)
        self._cascades.allocated(len(got.keys), got.evicted, clean_before)
        self._reserved.update(dict.fromkeys(got.keys, state))
        reached = self._share_out(got, run, found, state, tokens_per_chunk)
        self._walks.setdefault(state, {})[group_of(run[0])] = reached, run[reached - 1]
        return reached

    def _walked(self, run: Sequence[OffloadKey], state: RequestState) -> int:
        """Return how many of the run's first chunks were in the run that the request last reserved rows for."""
        length, last = self._walks.get(state, {}).get(group_of(run[0]), (0, None))
        return length if 0 < length <= len(run) and run[length - 1] == last else 0

    def _share_out(
        self,
        got: Allocation,
        run: Sequence[OffloadKey],
        found: Sequence[Found],
        state: RequestState,
        tokens_per_chunk: int,
    ) -> int:
        """Assign the leased rows to the tiers; return the run's length up to the first chunk that got no row."""
        taken, reached = 0, len(run)
        for slot, places in found:
            end = taken + len(places)
            keys, rows = got.keys[taken:end], got.rows[taken:end]
            if keys:
                starts = [place * tokens_per_chunk for place in places[: len(keys)]]
                before = state.firsts.get(group_of(run[0]), 0) * tokens_per_chunk
                self._add(slot, state, keys, rows, starts, before)
            if len(keys) < len(places):
                dropped = state.drop(slot, [run[place] for place in places[len(keys) :]])
                slot.metrics.over_store_reserve += dropped
                reached = min(reached, places[len(keys)])
            taken = end
        return reached

    def share(self, run: Sequence[OffloadKey], state: RequestState) -> None:
        """Share reservations: this request waits for the run too, so they are kept for both requests."""
        reserved = self._reserved
        if reserved.keys().isdisjoint(run):
            return
        if any(batch.state is not state for batch in self._batches.values()):
            self._shared.update((key, state) for key in run if reserved.get(key, state) is not state)

    def submit(self) -> None:
        """Hand the step's reservations to their tiers."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            self._drop_unused(batch)
            if batch.keys:
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
        self._walks.clear()

    def request_finished(self, state: RequestState) -> None:
        """Drop the reservations of this request alone; hand the shared ones to a request that shares them."""
        self._walks.pop(state, None)
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
                target.starts.append(-1)  # the sharer found it inside its run
                target.positions.append(position)
                self._reserved[key] = sharer
            self._forget(batch, [key for key, _ in unwanted], [row for _, row in unwanted])

    def _add(
        self,
        slot: TierSlot,
        state: RequestState,
        keys: list[OffloadKey],
        rows: list[int],
        starts: list[int],
        before: int,
    ) -> None:
        """Add chunks to the request's batch; ``before``: tokens of its prompt before the run."""
        batch = self._batch(slot, state)
        batch.keys += keys
        batch.rows += rows
        batch.starts += starts
        batch.positions += [before + start for start in starts]
        batch.reserved.add(len(rows))
        slot.metrics.loading_chunks += len(rows)
        slot.reserved_chunks += len(rows)
        state.loading[slot] = slot.reserved_chunks, state.loading.get(slot, (0, 0))[1] + len(rows)
        self._provenance.expect(slot, keys)

    def _batch(self, slot: TierSlot, state: RequestState) -> _Batch:
        name = slot.index, state.context.request_id
        batch = self._batches.get(name)
        if batch is None:
            batch = self._batches[name] = _Batch(slot, state, self._budget.reserve(slot))
        return batch

    def _drop_unused(self, batch: _Batch) -> None:
        reached = batch.state.reached.values()
        # By where a chunk starts: the groups of a run may begin at different tokens, less than a chunk apart.
        if not reached or max(batch.starts) < (shortest := min(reached)):
            return
        shared = self._shared
        keep = [start < shortest or key in shared for key, start in zip(batch.keys, batch.starts, strict=True)]
        unwanted = [i for i, kept in enumerate(keep) if not kept]
        self._forget(batch, [batch.keys[i] for i in unwanted], [batch.rows[i] for i in unwanted])
        batch.keys = list(compress(batch.keys, keep))
        batch.rows = list(compress(batch.rows, keep))
        batch.positions = list(compress(batch.positions, keep))

    def _forget(self, batch: _Batch, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        self._primary.complete_write(rows, success=False)
        self._provenance.forget(keys)
        batch.reserved.release(len(rows))
        batch.slot.metrics.loading_chunks -= len(rows)
