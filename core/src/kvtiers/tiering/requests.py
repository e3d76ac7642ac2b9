"""The request table: the manager's state of each request, and the notification of the tiers about its end.

::

    open --on_request_finished--> closing --its last store completed, no key parked--> closed

A tier gets ``on_new_request`` once, then all calls that name the request, then ``on_request_finished`` once.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.tiering.engine_side import RequestTrace, TraceSide
from kvtiers.tiering.load_plan import Plan
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import TENANT_FIELD, RequestContext, Retention

__all__ = ["Landed", "RequestState", "RequestTable"]

_REMEMBERED = 4096  # requests that are over, so that a late call for one of them does not open it again


class Landed(NamedTuple):
    """What a tier has brought for a request since it last used some of that: chunks, and the seconds of their jobs.

    ``prefix_chunks``: those by which prompts are measured; ``sum_of_positions``: of their first tokens in the prompt.
    """

    chunks: int
    prefix_chunks: int
    sum_of_positions: int
    seconds: float


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between ``on_new_request`` and the tiers' ``on_request_finished``.

    ``given_up``: chunks that are a MISS for this request: it waited too long for them, or computing them is cheaper.
    ``lost``: chunks whose load failed for it, by the tiers (bits) that lost them; those are not asked again. Both hold
    until the request ends or starts over, or the keys mean other values. The two clocks start with the first answer
    that makes the request wait and are never wound again, unless it starts over.
    """

    context: RequestContext
    slots: Sequence[TierSlot]
    """The tiers that this request may load from, in order."""
    whole: Sequence[TierSlot] = ()
    """The tiers that want all chunks of this request."""
    given_up: set[OffloadKey] = field(default_factory=set)
    lost: dict[OffloadKey, int] = field(default_factory=dict)
    lookup_since: float | None = None
    load_since: float | None = None
    load_tokens: int = 0
    """The most tokens whose chunks this request has waited for."""
    is_whole: bool = False
    """Its prompt has windows or states: no use can be made of a part of it."""
    lacks_boundary: bool = False
    """A prefix of its full attention was found, but no boundary."""
    given: list[OffloadKey] = field(default_factory=list)
    """The chunks that its last plan has given to the eviction policy as used."""
    plan: Plan | None = None
    """The last one, with the last answer, unless more may be found."""
    load_over: bool = False
    """It has waited for promotions as long as it may, or as it should."""
    is_overtaken: bool = False
    """It waits no longer since computing is sooner, not since its time is over."""
    tenant: str = ""
    """Of its parameters: its keys are this tenant's."""
    was_beside: bool = False
    """It had others beside it when it began to wait for a load."""
    queue: tuple[float, int] = (0.0, 0)
    """Tokens to be computed before it and behind it, when it began to wait for promotions."""
    ended_before: dict[TierSlot, int] = field(default_factory=dict)
    """How many chunks each tier had brought when it began to wait for promotions."""
    line_until: float | None = None
    """How long it may stand in line for rows, with nothing on its way."""
    loading: dict[TierSlot, tuple[int, int]] = field(default_factory=dict)
    """What each tier brings for it: the place of the last chunk among all that the tier was to bring; how many."""
    landed: dict[TierSlot, Landed] = field(default_factory=dict)
    """What each tier has brought for it."""
    prompt_tokens: int = 0
    """Of its prompt, as far as the engine says."""
    has_come: bool = False
    is_taken_up: bool = False
    """It was looked up, or is over."""
    is_computed: bool = False
    """A lookup has left some of it to be computed."""
    keeps: Retention | None = None
    """Its client wants the chunks of its prompt to stay for a while."""
    counted: int = 0
    """Chunks already counted as looked up."""
    counted_hits: set[OffloadKey] = field(default_factory=set)
    dropped: dict[int, set[OffloadKey]] = field(default_factory=dict)
    """Chunks that got no row, by the tier that has them."""
    open_stores: int = 0
    parked: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys that a tier of ``whole`` wants but that are not readable yet."""
    finished: bool = False
    trace: RequestTrace | None = None
    """Of a request in the sample of ``tracing``."""
    is_prefetch: bool = False
    """It stands for a prefetch: what is loaded for it is not protected, as no request waits to read it."""

    def start_over(self) -> None:
        """Forget its waits and what they have led to: its blocks were taken away, and it is served anew."""
        self.given_up.clear()
        self.lost.clear()
        self.lookup_since = self.load_since = self.line_until = None
        self.load_over = self.was_beside = self.is_computed = False
        self.load_tokens = 0
        self.loading, self.landed = {}, {}
        self.plan = None
        self.given = []

    def load_from(self, slot: TierSlot, chunks: int) -> None:
        """Count chunks that this tier is to bring for the request, behind all others that it brings."""
        slot.metrics.loading_chunks += chunks
        slot.reserved_chunks += chunks
        self.loading[slot] = slot.reserved_chunks, self.loading.get(slot, (0, 0))[1] + chunks

    def lose(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> None:
        """Record that loading these chunks from this tier failed."""
        if self.plan is not None:
            self.plan.awaited = ()
        lost, bit = self.lost, 1 << slot.index
        for key in keys:
            lost[key] = lost.get(key, 0) | bit

    def drop(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> int:
        """Count chunks that this tier has and that got no row, each once a request.

        Return how many were counted for the first time, for the budget that was used up.
        """
        dropped = self.dropped.setdefault(slot.index, set())
        before = len(dropped)
        dropped.update(keys)
        slot.metrics.dropped_promotions += len(dropped) - before
        return len(dropped) - before

    def not_lost(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys this tier has not lost for the request."""
        if not self.lost or self.lost.keys().isdisjoint(keys):
            return len(keys)
        bit = 1 << slot.index
        return next((i for i, key in enumerate(keys) if self.lost.get(key, 0) & bit), len(keys))


