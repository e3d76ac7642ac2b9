"""An engine of its own process for ``test_herd.py``: stores a set of chunks, or warms itself with them and checks them.

``herd_engine.py seed|warm CONFIG KEYS RATE``: the config as JSON, the keys as a file. Says "ready" when its tiers are
open, begins when it gets a line, and prints its last figures as JSON.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

import kvtiers
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import RequestContext

PAGE = 64_000
LAYOUT = CacheLayout(ModelIdentity("m", weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, PAGE),))
PATIENCE = 60.0


def payload(key):
    return hashlib.blake2b(key, digest_size=40).digest() * (PAGE // 40)


class Engine:
    def __init__(self, config):
        self.manager = kvtiers.open_manager(config, LAYOUT)
        tensor = np.zeros((2, PAGE), np.uint8)
        self.worker = kvtiers.open_worker(config, LAYOUT, [tensor], engine_id=self.manager.engine_id)
        self.manager.wait_ready(PATIENCE)
        self.step_until(lambda: all(tier["own"].get("open") for tier in self.manager.stats()["tiers"].values()))

    def view(self, row):
        start = row * LAYOUT.row_stride
        return self.manager._primary.get_kv_memoryview()[start : start + PAGE]

    def step_until(self, done):
        until = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < until, self.manager.stats()
            with self.manager.lock:
                self.manager.on_schedule_end()
            time.sleep(0.001)

    def seed(self, keys):
        for start in range(0, len(keys), 16):
            ctx = RequestContext(f"r{start}")
            self.manager.on_new_request(ctx)
            plan = self.manager.prepare_store(keys[start : start + 16], ctx)
            for key, row in zip(plan.keys, plan.chunk_ids.tolist(), strict=True):
                self.view(row)[:] = payload(key)
            self.manager.complete_store(plan)
            self.manager.on_request_finished(ctx)
            self.step_until(lambda: not self.manager.has_pending_work())
        return {"stored": self.manager.stats()["tiers"]["redis"]["stored_chunks"]}

    def warm(self, keys, rate):
        warm_ups = self.manager.warm_ups
        number = warm_ups.begin("redis", rate, None)["id"]
        warm_ups.give(number, [keys], continues=False, is_last=True)
        self.step_until(lambda: warm_ups.give(number, [], continues=False, is_last=False)["ended"])
        done = warm_ups.end(number)
        ctx = RequestContext("check")
        self.manager.on_new_request(ctx)
        plan = self.manager.prepare_load(keys, ctx)
        assert plan is not None, done
        wrong = [row for key, row in zip(keys, plan.chunk_ids.tolist(), strict=True) if self.view(row) != payload(key)]
        self.manager.complete_load(plan)
        return {**done, "wrong": len(wrong)}


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    what, config, path, rate = sys.argv[1:]
    keys = [bytes.fromhex(line) for line in Path(path).read_text("utf-8").split()]
    engine = Engine(json.loads(config))
    say("ready")
    sys.stdin.readline()
    say(json.dumps(engine.seed(keys) if what == "seed" else engine.warm(keys, float(rate))))
    engine.worker.shutdown()
    engine.manager.shutdown(10.0)


main()
