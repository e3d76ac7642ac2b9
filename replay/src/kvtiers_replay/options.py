"""The options of a replay, and the KV layout that follows from them."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from kvtiers.api import ConfigError
from kvtiers.api.units import format_size
from kvtiers.config import OffloadConfig
from kvtiers.gpu.device_blocks import cuda_problem
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.scheduler.options import StoreMode
from kvtiers_replay.content import CONTENT_VERSION
from kvtiers_replay.workload import Workload

__all__ = ["SMALL_MODEL", "SMALL_MODEL_TOKEN_BYTES", "Device", "ReplayOptions", "check_options", "replay_layout"]

_KV_TENSORS = 2
SMALL_MODEL = "a small model (12 KiB a token, as Qwen2.5-0.5B in bfloat16)"
SMALL_MODEL_TOKEN_BYTES = 24 * 2 * (64 + 64) * 2  # 24 layers, 2 KV heads of 64 for keys and values each, 2 bytes

Device: TypeAlias = Literal["cpu", "cuda"]
"""The place of the reference engine's KV."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a replay.

    ``bytes_per_chunk``: KV of one chunk, of all ranks. ``gpu_blocks``: an engine's pool; 0: as many as its requests
    need, and no prefix cache of its own. ``primary_chunks``: rows of each engine's primary, instead of the config's
    ``primary.capacity``. ``concurrency``: requests in flight in each engine. ``speed``: requests arrive so many times
    as fast as they were recorded; None: back to back. ``step_tokens``: tokens computed in a step at most. ``workers``:
    ranks of each engine in processes of their own; 0: one rank in the engine's. ``engines``: processes among which the
    requests are dealt out. ``prefill_speed``: tokens per second, for estimates. ``device``: where KV lies. ``model``:
    whose bytes these are, as people read it. ``settle_seconds``: how long an engine goes on stepping when all is done,
    to receive the tiers' own figures once more, which come each second. ``answer_seconds``: after which a rank that is
    silent hangs, and an engine after twice as long: it is the one to name the rank. A step takes far less.
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
    model: str = ""
    settle_seconds: float = 0.0
    answer_seconds: float = 60.0

    @property
    def world_size(self) -> int:
        """Ranks of each engine."""
        return self.workers or 1


def replay_layout(config: OffloadConfig, tokens_per_block: int, options: ReplayOptions) -> CacheLayout:
    """Return the reference engine's KV layout: one group of two tensors, or of one where a block has only a few bytes.

    ConfigError if no layout has chunks of this size.

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
    identity = ModelIdentity("replay", weights=CONTENT_VERSION, engine="replay")
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
    _check_memory(workload, options)
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


def _check_memory(workload: Workload, options: ReplayOptions) -> None:
    """Raise ConfigError if the engines' blocks do not fit into this machine's memory."""
    blocks = (options.gpu_blocks or workload.longest * options.concurrency) * options.engines
    nbytes = blocks * options.bytes_per_chunk // options.blocks_per_chunk
    available = _available_memory()
    if options.device == "cpu" and available is not None and nbytes > available:
        raise ConfigError(
            f"the engine's blocks take up to {format_size(nbytes)} ({blocks:,} of "
            f"{format_size(options.bytes_per_chunk // options.blocks_per_chunk)}), and this machine has "
            f"{format_size(available)} of memory to spare; lower --concurrency, --engines, --gpu-blocks or "
            "--bytes-per-chunk, or choose a smaller --model or --kv-dtype"
        )


def _available_memory() -> int | None:
    """Return the bytes that can be had without swapping; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
