"""The offload scheduler: decides in each step which GPU blocks to store and which prefix to load.

::

    add_request --> lookup --> start_load --> report --> on_computed ... --> finish_request
                     ^ | None: ask again                 |
                     | '-- in the next step              v
                     '---------------------------- preempt_request

Engine's thread only. The manager's lock is taken with a step's first ``lookup``, ``start_load`` or ``on_computed`` and
released by ``end_step``; the other calls may also come between steps.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.scheduler.eager import EagerStores
from kvtiers.scheduler.engine import BlockHolder, EngineRequest, FreeQueue
from kvtiers.scheduler.geometry import Geometry
from kvtiers.scheduler.lazy import LazyStores
from kvtiers.scheduler.loads import Loads
from kvtiers.scheduler.options import RequestLimits, SchedulerOptions
from kvtiers.scheduler.request_state import RequestState
from kvtiers.scheduler.transfers import JobsInFlight, LoadOutcome, StepTransfers
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import OffloadPolicy, TransferResult

__all__ = ["OffloadScheduler"]

_log = logging.getLogger("kvtiers.scheduler")


class OffloadScheduler:
    """The decisions on stores and loads. One for each engine, over one manager.

    ``blocks`` keeps GPU blocks in place while a transfer touches them; for lazy stores it is a ``FreeQueue``.
    """

    def __init__(
        self,
        manager: TieringManager,
        layout: CacheLayout,
        blocks: BlockHolder,
        options: SchedulerOptions | None = None,
    ) -> None:
        options = options or SchedulerOptions()
        geometry = Geometry(layout)
        self._manager = manager
        self._geometry = geometry
        self._requests: dict[str, RequestState] = {}
        self._jobs = JobsInFlight(layout.world_size)
        self._loads = Loads(manager, geometry, blocks, self._jobs, options)
        self._stores: EagerStores | LazyStores
        if options.mode == "eager":
            self._stores = EagerStores(manager, geometry, self._jobs, options, blocks)
        elif isinstance(blocks, FreeQueue):
            self._stores = LazyStores(manager, geometry, self._jobs, options, blocks)
        else:
            raise ConfigError(
                f"scheduler: mode 'lazy' needs to see the engine's free blocks, but {type(blocks).__name__} is no "
                "FreeQueue; give it allocated, next_free, hash_of and put_back, or use mode 'eager'"
            )
        self._in_step = False
        self._describes = manager.wants_descriptions

    # -- requests

    def add_request(self, request: EngineRequest) -> None:
        """Record a request before its first ``lookup``. The tokens that it has now are its prompt."""
        with self._briefly():
            policy = self._manager.on_new_request(request.context, request.num_tokens)
            tenant = self._manager.tenant_of(request.context)
        self._requests[request.context.request_id] = RequestState(
            request.context,
            policy is OffloadPolicy.REQUEST_LEVEL,
            RequestLimits.of(request.context) if tenant is not None else RequestLimits(0, 0),
            request.num_tokens,
            [[] for _ in self._geometry.groups],
            tenant or "",
        )

    def preempt_request(self, request: EngineRequest) -> None:
        """Record that the engine takes a request's blocks away, to serve it from its beginning later.

        The next call for it is ``lookup``. Blocks in transfers stay held; a load in flight is not reported.
        """
        tracked = self._requests[request.context.request_id]
        with self._briefly():
            self._loads.unpin(tracked)
            self._manager.on_request_preempted(tracked.context)
        tracked.computed = 0
        tracked.start_over()

    def finish_request(self, request: EngineRequest, computed_tokens: int | None = None) -> None:
        """Record that the engine is done with a request. It may free the blocks: those in transfers stay held.

        Chunks that are full and were not stored yet are stored now. ``computed_tokens``: as for ``on_computed``, if
        that has not been reported yet.
        """
        tracked = self._requests.pop(request.context.request_id)
        if computed_tokens is not None:
            tracked.computed = computed_tokens
        with self._briefly():
            self._loads.unpin(tracked)
            if self._describes:
                self._describe(request, tracked)
            self._stores.on_finished(request, tracked)
            self._manager.record_request(
                tracked.arrival,
                tracked.prompt_tokens,
                request.num_tokens,
                request.block_hashes,
                request.context.params,
            )
            output = max(0, request.num_tokens - tracked.prompt_tokens)
            self._manager.on_request_finished(request.context, output)
        tracked.start_over()

    # -- loads

    def lookup(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """Return how many tokens after ``computed_tokens`` can be loaded; None: not known yet, ask in the next step.

        ``computed_tokens``: the engine's hit in its own prefix cache, looked up again for each call: the chunks that
        the request waits for may have arrived there. At least one token is left to compute. The chunks found stay
        pinned until ``start_load``, a lookup from elsewhere, preemption, or the request's end.
        """
        tracked = self._requests[request.context.request_id]
        self._begin_step()
        if self._describes:
            self._describe(request, tracked)
        if not computed_tokens:
            tracked.outdated = False
        return self._loads.lookup(request, tracked, computed_tokens)

    def start_load(self, request: EngineRequest, tokens: int) -> int:
        """Start to load the first ``tokens`` of the last lookup's hit; return how many will be loaded.

        The request's blocks for them must be allocated. The rest of the hit is unpinned. ``report`` returns its end; a
        load that fails is computed, and further lookups of the request find nothing.
        """
        self._begin_step()
        return self._loads.start(request, self._requests[request.context.request_id], tokens)

    # -- stores

    def on_computed(self, request: EngineRequest, computed_tokens: int) -> None:
        """Store the chunks that are full now, or (lazy stores) note them to be stored in time.

        The KV of the request's first ``computed_tokens`` is in its blocks and stays: no draft tokens. Hits count too.
        """
        tracked = self._requests[request.context.request_id]
        self._begin_step()
        if self._describes:
            self._describe(request, tracked)
        tracked.computed = computed_tokens
        self._stores.on_computed(request, tracked)

    @property
    def blocks_in_flight(self) -> Collection[int]:
        """The GPU blocks that end a chunk whose eager store not all workers have reported yet."""
        return self._stores.in_flight if isinstance(self._stores, EagerStores) else ()

    # -- steps

    def end_step(
        self, prefill_tokens: int = 0, prefill_seconds: float = 0.0, prefill_position: float = 0.0
    ) -> StepTransfers:
        """End the step and return its transfers, for every worker. The last call of every step, also of an idle one.

        ``prefill_tokens``, ``prefill_seconds``, ``prefill_position``: what the engine computed since the last step, and
        how many tokens were before each of those in its prompt, on average.
        """
        self._begin_step()
        try:
            self._loads.end_step()
            self._stores.end_step()
            self._manager.on_schedule_end(prefill_tokens, prefill_seconds, prefill_position)
        finally:
            self._in_step = False
            self._manager.lock.release()
        return self._jobs.take_step()

    def report(self, results: Iterable[TransferResult], rank: int = 0) -> list[LoadOutcome]:
        """Accept a worker's ``get_finished`` results; return the loads that have now ended on all workers.

        The loads of requests that have been preempted or have finished meanwhile are left out. A rank whose process
        has ended needs no report: its transfers fail in the next step, and the next call returns them.
        """
        with self._briefly():
            for result in results:
                if self._jobs.report(result, rank) and not result.success:
                    _log.warning("rank %d: %s", rank, result.error)
            return self._loads.take_outcomes()

    def has_pending_work(self) -> bool:
        """Return whether the engine should keep stepping though it has no request."""
        with self._briefly():
            return bool(self._jobs) or self._manager.has_pending_work()

    # -- life

    def reset_cache(self) -> None:
        """Forget all that was stored, as ``TieringManager.reset_cache`` does. Loads in flight end as failed.

        Running requests offer their chunks again. Blocks in transfers stay held until those are reported.
        """
        with self._briefly():
            self._reset(new_weights=False)
            self._manager.reset_cache()

    def set_weights_version(self, version: str) -> None:
        """Retire all KV of the current weights. The engine empties its own prefix cache at the same time.

        What requests have computed until now is never stored; they store again once they have been preempted.
        """
        with self._briefly():
            self._reset(new_weights=True)
            self._manager.set_weights_version(version)

    # -- inside

    def _reset(self, *, new_weights: bool) -> None:
        for tracked in self._requests.values():
            self._loads.unpin(tracked)
            tracked.store_again()
            tracked.outdated = tracked.outdated or new_weights
        self._loads.reset()
        self._stores.reset(new_weights=new_weights)

    def _describe(self, request: EngineRequest, tracked: RequestState) -> None:
        """Say what KV events need of the chunks that are new, before these are stored or loaded."""
        if chunks := tracked.new_chunks(request, self._geometry.groups, self._geometry.blocks_per_chunk):
            self._manager.describe(chunks)

    def _begin_step(self) -> None:
        if not self._in_step:
            self._manager.lock.acquire()
            self._in_step = True
            for rank in self._manager.take_lost_ranks():
                if lost := self._jobs.lose(rank):
                    _log.warning("rank %d is lost; %d transfers have failed", rank, lost)

    @contextlib.contextmanager
    def _briefly(self) -> Iterator[None]:
        """Hold the manager's lock for a call that may come between steps."""
        if self._in_step:
            yield
        else:
            with self._manager.lock:
                yield
