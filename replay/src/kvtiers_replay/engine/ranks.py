"""The ranks of the reference engine: they compute, check and transfer in each step, here or each in a process.

As in a real engine, each rank has KV tensors of its own, and the scheduler's side gives all of them the same orders,
one message a step, and waits for their answers.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

import kvtiers
from kvtiers.config import OffloadConfig
from kvtiers.gpu.device_blocks import DeviceBlocks
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.scheduler import WorkerJob
from kvtiers.types import TransferResult
from kvtiers_replay.content import BlockContent
from kvtiers_replay.engine.processes import Child
from kvtiers_replay.options import Device

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["BlockRun", "Ranks", "StepOrders", "StepReply", "open_ranks"]

_OPEN_SECONDS = 60.0  # many processes start at the same time


class BlockRun(NamedTuple):
    """Blocks, and the hashes of what they hold."""

    hashes: Sequence[bytes]
    block_ids: Sequence[int]


@dataclass(slots=True)
class StepOrders:
    """A step's work for every rank, done in this order; ``wait``: answer when its transfers have ended."""

    computes: list[BlockRun] = field(default_factory=list)
    checks: list[BlockRun] = field(default_factory=list)
    loads: list[WorkerJob] = field(default_factory=list)
    stores: list[WorkerJob] = field(default_factory=list)
    wait: bool = False

    def __bool__(self) -> bool:
        return bool(self.computes or self.checks or self.loads or self.stores)


class StepReply(NamedTuple):
    """One rank's answer. ``seconds``: what the worker's calls took on the rank's thread, without waiting."""

    loads: list[TransferResult]
    stores: list[TransferResult]
    wrong_bytes: int
    seconds: float


class _Rank(Protocol):
    def begin(self, orders: StepOrders) -> None: ...
    def reply(self) -> StepReply: ...


class RankSetup(NamedTuple):
    """The parameters of a rank."""

    config: OffloadConfig
    layout: CacheLayout
    engine_id: str
    rank: int
    num_blocks: int
    device: Device


class RankHere:
    """One rank and its KV tensors, in this process."""

    def __init__(self, setup: RankSetup) -> None:
        config, layout, engine_id, rank, num_blocks, device = setup
        pages = [tensor.page_on(rank) for tensor in layout.tensors]
        if device == "cuda":
            blocks = [DeviceBlocks(num_blocks, page, rank) for page in pages]
            tensors: list[Any] = [each.tensor for each in blocks]
            self._content = BlockContent(blocks, rank)
        else:
            tensors = [np.zeros((num_blocks, page), np.uint8) for page in pages]
            self._content = BlockContent(tensors, rank)
        self._storing: set[int] = set()
        self.worker = kvtiers.open_worker(config, layout, tensors, engine_id=engine_id, rank=rank)

    def begin(self, orders: StepOrders) -> None:
        """Carry out a step's orders."""
        wrong = 0
        for run in orders.computes:
            self._content.write(*run)
        for run in orders.checks:
            wrong += self._content.count_wrong(*run)
        begin = time.perf_counter()
        for job in orders.loads:
            self.worker.submit_load(job.job_id, job.chunk_ids, job.blocks)
        for job in orders.stores:
            self.worker.submit_store(job.job_id, job.blocks, job.chunk_ids)
        seconds = time.perf_counter() - begin
        if orders.wait:
            self.worker.wait([job.job_id for job in (*orders.loads, *orders.stores)])
        begin = time.perf_counter()
        results = self.worker.get_finished()
        seconds += time.perf_counter() - begin
        self._storing.update(job.job_id for job in orders.stores)
        stores = [result for result in results if result.job_id in self._storing]
        loads = [result for result in results if result.job_id not in self._storing]
        self._storing.difference_update(result.job_id for result in stores)
        self._reply = StepReply(loads, stores, wrong, seconds)

    def reply(self) -> StepReply:
        """Return the answer to the last orders."""
        return self._reply


class RankProcess:
    """One rank in a process of its own, which hangs if it has its orders and is silent for ``answer_seconds``."""

    def __init__(self, setup: RankSetup, answer_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self.child = Child(f"rank {setup.rank}", _serve, setup)

    def begin(self, orders: StepOrders) -> None:
        """Send a step's orders."""
        self.child.send(orders)

    def reply(self) -> StepReply:
        """Wait for the answer to the last orders. ReplayError if the rank has ended, or does not answer."""
        reply: StepReply = self.child.receive(self._answer_seconds)
        return reply


def _serve(connection: "Connection[Any, Any]", setup: RankSetup) -> None:
    """Be a rank until the engine closes the connection."""
    rank = RankHere(setup)
    try:
        connection.send("open")
        while True:
            rank.begin(connection.recv())
            connection.send(rank.reply())
    finally:
        rank.worker.shutdown()


class Ranks:
    """All ranks of an engine."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks
        self._in_flight = 0

    @property
    def busy(self) -> bool:
        """Return whether some rank has not reported a transfer."""
        return self._in_flight > 0

    def execute(self, orders: StepOrders) -> list[StepReply]:
        """Make all ranks carry out these orders; return their answers, by rank: none if there was nothing to do."""
        if not orders and not self.busy:
            return []
        self._in_flight += (len(orders.loads) + len(orders.stores)) * len(self._ranks)
        for rank in self._ranks:
            rank.begin(orders)
        replies = [rank.reply() for rank in self._ranks]
        self._in_flight -= sum(len(reply.loads) + len(reply.stores) for reply in replies)
        return replies


@contextlib.contextmanager
def open_ranks(
    config: OffloadConfig,
    layout: CacheLayout,
    engine_id: str,
    num_blocks: int,
    *,
    processes: bool,
    device: Device = "cpu",
    answer_seconds: float = 60.0,
) -> Iterator[Ranks]:
    """Open an engine's ranks, each in a process of its own or all in this one. They join its region by themselves."""
    with contextlib.ExitStack() as closing:
        ranks: list[_Rank] = []
        for number in range(layout.world_size):
            setup = RankSetup(config, layout, engine_id, number, num_blocks, device)
            if processes:
                process = RankProcess(setup, answer_seconds)
                closing.callback(process.child.end)
                ranks.append(process)
            else:
                here = RankHere(setup)
                closing.callback(here.worker.shutdown)
                ranks.append(here)
        for rank in ranks:
            if isinstance(rank, RankProcess):
                rank.child.receive(_OPEN_SECONDS)
        yield Ranks(ranks)
