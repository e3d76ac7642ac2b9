"""Promotions: rows are reserved when a lookup finds a chunk in a tier, and filled from the end of the step on.

A reserved chunk is pending in the primary at once, so that every other lookup sees it and nobody fetches it twice. At
the end of the step each (tier, request) becomes one batch; what lies beyond the request's shortest run of the step is
let go again, unless another request has met it meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.primary.chunks import CPUPrimaryTier
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tiers import TierSlot

__all__ = ["Promotions"]


@dataclass(slots=True)
class _Batch:
    """Chunks that a request found in a tier; ``ends[i]`` is where ``keys[i]`` ends in the request's run, in tokens."""

    slot: TierSlot
    state: RequestState
    keys: list[OffloadKey] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Promotions:
    """Reservations of the current step."""

    def __init__(self, primary: CPUPrimaryTier, jobs: JobTable, options: TieringOptions) -> None:
        self._primary = primary
        self._jobs = jobs
        self._reserve_rows = max(1, round(options.store_reserve * primary.num_rows))
        self._batches: dict[tuple[int, str], _Batch] = {}
        self._reserved: dict[OffloadKey, RequestState] = {}
        self._shared: dict[OffloadKey, RequestState] = {}
        self.on_evicted: Callable[[Sequence[OffloadKey]], None] = lambda _keys: None

    def __bool__(self) -> bool:
        return bool(self._batches)

    def reserve(self, slot: TierSlot, run: Sequence[OffloadKey], hits: int, state: RequestState, tokens: int) -> int:
        """Reserve rows for the last ``hits`` chunks of a run, which this tier has; return how many of them got one.

        The run's other chunks are in the primary, and stay there: they do not make room for these.
        """
        room = min(hits, self._jobs.room(slot))
        got = None
        if room:
            got = self._primary.prepare_write(
                run, state.context.request_id, reserve_rows=self._reserve_rows, max_rows=room
            )
        if got is None:
            slot.metrics.dropped_promotions += hits
            return 0
        slot.metrics.dropped_promotions += hits - len(got.rows)
        self._jobs.hold(slot, len(got.rows))
        batch = self._batch(slot, state)
        batch.keys += got.keys
        batch.rows += got.rows
        first = len(run) - hits + 1
        batch.ends.extend(range(first * tokens, (first + len(got.rows)) * tokens, tokens))
        self._reserved.update(dict.fromkeys(got.keys, state))
        self.on_evicted(got.evicted)
        return len(got.rows)

    def met(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Note that a request's run includes these pending chunks: what another one reserved is now for both."""
        if self._reserved:
            reserved = self._reserved
            self._shared.update((key, state) for key in keys if reserved.get(key, state) is not state)

    def submit(self) -> None:
        """Hand the step's reservations to their tiers."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            self._let_go(batch)
            if batch.keys:
                self._jobs.submit(batch.slot, batch.keys, batch.rows, batch.state, promotion=True)
        self._reserved.clear()
        self._shared.clear()

    def drop(self) -> None:
        """Forget all reservations: none has reached a tier."""
        for batch in self._batches.values():
            self._forget(batch.slot, batch.rows)
        self._batches.clear()
        self._reserved.clear()
        self._shared.clear()

    def request_finished(self, state: RequestState) -> None:
        """Forget what only this request wanted; hand the rest to one who wants it too."""
        for name in [name for name, batch in self._batches.items() if batch.state is state]:
            batch = self._batches.pop(name)
            for key, row in zip(batch.keys, batch.rows, strict=True):
                heir = self._shared.pop(key, None)
                if heir is None or heir.finished:
                    self._reserved.pop(key, None)
                    self._forget(batch.slot, [row])
                else:
                    target = self._batch(batch.slot, heir)
                    target.keys.append(key)
                    target.rows.append(row)
                    target.ends.append(0)  # the heir met it inside its run
                    self._reserved[key] = heir

    def _batch(self, slot: TierSlot, state: RequestState) -> _Batch:
        return self._batches.setdefault((slot.index, state.context.request_id), _Batch(slot, state))

    def _let_go(self, batch: _Batch) -> None:
        shortest = batch.state.shortest_tokens
        if shortest is None or max(batch.ends) <= shortest:
            return
        shared = self._shared
        keep = [end <= shortest or key in shared for key, end in zip(batch.keys, batch.ends, strict=True)]
        self._forget(batch.slot, [row for row, kept in zip(batch.rows, keep, strict=True) if not kept])
        batch.keys = [key for key, kept in zip(batch.keys, keep, strict=True) if kept]
        batch.rows = [row for row, kept in zip(batch.rows, keep, strict=True) if kept]

    def _forget(self, slot: TierSlot, rows: list[int]) -> None:
        self._primary.complete_write(rows, success=False)
        self._jobs.hold(slot, -len(rows))
