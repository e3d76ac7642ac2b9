"""Spans: the lookups, loads and stores of sampled requests, recorded on the engine's thread for OpenTelemetry.

``SpanQueue.begin`` decides whether a new request is in the sample; the state of one that is has a ``TracedRequest``,
which is told what happens to it, and appends times and counts to a bounded queue. ``span_writer.py`` makes spans of
these on a thread of its own. Of all other requests nothing is recorded.

A request's ``traceparent``, where the engine hands one over, says whether it is in the sample; else chance does.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvtiers.api import OffloadKey, group_of
from kvtiers.tiering.requests import RequestState
from kvtiers.types import LoadPlan, PrefixHits, RequestContext, StorePlan

__all__ = ["Span", "SpanQueue", "TracedRequest"]

_MOST_WAITING = 8192
PRIMARY = "primary"


class _Window:
    """The chunks of a window group that were looked up one by one."""

    __slots__ = ("asked", "began", "ended", "found")

    def __init__(self) -> None:
        self.began = self.ended = time.monotonic_ns()
        self.asked: set[OffloadKey] = set()
        self.found: set[OffloadKey] = set()


class TracedRequest:
    """A request of the sample, told what happens to it (``tiering.engine_side.RequestTrace``).

    ``root``: its own span, made by the writer's thread.
    """

    __slots__ = ("asked", "began", "context", "ended", "looked_up", "plans", "root", "spans", "windows")

    def __init__(self, spans: "SpanQueue", context: RequestContext) -> None:
        self.spans = spans
        self.context = context
        self.began = time.monotonic_ns()
        self.ended = 0
        self.root: Any = None
        self.asked: dict[int, int] = {}
        """By group, since when it waits for an answer about its prefix."""
        self.looked_up: dict[int, tuple[int, int]] = {}
        """By group, the length of the prefix that was looked up last, and of its run."""
        self.windows: dict[int, _Window] = {}
        self.plans: dict[int, int] = {}
        """By plan, since when its rows are leased."""

    def looked_up_prefix(self, keys: Sequence[OffloadKey], hits: PrefixHits, state: RequestState, began: int) -> None:
        """Record a lookup when its answer stands: from the first question to it, waits included."""
        group = group_of(keys[0])
        if hits.pending or hits.unresolved:
            self.asked.setdefault(group, began)
            return
        began = self.asked.pop(group, began)
        if self.looked_up.get(group) != (len(keys), hits.ready):
            self.looked_up[group] = len(keys), hits.ready
            outcome = _found(hits.ready, len(keys))
            if state.given_up and outcome != "hit":
                outcome = "computing is sooner" if state.is_overtaken else "late"
            nbytes, tiers = hits.ready * self.spans.bytes_of(group), _tiers_of(state, hits.ready)
            self._add("lookup", began, tiers, len(keys), hits.ready, nbytes, outcome)

    def looked_up_window(self, keys: Sequence[OffloadKey], found: int) -> None:
        """Record chunks of a window that were looked up; all those of a group are one span, at the request's end."""
        window = self.windows.setdefault(group_of(keys[0]), _Window())
        window.ended = time.monotonic_ns()
        window.asked.update(keys)
        window.found.update(keys[:found])

    def planned_store(self, keys: Sequence[OffloadKey], plan: StorePlan | None) -> None:
        """Record that rows were leased for chunks from the GPU; None: there was no room."""
        if plan is None:
            self._add("store", time.monotonic_ns(), PRIMARY, len(keys), 0, 0, "no room")
        elif plan.keys:
            self.plans[plan.plan_id] = time.monotonic_ns()

    def planned_load(self, plan: LoadPlan) -> None:
        """Record that chunks were pinned for a copy to the GPU."""
        self.plans[plan.plan_id] = time.monotonic_ns()

    def completed(self, plan: StorePlan | LoadPlan, *, success: bool) -> None:
        """Record that the copies of a plan have ended."""
        began = self.plans.pop(plan.plan_id, None)
        if began is not None:
            name = "store" if isinstance(plan, StorePlan) else "load"
            done, nbytes, outcome = (
                (len(plan.keys), self.spans.bytes_in(plan.keys), "ok") if success else (0, 0, "failed")
            )
            self._add(name, began, PRIMARY, len(plan.keys), done, nbytes, outcome)

    def job_ended(
        self, name: str, tier: str, seconds: float, chunks: int, good: int, nbytes: int, failure: str
    ) -> None:
        """Record a tier's job ("load", "store") that took so long; ``failure``: why it was given up, or ""."""
        outcome = failure or ("ok" if good == chunks else ("part" if good else "failed"))
        self._add(name, time.monotonic_ns() - int(seconds * 1e9), tier, chunks, good, nbytes, outcome)

    def finished(self, state: RequestState) -> None:
        """Record the request's end in the engine; its stores may still run."""
        now = time.monotonic_ns()
        for group, began in self.asked.items():
            self._add("lookup", began, "", 0, 0, 0, "part" if state.reached.get(group, 0) else "unanswered")
        for group, window in self.windows.items():
            hits, chunks = len(window.found), len(window.asked)
            tiers, nbytes = _tiers_of(state, hits), hits * self.spans.bytes_of(group)
            times = window.began, window.ended
            self.spans.add(Span("lookup", self, *times, tiers, chunks, hits, nbytes, _found(hits, chunks)))
        self.ended = now
        self._add("request", self.began, "", 0, 0, 0, "")

    def _add(self, name: str, began: int, tier: str, chunks: int, moved: int, nbytes: int, outcome: str) -> None:
        self.spans.add(Span(name, self, began, time.monotonic_ns(), tier, chunks, moved, nbytes, outcome))


