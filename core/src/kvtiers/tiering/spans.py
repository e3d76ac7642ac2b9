"""Spans: the lookups, loads and stores of sampled requests, recorded on the engine's thread for OpenTelemetry.

Off, as by default, nothing here is used: the manager is made of the plain classes, not of their subclasses here, so it
costs nothing. On, each call looks whether its request is in the sample, and for one that is, appends times and counts
to a bounded queue. ``span_writer.py`` makes spans of these on a thread of its own.

A request's ``traceparent``, where the engine hands one over, says whether it is in the sample; else chance does.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvtiers.api import JobResult, LookupResult, OffloadKey, group_of
from kvtiers.secondary.tier_jobs import good_keys, moved
from kvtiers.tiering.jobs import JobTable, OnEnd, Running
from kvtiers.tiering.manager import Tracing
from kvtiers.tiering.plans import Plans
from kvtiers.tiering.prefix_lookup import Lookups
from kvtiers.tiering.requests import RequestState, RequestTable
from kvtiers.tiering.tier_slot import Reservation, TierSlot
from kvtiers.types import LoadPlan, PrefixHits, RequestContext, StorePlan

__all__ = ["Span", "SpanQueue", "TracedRequest", "traced"]

_MOST_WAITING = 8192
PRIMARY = "primary"


class TracedRequest:
    """A request of the sample. ``root``: its own span, made by the writer's thread."""

    __slots__ = ("asked", "began", "context", "ended", "looked_up", "root", "windows")

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.began = time.monotonic_ns()
        self.ended = 0
        self.root: Any = None
        self.asked: dict[int, int] = {}
        """By group, since when it waits for an answer about its prefix."""
        self.looked_up: dict[int, tuple[int, int]] = {}
        """By group, the length of the prefix that was looked up last, and of its run."""
        self.windows: dict[int, _Window] = {}


class _Window:
    """The chunks of a window group that were looked up one by one."""

    __slots__ = ("asked", "began", "ended", "found")

    def __init__(self) -> None:
        self.began = self.ended = time.monotonic_ns()
        self.asked: set[OffloadKey] = set()
        self.found: set[OffloadKey] = set()


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
        self._requests: dict[RequestState, TracedRequest] = {}
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

    def begin(self, state: RequestState) -> None:
        """Decide whether a request that is new here is in the sample."""
        if state not in self._requests and self._is_sampled(state.context.traceparent):
            self._requests[state] = TracedRequest(state.context)

    def of(self, state: RequestState) -> TracedRequest | None:
        """Return an open request's record, if it is in the sample."""
        return self._requests.get(state)

    def end(self, state: RequestState) -> None:
        """Record a request's end in the engine; its stores may still run."""
        request = self._requests.get(state)
        if request is None:
            return
        now = time.monotonic_ns()
        for group, began in request.asked.items():
            reached = state.reached.get(group, 0)
            self.add(Span("lookup", request, began, now, "", 0, 0, 0, "unanswered" if not reached else "part"))
        for group, window in request.windows.items():
            hits, chunks = len(window.found), len(window.asked)
            tiers, nbytes = _tiers_of(state, hits), hits * self.bytes_of(group)
            times = window.began, window.ended
            self.add(Span("lookup", request, *times, tiers, chunks, hits, nbytes, _found(hits, chunks)))
        request.ended = now
        self.add(Span("request", request, request.began, now, "", 0, 0, 0, ""))

    def close(self, state: RequestState) -> None:
        """Forget a request for which nothing more will be submitted."""
        self._requests.pop(state, None)

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


def traced(spans: SpanQueue, close: Callable[[float], None]) -> Tracing:
    """Return the classes of a manager's parts that record into this queue. ``close``: ends what takes from it."""
    return Tracing(
        jobs=partial(_TracedJobs, spans),
        lookups=partial(_TracedLookups, spans),
        plans=partial(_TracedPlans, spans),
        requests=partial(_TracedRequests, spans),
        lost=lambda: spans.lost,
        close=close,
    )


class _TracedRequests(RequestTable):
    """A request table that decides about the sample."""

    def __init__(self, spans: SpanQueue, slots: Sequence[TierSlot], on_misuse: Callable[[], None]) -> None:
        super().__init__(slots, on_misuse)
        self.spans = spans

    def open(self, ctx: RequestContext, prompt_tokens: int = 0) -> RequestState:
        """Open a request."""
        state = super().open(ctx, prompt_tokens)
        self.spans.begin(state)
        return state

    def finish(self, ctx: RequestContext) -> RequestState | None:
        """Handle a request's end in the engine."""
        state = super().finish(ctx)
        if state is not None:
            self.spans.end(state)
        return state

    def _notify_tiers(self, state: RequestState) -> None:
        super()._notify_tiers(state)
        self.spans.close(state)


