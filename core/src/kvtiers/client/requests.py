"""The requests of callers: what each asks the tiers for, step by step, on the driver's thread.

=============  ==================================================================================================
request        asks
=============  ==================================================================================================
``Put``        each tier that takes stores, at the same time; over when all jobs have ended
``Delete``     each tier that takes stores, at the same time; over when all jobs have ended
``Get``        the tiers in order: which of the keys a tier has, then for these, then the next tier for the rest;
               a tier that takes longer than its share of the time is not waited for, but may still give its part
``Prefix``     the tiers in order how far they have the prefix, and again from there, until none has more
``Present``    all tiers which of the keys they have, each by itself
``Prefetch``   the tiers in order; what a later one has is stored in the first that takes stores (``prefetch.py``)
``Task``       no tier: a function to be called on the driver's thread
=============  ==================================================================================================

The driver calls ``begin`` once, ``step`` after each poll until the request is over, and ``job_ended`` for each of its
jobs. The caller waits for ``over`` and reads the outcome; what it reads before is what has come so far.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeAlias

from kvtiers.api import LookupResult, OffloadKey, TransferJob
from kvtiers.client.rows import RowLease
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext

__all__ = ["Delete", "Get", "Jobs", "Prefix", "Present", "Put", "Request", "Task", "Transfer"]

NO_TIER = "no tier is usable"
_CONTEXT = RequestContext("")
_HIT, _RETRY = LookupResult.HIT, LookupResult.RETRY
Parts: TypeAlias = Sequence[tuple[int, int]]
"""Where a value lies in the region: offset and length in bytes of each part."""
_NO_PARTS: Mapping[int, Parts] = MappingProxyType({})


class Jobs(Protocol):
    """The driver, as requests see it."""

    slots: Sequence[TierSlot]

    def now(self) -> float:
        """Return the time by the driver's clock."""

    def submit(
        self, slot: TierSlot, request: "Transfer", keys: Sequence[OffloadKey], rows: Sequence[int], *, is_load: bool
    ) -> bool:
        """Start a job on these rows of the request's leases; False: nothing has started."""

    def delete(self, slot: TierSlot, request: "Transfer", keys: Sequence[OffloadKey]) -> bool:
        """Start a job that removes these keys; False: nothing has started."""


class Request:
    """A request. ``until``: no further job begins after this time."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.error = ""
        """Why something was not done, the first reason."""
        self.over = threading.Event()

    def begin(self, jobs: Jobs) -> None:
        """Start."""
        self.step(jobs)

    def step(self, jobs: Jobs) -> None:
        """Go on, if an answer has come."""

    def end(self, error: str = "") -> None:
        """End, with what has come so far."""
        if not self.over.is_set():
            self.error = self.error or error
            self.over.set()


class Transfer(Request):
    """A request that moves values. ``lease``: the rows of its jobs, which hold them too.

    Its caller ends its own use of the rows by ``release``: no job begins on them after that. ``parts``: where the
    values of rows of the region lie, which the caller takes back by ``stop`` and ``wait_detached``.
    """

    def __init__(self, lease: RowLease, until: float, parts: Mapping[int, Parts] = _NO_PARTS) -> None:
        super().__init__(until)
        self.lease = lease
        self.parts = parts
        self.spares: list[RowLease] = []
        """Further rows, each lease held by the caller and by the driver."""
        self._attached = 0
        """Jobs in flight that are not detached from their memory."""
        self.is_stopped = False
        """The driver is to detach its jobs from their memory, since the call is over."""
        self._is_released = False
        self._lock = threading.Condition()

    def stop(self) -> bool:
        """Begin no further job; return whether one may still use its memory. The caller goes on holding the rows."""
        with self._lock:
            self.is_stopped = True
            return self._attached > 0

    def wait_detached(self) -> None:
        """Wait, after ``stop``, until no job uses its memory any more."""
        with self._lock:
            self._lock.wait_for(lambda: not self._attached)

    def job_began(self) -> list[RowLease] | None:
        """Hold all rows for a job, and return their leases; None if the caller wants no more, or has released them."""
        with self._lock:
            if self.is_stopped or self._is_released:
                return None
            self._attached += 1
            held = [self.lease, *self.spares]
            for lease in held:
                lease.hold()
            return held

    def job_detached(self, job: TransferJob, good: Collection[OffloadKey]) -> None:
        """Count a job as detached from its memory, where the values of ``good`` have landed; once a job."""
        with self._lock:
            self._landed(job, good)
            self._attached -= 1
            self._lock.notify_all()

    def _landed(self, job: TransferJob, good: Collection[OffloadKey]) -> None:
        """Record what lies in the job's memory, also when the request is over."""

    def add(self, spare: RowLease) -> bool:
        """Add rows with one holder; if the caller has released its own, release these and return False."""
        with self._lock:
            if not self._is_released:
                spare.hold()
                self.spares.append(spare)
                return True
        spare.release()
        return False

    def release(self) -> None:
        """End the caller's use of the rows; those that a job uses are free when it is gone."""
        with self._lock:
            first, self._is_released = not self._is_released, True
            held = [self.lease, *self.spares]
        for lease in held if first else ():
            lease.release()

    def job_failed(self, jobs: Jobs, slot: TierSlot) -> None:
        """Take in that this tier's job has failed, though it may still use its rows; ``job_ended`` follows."""

    def job_ended(self, jobs: Jobs, slot: TierSlot, job: TransferJob, good: Collection[OffloadKey]) -> None:
        """Take in the end of one of its jobs: the keys that were moved."""
        raise NotImplementedError


