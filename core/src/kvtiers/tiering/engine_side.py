"""The interfaces of what the composition root (``runtime.py``) gives the manager: an engine's side, and besides it."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from kvtiers.api import OffloadKey, TierConfig
from kvtiers.types import ChunkBlocks, LoadPlan, OffloadEvent, PromptGroup, Reach, RequestContext, StorePlan

__all__ = [
    "EngineSide",
    "EventSide",
    "InStep",
    "LiveSide",
    "RecordSide",
    "RequestTrace",
    "ShadowSide",
    "TraceSide",
    "Watchers",
]

_WHAT_IF_SECONDS = 0.5  # what a shutdown waits for the end of the shadow caches, which sleep most of the time
_SPAN_SECONDS = 2.0  # what a shutdown gives the spans that wait to be sent
_EVENT_SECONDS = 1.0  # what it gives the events that wait
_RECORD_SECONDS = 5.0  # what it gives the recording to write what is waiting

InStep: TypeAlias = Callable[[Callable[[], Mapping[str, Any] | None]], Mapping[str, Any]]
"""Has a step of the engine do some work, and returns what that returned; CommandRefused if there was no step in time.
Work that returns None is called again in the next step."""


class EngineSide(Protocol):
    """The region, the ranks, and the tiers' life. Nothing blocks but ``wait_ready`` and the two ``close`` methods."""

    def ready(self) -> bool:
        """Return whether all ranks have joined. Handles the region's events."""

    def take_lost_ranks(self) -> Collection[int]:
        """Return the ranks that were lost since the last call, or before and are not back; as of the last ``ready``."""

    def dma_may_run(self) -> bool:
        """Return whether a rank that was lost may still write into rows."""

    def wait_ready(self, timeout: float) -> None:
        """Block until all ranks have joined and all required tiers are open; StartError names who is missing."""

    def new_weights(self, version: str) -> None:
        """Make all later keys and values those of other weights."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights, as it stands in the names of values."""

    def tier_stats(self, name: str) -> dict[str, float]:
        """Return a tier's own figures. From any thread."""

    def close_tiers(self, timeout: float) -> None:
        """Drain and close the tiers within ``timeout`` seconds."""

    def close_region(self) -> None:
        """Release the region, after all its users."""


class ShadowSide(Protocol):
    """The shadow caches beside an engine. Nothing blocks but ``close``."""

    def request(
        self,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object],
    ) -> None:
        """Take a request that has ended."""

    def report(self) -> dict[str, Any]:
        """Return the last figures as plain data; empty while there are none. From any thread."""

    def close(self, timeout: float) -> None:
        """End within ``timeout`` seconds."""


class EventSide(Protocol):
    """The publisher of an engine's KV events. Nothing waits but ``close``; the first three on the engine's thread."""

    def take(self, changes: Sequence[OffloadEvent]) -> None:
        """Take what has changed in a step, in its order."""

    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take descriptions of chunks whose events may follow."""

    def cleared(self) -> None:
        """Take that nothing is anywhere any more."""

    def add_tier(self, tier: TierConfig) -> None:
        """Use what the config says of a tier. From any thread."""

    def report(self) -> Mapping[str, Any]:
        """Return what was published, and what was dropped, as plain data. From any thread."""

    def close(self, timeout: float) -> None:
        """Send what waits, and end, within about ``timeout`` seconds."""


class RecordSide(Protocol):
    """The recording of an engine's requests. Nothing waits but ``close``."""

    dropped: int
    """Requests that were left out."""

    def request(
        self,
        arrival: float,
        prompt_tokens: int,
        tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object],
    ) -> None:
        """Take a request that has ended."""

    def close(self, timeout: float) -> None:
        """Write what waits, and end, within ``timeout`` seconds."""


class RequestTrace(Protocol):
    """The trace of one request of the sample. Engine's thread; nothing waits. ``state``: the request's."""

    def looked_up(
        self,
        groups: Sequence[PromptGroup],
        tokens_per_chunk: Sequence[int],
        computed: int,
        reach: Reach,
        state: Any,
        began: int,
    ) -> None:
        """Take an answer about a prompt that was asked for at ``began`` (``time.monotonic_ns``)."""

    def planned_store(self, keys: Sequence[OffloadKey], plan: StorePlan | None) -> None:
        """Take a plan of a store from the GPU; None: there was no room."""

    def planned_load(self, plan: LoadPlan) -> None:
        """Take a plan of a load to the GPU."""

    def completed(self, plan: StorePlan | LoadPlan, *, success: bool) -> None:
        """Take that the copies of a plan have ended."""

    def job_ended(
        self, name: str, tier: str, seconds: float, chunks: int, good: int, nbytes: int, failure: str
    ) -> None:
        """Take that a tier's job ("load", "store") has ended; ``failure``: why it was given up, or ""."""

    def finished(self, state: Any) -> None:
        """Take that the request is over in the engine."""


class TraceSide(Protocol):
    """The tracing of an engine. Nothing waits but ``close``."""

    @property
    def lost(self) -> int:
        """Spans that are missing at the receiver."""

    def begin(self, context: RequestContext) -> RequestTrace | None:
        """Return the trace of a new request, None if it is not in the sample."""

    def close(self, timeout: float) -> None:
        """Send what waits, and end, within about ``timeout`` seconds."""


@dataclass(frozen=True, slots=True)
class Watchers:
    """The observers of a manager: it calls each with what that observes, and none changes anything in it.

    ``publisher``: of KV events; ``listener``: another taker of these, such as the engine's own.
    """

    recorder: RecordSide | None = None
    what_if: ShadowSide | None = None
    tracing: TraceSide | None = None
    publisher: EventSide | None = None
    listener: EventSide | None = None

    @property
    def event_sides(self) -> tuple[EventSide, ...]:
        """Those that take KV events."""
        return tuple(side for side in (self.publisher, self.listener) if side is not None)

    def close(self, timeout: float) -> float:
        """End all, the recording within ``timeout`` seconds; return what is left of these."""
        if self.recorder is not None:
            began = time.monotonic()
            self.recorder.close(min(timeout, _RECORD_SECONDS))
            timeout = max(0.0, timeout - (time.monotonic() - began))
        if self.what_if is not None:
            self.what_if.close(_WHAT_IF_SECONDS)
        if self.tracing is not None:
            self.tracing.close(_SPAN_SECONDS)
        for side in self.event_sides:
            side.close(_EVENT_SECONDS)
        return timeout


class LiveSide(Protocol):
    """The config of a running engine, as far as an operator may change it. Not the engine's thread; may wait.

    All raise CommandRefused, one line, where they change nothing.
    """

    def limit(self, name: str, changes: Mapping[str, Any], in_step: InStep) -> Mapping[str, Any]:
        """Give a tier other threads, or another rate limit."""

    def reload(self, path: str, in_step: InStep) -> Mapping[str, Any]:
        """Apply the live options of the config's file, "" for that of the start."""

    def attach(self, name: str, path: str, in_step: InStep) -> Mapping[str, Any]:
        """Open a tier of the config's file."""

    def detach(self, name: str, in_step: InStep) -> Mapping[str, Any]:
        """Close a tier."""
