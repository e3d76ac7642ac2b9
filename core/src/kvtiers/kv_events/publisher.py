"""The publisher: hands an engine's KV events to routers, on a thread of its own.

    the engine's thread    ``take``, ``describe``, ``cleared``: append to a bounded queue, the oldest are dropped
    the publisher's        makes events of what waits, sends them, answers requests for a replay

A batch gets its sequence number when the engine hands it over. So a batch that was dropped is a gap in the numbers, as
one is that a slow subscriber has lost, and no subscriber takes an incomplete stream for a whole one. A clear is never
dropped: it is sent with the next batch.

Where an endpoint cannot be had, one line says so, and the engine runs without events.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvtiers._failures import logged_boundary
from kvtiers.api import OffloadKey, StartError, TierConfig
from kvtiers.config import EventsConfig
from kvtiers.kv_events.chunk_table import ChunkTable
from kvtiers.kv_events.naming import PRIMARY, GroupFacts, place_of
from kvtiers.kv_events.sockets import EventSockets
from kvtiers.kv_events.wire import Wire
from kvtiers.types import ChunkBlocks, OffloadEvent

__all__ = ["EventPublisher"]

_log = logging.getLogger("kvtiers.events")
_IN_A_BATCH = 512  # keys: encoding a batch keeps the interpreter for some 0.2 ms
_WAIT_SECONDS = 1.0
_LINGER_SECONDS = 0.5
_AT_ONCE = 64  # batches between two looks at requests for a replay


class _Waiting(NamedTuple):
    """What waits for the thread: a batch's changes, or descriptions. ``weight``: in blocks, about."""

    weight: int
    number: int
    timestamp: float
    changes: Sequence[OffloadEvent]
    described: Sequence[ChunkBlocks] = ()
    clears: bool = False


