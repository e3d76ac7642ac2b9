"""The manager for vLLM's scheduler: translates its calls, and decides for a request before vLLM looks it up.

vLLM looks up each chunk alone. kvtiers' connector asks ``TieringManager`` once about the whole prompt before
(``waits``): a request that has to wait is deferred without a look, and for another one vLLM's lookups are answered from
a dict of exactly the chunks that are to be loaded.

A plan (a lease of rows for a copy) ends when every rank has reported its copy, by the connector's own channel: vLLM
tracks neither failed copies nor, after a reset, those in flight. A request whose load has failed gets no further hits,
so that vLLM computes it.
"""

import itertools
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

from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import LoadPlan, PromptGroup, Reach, RequestContext, StorePlan
from kvtiers.types import OffloadPolicy as Policy
from kvtiers_vllm.engine import CoreLink
from kvtiers_vllm.life import FirstReport
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.own_tiering.idle_backoff import IdleBackoff
from kvtiers_vllm.stack.keys import RequestKeys
from kvtiers_vllm.stack.pipelined_loads import PipelinedLoads
from kvtiers_vllm.stack.plans import CopyReport, RunningPlans
from kvtiers_vllm.stack.requests import OpenRequest, RequestBook
from kvtiers_vllm.stack.steps import PassLimit, StepClock
from kvtiers_vllm.stack.worker import NO_PLAN, WAKEUP, PlannedRows

if TYPE_CHECKING:
    from kvtiers_vllm.stack.events import ChunkDescriber, VllmEvents

__all__ = ["KvtiersManager", "WindowBlocks"]

