"""Cascades: stores of chunks from the primary into the tiers, by each tier's admission rule.

The rule is ``all`` (as soon as a chunk is in the primary), ``second_access`` (when it is wanted a second time),
``on_eviction`` (when it is among the coldest: stored ahead of its eviction, so that no request waits for it) or
that of an admission policy (then, if it is likely enough to be used again; a prefix that several sessions use is stored
at its first hit, since it may never leave, and other engines want it). A chunk that was loaded from a tier is not
stored in others, unless a second access asks for it. A store that would exceed a pin budget, or whose tier is not
available, is dropped and counted.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import islice

from kvtiers.api import LookupResult, OffloadKey, group_of
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.admission import AdmissionPolicy, admission_class
from kvtiers.tiering.jobs import JobTable, OnEnd, TieringOptions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, Reservation, TierSlot
from kvtiers.types import RequestContext

__all__ = ["Cascades"]

_WORK_AHEAD_ROWS = 256  # most chunks that one step sends down ahead of their eviction


class Cascades:
    """Decides and submits stores; runs on the engine's thread."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        jobs: JobTable,
        budget: PinBudget,
        slots: Sequence[TierSlot],
        options: TieringOptions,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._budget = budget
        self._metrics = metrics
        self._clock = clock
        self._at_once: list[TierSlot] = []
        self._second: dict[TierSlot, _Wanted] = {}
        self._late: list[TierSlot] = []
        self._chosen: dict[TierSlot, AdmissionPolicy] = {}
        self.works_ahead = False
        """There is a tier that takes chunks before their eviction."""
        for slot in slots:
            self.add(slot)
        self._reserve = max(1, math.ceil(options.clean_reserve * primary.num_rows - 1e-9))
        self._written_since_scan = self._reserve
        self._fresh = 0  # rows leased since the chunks that leave next were looked at
        self._behind: dict[TierSlot, None] = {}  # tiers of ``_chosen`` that have not looked at all of them yet
        self._ahead = float(self._reserve)  # how many of those are looked at
        self._no_request = RequestState(RequestContext(""), slots)

    def add(self, slot: TierSlot) -> None:
        """Take in a tier, after those that there are."""
        if slot.options.read_only:
            return
        if slot.options.admission == "all":
            self._at_once.append(slot)
        elif slot.options.admission == "second_access":
            self._second[slot] = _Wanted(slot.options.remembered)
        elif slot.options.admission == "on_eviction":
            self._late.append(slot)
            self.works_ahead = True
        else:
            options = slot.options
            policy = admission_class(options.admission)
            admission = policy(options.may_lose, options.chunks, options.writes_per_hour, self._clock())
            self._chosen[slot] = admission
            if len(self._chosen) == 1:
                self._primary.forecast_reuse(admission.looked_at, admission.around)
            self.works_ahead = True
        self._primary.store_everything()

    def remove(self, slot: TierSlot) -> None:
        """Leave a tier out from now on."""
        self._at_once = [other for other in self._at_once if other is not slot]
        self._late = [other for other in self._late if other is not slot]
        self._second.pop(slot, None)
        self._behind.pop(slot, None)
        if self._chosen.pop(slot, None) is not None:
            self._primary.evict_first(next((left.looked_at for left in self._chosen.values()), None))
        self.works_ahead = bool(self._late or self._chosen)

    def reserve(self, chunks: int) -> list[Reservation]:
        """Reserve the rows of this many newly stored chunks for each tier that takes all of them at once."""
        return [  # in this order: each one's rows are missing from the room of the next
            self._budget.reserve(slot, chunks)
            for slot in self._at_once
            if not slot.read_only and self._budget.room(slot) >= chunks and slot.available()
        ]

    def stored(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], reserved: Sequence[Reservation], state: RequestState
    ) -> None:
        """Send chunks that became readable, with a reader for each of ``reserved``, to the tiers that want them."""
        takers = [taken.slot for taken in reserved]
        for taken in reserved:
            self._jobs.submit(taken, keys, rows, state, self._note_stored, promotion=False)
        if len(takers) < len(self._at_once):
            for slot in self._at_once:
                if slot not in takers:
                    self._send(slot, keys, state)
        for slot, wanted in self._second.items():
            again = wanted.note(keys, resend=True)
            self._send(slot, keys if slot in state.whole else again, state)
        for slot, admission in self._chosen.items():
            admission.computed(keys)
            slot.metrics.missed_cascades = admission.missed
        for slot in state.whole:
            if slot in self._late or slot in self._chosen:
                self._send(slot, keys, state)

    def read(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Handle chunks read by the engine: their second access, for the tiers that wait for one."""
        for slot, wanted in self._second.items():
            self._send(slot, wanted.note(keys, resend=False), state)
        if self._chosen:
            shared = keys[: self._primary.shared_prefix(keys)]
            for slot, admission in self._chosen.items():
                admission.read(keys)
                if shared and (unsent := admission.unsent(shared)):
                    self._send(slot, unsent, state)

    def offered_again(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Handle resident chunks that a tier of ``whole`` wants: send the readable ones, park the others."""
        state.parked.update(dict.fromkeys(keys))
        self.retry_parked(state)

    def retry_parked(self, state: RequestState) -> None:
        """Send the parked chunks that have become readable; forget those that never will."""
        keys = list(state.parked)
        found = list(zip(keys, self._primary.find(keys), strict=True))
        ready = [key for key, where in found if where is LookupResult.HIT]
        for slot in state.whole:
            self._send(slot, ready, state)
        state.parked = dict.fromkeys(key for key, where in found if where is LookupResult.HIT_PENDING)

    def work_ahead(self) -> None:
        """Send the coldest chunks down before their rows are needed, for tiers that take them on eviction only.

        Of the next rows to be used, free or evicted, a reserve is kept clean. Looked at once in a while: each look
        costs as many chunks as the reserve has.
        """
        if self._chosen:
            self._choose()
        if not self._late or self._written_since_scan * 4 < self._reserve:
            return
        ahead = self._reserve - self._primary.free_rows
        rooms = [(slot, self._budget.room(slot)) for slot in self._late if not slot.read_only and slot.available()]
        most = min(max((room for _, room in rooms), default=0), _WORK_AHEAD_ROWS)
        if ahead > 0 and not most:
            return  # looked at again in the next step
        self._written_since_scan = 0
        if ahead <= 0:
            return
        coldest = self._primary.coldest(ahead, clean=True)
        dirty = self._primary.dirty(coldest)
        for slot, room in rooms:
            self._send(slot, dirty[: min(room, most)], self._no_request)
        if len(dirty) > most:
            self._written_since_scan = self._reserve  # the rest in the next step

    def allocated(self, rows: int, evicted: Sequence[OffloadKey], clean_before: int) -> None:
        """Account for rows leased to new chunks and for ``evicted``; ``clean_before``: clean chunks before that."""
        self._written_since_scan += rows
        self._fresh += rows
        for admission in self._chosen.values():
            if evicted and (missed := admission.left(evicted)):
                self._metrics.dropped_dirty += missed
                self._ahead = min(0.25 * self._primary.num_rows, self._ahead + missed)
        if evicted and self._late:
            self._metrics.dropped_dirty += len(evicted) - (clean_before - self._primary.clean_rows)

    def promoted(self, slot: TierSlot, keys: Sequence[OffloadKey], _failed: Sequence[OffloadKey] = ()) -> None:
        """Handle chunks that were loaded from this tier: it has them."""
        if self._late:
            self._primary.mark_clean(keys)
        if slot in self._second:
            self._second[slot].sent(keys)
        for admission in self._chosen.values():
            admission.sent(keys, written=False)

    def found(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> None:
        """Handle chunks that are here since the start, and that this tier turns out to have."""
        if self._late == [slot]:  # of several the others may lack them
            self._primary.mark_clean(keys)
        elif slot in self._second:
            self._second[slot].sent(keys)
        elif slot in self._chosen:
            self._chosen[slot].sent(keys, written=False)

    def missed_by(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Handle chunks that are here since the start, and that this tier lacks; return those to store in it now.

        They were wanted once, when they came here.
        """
        if slot in self._second:
            return self._second[slot].note(keys, resend=False)
        return keys if slot in self._at_once else ()

    def hand_on(self, slot: TierSlot, keys: Sequence[OffloadKey], on_end: OnEnd | None = None) -> Reservation | None:
        """Store readable chunks in this tier, whatever its admission; None: nothing has begun.

        The first ones, as far as there is room. The job has ended when the reservation has no rows. ``on_end``: called
        as it ends or fails, unless the cache was reset since; in several parts, if it is a long one.
        """
        some = keys[: self._budget.room(slot)] if slot.available() and not slot.read_only else ()
        rows = self._primary.prepare_read(some) if some else None
        if rows is None:
            return None
        if slot in self._second:
            self._second[slot].sent(some)

        def ended(slot: TierSlot, keys: Sequence[OffloadKey], failed: Sequence[OffloadKey]) -> None:
            self._note_stored(slot, keys, failed)
            if on_end is not None:
                on_end(slot, keys, failed)

        reserved = self._budget.reserve(slot, len(rows))
        self._jobs.submit(reserved, some, rows, self._no_request, ended, promotion=False)
        return reserved

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Handle chunks that an operator has forgotten: they are resident no longer, and were not missed."""
        for admission in self._chosen.values():
            admission.forget(keys)

    def reset(self) -> None:
        """Handle a reset of the cache: no chunk is resident."""
        for admission in self._chosen.values():
            admission.reset()

    def retire_keys(self) -> None:
        """Forget all keys, which name other values from now on: no tier has them, no request has wanted them."""
        for wanted in self._second.values():
            wanted.forget()

    def _note_stored(self, slot: TierSlot, keys: Sequence[OffloadKey], failed: Sequence[OffloadKey]) -> None:
        if failed:
            slot.not_stored = failed[-1]
        if slot in self._late:
            self._primary.mark_clean(keys)
        elif failed and slot in self._second:
            self._second[slot].failed(failed)
        elif failed and slot in self._chosen:
            self._chosen[slot].failed(failed)

    def _choose(self) -> None:
        """Look at the chunks that leave next, for tiers that take what is likely to be used again.

        The nearest ones after each store: what was just stored may rank lowest. All of the reserve once in a while.
        A look costs as many chunks as there are ahead, so a tier without much room is left until rows come back.
        """
        if self._fresh * 4 >= self._reserve:
            self._fresh = 0
            self._behind = dict.fromkeys(self._chosen)
            self._ahead = max(self._reserve, 0.999 * self._ahead)
        if not self._behind:
            return
        ahead = int(self._ahead) - self._primary.free_rows
        now, few = self._clock(), min(_WORK_AHEAD_ROWS, self._reserve) // 4
        for slot in list(self._behind):
            most = min(self._budget.room(slot), _WORK_AHEAD_ROWS)
            if ahead <= 0 or slot.read_only or not slot.available():
                del self._behind[slot]
                continue
            if most < few and self._budget.held:
                continue
            admission = self._chosen[slot]
            undecided = self._primary.leaving(ahead, admission.looked_at)
            if len(undecided) <= most:
                del self._behind[slot]
            del undecided[most:]  # the rest in the next step
            if undecided:
                worth = admission.choose(undecided, self._primary.expected_reuse(undecided), now)
                slot.metrics.declined_cascades += len(undecided) - len(worth)
                self._send(slot, worth, self._no_request)

    def _send(self, slot: TierSlot, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Send as many of these readable chunks as there is room for, the first ones; drop and count the others.

        Of a request's chunks of several KV groups, which come one group after the other, all or none: a prompt is not
        found without its windows or states, which come last.
        """
        if not keys or slot.read_only:
            return
        available = slot.available()
        some = keys[: self._budget.room(slot)] if available else ()
        admission = self._chosen.get(slot)
        if admission is not None and (most := admission.room(self._clock())) is not None:
            some = some[:most]
        if len(some) < len(keys) and state is not self._no_request and group_of(keys[0]) != group_of(keys[-1]):
            some = ()
        slot.metrics.dropped_cascades += len(keys) - len(some)
        if available:
            self._budget.count_over(slot, len(keys) - len(some))
        if not some:
            return
        rows = self._primary.prepare_read(some)
        assert rows is not None, "only readable chunks are sent down"
        if slot in self._second:
            self._second[slot].sent(some)  # before the tier can say that it was not
        if admission is not None:
            admission.sent(some, written=True)
        reserved = self._budget.reserve(slot, len(rows))
        self._jobs.submit(reserved, some, rows, state, self._note_stored, promotion=False)


class _Wanted:
    """Keys that were wanted before, and whether they were sent since: ``most``, the oldest are forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sent: dict[OffloadKey, bool] = {}

    def note(self, keys: Sequence[OffloadKey], *, resend: bool) -> list[OffloadKey]:
        """Note these keys as wanted; return those wanted before, without those already sent unless ``resend``."""
        known = self._sent
        again = []
        for key in dict.fromkeys(keys):
            sent = known.pop(key, None)
            if sent is False or (sent and resend):
                again.append(key)
            known[key] = bool(sent)
        self._bound()
        return again

    def sent(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these keys are on their way to the tier, or there."""
        self._sent.update(dict.fromkeys(keys, True))
        self._bound()

    def failed(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these keys were not stored: the next access sends them again."""
        self._sent.update((key, False) for key in keys if key in self._sent)

    def forget(self) -> None:
        """Forget all keys."""
        self._sent.clear()

    def _bound(self) -> None:
        if len(self._sent) > self._most:
            # Many at once: finding the oldest key of a dict costs time for each that was removed before it.
            for key in list(islice(self._sent, self._most // 8)):
                del self._sent[key]
