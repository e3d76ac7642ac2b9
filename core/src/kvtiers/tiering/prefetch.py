"""Prefetches: chunks that are loaded into the primary ahead of requests, for warm-ups and for known prefixes.

Each step does a small part, after the loads of its requests have been submitted: it asks about some keys
(``prefetch_questions.py``), and submits jobs for those that were found.

No request waits for a prefetch. One gives way while a tier loads for requests, has at most what a tier brings in 25 ms
in flight, and asks about few keys at a time; what is in flight counts as the tier's queue, as any load does. It takes
free rows alone, and leaves those kept for stores: nothing is evicted for it. What it has loaded is not protected.
Several prefetches go one after the other, those of prefixes before warm-ups. Engine's thread only.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence

from kvtiers.api import OffloadKey
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.prefetch_questions import PATIENCE, Questions
from kvtiers.tiering.prefetch_state import Bandwidth, Flight, Prefetch
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, Reservation, TierSlot
from kvtiers.types import RequestContext

__all__ = ["MOST_WAITING_KEYS", "Prefetches"]

MOST_WAITING_KEYS = 4096
"""Keys of one prefetch that wait: from then on no more are taken."""
_MOST_PREFIXES = 64  # prefetches of prefixes that wait; further ones are dropped and counted
_AHEAD_SECONDS = 0.025  # of a tier's loads, in flight at a time
_FIRST_CHUNKS = 4  # in flight, of a tier that has loaded nothing yet
_CLIENT_SECONDS = 15.0  # without a word of the one that gives the keys


class Prefetches:
    """All prefetches of an engine."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        jobs: JobTable,
        budget: PinBudget,
        provenance: Provenance,
        cascades: Cascades,
        slots: Sequence[TierSlot],
        options: TieringOptions,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._budget = budget
        self._provenance = provenance
        self._cascades = cascades
        self._slots = slots
        self._store_reserve = options.store_reserve
        self._metrics = metrics
        self._clock = clock
        self.all: list[Prefetch] = []
        """Those that are not over; a step looks at it."""
        self._questions = Questions(primary, slots)
        self._numbers = itertools.count(1)
        self._runs = itertools.count(1)

    @property
    def warm_ups(self) -> int:
        """How many warm-ups there are that were not stopped."""
        return sum(one.is_warm_up and not one.is_closed for one in self.all)

    def set_store_reserve(self, store_reserve: float) -> None:
        """Leave another share of the rows to stores from now on."""
        self._store_reserve = store_reserve

    def has_work(self) -> bool:
        """Return whether the engine should keep stepping for one of them."""
        return any(one.has_work() for one in self.all)

    # -- what is asked for

    def prefix(self, keys: Sequence[OffloadKey], tiers: Collection[str] | None = None) -> bool:
        """Load a known prefix; False, with the keys counted as dropped, where too many wait.

        ``tiers``: those to load from alone.
        """
        if sum(not one.is_warm_up for one in self.all) >= _MOST_PREFIXES:
            self._metrics.dropped_prefetches += len(keys)
            return False
        one = Prefetch(tiers, is_complete=True, heard_at=self._clock())
        some = keys[:MOST_WAITING_KEYS]
        self._metrics.dropped_prefetches += len(keys) - len(some)
        one.give(some, ends_prefix=True)
        self.all.append(one)
        return True

    def warm_up(self, tier: str, bytes_per_second: float | None, most_bytes: float | None) -> Prefetch:
        """Begin a warm-up from this tier, without keys so far."""
        now, stride = self._clock(), self._primary.row_stride
        one = Prefetch(
            (tier,),
            most_chunks=math.inf if most_bytes is None else most_bytes // stride,
            bandwidth=None if not bytes_per_second else Bandwidth(bytes_per_second, stride, now),
            heard_at=now,
            number=next(self._numbers),
        )
        self.all.append(one)
        return one

    def find(self, number: int) -> Prefetch | None:
        """Return the warm-up of this number, if it is not over and was heard of."""
        found = next((one for one in self.all if one.number == number and not one.is_closed), None)
        if found is not None:
            found.heard_at = self._clock()
        return found

    def close(self, one: Prefetch) -> None:
        """Forget a warm-up whose last figures have been taken; what is in flight lands."""
        one.stop("stopped")
        one.is_closed = True

    def shut_down(self) -> None:
        """Begin nothing more."""
        for one in self.all:
            one.stop("the engine has ended")

    def retire_keys(self) -> None:
        """End all: their keys name other values from now on."""
        for one in self.all:
            one.stop("the weights have changed")

    # -- a step

    def advance(self) -> None:
        """Do a step's part: of the first prefix, or of the first warm-up that has something to do."""
        now = self._clock()
        for one in list(self.all):
            if one.is_moving:
                self._collect(one)
            silent = now - one.heard_at
            if silent > (_CLIENT_SECONDS if one.is_warm_up else PATIENCE):
                one.stop("the one that gave its keys has gone" if one.is_warm_up else "it had no turn in time")
            if one.is_over() and (one.is_closed or not one.is_warm_up or silent > _CLIENT_SECONDS):
                self.all.remove(one)
                self._questions.end_run(one)
        begun = [one for one in self.all if not one.ended]
        if begun:
            self._work_on(min(begun, key=lambda one: one.is_warm_up), now)

    def _work_on(self, one: Prefetch, now: float) -> None:
        slots = [slot for slot in self._slots if one.tiers is None or slot.name in one.tiers]
        tiers = self._questions.tiers_of(one, slots)
        if not tiers:
            if all(slot.has_spoken() for slot in slots):
                one.stop(f"{', '.join(one.tiers)} is not in use" if one.tiers else "no tier is in use")
            return
        self._questions.put_back(one, tiers)
        if any(slot.metrics.loading_chunks > self._own(slot) for slot in tiers):
            return  # requests wait for this tier
        if one.loaded + one.in_flight >= one.most_chunks:
            if not one.flights:
                one.stop("as much as was asked for is loaded")
            return
        self._questions.ask(one, tiers, now)
        if one.found:
            self._load(one, now)

    def _own(self, slot: TierSlot) -> int:
        """Return how many chunks this tier is loading for prefetches."""
        return sum(flight.owns(slot) for one in self.all for flight in one.flights)

    def _collect(self, one: Prefetch) -> None:
        """Take in the ends of jobs; store in the near tier what was loaded from one behind it."""
        ended = [flight for flight in one.flights if not self._is_moving(flight.reserved)]
        one.flights = [flight for flight in one.flights if flight not in ended]
        for flight in ended:
            one.loaded += len(flight.landed)
            one.failed += len(flight.keys) - len(flight.landed)
            self._metrics.prefetched_chunks += len(flight.landed)
            near = self._questions.near_of(flight.slot)
            if near is None or not (one.is_warm_up or one.tiers is None or near.name in one.tiers):
                continue
            if (stored := self._cascades.hand_on(near, flight.landed)) is not None:
                one.storing.append(stored)
        one.storing = [stored for stored in one.storing if self._is_moving(stored)]

    def _is_moving(self, reserved: Reservation) -> bool:
        """Return whether a job may still end with something: not one whose rows its tier never releases, maybe."""
        return bool(reserved.rows) and not self._jobs.has_given_up(reserved)

    def _load(self, one: Prefetch, now: float) -> None:
        """Submit a job for what was found, as far as rows, budgets and the bandwidth allow."""
        slot, stride = one.found[0][0], self._primary.row_stride
        most = self._most_now(one, slot, now)
        if most <= 0:
            return
        keys: list[OffloadKey] = []
        while one.found and one.found[0][0] is slot and len(keys) < most:
            keys.append(one.found.popleft()[1])
        one.run = one.run or f"kvtiers-prefetch-{next(self._runs)}"
        clean_before = self._primary.clean_rows
        got = self._primary.prepare_write(keys, one.run, reserve_rows=self._reserve(), max_rows=len(keys))
        leased = [] if got is None else got.keys
        one.resident += len(keys) - len(leased)
        if got is None or not leased:
            return
        self._provenance.forget(got.evicted)
        self._cascades.allocated(len(leased), got.evicted, clean_before)
        self._provenance.expect(slot, leased)
        if one.bandwidth is not None:
            one.bandwidth.take(len(leased) * stride)
        state = RequestState(RequestContext(""), (), finished=True, is_prefetch=True)
        state.load_from(slot, len(leased))
        flight = Flight(slot, self._budget.reserve(slot, len(leased)), state, leased)
        one.flights.append(flight)

        def landed(slot: TierSlot, keys: Sequence[OffloadKey], failed: Sequence[OffloadKey]) -> None:
            flight.landed += keys
            self._cascades.promoted(slot, keys, failed)

        self._jobs.submit(flight.reserved, leased, got.rows, state, landed, promotion=True)

    def _most_now(self, one: Prefetch, slot: TierSlot, now: float) -> int:
        """Return how many chunks may be submitted to this tier now; end the prefetch where the primary is full."""
        free = self._primary.free_rows - self._reserve()
        if free <= 0:
            if self._primary.closed_rows:
                self._primary.want_rows(1 + self._reserve())  # their memory is on its way
            else:
                one.stop("the primary is full")
            return 0
        per_chunk = slot.rate.seconds_per_chunk
        ahead = _FIRST_CHUNKS if not per_chunk else max(1, int(_AHEAD_SECONDS / per_chunk))
        left = min(
            ahead - self._own(slot),
            self._jobs.job_rows,
            free,
            (self._budget.room(slot) + 1) // 2,
            one.most_chunks - one.loaded - one.in_flight,
        )
        if one.bandwidth is not None:
            left = min(left, one.bandwidth.chunks(self._primary.row_stride, now))
        return int(left)

    def _reserve(self) -> int:
        primary = self._primary
        usable = primary.num_rows - primary.retired_rows - primary.closed_rows
        return max(1, math.ceil(self._store_reserve * usable - 1e-9))
