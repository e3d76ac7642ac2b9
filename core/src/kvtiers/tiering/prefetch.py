"""Prefetches: chunks that are loaded into the primary ahead of requests, for warm-ups and for known prefixes.

Each step does a small part, after the loads of its requests have been submitted::

    given --asked--> found --submitted--> loaded
          resident           missing      failed

No request waits for a prefetch. One gives way while a tier loads for requests, has at most what a tier brings in 25 ms
in flight, and asks about few keys at a time; what is in flight counts as the tier's queue, as any load does. It takes
free rows alone, and leaves those kept for stores: nothing is evicted for it. What it has loaded is not protected.
Several prefetches go one after the other, those of prefixes before warm-ups. Engine's thread only.
"""

import enum
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.api.keys import first_misfit
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.fetch_once import AGAIN_SECONDS, FetchRights, Turn
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, Reservation, TierSlot
from kvtiers.types import RequestContext

__all__ = ["MOST_WAITING_KEYS", "Prefetch", "Prefetches"]

MOST_WAITING_KEYS = 4096
"""Keys of one prefetch that wait: from then on no more are taken."""
_MOST_PREFIXES = 64  # prefetches of prefixes that wait; further ones are dropped and counted
_AHEAD_SECONDS = 0.025  # of a tier's loads, in flight at a time
_FIRST_CHUNKS = 4  # in flight, of a tier that has loaded nothing yet
_FIRST_QUESTION, _LONGEST_QUESTION = 8, 256  # keys
_SOON, _LATE = 0.005, 0.020  # seconds to an answer: the next question is longer, or shorter
_PATIENCE = 30.0  # for answers of one question, and for a prefix to get its turn
_QUESTIONS_BY_TURNS = 3  # about a chunk: to the near tier, to it again, to the far one
_BURST_SECONDS = 0.1  # of a bandwidth limit
_NO_REQUEST = RequestContext("")
_CLIENT_SECONDS = 15.0  # without a word of the one that gives the keys


