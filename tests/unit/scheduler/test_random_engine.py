"""An engine that does anything in any order: what comes back is right, and in the end nothing is held or pinned."""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvtiers.scheduler import SchedulerOptions, WorkerJob
from kvtiers.types import TransferResult
from kvtiers_replay.engine.block_pool import BlockPool

from .harness import NONE, PAGE, Bench, Request, Shelf, layout_of

TEXTS = ["a" * 96, "a" * 40 + "b" * 56, "a" * 64 + "c" * 32, "d" * 96]
BLOCKS, ROWS = 90, 40


class Pool(BlockPool):
    """Its cache is by hash and group."""

    def hash_of(self, block_id: int) -> bytes | None:
        found = super().hash_of(block_id)
        return None if found is None else found[:-1]

    def forget(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()


@dataclass(eq=False)
class Running:
    request: Request
    state: str = "waiting"  # loading, running
    computed: int = 0
    mixed: bool = False  # of old and new weights


@dataclass(eq=False)
class Job:
    job: WorkerJob
    is_store: bool
    waiting: list[int]


class VersionedBench(Bench):
    version = 0

    def content(self, block_hash: bytes, tensor: int, rank: int) -> bytes:
        return hashlib.sha256(block_hash + bytes([tensor, rank, self.version])).digest() * 2


LAYOUTS = [((8,), ()), ((8, 8), (None, 20)), ((8, 16), ()), ((8, 8, 16), (None, 12, 33))]


class AnyEngine:
    """Draws what it is and what it does from ``chance``."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        groups, windows = chance.choice(LAYOUTS)
        layout = layout_of(chance.randint(1, 3), groups, chance.randint(1, 2), windows)
        lazy, caching = chance.random() < 0.4, chance.random() < 0.7
        self.pool = Pool(BLOCKS, caching=caching)
        options = SchedulerOptions(mode="lazy" if lazy else "eager", prefix_caching=caching)
        self.shelf = Shelf(layout.row_stride)
        self.bench = VersionedBench(
            layout,
            ROWS,
            options,
            blocks=self.pool,
            num_blocks=BLOCKS,
            tier=self.shelf if chance.random() < 0.6 else None,
        )
        self.scheduler = self.bench.scheduler
        self.running: list[Running] = []
        self.jobs: list[Job] = []
        self.names = 0
        self.chunks: dict[bytes, tuple[int, list[bytes]]] = {}  # key -> group, hashes of its blocks

    # -- requests

    def arrive(self) -> None:
        if len(self.running) == 5:
            return
        self.names += 1
        request = self.bench.request(f"r{self.names}", self.chance.randint(1, 96), text=self.chance.choice(TEXTS))
        for group, ids in enumerate(request.block_ids):
            ids.clear()
            step = self.bench.layout.blocks_per_chunk
            for place, key in enumerate(self.bench.keys(request, group)):
                self.chunks[key] = group, request.block_hashes[group][place * step : (place + 1) * step]
        self.running.append(Running(request))

    def schedule(self) -> None:
        if (one := self.pick("waiting")) is None:
            return
        request = one.request
        found = [self.match(request, group) for group in range(len(request.block_ids))]
        computed = min(
            len(ids) * spec.tokens_per_block for ids, spec in zip(found, self.bench.layout.groups, strict=True)
        )
        computed = min(computed, request.num_tokens - 1) // 48 * 48
        tokens = self.scheduler.lookup(request, computed)
        needed = [
            len(hashes) - computed // spec.tokens_per_block
            for hashes, spec in zip(request.block_hashes, self.bench.layout.groups, strict=True)
        ]
        if tokens is None or sum(needed) > self.pool.free:
            for ids in found:
                self.pool.release(ids)
            return
        for group, spec in enumerate(self.bench.layout.groups):
            kept = computed // spec.tokens_per_block
            self.pool.release(found[group][kept:])
            request.block_ids[group][:] = found[group][:kept]
        for group, count in enumerate(needed):
            request.block_ids[group] += self.pool.allocate(count)
        one.computed, one.mixed = computed, False
        take = tokens if self.chance.random() < 0.8 else self.chance.randint(0, tokens)
        one.state = "loading" if self.scheduler.start_load(request, take) else "running"
        assert self.bench.wrong(request, computed) == []

    def compute(self) -> None:
        if (one := self.pick("running")) is None:
            return
        request = one.request
        start, one.computed = one.computed, min(one.computed + self.chance.randint(1, 60), request.num_tokens)
        for group, spec in enumerate(self.bench.layout.groups):
            first, last = start // spec.tokens_per_block, one.computed // spec.tokens_per_block
            for index in range(first, last):
                for rank, tensors in enumerate(self.bench.gpus):
                    kv = self.bench.content(request.block_hashes[group][index], group, rank)
                    kv = b"?" * PAGE if one.mixed else kv
                    tensors[group][request.block_ids[group][index]] = np.frombuffer(kv, np.uint8)
            if not one.mixed:
                names = [h + bytes([group]) for h in request.block_hashes[group][first:last]]
                self.pool.publish(names, request.block_ids[group][first:last])
        self.scheduler.on_computed(request, one.computed)
        for group, spec in enumerate(self.bench.layout.groups):
            if spec.window is not None:
                out = max(0, one.computed - spec.window + 1) // spec.tokens_per_block
                self.free(request, group, out)

    def preempt(self) -> None:
        if one := self.pick("running", "loading"):
            self.give_up(one)

    def finish(self) -> None:
        if one := self.pick("running", "running", "loading", "waiting"):
            gives_count = one.state == "running" and self.chance.random() < 0.5
            self.scheduler.finish_request(one.request, one.computed if gives_count else None)
            self.release_all(one.request)
            self.running.remove(one)

    # -- steps and workers

    def step(self) -> None:
        transfers = self.scheduler.end_step()
        ranks = range(self.bench.layout.world_size)
        self.jobs += [Job(job, False, list(ranks)) for job in transfers.loads]
        self.jobs += [Job(job, True, list(ranks)) for job in transfers.stores]

    def report(self) -> None:
        if self.jobs:
            one = self.chance.choice(self.jobs)
            self.copy(one, self.chance.choice(one.waiting), success=self.chance.random() < 0.95)

    def report_all(self) -> None:
        while self.jobs:
            self.copy(self.jobs[0], self.jobs[0].waiting[0], success=True)

    def copy(self, one: Job, rank: int, *, success: bool) -> None:
        if success:
            copier = self.bench.copiers[rank]
            list((copier.store if one.is_store else copier.load)(one.job.blocks, one.job.chunk_ids))
        one.waiting.remove(rank)
        if not one.waiting:
            self.jobs.remove(one)
        for outcome in self.scheduler.report([TransferResult(one.job.job_id, success, error="lost")], rank):
            (loaded,) = [running for running in self.running if running.request.name == outcome.request_id]
            assert loaded.state == "loading"
            loaded.state = "running"
            if outcome.success:
                loaded.computed = outcome.end
                assert self.bench.wrong(loaded.request, outcome.end, outcome.start) == []

    def land(self) -> None:
        self.shelf.fails = self.chance.random() < 0.2
        self.shelf.land()

    def forget_values(self) -> None:
        if self.shelf.values:
            self.shelf.values.pop(self.chance.choice(sorted(self.shelf.values)))

    # -- life

    def reset(self) -> None:
        self.scheduler.reset_cache()

    def new_weights(self) -> None:
        self.scheduler.set_weights_version(str(self.bench.version + 1))
        self.bench.version += 1
        self.pool.forget()
        self.shelf.values.clear()  # they have other names now
        for one in list(self.running):
            if one.state != "waiting" and self.chance.random() < 0.5:
                self.give_up(one)
            elif one.state != "waiting":
                one.mixed = True

    # -- inside

    def pick(self, *states: str) -> Running | None:
        some = [one for one in self.running if one.state in states]
        return self.chance.choice(some) if some else None

    def match(self, request: Request, group: int) -> list[int]:
        found = self.pool.match([h + bytes([group]) for h in request.block_hashes[group]])
        self.pool.hold(found)
        return found

    def give_up(self, one: Running) -> None:
        self.scheduler.preempt_request(one.request)
        self.release_all(one.request)
        one.state, one.computed, one.mixed = "waiting", 0, False

    def free(self, request: Request, group: int, count: int) -> None:
        ids = request.block_ids[group]
        self.pool.release([block for block in ids[:count] if block != NONE])
        ids[:count] = [NONE] * len(ids[:count])

    def release_all(self, request: Request) -> None:
        for group, ids in enumerate(request.block_ids):
            self.free(request, group, len(ids))
            ids.clear()

    # -- the test

    def live(self, actions: int) -> None:
        weights = {
            self.arrive: 10,
            self.schedule: 20,
            self.compute: 20,
            self.finish: 8,
            self.preempt: 2,
            self.step: 20,
            self.report: 20,
            self.report_all: 3,
            self.land: 10,
            self.forget_values: 1,
            self.reset: 0.3,
            self.new_weights: 0.3,
        }
        for action in self.chance.choices(list(weights), list(weights.values()), k=actions):
            action()

    def end(self) -> None:
        for one in self.running:
            self.scheduler.finish_request(one.request)
            self.release_all(one.request)
        self.running.clear()
        steps = 0
        while steps < 5 or self.scheduler.has_pending_work() or self.jobs:
            self.step()
            self.report_all()
            self.land()
            steps += 1
            assert steps < 50, "work that never ends"
        assert self.pool.free == BLOCKS
        assert not self.scheduler.blocks_in_flight
        primary = self.bench.primary
        assert self.bench.manager.stats()["engine"]["misuse"] == primary.misuse == 0
        assert primary.pinned_rows == primary.pending_rows == primary.quarantined_rows == 0
        assert primary.free_rows + primary.evictable + primary.protected_rows == ROWS
        self.check_rows()

    def check_rows(self) -> None:
        layout, stride = self.bench.layout, self.bench.layout.row_stride
        for key, row in self.bench.primary._row_of.items():
            group, hashes = self.chunks[key]
            want = b"".join(
                self.bench.content(block_hash, group, rank)
                for rank in range(layout.world_size)
                for block_hash in hashes
            )
            assert self.bench.region[row * stride : row * stride + len(want)] == want


@pytest.mark.parametrize("seed", range(40))
def test_whatever_an_engine_does_what_comes_back_is_right_and_nothing_stays_held(seed) -> None:
    engine = AnyEngine(random.Random(seed))
    engine.live(600)
    engine.end()
