"""What can be chosen for a replay, and the KV layout that follows from it."""

import sys
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig
from kvtiers.gpu.device_blocks import cuda_problem
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.scheduler.options import StoreMode
from kvtiers_replay.content import CONTENT_VERSION
from kvtiers_replay.workload import Workload

__all__ = ["Device", "ReplayOptions", "check_options", "replay_layout"]

_KV_TENSORS = 2

Device: TypeAlias = Literal["cpu", "cuda"]
"""Where the reference engine's KV lies."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is replayed how.

    ``bytes_per_chunk``: KV of one chunk, of all ranks. ``gpu_blocks``: an engine's pool; 0: as many as its requests
    need, and no prefix cache of its own. ``primary_chunks``: rows of each engine's primary, instead of the config's
    ``primary.capacity``. ``concurrency``: requests in flight in each engine. ``speed``: requests arrive so many times
    as fast as they were recorded; None: back to back. ``step_tokens``: tokens computed in a step at most. ``workers``:
    ranks of each engine in processes of their own; 0: one rank in the engine's. ``engines``: processes among which the
    requests are dealt out. ``prefill_speed``: tokens per second, for estimates. ``device``: where KV lies.
    """

    bytes_per_chunk: int = 4032
    gpu_blocks: int = 0
    primary_chunks: int | None = None
    blocks_per_chunk: int = 1
    concurrency: int = 1
    speed: float | None = None
    step_tokens: int = 8192
    store: StoreMode = "eager"
    workers: int = 0
    engines: int = 1
    prefill_speed: float = 10_000.0
    device: Device = "cpu"

    @property
    def world_size(self) -> int:
        """Ranks of each engine."""
        return self.workers or 1


def replay_layout(config: OffloadConfig, tokens_per_block: int, options: ReplayOptions) -> CacheLayout:
    """Return the reference engine's KV layout: one group, two tensors (one, for a few bytes). ConfigError if none fits.

    All ranks hold equal parts of each block.
    """
    parts = options.blocks_per_chunk * options.world_size
    if options.bytes_per_chunk % parts:
        raise ConfigError(
            f"--bytes-per-chunk {options.bytes_per_chunk}: a chunk has {options.blocks_per_chunk} blocks of "
            f"{options.world_size} ranks; give a multiple of {parts}"
        )
    page = options.bytes_per_chunk // parts
    tensors = _KV_TENSORS if page >= _KV_TENSORS else 1
    sizes = [page // tensors] * tensors
    sizes[0] += page - sum(sizes)
    identity = ModelIdentity("replay", weights=CONTENT_VERSION)
    if config.model is not None:
        identity = replace(identity, **config.model.identity())
    return CacheLayout(
        identity,
        (KVGroup("replay", tokens_per_block),),
        tuple(KVTensor(f"replay.{index}", 0, size) for index, size in enumerate(sizes)),
        blocks_per_chunk=options.blocks_per_chunk,
        world_size=options.world_size,
    )


def check_options(workload: Workload, options: ReplayOptions) -> None:
    """Raise ConfigError if this workload cannot be replayed so."""
    if options.gpu_blocks and options.gpu_blocks < workload.longest:
        raise ConfigError(
            f"--gpu-blocks {options.gpu_blocks}: the longest request has {workload.longest} full blocks; give that "
            "many at least, or 0 for blocks without a prefix cache"
        )
    if options.device == "cuda" and (problem := cuda_problem()):
        raise ConfigError(f"--device cuda: {problem}")
    if options.workers and sys.platform != "linux":
        raise ConfigError("--workers needs memory that processes share, which there is on Linux only; leave it out")
    if options.store == "lazy" and not options.gpu_blocks:
        raise ConfigError(
            "--store lazy stores what the engine's own prefix cache is about to lose, and without --gpu-blocks it has "
            f"none; give {workload.longest} at least"
        )
