"""kvtiers' manager as vLLM's scheduler sees it: translates, and remembers what vLLM asks piece by piece.

vLLM asks for each chunk of a prefix alone. The first question about a group in a step is asked of ``TieringManager``
for the whole rest of the prefix, and the answers to the others are read off that one.

A plan (leave to copy) ends when every rank has reported its copy, by the connector's own channel: vLLM knows neither
failed copies nor, after a reset, the ones that still run. A request whose load has failed hits nothing any more, so
that vLLM computes it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvtiers.api import LookupResult as Answer
from kvtiers.base import LoadPlan, PrefixHits, RequestContext, StorePlan
from kvtiers.base import OffloadPolicy as Policy
from kvtiers.integrations.vllm.guard import BugCount, never_raises
from kvtiers.integrations.vllm.stack.adapters import Adapters
from kvtiers.integrations.vllm.stack.keys import GroupKeys, RequestKeys
from kvtiers.integrations.vllm.stack.worker import NO_PLAN, CopyReport, PlannedRows
from kvtiers.tiering.manager import TieringManager

__all__ = ["KvtiersManager", "Weights"]

_ANSWERS = {
    Answer.MISS: LookupResult.MISS,
    Answer.HIT: LookupResult.HIT,
    Answer.HIT_PENDING: LookupResult.HIT_PENDING,
    Answer.RETRY: LookupResult.RETRY,
}
_POLICIES = {
    Policy.CHUNK_LEVEL: OffloadPolicy.CHUNK_LEVEL,
    Policy.REQUEST_LEVEL: OffloadPolicy.REQUEST_LEVEL,
}
_DRAIN_SECONDS = 10.0  # how long an engine that ends may still write to its tiers
_STEPS_IN_FLIGHT = 4  # vLLM schedules that far ahead at most
_PREFILL_TOKENS = 8  # tokens a request in a step of which prefill is the larger part


@dataclass(slots=True, eq=False)
class _Request:
    """A request. ``keys`` is None where it may have nothing to do with tiers: nobody can tell what its KV is."""

    context: RequestContext
    keys: RequestKeys | None
    adapter_id: int = 0
    load_failed: bool = False
    runs: dict[int, tuple[dict[bytes, int], PrefixHits]] = field(default_factory=dict)
    """By group: this step's answer, and the place of each key in it."""


@dataclass(slots=True, eq=False)
class _Plan:
    """A plan whose copies run on so many ranks."""

    plan: StorePlan | LoadPlan
    request: _Request
    ranks: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """What the weights are called at start, and vLLM's word for those that it has now."""

    name: str
    version: Callable[[], Any]


