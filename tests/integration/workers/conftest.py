"""Engines of several ranks, in processes of their own (spawn) or all in this one, on one shared region."""

import contextlib
import hashlib
import itertools
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

import kvtiers
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.scheduler import OffloadScheduler
from kvtiers.types import RequestContext

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes import the module by its name

import rank_process
from rank_process import PAGE, TOKENS, Rank

PATIENCE = 60.0
_numbers = itertools.count()


def layout_of(*, tp=1, stages=((0, 1, 2),), row_layout="direct", blocks_per_chunk=2):
    """A layout of three layers; ``stages[p]``: the layers of pipeline stage p. Rank = stage * tp + tensor rank."""
    tensors = []
    for layer in sorted(layer for stage in stages for layer in stage):
        page = PAGE if row_layout == "replicated" else max(PAGE // tp, PAGE // rank_process.KV_HEADS)
        pages = tuple(page if layer in stage else 0 for stage in stages for _ in range(tp))
        tensors.append(KVTensor(f"layer{layer}", 0, pages, canonical_page_bytes=PAGE))
    return CacheLayout(
        ModelIdentity("m", weights="w"),
        (KVGroup("full", TOKENS),),
        tuple(tensors),
        blocks_per_chunk=blocks_per_chunk,
        world_size=tp * len(stages),
        row_layout=row_layout,
    )


class NoBlocks:
    """An engine that never reuses a block."""

    def hold(self, block_ids):
        pass

    def release(self, block_ids):
        pass


@dataclass(eq=False)
class Request:
    text: str
    first_block: int
    blocks: int
    context: RequestContext = field(init=False)

    def __post_init__(self):
        self.context = RequestContext(f"r{next(_numbers)}")
        self.num_tokens = self.blocks * TOKENS + 1
        self.hashes = [hashlib.sha256(f"{self.text} {i}".encode()).digest() for i in range(self.blocks)]
        self.ids = list(range(self.first_block, self.first_block + self.blocks))
        self.block_hashes, self.block_ids = [self.hashes], [self.ids]


class ProcessRank:
    """A rank in a spawned process."""

    def __init__(self, engine_id, config, layout, rank, tp):
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(
            target=rank_process.serve, args=(child, engine_id, config, layout.to_json(), rank, tp), daemon=True
        )
        self.process.start()
        child.close()

    def __getattr__(self, name):
        return lambda *arguments: (self.send(name, *arguments), self.receive())[1]

    def send(self, name, *arguments):
        self.pipe.send((name, arguments))

    def receive(self):
        assert self.pipe.poll(PATIENCE), f"process {self.process.pid} has not answered for {PATIENCE} s"
        return self.pipe.recv()

    def close(self):
        self.pipe.close()
        self.process.join(PATIENCE)
        assert self.process.exitcode in {0, -9}, self.process.exitcode


class Engine:
    """A scheduler in this process, and its ranks."""

    def __init__(self, layout, tp, *, processes=True, secondary=(), rows=32, page_order="HND"):
        self.layout = layout
        config = {
            "version": 1,
            "primary": {"capacity": rows * layout.row_stride},
            "secondary": list(secondary),
            "lookup_wait": "30s",
            "load_wait": "30s",
        }
        self.manager = kvtiers.open_manager(config, layout)
        worker = {"version": 1, "primary": config["primary"]}
        self.start_rank = partial(ProcessRank if processes else Rank, self.manager.engine_id, worker, layout)
        self.rank_options = (tp,) if processes else (tp, page_order)
        self.ranks = [self.start_rank(rank, *self.rank_options) for rank in range(layout.world_size)]
        self.manager.wait_ready(PATIENCE)
        self.scheduler = OffloadScheduler(self.manager, layout, NoBlocks())
        self.step_until(lambda: all(tier["own"]["open"] for tier in self.manager.stats()["tiers"].values()))

    def add_rank(self, rank):
        self.ranks.append(self.start_rank(rank, *self.rank_options))
        self.manager.wait_ready(PATIENCE)

    def step_until(self, done):
        until = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < until, f"nothing came of it in {PATIENCE} s"
            self.step()
            time.sleep(0.0005)

    def step(self):
        transfers = self.scheduler.end_step()
        outcomes = []
        if transfers.loads or transfers.stores:
            for number, rank in enumerate(self.ranks):
                results = rank.transfer(list(transfers.loads), list(transfers.stores))
                outcomes += self.scheduler.report(results, number)
        return outcomes

    def on_all(self, name, *arguments):
        return [getattr(rank, name)(*arguments) for rank in self.ranks]

    def serve(self, request):
        """Compute a request's blocks on every rank, store them, and wait until they are wherever they go."""
        self.scheduler.add_request(request)
        self.scheduler.lookup(request, 0)
        self.on_all("compute", request.ids, request.hashes)
        self.scheduler.on_computed(request, request.blocks * TOKENS)
        self.step()
        self.scheduler.finish_request(request)
        self.settle()

    def settle(self):
        self.step_until(lambda: not self.scheduler.has_pending_work())

    def load(self, request):
        """Load what is there of a request; return (tokens, wrong pages on each rank)."""
        self.scheduler.add_request(request)
        found = []

        def looked_up():
            tokens = self.scheduler.lookup(request, 0)
            found[:] = [] if tokens is None else [tokens]
            return tokens is not None

        self.step_until(looked_up)
        tokens = self.scheduler.start_load(request, found[0])
        outcomes = self.step()
        self.scheduler.finish_request(request)
        if tokens:
            assert [outcome.success for outcome in outcomes] == [True]
        blocks = tokens // TOKENS
        return tokens, self.on_all("wrong", request.ids[:blocks], request.hashes[:blocks])

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.manager.shutdown(10)


@pytest.fixture
def start():
    """Start engines; all are closed in the end."""
    with contextlib.ExitStack() as closing:

        def begin(layout, tp, **options):
            engine = Engine(layout, tp, **options)
            closing.callback(engine.close)
            return engine

        yield begin
