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
from kvtiers.types import LoadPlan, PromptGroup, Reach, RequestContext, StorePlan

__all__ = ["Span", "SpanQueue", "TracedRequest"]

_MOST_WAITING = 8192
PRIMARY = "primary"


class TracedRequest:
    """A request of the sample, told what happens to it (``tiering.engine_side.RequestTrace``).

    ``root``: its own span, made by the writer's thread.
    """

    __slots__ = ("asked", "began", "context", "ended", "found", "plans", "root", "spans")

    def __init__(self, spans: "SpanQueue", context: RequestContext) -> None:
        self.spans = spans
        self.context = context
        self.began = time.monotonic_ns()
        self.ended = 0
        self.root: Any = None
        self.asked = 0
        """Since when it waits for an answer; 0: it does not."""
        self.found: dict[int, tuple[int, int]] = {}
        """By group, how many chunks were looked up last, and how many of them there were."""
        self.plans: dict[int, int] = {}
        """By plan, since when its rows are leased."""

    def looked_up(
        self,
        groups: Sequence[PromptGroup],
        tokens_per_chunk: Sequence[int],
        computed: int,
        reach: Reach,
        state: RequestState,
        began: int,
    ) -> None:
        """Record a lookup when its answer stands, by group: from the first question to it, waits included."""
        began = self.asked = self.asked or began
        if reach.waits:
            return
        self.asked = 0
        for keys, window, _ in groups:
            group = group_of(keys[0]) if keys else 0
            tokens = tokens_per_chunk[group]
            end = (computed + reach.tokens) if reach.tokens else len(keys) * tokens
            chunks = (min(window, end - computed) if window else len(keys) * tokens - computed) // -tokens * -1
            ready = (min(window, reach.ready) if window else reach.ready) // -tokens * -1
            if keys and self.found.get(group) != (chunks, ready):
                self.found[group] = chunks, ready
                outcome = _found(ready, chunks)
                if state.given_up and outcome != "hit":
                    outcome = "computing is sooner" if state.is_overtaken else "late"
                nbytes, tiers = ready * self.spans.bytes_of(group), _tiers_of(state, ready)
                self._add("lookup", began, tiers, chunks, ready, nbytes, outcome)

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
        if self.asked:
            self._add("lookup", self.asked, "", 0, 0, 0, "part" if state.loading else "unanswered")
        self.ended = time.monotonic_ns()
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
    ``most_waiting``: spans that are not taken yet.
    """

    def __init__(
        self,
        sample: float,
        group_bytes: Sequence[int],
        chance: Callable[[], float] = random.random,
        *,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self._most_waiting = most_waiting
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
        if len(self._spans) >= self._most_waiting:
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