class RequestTable:
    """The open requests, and those that are over but of whose end the tiers have not been notified yet."""

    def __init__(
        self, slots: Sequence[TierSlot], on_misuse: Callable[[], None], tracing: TraceSide | None = None
    ) -> None:
        self._slots = slots
        self._on_misuse = on_misuse
        self._tracing = tracing
        self._open: dict[str, RequestState] = {}
        self._closing: dict[str, RequestState] = {}
        self._over: OrderedDict[str, RequestContext] = OrderedDict()
        self.parked: set[RequestState] = set()
        """The requests with keys that wait to become readable."""

    def open(self, ctx: RequestContext, prompt_tokens: int = 0) -> RequestState:
        """Open a request. One that is open already stays as it is."""
        state = self._open.get(ctx.request_id)
        if state is not None:
            self._on_misuse()
            return state
        before = self._closing.pop(ctx.request_id, None)
        if before is not None:  # the id is used again: work in flight for the old request has no request now
            self._notify_tiers(before)
            before.context = RequestContext("")
            before.parked.clear()
            self.parked.discard(before)
        self._over.pop(ctx.request_id, None)
        allowed: list[TierSlot] = []
        whole: list[TierSlot] = []
        for slot in self._slots:
            if ctx.may_load_from(slot.name):
                allowed.append(slot)
            if slot.wants_requests and slot.request_started(ctx) and not slot.options.read_only:
                whole.append(slot)
        state = RequestState(ctx, allowed, whole, prompt_tokens=prompt_tokens)
        if ctx.params and isinstance(named := ctx.params.get(TENANT_FIELD), str):
            state.tenant = named
        if self._tracing is not None:
            state.trace = self._tracing.begin(ctx)
        self._open[ctx.request_id] = state
        return state

    def get(self, ctx: RequestContext) -> RequestState | None:
        """Return the request's state, opening it if need be; None (a misuse) if it is over."""
        state = self._open.get(ctx.request_id)
        if state is not None:
            return state
        if self._over.get(ctx.request_id) is ctx:
            self._on_misuse()
            return None
        return self.open(ctx)

    def finish(self, ctx: RequestContext) -> RequestState | None:
        """Handle a request's end in the engine; None (a misuse) if it is not open."""
        state = self._open.pop(ctx.request_id, None)
        if state is None:
            self._on_misuse()
            return None
        state.finished = True
        self._over[ctx.request_id] = state.context
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        self._closing[ctx.request_id] = state
        if state.trace is not None:
            state.trace.finished(state)
        return state

    def retire_keys(self) -> None:
        """Clear the per-request state of all keys, which name other values from now on: given up, lost, hits counted.

        The clocks go on: new weights do not extend a wait. So a request that has waited as long as it may finds what is
        in the primary, and no more.
        """
        for state in self._open.values():
            state.given_up.clear()
            state.lost.clear()
            state.counted_hits.clear()

    def forget_answers(self) -> None:
        """Forget the last answers to waiting requests: the chunks that they call ready or pending are gone."""
        for state in self._open.values():
            state.plan = None
            state.given = []

    def close_if_done(self, state: RequestState) -> None:
        """Notify the tiers of the request's end, as soon as nothing can be submitted for it any more."""
        if state.finished and not state.open_stores and not state.parked:
            closing = self._closing.get(state.context.request_id)
            if closing is state:
                del self._closing[state.context.request_id]
                self._notify_tiers(state)

    def _notify_tiers(self, state: RequestState) -> None:
        for slot in self._slots:
            if slot.wants_requests:
                slot.request_finished(state.context)
