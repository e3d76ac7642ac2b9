"""The calls of a store: how each is made, how often it is tried, and which answers are remembered.

Values are moved by the two methods of ``SupportsBatch``, the store's own or those that ``one_by_one`` makes of its
four. What a store has in memory of its own anyway (``SupportsPieces``) is copied into the row and hashed piece by
piece: a hash over what is in the processor's cache takes a third of the time.

A call is made under the tier's rate limit, and repeated after a transient error until a deadline. Loads and probes have
requests that wait for them, stores have none. So loads and probes take the next turn and borrow from the token bucket;
a store waits until the bucket is out of debt. A call that moves no value, as a probe, waits for the rate of calls
alone: behind the bytes of loads, one request's loads would hold up the answer to another one.

The names that a store holds are remembered, so that N replicas do not write the same system prompt N times. What its
plugin does wrong is logged, once for each method; that it has no room, once; and the first failure of each method by
each type of exception. All others are counted alone.
"""

import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

from kvtiers._failures import error_text, plugin_boundary, same_process
from kvtiers.api import ChunkStore, NotKept, RateLimit, StoreContractError, SupportsBatch, SupportsPieces
from kvtiers.api.answers import kept_each, lengths_each
from kvtiers.host.compressed_store import CompressedStore
from kvtiers.host.messages import Status, drop_oldest
from kvtiers.host.one_by_one import OneByOne
from kvtiers.layout.seal import PayloadHash

__all__ = [
    "RETRY_PAUSES",
    "Attempts",
    "KnownNames",
    "NoTimeLeft",
    "RateLimiter",
    "Read",
    "StoreCalls",
    "StoreLog",
    "plugin_place",
]

RETRY_PAUSES = 0.02, 2.0
"""Seconds until the first retry of a call, and the most until a later one."""

_log = logging.getLogger("kvtiers.secondary")
# Fits into a processor's own cache together with what it is copied from, and is hashed without releasing the GIL, as
# more than 100 kB would be: the next copy would have to wait for the GIL.
_STEP_BYTES = 64 << 10
_MOST_VIEWS = 64
_LONGEST_REASON = 500
_BURST_SECONDS = 1.0  # so much of an unused rate is kept
_T = TypeVar("_T")
_MOST_KNOWN = 65_536
_CORE = f"{Path(__file__).parents[1]}{os.sep}"
_HUNG = "hung"  # in place of an exception's name


class Read(NamedTuple):
    """What a read has given: the value's length, 0 for none, and its payload's hash, if it was made on the way."""

    nbytes: int
    hashed: bytes | None = None


