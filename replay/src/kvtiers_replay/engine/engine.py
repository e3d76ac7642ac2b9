"""The reference engine: it computes requests by writing their blocks' bytes, some tokens a step, and checks them.

It is the smallest engine that uses all of kvtiers: a block pool with prefix caching, requests that are served
side by side, prefill in chunks, preemption when blocks run out, and the offload scheduler, which decides about KV.

::

    arrivals --> waiting --lookup, blocks--> running: loading --> computing --> done
                    ^                           |
                    '------- preempted ---------'
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from kvtiers.scheduler import LoadOutcome, OffloadScheduler
from kvtiers.types import TENANT_FIELD, RequestContext
from kvtiers_replay.engine.block_pool import BlockPool
from kvtiers_replay.engine.measures import Measures
from kvtiers_replay.engine.ranks import BlockRun, Ranks, StepOrders, StepReply
from kvtiers_replay.workload import Arrivals

__all__ = ["EngineOptions", "Interrupted", "ReplayEngine"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Interrupted(Exception):  # noqa: N818 -- a wish, not an error
    """The user has stopped the replay."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``concurrency``: requests in flight. With one, each begins when everything before it has ended, cascades too.

    ``step_tokens``: what is computed in a step at most. ``prefill_speed``: tokens per second, of the engine that this
    one stands for; no time passes for it.
    """

    tokens_per_block: int
    concurrency: int
    step_tokens: int
    prefill_speed: float


@dataclass(slots=True, eq=False)
class _Request:
    """A request as the offload scheduler sees it (one group), and its state."""

    context: RequestContext
    num_tokens: int
    block_hashes: tuple[list[bytes]]
    infinite_hits: int
    block_ids: tuple[list[int]] = field(default_factory=lambda: ([],))
    computed: int = 0
    """The number of its first tokens whose KV is in its blocks."""
    unchecked: bool = False
    """Blocks computed by others and not checked yet."""
    preempted: bool = False
    in_pool: int = 0
    loaded: int = 0
    asked_at: float | None = None
    answered: bool = False
    load_at: float = 0.0
    delay: float = 0.0


class ReplayEngine:
    """Serves requests and counts into ``measures``. ``stop``: set by another thread to end it within a step."""

    def __init__(
        self,
        scheduler: OffloadScheduler,
        ranks: Ranks,
        pool: BlockPool,
        options: EngineOptions,
        measures: Measures,
        stop: threading.Event,
    ) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._pool = pool
        self._options = options
        self._measures = measures
        self._stop = stop
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._loading: dict[str, _Request] = {}
        self._served = 0
        self._begun: set[bytes] = set()
        """Blocks of the requests that were given blocks: what this engine may have stored."""
        # Of the step:
        self._orders = StepOrders()
        self._computing: list[tuple[_Request, range]] = []
        self._budget = 0
        self._stall = 0.0

    @property
    def waiting(self) -> int:
        """Requests that have arrived and have no blocks."""
        return len(self._waiting)

    def run(self, arrivals: Arrivals, stepped: Callable[[], None] = lambda: None) -> None:
        """Serve all requests, and step on until nothing is in flight. ``stepped`` is called after each step."""

        def all_done() -> bool:
            self._admit(arrivals)
            stepped()
            in_flight = self._waiting or self._running
            return not in_flight and arrivals.exhausted and not self._scheduler.has_pending_work()

        self.step_until(all_done)

    def step_until(self, done: Callable[[], bool], timeout: float = math.inf) -> None:
        """Step until ``done()``; a pause between steps grows while only others (the tiers) are at work."""
        until = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while not done() and time.monotonic() < until:
            if self._stop.is_set():
                raise Interrupted
            if self._step():
                pause = _SHORTEST_PAUSE
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    # -- requests

    def _admit(self, arrivals: Arrivals) -> None:
        alone = self._options.concurrency == 1
        while len(self._waiting) + len(self._running) < self._options.concurrency:
            if alone and self._scheduler.has_pending_work():
                return
            arrived = arrivals.take()
            if arrived is None:
                return
            request, infinite_hits = arrived
            context = RequestContext(f"replay-{self._served}", request.params)
            self._served += 1
            admitted = _Request(context, request.num_tokens, (list(request.block_hashes),), infinite_hits)
            self._kvtiers(self._scheduler.add_request, admitted)
            self._waiting.append(admitted)

    def _preempt(self, request: _Request) -> None:
        """Preempt a request: free its blocks; it is served again from its beginning, before all others that wait."""
        self._running.remove(request)
        self._kvtiers(self._scheduler.preempt_request, request)
        self._pool.release(request.block_ids[0])
        request.block_ids[0].clear()
        request.computed = 0
        request.preempted = True
        self._loading.pop(request.context.request_id, None)
        self._waiting.appendleft(request)
        self._measures.preemptions += 1

    def _finish(self, request: _Request) -> None:
        self._running.remove(request)
        self._kvtiers(self._scheduler.finish_request, request)
        self._pool.release(request.block_ids[0])
        measures, hits = self._measures, request.in_pool + request.loaded
        measures.requests += 1
        tenant = request.context.params.get(TENANT_FIELD)
        if isinstance(tenant, str):
            measures.by_tenant.setdefault(tenant, Counter()).update(
                requests=1, references=len(request.block_hashes[0]), hits=hits
            )
        measures.references += len(request.block_hashes[0])
        measures.gpu_hits += request.in_pool
        measures.loaded += request.loaded
        measures.infinite_hits += request.infinite_hits
        measures.tokens += request.num_tokens
        measures.tokens_saved += hits * self._options.tokens_per_block
        measures.prompts.append(request.num_tokens)
        measures.computed.append(request.num_tokens - hits * self._options.tokens_per_block)
        measures.delays.append(request.delay)

    # -- a step

    def _step(self) -> bool:
        """Do one step; return whether it changed anything."""
        self._orders, self._computing, self._budget = StepOrders(), [], self._options.step_tokens
        preemptions, at = self._measures.preemptions, 0
        while at < len(self._running):  # who is preempted meanwhile stands further behind, or is the last
            self._compute(self._running[at])
            at += 1
        started = self._start_waiting() if preemptions == self._measures.preemptions else 0
        in_flight = len(self._waiting) + len(self._running)
        tokens = self._options.step_tokens - self._budget
        transfers = self._kvtiers(self._scheduler.end_step, tokens, tokens / self._options.prefill_speed)
        self._orders.loads, self._orders.stores = transfers.loads, transfers.stores
        self._orders.wait = in_flight <= 1  # there is nothing else to do meanwhile
        replies = self._ranks.execute(self._orders)
        self._take(replies)
        for request, blocks in self._computing:
            self._publish(request, blocks)
            if request.computed == request.num_tokens:
                self._finish(request)
        if in_flight:
            self._measures.stalls.append(self._stall)
        self._stall = 0.0
        heard = any(reply.loads or reply.stores for reply in replies)
        return bool(self._orders or self._computing or started or heard)

    def _start_waiting(self) -> int:
        """Give blocks to those that wait, as long as there are any; return how many requests that were."""
        before = len(self._running)
        for request in list(self._waiting):
            if not self._budget or not self._start(request):
                break
        return len(self._running) - before

    def _start(self, request: _Request) -> bool:
        """Serve a request from its beginning, unless a tier's answer is still to come; False: there is no room."""
        per_block, hashes = self._options.tokens_per_block, request.block_hashes[0]
        # The last token is always computed, so a block that ends with it is of no use.
        in_pool = self._pool.match(hashes[: max(0, request.num_tokens - 1) // per_block])
        tokens = self._look_up(request, len(in_pool) * per_block)
        if tokens is None:
            return True
        cached = len(in_pool) * per_block + tokens
        first_end = cached if tokens else min(request.num_tokens, cached + self._budget)
        self._pool.hold(in_pool)
        blocks = self._pool.allocate(first_end // per_block - len(in_pool))
        if blocks is None:
            self._pool.release(in_pool)
            return False
        self._waiting.remove(request)
        self._running.append(request)
        request.block_ids[0].extend(in_pool + blocks)
        request.computed = len(in_pool) * per_block
        request.unchecked = bool(in_pool)
        if not request.preempted:
            request.in_pool = len(in_pool)
            self._measures.foreign_hits += sum(each not in self._begun for each in hashes[: cached // per_block])
            self._begun.update(hashes)
        if self._kvtiers(self._scheduler.start_load, request, tokens):
            request.load_at = time.perf_counter()
            self._loading[request.context.request_id] = request
        else:
            self._compute(request)
        return True

    def _look_up(self, request: _Request, computed: int) -> int | None:
        begin = time.perf_counter()
        tokens = self._kvtiers(self._scheduler.lookup, request, computed)
        if request.asked_at is None:
            request.asked_at = begin
        if tokens is not None and not request.answered:
            request.answered = True
            request.delay += time.perf_counter() - request.asked_at
            self._measures.asked.append(request.delay)
        return tokens

    def _compute(self, request: _Request) -> None:
        """Compute as many of a request's tokens as the step still takes, if it has, or gets, blocks for them."""
        if request.context.request_id in self._loading or not self._budget:
            return
        per_block, start = self._options.tokens_per_block, request.computed
        end = min(request.num_tokens, start + self._budget)
        missing = end // per_block - len(request.block_ids[0])
        if missing > 0 and not self._make_room(request, missing):
            return
        new = range(start // per_block, end // per_block)
        if new:
            self._orders.computes.append(_run_of(request, new))
        if end == request.num_tokens and self._options.concurrency > 1:
            # Others' transfers run beside it: nothing may have touched what it computed itself.
            self._orders.checks.append(_run_of(request, range(end // per_block)))
        elif request.unchecked:
            self._orders.checks.append(_run_of(request, range(start // per_block)))
        request.unchecked = False
        request.computed = end
        self._budget -= end - start
        self._kvtiers(self._scheduler.on_computed, request, end)
        self._computing.append((request, new))

    def _make_room(self, request: _Request, count: int) -> bool:
        """Give a running request more blocks; those who came last lose theirs, perhaps it itself: False then."""
        while (blocks := self._pool.allocate(count)) is None:
            last = self._running[-1]
            self._preempt(last)
            if last is request:
                return False
        request.block_ids[0].extend(blocks)
        return True

    def _publish(self, request: _Request, blocks: range) -> None:
        """Put blocks that hold their KV now into the engine's own prefix cache."""
        self._pool.publish(*_run_of(request, blocks))

    def _take(self, replies: Sequence[StepReply]) -> None:
        measures = self._measures
        for rank, reply in enumerate(replies):
            measures.wrong_bytes += reply.wrong_bytes
            measures.take_loads(reply.loads, len(replies))
            measures.take_stores(reply.stores, len(replies))
            for outcome in self._kvtiers(self._scheduler.report, [*reply.loads, *reply.stores], rank):
                self._loaded(outcome)
        # The ranks work side by side, and the step waits for all of them.
        self._stall += max((reply.seconds for reply in replies), default=0.0)

    def _loaded(self, outcome: LoadOutcome) -> None:
        request = self._loading.pop(outcome.request_id)
        waited = time.perf_counter() - request.load_at
        self._measures.waited.append(waited)
        if not request.preempted:
            request.delay += waited
        if not outcome.success:
            self._measures.failed_loads += 1
            return
        blocks = range(outcome.start // self._options.tokens_per_block, outcome.end // self._options.tokens_per_block)
        self._publish(request, blocks)
        request.computed = outcome.end
        request.unchecked = True
        if not request.preempted:
            request.loaded = len(blocks)

    def _kvtiers(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Make a call and count its time as the step's."""
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._stall += time.perf_counter() - begin


def _run_of(request: _Request, blocks: range) -> BlockRun:
    places = slice(blocks.start, blocks.stop)
    return BlockRun(request.block_hashes[0][places], request.block_ids[0][places])
