"""The engine with kvtiers: a lookup before a prompt is computed, a store afterwards, and copies in between."""

from collections.abc import Mapping
from typing import Any

import kvtiers
from demo.engine import Engine, Request
from demo.setting import BLOCKS_PER_CHUNK, TOKENS_PER_BLOCK
from demo.transformer import Size
from kvtiers import BLOCK_HASH_ALGORITHM, CacheLayout, KVGroup, KVTensor, ModelIdentity, OffloadScheduler

__all__ = ["TieredEngine"]

_START_SECONDS = 60.0


class TieredEngine(Engine):
    """The same engine over the tiers of a config."""

    def __init__(self, config: Mapping[str, Any], size: Size, num_blocks: int, piece: int) -> None:
        super().__init__(size, num_blocks, piece)
        layout = CacheLayout(
            ModelIdentity("demo", weights=self.model.digest(), hash_algorithm=BLOCK_HASH_ALGORITHM),
            (KVGroup("all", TOKENS_PER_BLOCK),),
            tuple(KVTensor(f"layer.{index}", 0, tensor[0].nbytes) for index, tensor in enumerate(self.kv)),
            blocks_per_chunk=BLOCKS_PER_CHUNK,
        )
        self.manager = kvtiers.open_manager(config, layout)
        self.worker = kvtiers.open_worker(config, layout, self.kv, engine_id=self.manager.engine_id)
        self.scheduler = OffloadScheduler(self.manager, layout, self.pool)
        self.manager.wait_ready(_START_SECONDS)
        self._loading: dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.scheduler.add_request(request)
        super().submit(request)

    def find(self, request: Request, cached: int) -> int | None:
        """Ask which tokens after the engine's own cached ones are in a tier; None: not known yet."""
        return self.scheduler.lookup(request, cached)

    def load(self, request: Request, tokens: int) -> None:
        """Begin to load; ``end_step`` notices the end."""
        if self.scheduler.start_load(request, tokens):
            request.loading = True
            self._loading[request.context.request_id] = request

    def keep(self, request: Request) -> None:
        """Have all full chunks stored that are not yet."""
        self.scheduler.on_computed(request, request.computed)
        if request.done:
            self.scheduler.finish_request(request)

    def end_step(self, prefill_tokens: int, prefill_seconds: float) -> None:
        """Hand this step's transfers to the worker, and take in what has ended."""
        transfers = self.scheduler.end_step(prefill_tokens, prefill_seconds)
        for job in transfers.loads:
            self.worker.submit_load(job.job_id, job.chunk_ids, job.blocks)
        for job in transfers.stores:
            self.worker.submit_store(job.job_id, job.blocks, job.chunk_ids)
        for outcome in self.scheduler.report(self.worker.get_finished()):
            request = self._loading.pop(outcome.request_id)
            request.loading = False
            if outcome.success:
                request.computed = outcome.end
                request.loaded = outcome.end - outcome.start

    def busy(self) -> bool:
        """Say whether there is anything to step for: requests, copies, promotions, cascades."""
        return super().busy() or self.scheduler.has_pending_work()

    def close(self) -> None:
        """End the worker, then the manager: it releases the memory last."""
        self.worker.shutdown()
        self.manager.shutdown()