class _TracedLookups(Lookups):
    """Lookups of which a span is made when the answer stands: from the first question to it, waits included."""

    def __init__(self, spans: SpanQueue, *parts: Any) -> None:
        super().__init__(*parts)
        self.spans = spans

    def prefix(self, keys: Sequence[OffloadKey], state: RequestState, first: int) -> PrefixHits:
        """Return the leading run of ``keys`` that is present."""
        request = self.spans.of(state)
        if request is None:
            return super().prefix(keys, state, first)
        began = time.monotonic_ns()
        hits = super().prefix(keys, state, first)
        group = group_of(keys[0])
        if hits.pending or hits.unresolved:
            request.asked.setdefault(group, began)
            return hits
        began = request.asked.pop(group, began)
        if request.looked_up.get(group) != (len(keys), hits.ready):
            request.looked_up[group] = len(keys), hits.ready
            outcome = _found(hits.ready, len(keys))
            if state.given_up and outcome != "hit":
                outcome = "computing is sooner" if state.is_overtaken else "late"
            nbytes = hits.ready * self.spans.bytes_of(group)
            tiers, now = _tiers_of(state, hits.ready), time.monotonic_ns()
            self.spans.add(Span("lookup", request, began, now, tiers, len(keys), hits.ready, nbytes, outcome))
        return hits

    def single(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Return where one chunk stands; all those of a group are one span, at the request's end."""
        found = super().single(key, state)
        self._note_window([key], int(found is LookupResult.HIT), state)
        return found

    def window(self, keys: Sequence[OffloadKey], state: RequestState) -> PrefixHits:
        """Return the leading run of a window that is present; all those of a group are one span."""
        hits = super().window(keys, state)
        self._note_window(keys[: hits.chunks + 1], 0 if hits.pending else hits.ready, state)
        return hits

    def _note_window(self, keys: Sequence[OffloadKey], found: int, state: RequestState) -> None:
        request = self.spans.of(state)
        if request is not None:
            window = request.windows.setdefault(group_of(keys[0]), _Window())
            window.ended = time.monotonic_ns()
            window.asked.update(keys)
            window.found.update(keys[:found])


class _TracedPlans(Plans):
    """Plans of which a span is made when the copies have ended; of a store without room, at once."""

    def __init__(self, spans: SpanQueue, *parts: Any) -> None:
        super().__init__(*parts)
        self.spans = spans
        self.began: dict[int, tuple[TracedRequest, int]] = {}
        """By plan, whose it is and since when its rows are leased."""

    def prepare_store(self, keys: Sequence[OffloadKey], state: RequestState) -> StorePlan | None:
        """Lease rows for chunks from the GPU."""
        plan = super().prepare_store(keys, state)
        request = self.spans.of(state)
        if request is not None:
            now = time.monotonic_ns()
            if plan is None:
                self.spans.add(Span("store", request, now, now, PRIMARY, len(keys), 0, 0, "no room"))
            elif plan.keys:
                self.began[plan.plan_id] = request, now
        return plan

    def complete_store(self, plan: StorePlan, *, success: bool) -> RequestState | None:
        """End a store."""
        self._ended("store", plan, success=success)
        return super().complete_store(plan, success=success)

    def prepare_load(self, keys: Sequence[OffloadKey], state: RequestState) -> LoadPlan | None:
        """Pin chunks for a copy to the GPU."""
        plan = super().prepare_load(keys, state)
        request = self.spans.of(state)
        if plan is not None and request is not None:
            self.began[plan.plan_id] = request, time.monotonic_ns()
        return plan

    def complete_load(self, plan: LoadPlan, *, success: bool) -> None:
        """End a load."""
        self._ended("load", plan, success=success)
        super().complete_load(plan, success=success)

    def _ended(self, name: str, plan: StorePlan | LoadPlan, *, success: bool) -> None:
        begun = self.began.pop(plan.plan_id, None)
        if begun is not None:
            request, began = begun
            done = len(plan.keys) if success else 0
            nbytes, outcome = (self.spans.bytes_in(plan.keys), "ok") if success else (0, "failed")
            now = time.monotonic_ns()
            self.spans.add(Span(name, request, began, now, PRIMARY, len(plan.keys), done, nbytes, outcome))


class _TracedJobs(JobTable):
    """A job table that makes a span of each job when it has ended, or was given up."""

    def __init__(self, spans: SpanQueue, *parts: Any) -> None:
        super().__init__(*parts)
        self.spans = spans
        self.traced: dict[int, TracedRequest] = {}
        """By job in flight, the request that it was submitted for."""
        self._submitting: TracedRequest | None = None
        self._newest = 0

    def submit(
        self,
        reserved: Reservation,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        state: RequestState,
        on_end: OnEnd,
        *,
        promotion: bool,
        positions: Sequence[int] = (),
    ) -> None:
        """Hand chunks to a tier."""
        self._submitting = self.spans.of(state)
        super().submit(reserved, keys, rows, state, on_end, promotion=promotion, positions=positions)
        if self._submitting is not None:
            for job_id in reversed(self._jobs):
                if job_id <= self._newest:
                    break
                self.traced[job_id] = self._submitting
            self._submitting = None
        self._newest = max(self._newest, self.newest)

    def _finish(self, running: Running, result: JobResult) -> None:
        super()._finish(running, result)
        request = self.traced.pop(running.job.job_id, None) or self._submitting  # one that no tier took ends at once
        if request is not None and not running.failed_in_use:
            good = len(good_keys(running.job, result))
            outcome = "ok" if good == len(running.rows) else ("part" if good else "failed")
            self._record(request, running, good, moved(result)[0] if good else 0, outcome)

    def _give_up(
        self, slot: TierSlot, jobs: Sequence[Running], why: str, *, notify: Callable[[int], object] | None = None
    ) -> None:
        super()._give_up(slot, jobs, why, notify=notify)
        for running in jobs:
            request = self.traced.pop(running.job.job_id, None)
            if request is not None:
                self._record(request, running, 0, 0, why)

    def _record(self, request: TracedRequest, running: Running, good: int, nbytes: int, outcome: str) -> None:
        name = "load" if running.job.is_promotion else "store"
        now = time.monotonic_ns()
        began = now - int((self._clock() - running.submitted) * 1e9)
        self.spans.add(Span(name, request, began, now, running.slot.name, len(running.rows), good, nbytes, outcome))
