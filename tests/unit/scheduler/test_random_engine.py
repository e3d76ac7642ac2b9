"""An engine that does anything in any order: what comes back is right, and in the end nothing is held or pinned."""

import hashlib
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtiers.base import TransferResult
from kvtiers.replay.block_pool import BlockPool
from kvtiers.scheduler import SchedulerOptions, WorkerJob

from .bench import NONE, PAGE, Bench, Request, layout_of

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


class AnyEngine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from([((8,), ()), ((8, 8), (None, 20)), ((8, 16), ()), ((8, 8, 16), (None, 12, 33))]),
        per_chunk=st.integers(1, 3),
        ranks=st.integers(1, 2),
        lazy=st.booleans(),
        caching=st.booleans(),
    )
    def begin(self, groups, per_chunk, ranks, lazy, caching) -> None:
        layout = layout_of(per_chunk, groups[0], ranks, groups[1])
        self.pool = Pool(BLOCKS, caching=caching)
        options = SchedulerOptions(mode="lazy" if lazy else "eager", prefix_caching=caching)
        self.bench = VersionedBench(layout, ROWS, options, blocks=self.pool, num_blocks=BLOCKS)
        self.scheduler = self.bench.scheduler
        self.running: list[Running] = []
        self.jobs: list[Job] = []
        self.names = 0
        self.chunks: dict[bytes, tuple[int, list[bytes]]] = {}  # key -> group, hashes of its blocks

    # -- requests

    @precondition(lambda self: len(self.running) < 5)
    @rule(text=st.sampled_from(TEXTS), tokens=st.integers(1, 96))
    def arrive(self, text, tokens) -> None:
        self.names += 1
        request = self.bench.request(f"r{self.names}", tokens, text=text)
        for group, ids in enumerate(request.block_ids):
            ids.clear()
            step = self.bench.layout.blocks_per_chunk
            for place, key in enumerate(self.bench.keys(request, group)):
                self.chunks[key] = group, request.block_hashes[group][place * step : (place + 1) * step]
        self.running.append(Running(request))

    @rule(data=st.data(), take=st.floats(0, 1))
    def schedule(self, data, take) -> None:
        if (one := self.pick(data, "waiting")) is None:
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
        one.state = "loading" if self.scheduler.start_load(request, int(tokens * take)) else "running"
        assert self.bench.wrong(request, computed) == []

    @rule(data=st.data(), tokens=st.integers(1, 60))
    def compute(self, data, tokens) -> None:
        if (one := self.pick(data, "running")) is None:
            return
        request = one.request
        start, one.computed = one.computed, min(one.computed + tokens, request.num_tokens)
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

    @rule(data=st.data())
    def preempt(self, data) -> None:
        if one := self.pick(data, "running", "loading"):
            self.give_up(one)

    @rule(data=st.data(), told=st.booleans())
    def finish(self, data, told) -> None:
        if one := self.pick(data, "running", "loading", "waiting"):
            self.scheduler.finish_request(one.request, one.computed if told and one.state == "running" else None)
            self.release_all(one.request)
            self.running.remove(one)

    # -- steps and workers

    @rule()
    def step(self) -> None:
        transfers = self.scheduler.end_step()
        ranks = range(self.bench.layout.world_size)
        self.jobs += [Job(job, False, list(ranks)) for job in transfers.loads]
        self.jobs += [Job(job, True, list(ranks)) for job in transfers.stores]

    @rule(data=st.data(), success=st.sampled_from([True] * 9 + [False]))
    def report(self, data, success) -> None:
        if self.jobs:
            one = data.draw(st.sampled_from(self.jobs))
            self.copy(one, data.draw(st.sampled_from(one.waiting)), success=success)

    @rule()
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

    # -- life

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_cache()

    @rule(data=st.data())
    def new_weights(self, data) -> None:
        self.scheduler.set_weights_version(str(self.bench.version + 1))
        self.bench.version += 1
        self.pool.forget()
        for one in list(self.running):
            if one.state != "waiting" and data.draw(st.booleans()):
                self.give_up(one)
            elif one.state != "waiting":
                one.mixed = True

    # -- inside

    def pick(self, data, *states: str) -> Running | None:
        some = [one for one in self.running if one.state in states]
        return data.draw(st.sampled_from(some)) if some else None

    def match(self, request: Request, group: int) -> list[int]:
        return self.pool.match([h + bytes([group]) for h in request.block_hashes[group]])

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

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for one in self.running:
            self.scheduler.finish_request(one.request)
            self.release_all(one.request)
        self.running.clear()
        while self.scheduler.has_pending_work() or self.jobs:
            self.step()
            self.report_all()
        self.step()
        self.report_all()
        assert self.pool.free == BLOCKS
        assert not self.scheduler.blocks_in_flight
        primary = self.bench.primary
        assert self.bench.manager.stats()["engine"]["misuse"] == primary.misuse == 0
        assert primary.pinned_rows == primary.pending_rows == primary.quarantined_rows == 0
        assert primary.free_rows + primary.evictable == ROWS
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


TestAnyEngine = AnyEngine.TestCase
TestAnyEngine.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=60, suppress_health_check=list(HealthCheck)
)