_log = logging.getLogger("kvtiers.vllm")

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
        self.pipelined = PipelinedLoads(manager, self._start, is_whole=requests.groups > 1)
        self._describer = describer
        self._vllm_events = vllm_events
        self._figures = figures
        self._on_shutdown = on_shutdown
        self._backoff = IdleBackoff(sleep=WAKEUP.wait)
        self._limit = PassLimit(steps)
        self._passed_over = False
        """The last pass has left requests to the next one, which is to come at once."""
        self._alone = alone
        self._core = core
        self._answered_for: Any = None
        """The context of the request for which was decided last, in this step."""
        self._answers: set[bytes] = set()
        """Of that request: vLLM's keys of the chunks that can be loaded."""
        self._sources: dict[bytes, str] = {}
        """Of the chunks of the last load that a tier has brought for it, by vLLM's keys: vLLM's name of the tier."""
        self.window_blocks: WindowBlocks | None = None
        """Where a chunk has several of vLLM's blocks, of which windows may have lost some."""
        self._first_report = FirstReport(manager.tiers_have_spoken) if self._alone else None
        self._said_unseen = False
        self._began_idle: bool | None = None
        """Nothing but new requests could be computed when this step's first lookup came; None before it."""
        core.request_arrived.append(self._announce)

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

    @never_raises(lambda: False)
    def waits(self, req_context: Any, computed: int, end: int) -> bool:
        """Decide how much of a request's first ``end`` tokens is loaded; True: vLLM is to ask again in its next pass.

        ``computed``: how many of them vLLM has itself. Its lookups for the request are answered by that from then on.
        """
        if self._began_idle is None:
            self._began_idle = self._alone and self._core.is_idle()
        self._follow_weights()
        self._answered_for, self._answers = req_context, set()
        request = self.requests.get(req_context.req_id)
        keys = None if request is None or request.load_failed else request.keys
        if request is None:
            return False
        if keys is None or end <= computed:  # it is computed, and waits for the GPU no longer
            with self._manager.lock:
                self._manager.reach((), request.context, computed)
            return False
        with self._manager.lock:
            reach = self._manager.waits_on(request.context, computed, end)
        if reach is not None and not self.pipelined.can_begin(reach):
            return True
        reach = self._ask(keys.groups(), request, computed, end)
        load = computed, computed + reach.tokens
        if self._describer is not None and reach.pending and request.described < load[1]:
            request.described = load[1]
            self._describe(request, keys, keys.needed(*load))
        if reach.unresolved or (reach.pending and not self.pipelined.can_begin(reach)):
            return True
        self._answers = set(keys.needed(*load))
        request.load = load
        return False

    @never_raises(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Look one chunk up: by what was decided for its request, or alone where that says nothing of it.

        That is the part of a block at a prompt's end, and whatever vLLM asks without kvtiers' connector.
        """
        is_decided = req_context is self._answered_for
        if is_decided and key in self._answers:
            return LookupResult.HIT
        request = self.requests.get(req_context.req_id)
        keys = None if request is None or request.load_failed else request.keys
        if request is None or keys is None or (is_decided and keys.place(key) is not None):
            return LookupResult.MISS
        if not request.names(keys, (key,)):
            return LookupResult.MISS
        with self._manager.lock:
            reach = self._manager.reach([PromptGroup([keys.of(key)])], request.context)
        if reach.unresolved:
            return LookupResult.RETRY
        return LookupResult.HIT_PENDING if reach.pending else LookupResult.HIT if reach.ready else LookupResult.MISS

    def _ask(self, groups: Sequence[PromptGroup], request: OpenRequest, computed: int, end: int) -> Reach:
        """Ask how much can be loaded; where nothing can be computed meanwhile, wait a moment for the tiers' answers."""
        while True:
            with self._manager.lock:
                reach = self._manager.reach(groups, request.context, computed, end)
                awaits = reach.unresolved and not reach.pending and self._began_idle
                awaits = awaits and self._manager.hurry(request.context)
            if not (awaits and self._backoff.for_answer()):
                return reach

    @never_raises(lambda: None)
    def _announce(self, shown: Any) -> None:
        """Ask the tiers about a request that has just arrived, unless the engine is calling them; on any thread."""
        WAKEUP.announce()
        groups = self.requests.announced(shown)
        if groups and self._manager.lock.acquire(blocking=False):
            try:
                self._manager.announce(groups)
            finally:
                self._manager.lock.release()

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Pin chunks; if that is impossible, the load fails and vLLM computes them."""
        rows = self._pin(keys, req_context.req_id)
        if rows is None:
            rows = PlannedRows(NO_PLAN, req_context.req_id, np.empty(0, np.int32))
        return rows

    @never_raises(lambda: None)
    def _pin(self, keys: Collection[bytes], request_id: str) -> PlannedRows | None:
        self._sources = {}
        request = self.requests.get(request_id)
        if request is None:
            return None
        own = request.keys
        rows = None
        if own is not None:
            named = own.of_all(keys)
            with self._manager.lock:
                if brought := self._manager.brought(named):
                    tiers = zip(keys, map(brought.get, named), strict=True)
                    self._sources = {shown: _source(tier) for shown, tier in tiers if tier is not None}
                plan = self._manager.prepare_load(named, request.context)
            if plan is not None:
                rows = self._start(plan, request)
            else:
                runs = [own.of_all(list(run)) for _, run in itertools.groupby(keys, _group_number)]
                rows = self.pipelined.begin(request, runs, *request.load)
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
        return self._sources.get(key, "host")

    def pass_is_over(self) -> bool:
        """Return whether this scheduling pass is to leave its other requests to the next one: loads are to begin."""
        return self._limit.is_reached(idle=self._core.is_idle())

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
        self._passed_over = self._limit.pass_ends()
        self._forget_answers()
        self._began_idle = None
        self._plans.confirm()
        self._continue_loads()
        with self._manager.lock:
            for name in context.preempted_req_ids:
                if (request := self.requests.get(name)) is not None:
                    request.load_failed = False
                    self._manager.on_request_preempted(request.context)
            self._manager.on_schedule_end(*self.steps.take_computed())

    @never_raises(lambda: None)
    def _continue_loads(self) -> None:
        self.pipelined.advance()

    @never_raises(lambda: None)
    def look_again(self) -> None:
        """Poll the tiers with the next call: vLLM before 0.33 offers a step's stores after its end, which polls them.

        The lookups of the next step would not see what has come since, while this one was computed.
        """
        with self._manager.lock:
            self._manager.look_again()

    @never_raises(lambda: None)
    def back_off(self, *, computes: bool) -> None:
        """Pause in a step that computes nothing, so that the awaited copies get the interpreter and the processor."""
        idle = self._alone and not computes and not self._passed_over
        waits = self._plans.are_running() or self._tiers_want_steps() or self._first_report_is_due()
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
        self._answered_for, self._answers = None, set()

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Return whether steps are needed without a request."""
        if self._core.is_ending():  # what tiers still have to write is the shutdown's, which has a bound
            return self._plans.are_running() or self._plans.has_unconfirmed()
        if self._plans.has_unconfirmed() or self.pipelined.are_open():
            return True
        return self._tiers_want_steps() or self._first_report_is_due()

    def _tiers_want_steps(self) -> bool:
        with self._manager.lock:
            return self._manager.has_pending_work()

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


def _source(tier: TierSlot) -> str:
    """Return vLLM's name of a tier as a source: of a remote store it has no more than that it is outside."""
    return "external_unspecified" if tier.options.is_remote else "disk"


def _group_number(key: bytes) -> int:
    """Return vLLM's number of a key's group."""
    return int.from_bytes(key[-4:], "big")