class Span(NamedTuple):
    """What is to become a span. Times by ``time.monotonic_ns``; ``tier``: "primary", or names, by commas.

    ``chunks``: that it was about; ``moved``: those of them that were found or moved, and ``nbytes`` of these.
    """

    name: str
    request: TracedRequest
    began: int
    ended: int
    tier: str
    chunks: int
    moved: int
    nbytes: int
    outcome: str


class SpanQueue:
    """What was recorded and not written yet. ``take``: the writer's thread; all else: the engine's.

    ``sample``: the share of the requests that have no trace context. ``group_bytes``: of a chunk of each KV group.
    """

    def __init__(self, sample: float, group_bytes: Sequence[int], chance: Callable[[], float] = random.random) -> None:
        self._sample = sample
        self._bytes = group_bytes
        self._chance = chance
        self._spans: deque[Span] = deque()
        self.dropped = 0
        """Spans that found no room, since the writer was behind."""
        self.unsent = 0
        """Spans that no receiver took; counted by the writer's thread."""

    @property
    def lost(self) -> int:
        """Spans that are missing at the receiver."""
        return self.dropped + self.unsent

    def add(self, span: Span) -> None:
        """Record a span, or count it where too many wait."""
        if len(self._spans) >= _MOST_WAITING:
            self.dropped += 1
        else:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Return what was recorded since the last call, in order."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def begin(self, context: RequestContext) -> TracedRequest | None:
        """Return the record of a request that is new here, if it is in the sample."""
        return TracedRequest(self, context) if self._is_sampled(context.traceparent) else None

    def bytes_of(self, group: int) -> int:
        """Return the bytes of a chunk of this group; 0 for a group that there is not."""
        return self._bytes[group] if group < len(self._bytes) else 0

    def bytes_in(self, keys: Sequence[OffloadKey]) -> int:
        """Return the bytes of these chunks."""
        return sum(self.bytes_of(group_of(key)) for key in keys)

    def _is_sampled(self, traceparent: str) -> bool:
        """Return the decision that a trace context carries (its last two digits), else chance's."""
        if len(traceparent) >= 55 and traceparent[52] == "-":
            try:
                return bool(int(traceparent[53:55], 16) & 1)
            except ValueError:
                pass
        return self._chance() < self._sample


def _found(hits: int, chunks: int) -> str:
    if not hits:
        return "miss"
    return "hit" if hits >= chunks else "part"


def _tiers_of(state: RequestState, ready: int) -> str:
    """Return where the chunks of a run came from."""
    loaded = {slot.name: chunks for slot, (_, chunks) in state.loading.items()}
    return ",".join([*([PRIMARY] if ready > sum(loaded.values()) else []), *loaded])
