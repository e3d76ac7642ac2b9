"""A whole engine side in this process: the region, its ranks, real tiers; only the GPU is played by the test."""

import contextlib
import hashlib
import itertools
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

import kvtiers
from kvtiers.api import make_offload_key
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import PromptGroup, RequestContext

PAGE = 4000
PATIENCE = 60.0


def make_layout(world_size=1, weights="w1"):
    model = ModelIdentity("m", weights=weights)
    return CacheLayout(model, (KVGroup("g", 16),), (KVTensor("t", 0, PAGE),), world_size=world_size)


def payload(key, version):
    return hashlib.blake2b(key + version.encode(), digest_size=40).digest() * (PAGE // 40)


@dataclass(eq=False)
class EngineOfOne:
    """An engine's scheduler, whose GPU copies are done at once, by hand."""

    config: dict
    layout: CacheLayout = field(default_factory=make_layout)
    version: str = ""

    def __post_init__(self):
        self.manager = kvtiers.open_manager(self.config, self.layout)
        self.numbers = itertools.count()

    def view(self, row):
        stride = self.layout.row_stride
        return self.manager._primary.get_kv_memoryview()[row * stride : row * stride + PAGE]

    def request(self, tenant=""):
        ctx = RequestContext(f"r{next(self.numbers)}", {"kvtiers_tenant": tenant} if tenant else {})
        self.manager.on_new_request(ctx)
        return ctx

    def write(self, plan):
        for key, row in zip(plan.keys, plan.chunk_ids.tolist(), strict=True):
            self.view(row)[:] = payload(key, self.version)

    def check(self, plan, version=None):
        for key, row in zip(plan.keys, plan.chunk_ids.tolist(), strict=True):
            wanted = payload(key, self.version if version is None else version)
            assert bytes(self.view(row)) == wanted, f"wrong bytes of {key!r}"

    def step_until(self, done):
        until = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < until, f"nothing came of it in {PATIENCE} s"
            self.manager.on_schedule_end()
            time.sleep(0.0005)

    def settle(self):
        self.step_until(lambda: not self.manager.has_pending_work())
        self.manager.on_schedule_end()

    def until_open(self):
        self.step_until(lambda: all(tier["own"]["open"] for tier in self.manager.stats()["tiers"].values()))

    def store(self, keys, tenant=""):
        ctx = self.request(tenant)
        plan = self.manager.prepare_store(keys, ctx)
        self.write(plan)
        self.manager.complete_store(plan)
        self.manager.on_request_finished(ctx)
        self.settle()

    def resolve(self, keys, ctx):
        """Ask until the answer is final; return how many chunks are ready."""
        found = []

        def final():
            hits = self.manager.reach([PromptGroup(keys)], ctx).in_chunks(self.manager.tokens_per_chunk[0])
            found[:] = [hits.ready]
            return not hits.waits

        self.step_until(final)
        return found[0]

    def load(self, keys, tenant=""):
        """Load as much of these as can be had; return how many chunks that were, their bytes compared."""
        ctx = self.request(tenant)
        count = self.resolve(keys, ctx)
        if count:
            plan = self.manager.prepare_load(keys[:count], ctx)
            self.check(plan)
            self.manager.complete_load(plan)
        self.manager.on_request_finished(ctx)
        return count

    def figures(self, tier):
        self.manager.on_schedule_end()
        return self.manager.stats()["tiers"][tier]

    def forget(self):
        self.manager.reset_cache()
        self.settle()


@pytest.fixture
def keys():
    def some(count, name="k"):
        return [make_offload_key(f"{name}{number:06}".encode(), 0) for number in range(count)]

    return some


@pytest.fixture
def start():
    """Start engines of one rank, which is in this process; all are shut down at the end."""
    with contextlib.ExitStack() as closing:

        def begin(*secondary, weights="w1", rows=64, until_open=True, **options):
            layout = make_layout(weights=weights)
            config = {
                "version": 1,
                "primary": {"capacity": rows * layout.row_stride},
                "secondary": list(secondary),
                "lookup_wait": "20s",
                "load_wait": "20s",
                **options,
            }
            engine = EngineOfOne(config, layout)
            closing.callback(engine.manager.shutdown, 10)
            worker = kvtiers.open_worker(
                config, layout, [np.zeros((1, PAGE), np.uint8)], engine_id=engine.manager.engine_id
            )
            closing.callback(worker.shutdown)
            engine.manager.wait_ready(PATIENCE)
            if until_open:
                engine.until_open()
            return engine

        yield begin
