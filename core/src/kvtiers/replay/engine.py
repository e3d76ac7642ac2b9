"""The reference engine: one request after the other, computed by writing its blocks' bytes, checked when they return.

It is as small as an engine can be that uses kvtiers in full: a block pool with prefix caching, KV tensors in host
memory, the offload scheduler, and one worker.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtiers.base import RequestContext, TransferResult
from kvtiers.gpu.worker import GpuWorker
from kvtiers.replay.block_pool import BlockPool
from kvtiers.replay.content import BlockContent
from kvtiers.replay.report import Link, ReplayReport
from kvtiers.replay.workload import ReplayRequest
from kvtiers.scheduler import LoadOutcome, OffloadScheduler

__all__ = ["Interrupted", "ReplayEngine"]

STORE_LINK, LOAD_LINK = "gpu -> primary", "primary -> gpu"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3


class Interrupted(Exception):  # noqa: N818 -- a wish, not an error
    """The user wants the replay to end."""


@dataclass(slots=True, eq=False)
class _Request:
    """A running request, as the offload scheduler sees it (one group)."""

    context: RequestContext
    num_tokens: int
    block_hashes: tuple[list[bytes]]
    block_ids: tuple[list[int]] = field(default_factory=lambda: ([],))


class ReplayEngine:
    """Runs requests and counts into ``report``. ``stop``: set by anyone to end within a step."""

    def __init__(
        self,
        scheduler: OffloadScheduler,
        worker: GpuWorker,
        pool: BlockPool,
        content: BlockContent,
        tokens_per_block: int,
        report: ReplayReport,
        stop: threading.Event,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._pool = pool
        self._content = content
        self._tokens_per_block = tokens_per_block
        self._report = report
        self._stop = stop
        self._outcome: LoadOutcome | None = None
        self._seen: set[bytes] = set()

    def run(self, request: ReplayRequest) -> None:
        """Serve one request to its end. Everything that earlier ones began has ended before its lookup."""
        if self._stop.is_set():
            raise Interrupted
        self.settle()
        running = _Request(
            RequestContext(f"replay-{self._report.requests}"), request.num_tokens, (list(request.block_hashes),)
        )
        self._scheduler.add_request(running)
        blocks = running.block_ids[0]
        try:
            in_pool, loaded = self._load(running, blocks)
            cached = in_pool + loaded
            self._check(running, cached)
            self._compute(running, cached)
        finally:
            self._scheduler.finish_request(running)
            self._pool.release(blocks)
        self._count(request, in_pool, loaded)

    def settle(self) -> None:
        """Step until nothing is under way any more: no copy, no promotion, no cascade."""
        self.step_until(lambda: not self._scheduler.has_pending_work())

    def _load(self, running: _Request, blocks: list[int]) -> tuple[int, int]:
        """Give the request its blocks; return how many of them were in the pool, and how many were loaded then."""
        hashes = running.block_hashes[0]
        # The last token is always computed, so a block that ends with it is of no use.
        usable = min(len(hashes), (running.num_tokens - 1) // self._tokens_per_block)
        blocks += self._pool.match(hashes[:usable])
        in_pool = len(blocks)
        found: list[int] = []

        def looked_up() -> bool:
            tokens = self._scheduler.lookup(running, in_pool * self._tokens_per_block)
            found.extend([] if tokens is None else [tokens])
            return tokens is not None

        self.step_until(looked_up)
        blocks += self._allocate(len(hashes) - in_pool)
        loading = self._scheduler.start_load(running, found[0]) // self._tokens_per_block
        if not loading:
            return in_pool, 0
        self._outcome = None
        self.step_until(lambda: self._outcome is not None)
        if self._outcome is None or not self._outcome.success:
            self._report.failed_loads += 1
            return in_pool, 0
        return in_pool, loading

    def _allocate(self, count: int) -> list[int]:
        allocated: list[int] = []

        def done() -> bool:
            allocated.extend(self._pool.allocate(count) or ())
            return len(allocated) == count

        self.step_until(done)
        return allocated

    def _check(self, running: _Request, cached: int) -> None:
        hashes, blocks = running.block_hashes[0][:cached], running.block_ids[0][:cached]
        self._report.wrong_bytes += self._content.count_wrong(hashes, blocks)

    def _compute(self, running: _Request, cached: int) -> None:
        hashes, blocks = running.block_hashes[0], running.block_ids[0]
        self._content.write(hashes[cached:], blocks[cached:])
        self._pool.publish(hashes, blocks)
        self._scheduler.on_computed(running, len(hashes) * self._tokens_per_block)
        self._step()

    def _count(self, request: ReplayRequest, in_pool: int, loaded: int) -> None:
        report, hashes = self._report, request.block_hashes
        cached = in_pool + loaded
        usable = min(len(hashes), (request.num_tokens - 1) // self._tokens_per_block)
        report.requests += 1
        report.references += len(hashes)
        report.prefix_hits += cached
        if report.gpu_hits is not None:
            report.gpu_hits += in_pool
        report.loaded += loaded
        report.infinite_hits += next((i for i in range(usable) if hashes[i] not in self._seen), usable)
        self._seen.update(hashes)
        report.tokens += request.num_tokens
        report.tokens_saved += cached * self._tokens_per_block

    # -- steps

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

    def _step(self) -> bool:
        """End a step: run its transfers to their end and report them. Say whether there were any."""
        transfers = self._scheduler.end_step()
        for job in transfers.loads:
            self._worker.submit_load(job.job_id, job.chunk_ids, job.blocks)
        for job in transfers.stores:
            self._worker.submit_store(job.job_id, job.blocks, job.chunk_ids)
        # One request at a time: there is nothing else to do meanwhile.
        self._worker.wait([job.job_id for job in (*transfers.loads, *transfers.stores)])
        results = self._worker.get_finished()
        self._measure(results, {job.job_id for job in transfers.stores})
        for outcome in self._scheduler.report(results):
            self._outcome = outcome
        return bool(results)

    def _measure(self, results: Iterable[TransferResult], stores: set[int]) -> None:
        links = self._report.links
        for result in results:
            is_store = result.job_id in stores
            name = STORE_LINK if is_store else LOAD_LINK
            links[name] = links.get(name, Link()).plus(result.nbytes, result.seconds)
            if is_store and not result.success:
                self._report.failed_stores += 1
