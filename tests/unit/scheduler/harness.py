"""The offload scheduler over a real manager, a real primary and real copies; the tests play the engine."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtiers.api import JobResult, LookupResult, TransferJob, make_offload_key
from kvtiers.gpu.host_copy import HostCopier
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.scheduler import BlockHolder, LoadOutcome, OffloadScheduler, SchedulerOptions, StepTransfers
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import RequestContext, TransferResult

TOKENS = 16
PAGE = 64
NONE = -1


def layout_of(
    per_chunk: int = 1,
    groups: Sequence[int] = (TOKENS,),
    world_size: int = 1,
    windows: Sequence[int | None] = (),
    state_space: Sequence[int] = (),
) -> CacheLayout:
    """One tensor a group. ``groups``: tokens per block; ``windows``: by group; ``state_space``: which groups."""
    specs = []
    for index, tokens in enumerate(groups):
        window = windows[index] if index < len(windows) else None
        kind = "state_space" if index in state_space else "full_attention" if window is None else "sliding_window"
        specs.append(KVGroup(f"g{index}", tokens, kind, window))
    return CacheLayout(
        ModelIdentity("m"),
        tuple(specs),
        tuple(KVTensor(f"t{index}", index, PAGE) for index in range(len(groups))),
        blocks_per_chunk=per_chunk,
        world_size=world_size,
    )


class ReadyEngine:
    """An engine side whose ranks and tiers are all there, but those that a test takes away."""

    lost_ranks: Collection[int] = ()

    def ready(self) -> bool:
        return True

    def take_lost_ranks(self) -> Collection[int]:
        return self.lost_ranks

    def dma_may_run(self) -> bool:
        return False

    def wait_ready(self, timeout: float) -> None:
        pass

    def new_weights(self, version: str) -> None:
        pass

    def tier_stats(self, name: str) -> dict[str, float]:
        return {}

    def close_tiers(self, timeout: float) -> None:
        pass

    def close_region(self) -> None:
        pass


class Blocks:
    """Who holds which GPU block."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def hold(self, block_ids: Sequence[int]) -> None:
        self.held.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values(), default=0) >= 0
        self.held = +self.held


class Offers(TieringManager):
    """The manager, with notes of what it was offered and asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.offered: list[list[bytes]] = []
        self.loaded: list[list[bytes]] = []

    def prepare_store(self, keys, ctx):
        self.offered.append(list(keys))
        return super().prepare_store(keys, ctx)

    def prepare_load(self, keys, ctx):
        self.loaded.append(list(keys))
        return super().prepare_load(keys, ctx)


class Shelf(EventTier):
    """A tier whose answers and transfers the test decides; loads end with ``land``."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.region = memoryview(b"")
        self.values: dict[bytes, bytes] = {}
        self.unknown: set[bytes] = set()
        self.fails = False
        self.loads: list[TransferJob] = []
        self.loaded: Counter[bytes] = Counter()
        self.finished: list[JobResult] = []

    def lookup(self, key, context) -> LookupResult:
        if key in self.unknown:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.values else LookupResult.MISS

    def submit_store(self, job) -> None:
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            self.values[key] = bytes(self._row(row))
        self.finished.append(JobResult(job.job_id, success=True))

    def submit_load(self, job) -> None:
        self.loads.append(job)
        self.loaded.update(job.keys)

    def land(self) -> None:
        for job in self.loads:
            here = [] if self.fails else [key for key in job.keys if key in self.values]
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                if key in here:
                    self._row(row)[:] = self.values[key]
            self.finished.append(JobResult(job.job_id, len(here) == len(job.keys), here))
        self.loads.clear()

    def get_finished_jobs(self):
        finished, self.finished = self.finished, []
        return finished

    def drain(self, timeout) -> bool:
        return True

    def _row(self, row: int) -> memoryview:
        return self.region[row * self.stride : (row + 1) * self.stride]


@dataclass(eq=False)
class Request:
    name: str
    num_tokens: int
    block_hashes: list[list[bytes]]
    block_ids: list[list[int]]
    params: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context = RequestContext(self.name, self.params)