class EventPublisher:
    """The events of one engine or client. All methods but ``close`` and ``report``: one thread at a time, never wait.

    ``groups``: by KV group. ``tiers``: the secondary tiers. ``rank``: of data-parallel engines, each of which has
    ports of its own.
    """

    def __init__(
        self, config: EventsConfig, groups: Sequence[GroupFacts], tiers: Sequence[TierConfig], rank: int = 0
    ) -> None:
        self._config = config
        self._places = {"": PRIMARY}
        for tier in tiers:
            self.add_tier(tier)
        wire = Wire(config.hashes, config.encoding, rank)
        self._table = ChunkTable(wire, groups, self._places, tokens=config.tokens)
        self._wire = wire
        self._queue: deque[_Waiting] = deque()
        self._put = self._gone = 0  # weight, counted by the engine's thread alone
        self._taken = 0  # by the publisher's thread alone
        self._number = 0
        self._lost_clear = False
        self._lost: deque[Sequence[OffloadKey]] = deque()
        """Chunks evicted from the primary in batches that were dropped; taken by the publisher's thread."""
        self._clears_next = False
        self._sleeps = False
        self._close_at: float | None = None
        self._published = _Counts()
        self.dropped = 0
        """Chunks whose events were dropped, since too many waited."""
        self.error = ""
        """Why nothing is published, in one line; "" while it is."""
        self._sockets: EventSockets | None = None
        try:
            self._sockets = EventSockets(config, rank)
        except StartError as error:
            self.error = str(error)
            _log.error("events: %s; the engine runs without KV events", error)
            return
        self._thread = threading.Thread(target=self._run, args=(self._sockets,), name="kvtiers-events", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._sockets.close(0.0)
            raise

    # -- the engine's thread

    def add_tier(self, tier: TierConfig) -> None:
        """Use what the config says of a tier. Any thread."""
        self._places[tier.tier_name] = place_of(tier, self._config)

    def take(self, changes: Sequence[OffloadEvent]) -> None:
        """Take what has changed in a step, in its order, to be published."""
        if self.error:
            return
        now = time.time()
        for some in _batches(changes):
            self._append(_Waiting(sum(len(change.keys) for change in some), self._next(), now, some))
        self._wake()

    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take descriptions of chunks whose events may follow; before those."""
        if not self.error and chunks:
            self._append(_Waiting(sum(len(chunk.hashes) for chunk in chunks), 0, 0.0, (), chunks))

    def cleared(self) -> None:
        """Report that nothing is anywhere any more."""
        if not self.error:
            self._append(_Waiting(0, self._next(), time.time(), (), clears=True))
            self._wake()

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _append(self, waiting: _Waiting) -> None:
        self._put += waiting.weight
        self._queue.append(waiting)
        while self._put - self._gone - self._taken > self._config.max_waiting:
            try:
                oldest = self._queue.popleft()
            except IndexError:  # the thread has just taken it
                return
            self._gone += oldest.weight
            self.dropped += sum(len(change.keys) for change in oldest.changes)
            self._lost.extend(change.keys for change in oldest.changes if change.removed and not change.tier)
            if oldest.clears:
                self._lost_clear = True

    def _wake(self) -> None:
        if self._sleeps and self._sockets is not None:
            self._sleeps = False
            self._sockets.wake()

    # -- any thread

    def close(self, timeout: float) -> None:
        """Send what waits, within so many seconds, and close the sockets."""
        if self.error or self._sockets is None:
            return
        self._close_at = time.monotonic() + timeout
        self._sockets.wake()
        self._thread.join(timeout + 2 * _LINGER_SECONDS)

    def report(self) -> Mapping[str, Any]:
        """Return where events are published, what was, and what was dropped, as plain data."""
        sockets, counts = self._sockets, self._published
        return {
            "endpoint": self._config.endpoint if sockets is None else sockets.endpoint,
            "replay_endpoint": "" if sockets is None else sockets.replay_endpoint,
            "topic": self._config.topic,
            "error": self.error,
            "next_batch": self._number,
            "batches": counts.batches,
            "chunks": counts.chunks,
            "dropped_chunks": self.dropped,
            "replayed_batches": 0 if sockets is None else sockets.replayed,
            "waiting_blocks": max(0, self._put - self._gone - self._taken),
        }

    # -- the publisher's thread

    def _run(self, sockets: EventSockets) -> None:
        with logged_boundary(_log, "events: no more are published; a bug of kvtiers") as running:
            while not self._is_done():
                for _ in range(_AT_ONCE):
                    if not self._step(sockets):
                        self._sleep(sockets)
                        break
                sockets.serve_replays()
                time.sleep(0)  # the engine's thread may be waiting for the interpreter
        self.error = running.error
        self._queue.clear()
        sockets.close(_LINGER_SECONDS)

    def _is_done(self) -> bool:
        return self._close_at is not None and (not self._queue or time.monotonic() >= self._close_at)

    def _sleep(self, sockets: EventSockets) -> None:
        self._sleeps = True
        if not self._queue and self._close_at is None:
            sockets.wait(_WAIT_SECONDS)
        self._sleeps = False

    def _step(self, sockets: EventSockets) -> bool:
        """Deal with one of those that wait; False: none does."""
        try:
            waiting = self._queue.popleft()
        except IndexError:
            return False
        self._taken += waiting.weight
        while self._lost:
            self._table.forget(self._lost.popleft())
        if waiting.clears or self._lost_clear:  # one that was dropped was before this, so it comes first here, too
            self._lost_clear = False
            self._clears_next = True
            self._table.clear()
        if waiting.described:
            self._table.describe(waiting.described)
            return True
        events: list[Any] = []
        if self._clears_next:
            self._clears_next = False
            events.append(self._wire.cleared())
        for change in waiting.changes:
            events.extend(self._table.events(change))
        sockets.publish(waiting.number, self._wire.encode(waiting.timestamp, events))
        self._published.batches += 1
        self._published.chunks += sum(len(change.keys) for change in waiting.changes)
        return True


class _Counts:
    """What was published so far."""

    def __init__(self) -> None:
        self.batches = self.chunks = 0


def _batches(changes: Sequence[OffloadEvent]) -> Iterator[list[OffloadEvent]]:
    """Yield the changes in batches of a bounded number of keys."""
    some: list[OffloadEvent] = []
    room = _IN_A_BATCH
    for change in changes:
        for start in range(0, len(change.keys), _IN_A_BATCH):
            keys = change.keys[start : start + _IN_A_BATCH]
            if some and len(keys) > room:
                yield some
                some, room = [], _IN_A_BATCH
            some.append(OffloadEvent(keys, change.removed, change.tier))
            room -= len(keys)
    if some:
        yield some