class KvtiersManager(OffloadingManager):
    """Drives ``manager``. ``groups``: how keys come about; ``ranks``: workers that copy; ``figures``: for /metrics."""

    def __init__(
        self,
        manager: TieringManager,
        groups: Mapping[int, GroupKeys],
        ranks: int,
        weights: Weights,
        figures: Callable[[], Any],
        on_shutdown: Callable[[], None],
    ) -> None:
        self.bugs = BugCount("kvtiers")
        self._manager = manager
        self._groups = groups
        self._ranks = ranks
        self._weights = weights
        self._weights_version = weights.version()
        self._figures = figures
        self._on_shutdown = on_shutdown
        self._adapters = Adapters()
        self._shown: Any = None
        self._requests: dict[str, _Request] = {}
        self._asked: set[_Request] = set()
        self._plans: dict[int, _Plan] = {}
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._prefill = (0, 0.0)

    # -- requests

    def show(self, request: Any) -> None:
        """Take note of vLLM's request, which is named next."""
        self._shown = request

    @never_raises(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> Any:
        """Take note of a request; say which of its chunks are wanted."""
        self._follow_weights()
        shown, self._shown = self._shown, None
        if shown is not None and shown.request_id != req_context.req_id:
            shown = None
        context = RequestContext(req_context.req_id, req_context.kv_transfer_params or {})
        lora = getattr(shown, "lora_request", None)
        request = _Request(context, self._keys_of(shown, lora), lora.lora_int_id if lora else 0)
        self._requests[context.request_id] = request
        with self._manager.lock:
            return RequestOffloadingContext(_POLICIES[self._manager.on_new_request(context)])

    @never_raises(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request; its copies may still run."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._asked.discard(request)
            with self._manager.lock:
                self._manager.on_request_finished(request.context)

    def _keys_of(self, shown: Any, lora: Any) -> RequestKeys | None:
        if shown is None:
            return None
        digest = b""
        if lora is not None:
            known = self._adapters.digest(lora)
            if self._adapters.has_changed(lora.lora_int_id):
                for request in self._requests.values():
                    if request.adapter_id == lora.lora_int_id:
                        request.keys = None  # part of it was computed with the adapter as it was, part is not yet
            if known is None:
                return None
            digest = known
        return RequestKeys(self._groups, shown.block_hashes, digest, shown.cache_salt or "")

    # -- lookups and loads

    @never_raises(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Say where a chunk stands."""
        self._follow_weights()
        request = self._requests.get(req_context.req_id)
        if request is None or request.keys is None or request.load_failed:
            return LookupResult.MISS
        if not request.keys.is_prefix(key):
            with self._manager.lock:
                return _ANSWERS[self._manager.lookup(request.keys.of(key), request.context)]
        return self._in_prefix(key, request, request.keys)

    def _in_prefix(self, key: bytes, request: _Request, keys: RequestKeys) -> Any:
        own = keys.of(key)
        group = int.from_bytes(own[-4:], "big")
        run = request.runs.get(group)
        if run is None or own not in run[0]:
            rest = keys.following(key)
            with self._manager.lock:
                hits = self._manager.lookup_prefix(rest, request.context)
            run = request.runs[group] = ({each: place for place, each in enumerate(rest)}, hits)
            self._asked.add(request)
        place, hits = run[0][own], run[1]
        if place < hits.chunks:  # vLLM defers a request of whose run any chunk is pending, whichever it is
            return LookupResult.HIT_PENDING if hits.pending else LookupResult.HIT
        return LookupResult.RETRY if place == hits.chunks and hits.unresolved else LookupResult.MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Pin chunks; where that cannot be, the load fails and vLLM computes them."""
        rows = self._pin(keys, req_context.req_id)
        if rows is None:
            rows = PlannedRows(NO_PLAN, req_context.req_id, np.empty(0, np.int32))
        return rows

    @never_raises(lambda: None)
    def _pin(self, keys: Collection[bytes], request_id: str) -> PlannedRows | None:
        request = self._requests.get(request_id)
        if request is None or request.keys is None:
            return None
        own = [request.keys.of(key) for key in keys]
        with self._manager.lock:
            plan = self._manager.prepare_load(own, request.context)
        if plan is None:
            request.load_failed = True
            return None
        return self._start(plan, request)

    # -- stores

    @never_raises(lambda: None)
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Lease rows for those of the chunks that are not there."""
        self._follow_weights()
        request = self._requests.get(req_context.req_id)
        if request is None or request.keys is None:
            return None
        named = {request.keys.of(key): key for key in keys}
        with self._manager.lock:
            plan = self._manager.prepare_store(list(named), request.context)
            if plan is None:
                return None
            if not plan.keys:
                self._manager.complete_store(plan)
                return PrepareStoreOutput([], PlannedRows(NO_PLAN, req_context.req_id, plan.chunk_ids), [])
        return PrepareStoreOutput([named[key] for key in plan.keys], self._start(plan, request), [])

    def _start(self, plan: StorePlan | LoadPlan, request: _Request) -> PlannedRows:
        self._plans[plan.plan_id] = _Plan(plan, request, self._ranks)
        return PlannedRows(plan.plan_id, request.context.request_id, plan.chunk_ids)

    @never_raises(lambda: None)
    def copies_ended(self, report: CopyReport) -> None:
        """Take what became of copies; a plan ends with the last rank's."""
        for plan_id, ranks in report.ended.items():
            running = self._plans.get(plan_id)
            if running is None:
                continue
            running.failed |= plan_id in report.failed
            running.ranks -= ranks
            if running.ranks <= 0:
                del self._plans[plan_id]
                self._end(running)

    def _end(self, running: _Plan) -> None:
        plan = running.plan
        with self._manager.lock:
            if isinstance(plan, StorePlan):
                self._manager.complete_store(plan, success=not running.failed)
            else:
                running.request.load_failed |= running.failed
                self._manager.complete_load(plan, success=not running.failed)

    # -- steps

    def step_begins(self, tokens: int, requests: int) -> None:
        """Take note of how many tokens a step computes for how many requests."""
        self._steps.append((tokens if tokens >= _PREFILL_TOKENS * requests else 0, time.monotonic()))

    @never_raises(lambda: None)
    def get_stats(self) -> Any:
        """Return the figures that have changed; vLLM asks at the end of each step."""
        if self._steps:
            tokens, began = self._steps.popleft()
            if tokens:
                self._prefill = (tokens, time.monotonic() - began)
        return self._figures()

    @never_raises(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Send what the step has collected."""
        del context  # who was scheduled is nothing to the tiers
        for request in self._asked:
            request.runs.clear()
        self._asked.clear()
        prefill, self._prefill = self._prefill, (0, 0.0)
        with self._manager.lock:
            self._manager.on_schedule_end(*prefill)

    def _follow_weights(self) -> None:
        """Retire all KV of other weights. A request from before has some of it: it has nothing to do with tiers now."""
        version = self._weights.version()
        if version == self._weights_version:
            return
        self._weights_version = version
        for request in self._requests.values():
            request.keys = None
            request.runs.clear()
        with self._manager.lock:
            self._manager.set_weights_version(f"{self._weights.name}@{version}")

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Say whether steps are needed without a request."""
        return self._manager.has_pending_work()

    @never_raises(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return nothing: vLLM's events name its own hashes, ours are others."""
        self._manager.take_events()
        return ()

    @never_raises(lambda: None)
    def reset_cache(self) -> None:
        """Forget all chunks; the tiers keep theirs."""
        for request in self._requests.values():
            request.runs.clear()
        with self._manager.lock:
            self._manager.reset_cache()

    @never_raises(lambda: None)
    def shutdown(self) -> None:
        """End within a bound."""
        self._on_shutdown()
        self._manager.shutdown(_DRAIN_SECONDS)