@dataclass(eq=False)
class Bench:
    layout: CacheLayout
    rows: int = 64
    options: SchedulerOptions | None = None
    blocks: BlockHolder = field(default_factory=Blocks)
    num_blocks: int = 400
    tier: EventTier | None = None

    def __post_init__(self) -> None:
        stride = self.layout.row_stride
        self.region = memoryview(bytearray(self.rows * stride))
        self.primary = CPUPrimaryTier(self.rows, stride, self.region)
        tokens = [self.layout.tokens_per_chunk(group) for group in range(len(self.layout.groups))]
        waits = TieringOptions(lookup_wait=60, load_wait=60, all_tiers=0.9, one_tier=0.9, store_reserve=0.01)
        slots = []
        if self.tier is not None:
            slots = [TierSlot(0, self.tier, TierOptions("shelf"))]
            self.tier.region = self.region
        self.engine = ReadyEngine()
        self.manager = Offers("e", self.primary, slots, tokens, self.engine, waits)
        self.scheduler = OffloadScheduler(self.manager, self.layout, self.blocks, self.options)
        self.gpus = [
            [np.zeros((self.num_blocks, PAGE), np.uint8) for _ in self.layout.tensors]
            for _ in range(self.layout.world_size)
        ]
        self.copiers = [HostCopier(self.layout, rank, tensors) for rank, tensors in enumerate(self.gpus)]
        for copier in self.copiers:
            copier.attach(self.region)

    # -- the engine

    def request(self, name: str, tokens: int, first_block: int = 0, text: str = "", **params: object) -> Request:
        """A request of one text: the hashes of its full blocks, and blocks from ``first_block`` on."""
        text = text or "a" * tokens
        hashes, ids, at = [], [], first_block
        for group in self.layout.groups:
            count = tokens // group.tokens_per_block
            ends = [(i + 1) * group.tokens_per_block for i in range(count)]
            hashes.append([hashlib.sha256(text[:end].encode()).digest() for end in ends])
            ids.append(list(range(at, at + count)))
            at += count
        request = Request(name, tokens, hashes, ids, params)
        self.scheduler.add_request(request)
        return request

    def content(self, block_hash: bytes, tensor: int, rank: int) -> bytes:
        return hashlib.sha256(block_hash + bytes([tensor, rank])).digest() * 2

    def compute(self, request: Request, start: int = 0, end: int | None = None) -> None:
        """Write the KV of these tokens into the request's blocks, on every rank."""
        for rank, tensors in enumerate(self.gpus):
            for group, spec in enumerate(self.layout.groups):
                last = (request.num_tokens if end is None else end) // spec.tokens_per_block
                for index in range(start // spec.tokens_per_block, last):
                    if (block := request.block_ids[group][index]) != NONE:
                        kv = self.content(request.block_hashes[group][index], group, rank)
                        tensors[group][block] = np.frombuffer(kv, np.uint8)

    def wrong(self, request: Request, end: int, start: int = 0) -> list[tuple[int, int, int]]:
        """The (rank, group, block index) that do not hold what a computation from token ``end`` on reads."""
        found = []
        for rank, tensors in enumerate(self.gpus):
            for group, spec in enumerate(self.layout.groups):
                first = start if spec.kind == "full_attention" else max(start, end - ((spec.window or 2) - 1))
                for index in range(first // spec.tokens_per_block, end // spec.tokens_per_block):
                    kv = self.content(request.block_hashes[group][index], group, rank)
                    if tensors[group][request.block_ids[group][index]].tobytes() != kv:
                        found.append((rank, group, index))
        return found

    # -- the workers

    def done(
        self, transfers: StepTransfers, ranks: Iterable[int] | None = None, success: bool = True
    ) -> list[LoadOutcome]:
        """Let the workers copy and report these transfers; return the load outcomes."""
        outcomes = []
        for rank in range(self.layout.world_size) if ranks is None else ranks:
            for job in transfers.loads:
                if success:
                    list(self.copiers[rank].load(job.blocks, job.chunk_ids))
                outcomes += self.scheduler.report([TransferResult(job.job_id, success)], rank)
            for job in transfers.stores:
                if success:
                    list(self.copiers[rank].store(job.blocks, job.chunk_ids))
                outcomes += self.scheduler.report([TransferResult(job.job_id, success)], rank)
        return outcomes

    # -- all together

    def serve(self, request: Request) -> None:
        """Compute a whole request, whatever could be loaded, and store it."""
        self.compute(request)
        self.scheduler.on_computed(request, request.num_tokens)
        self.done(self.scheduler.end_step())
        self.scheduler.finish_request(request)
        self.done(self.scheduler.end_step())

    def store_step(self, request: Request, computed: int | None = None) -> StepTransfers:
        """Compute a request and end the step; return the step's transfers."""
        self.compute(request, 0, computed)
        self.scheduler.on_computed(request, request.num_tokens if computed is None else computed)
        return self.scheduler.end_step()

    def lookup(self, request: Request, computed: int = 0) -> int | None:
        found = self.scheduler.lookup(request, computed)
        self.scheduler.end_step()
        return found

    def load(self, request: Request, computed: int = 0) -> int:
        """Look up and load all that is there; return how many tokens that were."""
        tokens = self.scheduler.lookup(request, computed)
        assert tokens is not None
        started = self.scheduler.start_load(request, tokens)
        outcomes = self.done(self.scheduler.end_step())
        if started:
            assert outcomes == [LoadOutcome(request.name, True, computed, computed + started)]
        return started

    def keys(self, request: Request, group: int = 0) -> list[bytes]:
        step = self.layout.blocks_per_chunk
        return [make_offload_key(block_hash, group) for block_hash in request.block_hashes[group][step - 1 :: step]]

    def present(self, request: Request, group: int = 0) -> list[bool]:
        """Which of the request's chunks are readable in the primary."""
        return [found is LookupResult.HIT for found in self.primary.find(self.keys(request, group))]


def stored(transfers: StepTransfers) -> list[int]:
    """The blocks that a step stores."""
    return [block for job in transfers.stores for block in job.blocks.block_ids.tolist()]