class _Bandwidth:
    """A bandwidth limit: a token bucket of bytes."""

    def __init__(self, bytes_per_second: float, least: int, now: float) -> None:
        self._rate = bytes_per_second
        self._most = max(float(least), bytes_per_second * _BURST_SECONDS)
        self._left = float(least)
        self._at = now

    def chunks(self, nbytes: int, now: float) -> int:
        """Return how many chunks of this size may be loaded now."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        return int(self._left / nbytes)

    def take(self, nbytes: int) -> None:
        """Count bytes as loaded."""
        self._left -= nbytes


@dataclass(slots=True, eq=False)
class _Flight:
    """A job in flight. ``reserved``: its rows of the budgets, until they are released."""

    slot: TierSlot
    reserved: Reservation
    state: RequestState
    keys: Sequence[OffloadKey]
    landed: list[OffloadKey] = field(default_factory=list)

    def owns(self, slot: TierSlot) -> int:
        """Return how many chunks this tier is loading for it."""
        return len(self.keys) if slot is self.slot and not self.state.lost else 0


class _Answer(enum.Enum):
    """An answer about a chunk that names no tier to load it from."""

    MISSING = "missing"
    OPEN = "open"
    """It is to be asked again in the next step."""
    ANOTHERS = "another's"
    """Another engine is fetching it."""


class _Way(NamedTuple):
    """The tiers that are asked, in order: ``before``, up to ``near``, and ``after``, by turns with other engines.

    ``near``: what is fetched from those after it is stored in it, for the others; None: there is no such tier.
    """

    before: Sequence[TierSlot]
    near: TierSlot | None
    after: Sequence[TierSlot]


@dataclass(slots=True, eq=False)
class Prefetch:
    """One prefetch, and what has come of its keys so far. ``ended``: why it has ended; "" while it goes on.

    ``tiers``: the names of those to load from, in the config's order; None: all. ``is_complete``: no more keys will be
    given.
    """

    tiers: Collection[str] | None = None
    most_chunks: float = math.inf
    bandwidth: _Bandwidth | None = None
    is_complete: bool = False
    ended: str = ""
    given: int = 0
    loaded: int = 0
    resident: int = 0
    """Keys whose chunk was in the primary already."""
    missing: int = 0
    """Keys that no tier has, or that are no chunk's."""
    failed: int = 0
    heard_at: float = 0.0
    is_closed: bool = False
    """Its last figures have been taken."""
    number: int = 0
    run: str = ""
    """The request id under which the policy sees the chunks of the present prefix."""
    waiting: deque[OffloadKey | None] = field(default_factory=deque)
    """Keys in order; None: the end of a prefix."""
    rights: set[OffloadKey] = field(default_factory=set)
    """Keys that it has the right to fetch, and that are not in flight yet."""
    asking: list[OffloadKey] = field(default_factory=list)
    asked_at: float = 0.0
    question: int = _FIRST_QUESTION
    others: deque[tuple[OffloadKey, float]] = field(default_factory=deque)
    """Keys that another engine is fetching, and when to look again."""
    found: deque[tuple[TierSlot, OffloadKey]] = field(default_factory=deque)
    flights: list[_Flight] = field(default_factory=list)
    storing: list[tuple[Reservation, Sequence[OffloadKey]]] = field(default_factory=list)
    """Chunks that are being stored in the near tier."""

    @property
    def is_warm_up(self) -> bool:
        """It is an operator's, and not a prefix's."""
        return self.number > 0

    @property
    def in_flight(self) -> int:
        """Chunks on their way."""
        return sum(len(flight.keys) for flight in self.flights)

    @property
    def is_moving(self) -> bool:
        """Something of it is in flight."""
        return bool(self.flights or self.storing)

    def has_work(self) -> bool:
        """Return whether there is something to be done for it in the next steps."""
        left = self.waiting or self.asking or self.others or self.found or self.is_moving
        return bool(left or (self.is_complete and not self.ended))

    def give(self, keys: Sequence[OffloadKey], *, ends_prefix: bool) -> None:
        """Take in keys, the head of a prefix first."""
        self.waiting.extend(keys)
        self.given += len(keys)
        if ends_prefix and keys:
            self.waiting.append(None)

    def is_over(self) -> bool:
        """Return whether nothing of it is left to do or in flight."""
        left = self.waiting or self.asking or self.others or self.found or self.is_moving
        if self.is_complete and not (self.ended or left):
            self.ended = "done"
        return bool(self.ended) and not self.is_moving

    def answered_in(self, seconds: float) -> None:
        """Make the next question longer or shorter, by the time to the answer of this one."""
        if seconds <= _SOON:
            self.question = min(_LONGEST_QUESTION, self.question * 2)
        elif seconds > _LATE:
            self.question = max(1, self.question // 2)

    def stop(self, why: str) -> None:
        """Begin nothing more."""
        self.ended = self.ended or why
        self.waiting.clear()
        self.asking.clear()
        self.others.clear()
        self.found.clear()

    def figures(self, chunk_bytes: int) -> dict[str, Any]:
        """Return its figures as plain data."""
        return {
            "id": self.number,
            "given": self.given,
            "loaded": self.loaded,
            "loaded_bytes": self.loaded * chunk_bytes,
            "resident": self.resident,
            "missing": self.missing,
            "failed": self.failed,
            "in_flight": self.in_flight,
            "waiting": sum(key is not None for key in self.waiting)
            + len(self.asking)
            + len(self.others)
            + len(self.found),
            "ended": self.ended if self.is_closed or not self.is_moving else "",
        }


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
        scope: Callable[[], str] = str,
    ) -> None:
        self._rights = FetchRights(primary.row_stride, scope)
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
            bandwidth=None if not bytes_per_second else _Bandwidth(bytes_per_second, stride, now),
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
        """Begin nothing more, and leave all chunks to other engines."""
        for one in self.all:
            one.stop("the engine has ended")
        self._rights.release_all()

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
            if silent > (_CLIENT_SECONDS if one.is_warm_up else _PATIENCE):
                one.stop("the one that gave its keys has gone" if one.is_warm_up else "it had no turn in time")
            if one.is_over() and (one.is_closed or not one.is_warm_up or silent > _CLIENT_SECONDS):
                self.all.remove(one)
                self._end_run(one)
            if one.ended and one.rights:
                self._rights.release(one.rights)
                one.rights.clear()
        begun = [one for one in self.all if not one.ended]
        if begun:
            self._work_on(min(begun, key=lambda one: one.is_warm_up), now)

    def _work_on(self, one: Prefetch, now: float) -> None:
        slots = [slot for slot in self._slots if one.tiers is None or slot.name in one.tiers]
        way = self._way(one, slots)
        if not (way.before or way.after):
            if not slots or all(slot.has_spoken() for slot in slots):
                one.stop(f"{', '.join(one.tiers)} is not in use" if one.tiers else "no tier is in use")
            return
        self._put_back(one, {*way.before, *way.after})
        if any(slot.metrics.loading_chunks > self._own(slot) for slot in (*way.before, *way.after)):
            return  # requests wait for this tier
        if one.loaded + one.in_flight >= one.most_chunks:
            if not one.flights:
                one.stop("as much as was asked for is loaded")
            return
        self._ask(one, way, now)
        if one.found:
            self._load(one, now)

    def _put_back(self, one: Prefetch, usable: Collection[TierSlot]) -> None:
        """Let the other tiers be asked for what was found in one that was switched off since."""
        gone = [key for slot, key in one.found if slot not in usable]
        if gone:
            one.found = deque(pair for pair in one.found if pair[0] in usable)
            one.waiting.extendleft(reversed(gone))
            self._release(one, gone)

    def _way(self, one: Prefetch, slots: Sequence[TierSlot]) -> _Way:
        """Return how the usable ones of these tiers are asked."""
        usable = [slot for slot in slots if slot.available()]
        last = max((self._slots.index(slot) for slot in usable), default=0)
        for place, slot in enumerate(self._slots[:last]):
            is_allowed = one.is_warm_up or slot in slots
            if is_allowed and _can_be_near(slot) and slot.available():
                before = [other for other in self._slots[:place] if other in usable]
                return _Way([*before, slot], slot, [other for other in self._slots[place + 1 :] if other in usable])
        return _Way(usable, None, ())

    def _own(self, slot: TierSlot) -> int:
        """Return how many chunks this tier is loading for prefetches."""
        return sum(flight.owns(slot) for one in self.all for flight in one.flights)

    def _collect(self, one: Prefetch) -> None:
        """Take in the ends of jobs; store in the near tier what was fetched by this engine's turn."""
        ended = [flight for flight in one.flights if not self._is_moving(flight.reserved)]
        one.flights = [flight for flight in one.flights if flight not in ended]
        for flight in ended:
            one.loaded += len(flight.landed)
            one.failed += len(flight.keys) - len(flight.landed)
            self._metrics.prefetched_chunks += len(flight.landed)
            fetched = [key for key in flight.landed if key in self._rights]
            near = self._near_of(flight.slot) if fetched else None
            stored = None if near is None else self._cascades.hand_on(near, fetched)
            handed = fetched[: stored.rows] if stored is not None else []
            if stored is not None:
                one.storing.append((stored, handed))
            self._rights.release(set(flight.keys).difference(handed))
        for stored, keys in one.storing:
            if not self._is_moving(stored):
                self._rights.release(keys)
        one.storing = [pair for pair in one.storing if self._is_moving(pair[0])]

    def _is_moving(self, reserved: Reservation) -> bool:
        """Return whether a job may still end with something: not one whose rows its tier never releases, maybe."""
        return bool(reserved.rows) and not self._jobs.has_given_up(reserved)

    def _near_of(self, far: TierSlot) -> TierSlot | None:
        """Return the near tier for what was fetched from this one."""
        places = self._slots[: self._slots.index(far)] if far in self._slots else ()
        return next(filter(_can_be_near, places), None)

    def _ask(self, one: Prefetch, way: _Way, now: float) -> None:
        """Ask the tiers about the next keys, each by itself: one that is missing says nothing of the others."""
        if not one.asking:
            if len(one.found) >= one.question:
                return
            self._take_question(one, now)
            one.asked_at = now
        asking, one.asking = one.asking, []
        for key in asking:
            answer = self._answer(one, key, way, now)
            if isinstance(answer, TierSlot):
                one.found.append((answer, key))
            elif answer is _Answer.ANOTHERS:
                one.others.append((key, now + AGAIN_SECONDS))
            elif answer is _Answer.OPEN and now - one.asked_at < _PATIENCE:
                one.asking.append(key)
            else:
                self._release(one, [key])
                one.missing += 1
        if asking and not one.asking:
            one.answered_in((now - one.asked_at) / (_QUESTIONS_BY_TURNS if way.near is not None else 1))

    def _answer(self, one: Prefetch, key: OffloadKey, way: _Way, now: float) -> "TierSlot | _Answer":
        """Return the tier to load a chunk from, or why there is none.

        A chunk that the near tier lacks is asked about there once more by right: another engine may have stored
        it since.
        """
        answer = _tier_with(key, way.before)
        if answer is not _Answer.MISSING or way.near is None:
            if isinstance(answer, TierSlot):
                self._release(one, [key])
            return answer
        if key in one.rights:
            return _tier_with(key, way.after)
        turn = self._take_right(one, key, now)
        if turn is Turn.ANOTHERS:
            return _Answer.ANOTHERS
        if turn is Turn.LATER:
            one.asked_at = now  # no fault of the tiers
        else:
            way.near.ask_again([key])
        return _Answer.OPEN

    def _take_right(self, one: Prefetch, key: OffloadKey, now: float) -> Turn:
        """Take the right to fetch a chunk, also from a prefetch of this engine that comes after this one."""
        owner = next((other for other in self.all if key in other.rights), None) if key in self._rights else None
        if owner is not None:
            owner.rights.discard(key)
        turn = Turn.OWN if owner is not None else self._rights.take(key, now)
        if turn is Turn.OWN:
            one.rights.add(key)
        return turn

    def _release(self, one: Prefetch, keys: Sequence[OffloadKey]) -> None:
        if one.rights:
            one.rights.difference_update(keys)
            self._rights.release(keys)

    def _take_question(self, one: Prefetch, now: float) -> None:
        """Take the keys of the next question, within one prefix, that are not resident."""
        while one.others and one.others[0][1] <= now and len(one.asking) < one.question:
            again = one.others.popleft()[0]
            if self._primary.resident_run([again])[0]:
                one.resident += 1
            else:
                one.asking.append(again)
        if one.waiting and one.waiting[0] is None and not one.found:
            one.waiting.popleft()
            self._end_run(one)
        while one.waiting and one.waiting[0] is not None and len(one.asking) < one.question:
            key = one.waiting.popleft()
            assert key is not None
            if first_misfit([key]) is not None:
                one.missing += 1
            elif self._primary.resident_run([key])[0]:
                one.resident += 1
            else:
                one.asking.append(key)

    def _end_run(self, one: Prefetch) -> None:
        if one.run:
            self._primary.on_request_finished(one.run)
            one.run = ""

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
        self._release(one, [key for key in keys if key not in leased])
        one.resident += len(keys) - len(leased)
        if got is None or not leased:
            return
        self._provenance.forget(got.evicted)
        self._cascades.allocated(len(leased), got.evicted, clean_before)
        self._provenance.expect(slot, leased)
        slot.metrics.loading_chunks += len(leased)
        slot.reserved_chunks += len(leased)
        if one.bandwidth is not None:
            one.bandwidth.take(len(leased) * stride)
        state = RequestState(RequestContext(""), (), finished=True, is_prefetch=True)
        flight = _Flight(slot, self._budget.reserve(slot, len(leased)), state, leased)
        one.flights.append(flight)
        one.rights.difference_update(leased)

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


def _can_be_near(slot: TierSlot) -> bool:
    """Return whether other engines find what this one stores there; not in one whose writes are bounded."""
    return slot.options.shareable and not slot.read_only and slot.options.writes_per_hour is None


def _tier_with(key: OffloadKey, slots: Sequence[TierSlot]) -> TierSlot | _Answer:
    """Return the first of these tiers that has the chunk; OPEN: one is still to answer."""
    answer = _Answer.MISSING
    for slot in slots:
        hits, retry = slot.ask([key], _NO_REQUEST)
        if hits:
            return slot
        answer = _Answer.OPEN if retry else answer
    return answer
