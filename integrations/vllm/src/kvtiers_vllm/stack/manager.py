"""The manager for vLLM's scheduler: translates its calls, and caches the answers that vLLM asks for piece by piece.

vLLM looks up each chunk of a prefix alone. The first lookup of a group in a step looks up the
whole rest of the prefix in ``TieringManager``, and the other lookups are answered from that. So does the first of a
window look up the window.

A plan (a lease of rows for a copy) ends when every rank has reported its copy, by the connector's own channel: vLLM
tracks neither failed copies nor, after a reset, those in flight. A request whose load has failed gets no further hits,
so that vLLM computes it.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvtiers.api import LookupResult as Answer
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import LoadPlan, PrefixHits, RequestContext, StorePlan
from kvtiers.types import OffloadPolicy as Policy
from kvtiers_vllm.engine import CoreLink
from kvtiers_vllm.life import FirstReport
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.own_tiering.idle_backoff import IdleBackoff
from kvtiers_vllm.stack.keys import RequestKeys
from kvtiers_vllm.stack.pipelined_loads import PipelinedLoads
from kvtiers_vllm.stack.plans import CopyReport, RunningPlans
from kvtiers_vllm.stack.requests import OpenRequest, RequestBook, Run
from kvtiers_vllm.stack.steps import PassLimit, StepClock
from kvtiers_vllm.stack.worker import NO_PLAN, WAKEUP, PlannedRows

if TYPE_CHECKING:
    from kvtiers_vllm.stack.events import ChunkDescriber, VllmEvents

__all__ = ["KvtiersManager", "WindowBlocks"]

_log = logging.getLogger("kvtiers.vllm")

_ANSWERS = {
    Answer.MISS: LookupResult.MISS,
    Answer.HIT: LookupResult.HIT,
    Answer.HIT_PENDING: LookupResult.HIT_PENDING,
    Answer.RETRY: LookupResult.RETRY,
}
_THERE = (LookupResult.HIT, LookupResult.HIT_PENDING)
_POLICIES = {
    Policy.CHUNK_LEVEL: OffloadPolicy.CHUNK_LEVEL,
    Policy.REQUEST_LEVEL: OffloadPolicy.REQUEST_LEVEL,
}
WindowBlocks: TypeAlias = Callable[[str, int, int], Sequence[int] | None]
"""Takes a request, vLLM's number of a group, and a chunk's number; returns vLLM's blocks of it, 0 for one that is lost.