class Put(Transfer):
    """Values to store: ``keys[i]`` lies in row i of the lease. ``stored``: the keys that each tier has, by its name."""

    def __init__(
        self, keys: Sequence[OffloadKey], lease: RowLease, until: float, parts: Mapping[int, Parts] = _NO_PARTS
    ) -> None:
        super().__init__(lease, until, parts)
        self.keys = keys
        self.stored: dict[str, Collection[OffloadKey]] = {}
        self._running = 0

    def begin(self, jobs: Jobs) -> None:
        """Send the values to all tiers that take stores."""
        takers = [slot for slot in jobs.slots if not slot.options.read_only and slot.available()]
        for slot in takers:
            self._running += jobs.submit(slot, self, self.keys, self.lease.rows, is_load=False)
        if not self._running:
            self.end(NO_TIER)

    def job_ended(self, jobs: Jobs, slot: TierSlot, job: TransferJob, good: Collection[OffloadKey]) -> None:  # noqa: ARG002 -- as its base
        """Record what this tier has; end with the last one."""
        self.stored[slot.name] = good
        self._running -= 1
        if len(good) < len(self.keys):
            self.error = self.error or f"{slot.name} has not taken all values"
        if not self._running:
            self.end()


class Delete(Transfer):
    """Keys to remove; no rows. ``gone``: those that no tier that takes stores has any more."""

    def __init__(self, keys: Sequence[OffloadKey], lease: RowLease, until: float) -> None:
        super().__init__(lease, until)
        self.gone: set[OffloadKey] = set()
        self._keys = keys
        self._removed: list[Collection[OffloadKey]] = []
        self._tiers = 0
        self._running = 0

    def begin(self, jobs: Jobs) -> None:
        """Ask all tiers that take stores, be they usable or not: a value in one that is not used now comes back."""
        takers = [slot for slot in jobs.slots if not slot.options.read_only]
        self._tiers = len(takers)
        for slot in takers:
            if not slot.can_delete:
                self.error = self.error or f"{slot.name} moves rows by itself, and has no way to remove a value"
            elif slot.available() and jobs.delete(slot, self, self._keys):
                self._running += 1
            else:
                self.error = self.error or f"{slot.name} removes nothing now"
        if not self._running:
            self.end(NO_TIER)

    def job_ended(self, jobs: Jobs, slot: TierSlot, job: TransferJob, good: Collection[OffloadKey]) -> None:  # noqa: ARG002 -- as its base
        """Record what this tier has removed; end with the last one."""
        self._removed.append(set(good))
        self._running -= 1
        if not self._running:
            if len(self._removed) == self._tiers:
                self.gone = set(self._keys).intersection(*self._removed)
            self.end()