class StoreCalls:
    """Makes the calls of one store that move values. Used by many threads."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.full_because = ""
        """Why the store last had no room for a value."""
        self.refused_because = ""
        """Why the store last did not take a value for another reason."""
        # Looked at once: what a runtime Protocol is asked costs as much as moving a small value.
        self._batches: SupportsBatch = store if isinstance(store, SupportsBatch) else OneByOne(store)
        is_batched = self._batches is store
        self.batch_values = max(1, int(self._batches.batch_values))
        self.most_views = _MOST_VIEWS if is_batched and not isinstance(store, CompressedStore) else 1
        """In so many views the store takes a value."""
        self.read_method, self.write_method = ("read_many_into", "write_many") if is_batched else ("read_into", "write")
        self._pieces = store if isinstance(store, SupportsPieces) and not is_batched else None

    def in_pieces(self, nbytes: int) -> bool:
        """Return whether values of this length are read by ``read_pieces``."""
        return self._pieces is not None and self._pieces.reads_in_pieces(nbytes)

    def read(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> list[Read]:
        """Read each value into its views."""
        rooms = [sum(map(len, dst)) for dst in dsts]
        lengths = lengths_each(self._store, self.read_method, rooms, self._batches.read_many_into(names, dsts))
        return [Read(length) for length in lengths]

    def read_pieces(self, name: str, view: memoryview, payload_bytes: int, *, hashes: bool = True) -> list[Read]:
        """Fill core's own view with a value. ``hashes``: False: its payload is not hashed."""
        store = self._pieces
        assert store is not None, "ask in_pieces first"
        pieces = store.read_pieces(name, len(view))
        if pieces is None:
            return [Read(0)]
        hashed, at = PayloadHash(name), 0
        for piece in pieces:
            with memoryview(piece) as source:
                if at + len(source) > len(view):
                    raise StoreContractError(store, "read_pieces", f"gave more than the {len(view)} bytes of a value")
                for start in range(0, len(source), _STEP_BYTES):
                    part = source[start : start + _STEP_BYTES]
                    end = at + len(part)
                    view[at:end] = part
                    if hashes:  # of the row, so that what is judged is what is there
                        hashed.update(view[at : min(end, payload_bytes)])
                    at = end
        if at < len(view):
            raise StoreContractError(store, "read_pieces", f"gave {at} of the {len(view)} bytes of a value")
        return [Read(at, hashed.digest() if hashes else None)]

    def write(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> list[Status]:
        """Write each value out of its views, and say of each whether it was kept."""
        try:
            answers = kept_each(self._store, names, self._batches.write_many(names, srcs))
        except NotKept as error:  # here, so that no definition of a transient error can have it retried
            return [self._status(error)] * len(names)
        return [Status.DONE if answer is None else self._status(answer) for answer in answers]

    def _status(self, error: NotKept) -> Status:
        reason = " ".join(str(error.reason).split())[:_LONGEST_REASON] or "it does not say why"
        if error.full:
            self.full_because = reason
            return Status.DROPPED
        self.refused_because = reason
        return Status.REFUSED


class NoTimeLeft(Exception):  # noqa: N818 -- the deadline's doing, not the store's
    """A call's turn would have come after its deadline, or the tier is being closed."""


class _Bucket:
    """A token bucket that may go into debt: ``_paid_at`` is when it will be out of it."""

    def __init__(self, per_second: float) -> None:
        self._seconds_per_unit = 1.0 / per_second
        self._paid_at = float("-inf")

    def debt(self, now: float) -> float:
        """Return the seconds until the bucket is out of debt."""
        return max(0.0, self._paid_at - now)

    def take(self, units: float, now: float) -> None:
        """Take units, in stock or not."""
        self._paid_at = max(self._paid_at, now - _BURST_SECONDS) + units * self._seconds_per_unit


class RateLimiter:
    """Makes the tier's threads wait their turn. Unlimited where the config sets nothing."""

    def __init__(self, limit: RateLimit, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self.set(limit)
        self._lock = threading.Lock()
        self._stop = stop
        self._clock = clock

    def set(self, limit: RateLimit) -> None:
        """Set another limit. A call that waits already still waits by the one before."""
        self._bytes = _Bucket(limit.bytes_per_second) if limit.bytes_per_second else None
        self._calls = _Bucket(limit.requests_per_second) if limit.requests_per_second else None

    def wait(self, nbytes: int, *, urgent: bool, give_up_at: float) -> bool:
        """Wait for the turn of one call that moves ``nbytes``.

        False, and nothing taken, if it does not come before ``give_up_at`` (by the clock) or the tier is being closed.
        """
        costs = [(bucket, units) for bucket, units in ((self._bytes, nbytes), (self._calls, 1)) if bucket and units]
        if not costs:
            return True
        while True:
            with self._lock:
                now = self._clock()
                debt = max(bucket.debt(now) for bucket, _ in costs)
                if debt and now + debt >= give_up_at:
                    return False
                mine = urgent or not debt
                if mine:
                    for bucket, units in costs:
                        bucket.take(units, now)
            if debt and self._stop.wait(debt):
                return False
            if mine:
                return True


class Attempts:
    """Makes the calls of one store and counts the retries. Used by many threads.

    ``pauses``: seconds until a retry, doubling from the first to the second.
    """

    def __init__(
        self,
        transient: tuple[type[Exception], ...],
        retries: int,
        limiter: RateLimiter,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        pauses: tuple[float, float] = RETRY_PAUSES,
    ) -> None:
        self._pauses = pauses
        self._transient = tuple(transient)
        self._retries = retries
        self._limiter = limiter
        self._stop = stop
        self._clock = clock
        self._running: dict[int, float] = {}
        """When the call began that a thread is in, by the thread's ident; infinite once it has been looked at."""

    def hung(self, seconds: float) -> list[int]:
        """Return the idents of the threads that have been in one call for so long; each call once. From any thread."""
        latest = self._clock() - seconds
        found = [ident for ident, began in self._running.copy().items() if began <= latest]
        self._running.update((ident, math.inf) for ident in found)
        return found

    def call(
        self, call: Callable[[], _T], *, give_up_at: float, nbytes: int = 0, urgent: bool = True
    ) -> tuple[_T, int]:
        """Return the call's result and the number of retries; raise its last error when attempts or time are used up.

        ``give_up_at``: when no new attempt begins any more. ``nbytes``, ``urgent``: for the rate limit, which counts
        every attempt.
        """
        for attempt in range(self._retries + 1):
            if not self._limiter.wait(nbytes, urgent=urgent, give_up_at=give_up_at):
                raise NoTimeLeft("no turn under the rate limit before the deadline")
            try:
                return self._made(call), attempt
            except StoreContractError:  # whatever a store calls transient: asked again, it would answer the same
                raise
            except self._transient:
                first, longest = self._pauses
                pause = min(first * 2**attempt, longest) * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter
                last = attempt == self._retries or self._clock() + pause >= give_up_at
                if last or self._stop.wait(pause):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _made(self, call: Callable[[], _T]) -> _T:
        ident = threading.get_ident()
        self._running[ident] = self._clock()
        try:
            with same_process():  # a child that came back with an error would be tried again
                return call()
        finally:
            self._running.pop(ident, None)


class KnownNames:
    """The names of one store, the latest ``most``; for many threads. ``seconds``: how long a name counts as present.

    Names are remembered by their hash alone: two that share one, a chance of one in 10^9 with a full memory, cost a
    write that is not made.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, *, most: int = _MOST_KNOWN) -> None:
        self._seconds = seconds
        self._clock = clock
        self._most = most
        self._until: dict[int, float] = {}
        self._lock = threading.Lock()

    def sort(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the indexes of the names that are known to be there, and of those that have to be asked for."""
        present, unknown = [], []
        with self._lock:
            now = self._clock()
            for index, name in enumerate(names):
                if self._until.get(hash(name), 0.0) > now:
                    present.append(index)
                else:
                    unknown.append(index)
        return present, unknown

    def learn(self, names: Iterable[str]) -> None:
        """Add names that are there now: written, read or seen."""
        with self._lock:
            until = self._clock() + self._seconds
            for name in names:
                self._until[hash(name)] = until
            drop_oldest(self._until, self._most)

    def forget(self, names: Iterable[str]) -> None:
        """Remove names that are absent, or whose presence is unknown."""
        with self._lock:
            for name in names:
                self._until.pop(hash(name), None)


class StoreLog:
    """Log lines about one store, each of them once: no room, a breach of the contract, the first of each failure.

    ``label``: the tier's name in them.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._logged_methods: set[str] = set()
        self._logged_failures: set[tuple[str, str]] = set()
        self._was_full = False

    def watched(self, method: str, *, ends: bool = True) -> "_WatchedCall":
        """Return the boundary for a call of this method of the store, which logs what the call raises.

        ``ends``: it goes no further; False: it is for the caller.
        """
        return _WatchedCall(self, method, ends=ends)

    def log_breach(self, error: StoreContractError) -> None:
        """Log a breach of the contract, once for each method of the store."""
        if error.method not in self._logged_methods:
            self._logged_methods.add(error.method)
            # Its text: a handler that keeps the record would keep the error's traceback, and so the store's views.
            _log.error("%s: a bug of the tier's plugin: %s", self._label, str(error), extra={"once": True})

    def log_failure(self, method: str, error: BaseException) -> None:
        """Log what a method of the store has raised, once for each method and type of exception."""
        if (kind := (method, type(error).__name__)) not in self._logged_failures:
            self._logged_failures.add(kind)
            text = "%s: its store's %s failed: %s; further failures of this kind are counted (errors), not logged"
            _log.warning(text, self._label, method, error_text(error), extra={"once": True})

    def log_hung(self, seconds: float, ident: int) -> None:
        """Log, once for each place, in which call of the store a thread has been for so long."""
        if (place := plugin_place(ident)) and (_HUNG, place) not in self._logged_failures:
            self._logged_failures.add((_HUNG, place))
            text = "%s: its store has not answered for %g s: it is in %s"
            _log.warning(text, self._label, seconds, place, extra={"once": True})

    def log_full(self, nbytes: int, reason: str) -> None:
        """Log that the store has no room for a value of this length: for now, or at all. ``reason``: what it says."""
        if not self._was_full:
            self._was_full = True
            text = "%s: no room for a value of %d bytes: %s; such writes are dropped and counted (dropped_full)"
            _log.warning(text, self._label, nbytes, reason, extra={"once": True})


class _WatchedCall(plugin_boundary):
    """A plugin boundary around one call of a store: what ends it is logged, once for each method and type."""

    __slots__ = ("_ends", "_log", "_method")

    def __init__(self, log: StoreLog, method: str, *, ends: bool) -> None:
        super().__init__(exits=True)  # sys.exit() in a store fails its call, not the thread
        self._log, self._method, self._ends = log, method, ends

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        super().__exit__(kind, error, traceback)  # a forked child ends here
        if error is None:
            return False
        if isinstance(error, StoreContractError):
            self._log.log_breach(error)
            self.error = str(error)
        elif isinstance(error, NoTimeLeft):
            self.error = str(error)
        else:
            self._log.log_failure(self._method, error)
            self.error = error_text(error)
        return self._ends


def plugin_place(ident: int) -> str:
    """Return which function of a plugin's this thread is in, the one that core has called; "" for none."""
    # A frame that is looked at holds its views if its call returns just then: once a call, and never for long.
    place, frame = "", sys._current_frames().get(ident)  # noqa: SLF001 -- documented, and as a debugger does it
    while frame is not None:  # the innermost first: what is left at the end is what core has called
        code = frame.f_code
        if not code.co_filename.startswith(_CORE) and code.co_filename != threading.__file__:
            place = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return place