None: the group has no windows, and loses none."""
_DRAIN_SECONDS = 10.0  # how long an engine that ends may still write to its tiers


class KvtiersManager(OffloadingManager):
    """Drives ``manager``. ``ranks``: workers that copy; ``figures``: for /metrics; ``alone``: no engine steps with it.

    A core whose requests are not seen as it takes them in is one whose weights could be updated unseen: no request uses
    a tier then.
    """

    def __init__(
        self,
        manager: TieringManager,
        requests: RequestBook,
        ranks: int,
        steps: StepClock,
        figures: Callable[[], Any],
        on_shutdown: Callable[[], None],
        core: CoreLink,
        *,
        alone: bool,
        describer: "ChunkDescriber | None" = None,
        vllm_events: "VllmEvents | None" = None,
    ) -> None:
        self.bugs = BugCount("kvtiers")
        self.requests = requests
        self.steps = steps
        self._manager = manager
        self._plans = RunningPlans(manager, ranks)
        self.pipelined = PipelinedLoads(manager, self._start, is_possible=requests.groups == 1)
        self._describer = describer
        self._vllm_events = vllm_events
        self._figures = figures
        self._on_shutdown = on_shutdown
        self._asked: set[OpenRequest] = set()
        self._backoff = IdleBackoff(sleep=WAKEUP.wait)
        self._limit = PassLimit()
        self._passed_over = False
        """The last pass has left requests to the next one, which is to come at once."""
        self._alone = alone
        self._core = core
        self._answered_for: Any = None
        """The context of the request whose answers are in ``_answers``, in this step."""
        self._answers: dict[bytes, LookupResult] = {}
        """By vLLM's key: it asks chunk by chunk, and one sweep over the prefix has answered them all."""
        self._brought: set[bytes] = set()
        """Those chunks of the last load that a tier has brought for it, by vLLM's keys."""
        self.window_blocks: WindowBlocks | None = None
        """Where a chunk has several of vLLM's blocks, of which windows may have lost some."""
        self._first_report = FirstReport(manager.tiers_have_spoken) if self._alone else None
        self._said_unseen = False
        self._began_idle: bool | None = None
        """Nothing but new requests could be computed when this step's first lookup came; None before it."""
        core.request_arrived.append(self._ask_ahead)

    # -- requests

    @never_raises(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> Any:
        """Record a request; return which of its chunks are wanted."""
        self._follow_weights()
        request = self.requests.open(req_context.req_id, req_context.kv_transfer_params)
        if not self._core.sees_requests:
            request.out = True
            self._say_unseen()
        with self._manager.lock:
            policy = self._manager.on_new_request(request.context, request.prompt_tokens)
            if request.context.params and request.keys is not None:
                self._follow_hints(request.context, request.keys)
        return RequestOffloadingContext(_POLICIES[policy])

    def _follow_hints(self, context: RequestContext, keys: RequestKeys) -> None:
        """Do what a request's parameters say of its whole prompt, a part of which vLLM may have itself."""
        for prefix in keys.prefixes():
            self._manager.keep(prefix, context)
            if context.params.get("prefetch") is True:
                self._manager.prefetch(prefix, context)

    def _say_unseen(self) -> None:
        if not self._said_unseen:
            self._said_unseen = True
            _log.error(
                "kvtiers does not see the requests that vLLM's engine core takes in, so weights that are updated in "
                "place would go unseen, and no request uses a tier; use kvtiers under vLLM's own tiering, and report it"
            )

    @never_raises(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request; its copies may still run."""
        request = self.requests.close(req_context.req_id)
        if req_context is self._answered_for:
            self._forget_answers()
        if request is not None:
            self._asked.discard(request)
            self.pipelined.drop(request)
            output = request.output_tokens()
            with self._manager.lock:
                if self._manager.takes_requests:
                    self._manager.record_request(
                        float(getattr(request.shown, "arrival_time", None) or time.time()),
                        request.prompt_tokens,
                        request.prompt_tokens + output,
                        self.requests.block_hashes(request),
                        request.context.params,
                    )
                self._manager.on_request_finished(request.context, output)

    # -- lookups and loads

    @never_raises(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Look one chunk up."""
        if req_context is self._answered_for and (answer := self._answers.get(key)) is not None:
            return answer
        if self._began_idle is None:
            self._began_idle = self._alone and self._core.is_idle()
        self._follow_weights()
        request = self.requests.get(req_context.req_id)
        keys = None if request is None or request.load_failed else request.keys
        if request is None or keys is None:
            return LookupResult.MISS
        place = keys.place(key)
        if req_context is not self._answered_for:
            self._answered_for, self._answers = req_context, {}
        if place is not None and keys.group_of(key).whole_prefix:
            return self._of_prefix(key, place, request, keys)
        if not request.names(keys, (key,)):
            return LookupResult.MISS
        if place is not None and keys.group_of(key).window > 1 and not self._is_in_a_row(key, place, keys):
            return self._of_window(key, place, request, keys)
        with self._manager.lock:
            return _ANSWERS[self._manager.lookup(keys.of(key), request.context)]

    def _of_prefix(self, key: bytes, place: int, request: OpenRequest, keys: RequestKeys) -> Any:
        run = self._run(key, place, request, keys)
        place -= run.first
        if place < run.hits.chunks:  # vLLM defers a request of whose run any chunk is pending, whichever it is
            waits = run.hits.pending and not self._can_begin(run, keys.following(key, run.first))
            answer = LookupResult.HIT_PENDING if waits else LookupResult.HIT
            self._answers.update(dict.fromkeys(keys.shown(key, run.first, run.hits.chunks), answer))
            return answer
        return LookupResult.RETRY if place == run.hits.chunks and run.hits.unresolved else LookupResult.MISS

    def _is_in_a_row(self, key: bytes, place: int, keys: RequestKeys) -> bool:
        """Return whether the chunk behind this one is there: then vLLM wants a window longer than the group's own."""
        behind = keys.shown(key, place + 1, 1)
        return bool(behind) and self._answers.get(behind[0]) in _THERE

    def _of_window(self, key: bytes, place: int, request: OpenRequest, keys: RequestKeys) -> Any:
        """Answer for the window that ends with this chunk, as one: vLLM scans from the right, one chunk a call.

        A chunk that is missing ends all windows that it is in. While an answer is missing vLLM goes on to the head, and
        nothing more is asked.
        """
        group = keys.group_of(key)
        first = min(place, max(place + 1 - group.window, request.computed // max(1, group.tokens_per_chunk)))
        wanted = keys.following(key, first)[: place + 1 - first]
        hits = self._ask(wanted, lambda: self._manager.lookup_window(wanted, request.context))
        if hits.unresolved:
            first, answer = 0, LookupResult.RETRY
        elif hits.chunks == len(wanted):
            answer = LookupResult.HIT_PENDING if hits.pending else LookupResult.HIT
        else:
            first, answer = first + hits.chunks, LookupResult.MISS
        self._answers.update(dict.fromkeys(keys.shown(key, first, place + 1 - first), answer))
        return answer

    def _run(self, key: bytes, place: int, request: OpenRequest, keys: RequestKeys) -> Run:
        """Return this step's answer for the prefix from this chunk, or from one before it, on."""
        group = _group_number(key)
        run = request.runs.get(group)
        if run is None or place < run.first:
            wanted = keys.following(key, place)
            hits = self._ask(wanted, lambda: self._manager.lookup_prefix(wanted, request.context, place))
            run = request.runs[group] = Run(place, hits)
            self._asked.add(request)
            if self._describer is not None and hits.pending and request.described < place + hits.chunks:
                request.described = place + hits.chunks
                self._describe(request, keys, keys.shown(key, place, hits.chunks))
        return run

    def _ask(self, wanted: Sequence[bytes], look: Callable[[], PrefixHits]) -> PrefixHits:
        """Look up; where nothing can be computed meanwhile, wait a moment for the tiers' answers."""
        with self._manager.lock:
            hits = look()
        while hits.unresolved and not hits.pending and self._began_idle:
            with self._manager.lock:
                self._manager.ask_ahead(wanted)
            if not self._backoff.for_answer():
                break
            with self._manager.lock:
                self._manager.look_again()
                hits = look()
        return hits

    @never_raises(lambda: None)
    def _ask_ahead(self, shown: Any) -> None:
        """Probe the tiers for a request that has just arrived, unless the engine is calling them; on any thread."""
        WAKEUP.announce()
        for keys in self.requests.prefixes(shown):
            if keys and self._manager.lock.acquire(blocking=False):
                try:
                    self._manager.ask_ahead(keys)
                finally:
                    self._manager.lock.release()

    def _can_begin(self, run: Run, keys: Sequence[bytes]) -> bool:
        """Return whether the rows of a run that is partly pending can follow its load in parts."""
        return not run.hits.unresolved and self.pipelined.can_begin(keys[: run.hits.chunks])

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Pin chunks; if that is impossible, the load fails and vLLM computes them."""
        rows = self._pin(keys, req_context.req_id)
        if rows is None:
            rows = PlannedRows(NO_PLAN, req_context.req_id, np.empty(0, np.int32))
        return rows

    @never_raises(lambda: None)
    def _pin(self, keys: Collection[bytes], request_id: str) -> PlannedRows | None:
        self._brought = set()
        request = self.requests.get(request_id)
        if request is None:
            return None
        own = request.keys
        rows = None
        if own is not None:
            named = own.of_all(keys)
            with self._manager.lock:
                if brought := self._manager.brought(named):
                    self._brought = {shown for shown, key in zip(keys, named, strict=True) if key in brought}
                plan = self._manager.prepare_load(named, request.context)
            if plan is not None:
                rows = self._start(plan, request)
            else:
                rows = self.pipelined.begin(request, named, own.place(next(iter(keys))) or 0)
        if rows is None:
            request.load_failed = True
            self._forget_answers()
            return None
        self.requests.computes()
        self._limit.load_found()
        return rows

    def get_load_source(self, key: bytes, req_context: Any) -> str:
        """Return where a chunk of the load that was just prepared came from, by vLLM's name: a tier, or the primary."""
        del req_context
        return "disk" if key in self._brought else "host"

    def pass_is_over(self) -> bool:
        """Return whether this scheduling pass is to leave its other requests to the next one: loads are to begin."""
        return self._limit.is_reached(computes_prompts=self.steps.computes_prompts)

    # -- stores

    @never_raises(lambda: None)
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Lease rows for the chunks that are not in the primary; None: vLLM asks again in the next step."""
        self._follow_weights()
        request = self.requests.get(req_context.req_id)
        if request is None:
            return None
        own = request.keys
        if own is None:
            return None if self.requests.stores_wait(request) else _nothing_of(request)
        if not request.names(own, keys):
            return _nothing_of(request)
        if self.window_blocks is not None:
            keys = [key for key in keys if self._is_whole(key, request, own, self.window_blocks)]
        named = {own.of(key): key for key in keys}
        with self._manager.lock:
            plan = self._manager.prepare_store(list(named), request.context)
            if plan is None:
                return None
            if not plan.keys:
                self._manager.complete_store(plan)
                return _nothing_of(request)
        if self._describer is not None:
            self._describe(request, own, [named[key] for key in plan.keys])
        return PrepareStoreOutput([named[key] for key in plan.keys], self._start(plan, request), [])

    def _is_whole(self, key: bytes, request: OpenRequest, keys: RequestKeys, window_blocks: WindowBlocks) -> bool:
        """Return whether vLLM has all blocks of a chunk: those that a window has moved past may be another request's.

        vLLM copies the others as if they were one chunk after the other.
        """
        place = keys.place(key)
        blocks = None if place is None else window_blocks(request.context.request_id, _group_number(key), place)
        return blocks is None or 0 not in blocks

    @never_raises(lambda: None)
    def _describe(self, request: OpenRequest, keys: RequestKeys, shown: Sequence[bytes]) -> None:
        """Say what routers need of chunks, before their events can come: those come at the end of a step."""
        if self._describer is not None:
            chunks = self._describer.chunks(request.shown, keys, shown)
            with self._manager.lock:
                self._manager.describe(chunks)

    def _start(self, plan: StorePlan | LoadPlan, request: OpenRequest) -> PlannedRows:
        self._plans.start(plan, request)
        return PlannedRows(plan.plan_id, request.context.request_id, plan.chunk_ids)

    @never_raises(lambda: None)
    def copies_ended(self, report: CopyReport) -> None:
        """Complete plans by the results of copies."""
        self._plans.copies_ended(report)

    # -- steps

    @never_raises(lambda: None)
    def get_stats(self) -> Any:
        """Return the figures that have changed; vLLM asks at the end of each step."""
        self.steps.ends()
        report = self._figures()
        if report is not None and self._first_report is not None:
            self._first_report.given()
        return report

    @never_raises(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Send what the step has collected."""
        del context  # who was scheduled is nothing to the tiers
        self._passed_over = self._limit.pass_ends()
        for request in self._asked:
            request.runs.clear()
        self._asked.clear()
        self._forget_answers()
        self._began_idle = None
        self._plans.confirm()
        self._continue_loads()
        with self._manager.lock:
            self._manager.on_schedule_end(*self.steps.take_computed())

    @never_raises(lambda: None)
    def _continue_loads(self) -> None:
        self.pipelined.advance()

    @never_raises(lambda: None)
    def back_off(self, *, computes: bool) -> None:
        """Pause in a step that computes nothing, so that the awaited copies get the interpreter and the processor."""
        idle = self._alone and not computes and not self._passed_over
        waits = self._plans.are_running() or self._manager.has_pending_work() or self._first_report_is_due()
        self._backoff.step(idle=idle and waits, watched=WAKEUP.watched > 0 and not self.pipelined.are_open())

    @never_raises(lambda: None)
    def computes(self) -> None:
        """Record a step that computes something."""
        self._follow_weights()
        self.requests.computes()

    def _follow_weights(self) -> None:
        """Retire all KV of weights other than vLLM's current ones."""
        name = self.requests.new_weights()
        if name is not None:
            self._forget_answers()
            with self._manager.lock:
                self._manager.set_weights_version(name)

    def _forget_answers(self) -> None:
        self._answered_for, self._answers = None, {}

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Return whether steps are needed without a request."""
        if self._core.is_ending():  # what tiers still have to write is the shutdown's, which has a bound
            return self._plans.are_running() or self._plans.has_unconfirmed()
        if self._plans.has_unconfirmed() or self.pipelined.are_open():
            return True
        return self._manager.has_pending_work() or self._first_report_is_due()

    def _first_report_is_due(self) -> bool:
        return self._first_report is not None and self._first_report.is_due()

    def take_events(self) -> Iterable[Any]:
        """Return nothing: vLLM's translation would keep the tokens of all that a tier has stored. See ``kv_events``."""
        return ()

    @never_raises(list)
    def kv_events(self) -> list[Any]:
        """Return the KV events since the last call, in vLLM's own classes; none where it publishes none."""
        return [] if self._vllm_events is None else self._vllm_events.events()

    @never_raises(lambda: None)
    def reset_cache(self) -> None:
        """Forget all chunks; the tiers keep theirs."""
        for request in self.requests:
            request.runs.clear()
            request.described = 0
        self._forget_answers()
        with self._manager.lock:
            self._manager.reset_cache()

    @never_raises(lambda: None)
    def shutdown(self) -> None:
        """End within a bound."""
        self._on_shutdown()
        self._manager.shutdown(_DRAIN_SECONDS)


def _nothing_of(request: OpenRequest) -> PrepareStoreOutput:
    return PrepareStoreOutput([], PlannedRows(NO_PLAN, request.context.request_id, np.empty(0, np.int32)), [])


def _group_number(key: bytes) -> int:
    """Return vLLM's number of a key's group."""
    return int.from_bytes(key[-4:], "big")