class Get(Transfer):
    """Load values: that of ``keys[i]``, no key twice, into row i of the lease. ``found``: the row of each that landed.

    A tier has an equal share of the time that is left when its turn begins. A load that takes longer keeps its rows,
    and the next tier fills others; whichever is first is taken.
    """

    def __init__(
        self, keys: Sequence[OffloadKey], lease: RowLease, until: float, parts: Mapping[int, Parts] = _NO_PARTS
    ) -> None:
        super().__init__(lease, until, parts)
        self.found: dict[OffloadKey, int] = {}
        self._row_of = dict(zip(keys, lease.rows, strict=True))
        self._tier = 0
        self._turn_until: float | None = None
        self._left = list(keys)
        """Keys that no tier before this one has given."""
        self._unknown = self._left
        """Those of them that this tier has not answered for yet."""
        self._wanted: list[OffloadKey] = []
        """Those that it has, by its answer."""
        self._is_loading = False
        self._loading: dict[int, Collection[OffloadKey]] = {}
        """The keys of each job in flight that has not failed, by its tier."""
        self._in_use: dict[int, Collection[OffloadKey]] = {}
        """Those of failed ones, whose rows their tiers may still use until they have ended."""

    def step(self, jobs: Jobs) -> None:
        """Ask the tier for each key by itself: these are no prefix. Load what it has when it has answered for all."""
        while not self.over.is_set():
            if not self._left or self._tier == len(jobs.slots):
                if not (self._left and self._loading):
                    self.end()
                return
            slot = jobs.slots[self._tier]
            is_late = self._is_late(jobs)
            if not self._is_loading:
                if self._unknown and slot.available():
                    self._ask(slot)
                    if self._unknown and not is_late:
                        return
                self._unknown = []
                wanted = [key for key in self._wanted if key not in self.found] if slot.available() else []
                keys = self._with_rows(wanted)
                if wanted and self._in_use and not (keys or is_late):
                    return  # their rows come back with the job that has failed
                self._is_loading = bool(keys) and self._load(jobs, slot, keys)
            if self._is_loading and not is_late:
                return
            self._next_tier()

    def _is_late(self, jobs: Jobs) -> bool:
        now = jobs.now()
        if self._turn_until is None:
            self._turn_until = now + (self.until - now) / (len(jobs.slots) - self._tier)
        return now >= self._turn_until and self._tier < len(jobs.slots) - 1

    def _ask(self, slot: TierSlot) -> None:
        said = slot.ask_each(self._unknown, _CONTEXT)
        self._wanted += [key for key in self._unknown if said.get(key) is _HIT]
        self._unknown = [key for key in self._unknown if said.get(key) is _RETRY]

    def _load(self, jobs: Jobs, slot: TierSlot, keys: Sequence[OffloadKey]) -> bool:
        is_sent = jobs.submit(slot, self, keys, [self._row_of[key] for key in keys], is_load=True)
        if is_sent:
            self._loading[slot.index] = keys
        return is_sent

    def _with_rows(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that have a row which no job is filling; some get another one for that."""
        busy = set[OffloadKey]().union(*self._loading.values(), *self._in_use.values())
        usable, late = [key for key in keys if key not in busy], [key for key in keys if key in busy]
        if late and (spare := self.lease.another(len(late))) is not None and self.add(spare):
            some = late[: len(spare.rows)]
            self._row_of.update(zip(some, spare.rows, strict=True))
            usable += some
        return usable

    def _next_tier(self) -> None:
        self._tier += 1
        self._turn_until = None
        self._is_loading = False
        self._left = self._unknown = [key for key in self._left if key not in self.found]
        self._wanted = []

    def _landed(self, job: TransferJob, good: Collection[OffloadKey]) -> None:
        """Record what lies in the region, whose bytes are the caller's."""
        if self.parts:
            landed = set(good)
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                if key in landed and row in self.parts:
                    self.found.setdefault(key, row)

    def job_failed(self, jobs: Jobs, slot: TierSlot) -> None:
        """Ask the next tier for what this one will not give: its host may take a while to end."""
        self._in_use[slot.index] = self._loading.get(slot.index, ())
        self._go_on(jobs, slot)

    def job_ended(self, jobs: Jobs, slot: TierSlot, job: TransferJob, good: Collection[OffloadKey]) -> None:
        """Record what has been loaded; ask the next tier for the other keys."""
        rows = dict(zip(job.keys, job.chunk_ids, strict=True))
        for key in good:
            self.found.setdefault(key, rows[key])
        self._in_use.pop(slot.index, None)
        self._go_on(jobs, slot)

    def _go_on(self, jobs: Jobs, slot: TierSlot) -> None:
        self._loading.pop(slot.index, None)
        if self._is_loading and slot is jobs.slots[self._tier]:
            self._next_tier()
        else:
            self._left = [key for key in self._left if key not in self.found]
        self.step(jobs)


class Prefix(Request):
    """How many of the leading keys the tiers have together: ``length``."""

    def __init__(self, keys: Sequence[OffloadKey], until: float) -> None:
        super().__init__(until)
        self.length = 0
        self._keys = keys

    def step(self, jobs: Jobs) -> None:
        """Ask each tier about the rest of the prefix, from where the one before ended."""
        is_unknown = has_moved = True
        while has_moved and self.length < len(self._keys):
            is_unknown = has_moved = False
            for slot in jobs.slots:
                if self.length < len(self._keys) and slot.available():
                    hits, unresolved = slot.ask(self._keys[self.length :], _CONTEXT)
                    self.length += hits
                    has_moved = has_moved or hits > 0
                    is_unknown = is_unknown or unresolved
        if self.length == len(self._keys) or not is_unknown:
            self.end()


class Present(Request):
    """Which of the keys, each by itself, the tiers have: ``there``."""

    def __init__(self, keys: Sequence[OffloadKey], until: float) -> None:
        super().__init__(until)
        self.there: set[OffloadKey] = set()
        self._unknown: Collection[OffloadKey] = dict.fromkeys(keys)

    def step(self, jobs: Jobs) -> None:
        """Ask all usable tiers for each key that none is known to have, until they have answered."""
        left, unknown = list(self._unknown), set[OffloadKey]()
        for slot in jobs.slots:
            if slot.available():
                said = slot.ask_each(left, _CONTEXT)
                self.there.update(key for key in left if said.get(key) is _HIT)
                unknown.update(key for key in left if said.get(key) is _RETRY)
                left = [key for key in left if key not in self.there]
        self._unknown = [key for key in left if key in unknown]
        if not self._unknown:
            self.end()


class Task(Request):
    """A function to call on the driver's thread, between two steps of the tiers."""

    def __init__(self, call: Callable[[], None], until: float) -> None:
        super().__init__(until)
        self._call = call

    def begin(self, jobs: Jobs) -> None:  # noqa: ARG002 -- as its base
        """Make the call, and end at once: there is nothing to wait for."""
        self._call()
        self.end()
