"""The engine of a soak: stores documents, loads them again, compares every byte, and measures its own thread's stalls.

``python engine.py SECONDS CONFIG``: prints a JSON line a second, and a last one with ``"end": true``.
"""

import faulthandler
import json
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import kvtiers
from kvtiers.api import make_offload_key
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import PromptGroup, RequestContext

PAYLOAD, VALUE = 65_000, 65_536
DOCUMENTS, LONGEST = 60, 8
PATIENCE_STEPS = 400  # then the client of a request has gone
LAYOUT = CacheLayout(ModelIdentity("soak/model", weights="w1"), (KVGroup("all", 16),), (KVTensor("t", 0, PAYLOAD),))


def key(document, chunk):
    return make_offload_key(document.to_bytes(16, "big") + chunk.to_bytes(16, "big"), 0)


def payload(of):
    return (of * (PAYLOAD // len(of) + 1))[:PAYLOAD]


class Thread:
    """Times the calls of the engine's thread, without what it waited for a processor.

    A call in which the whole process was stopped says nothing about kvtiers.
    """

    def __init__(self):
        self._was_stopped = False
        signal.signal(signal.SIGCONT, self._note_stop)
        self._waited = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self.worst = 0.0
        self.worst_call = ""

    def call(self, function, *arguments):
        self._was_stopped = False
        # The clock is read outside of the waits, so that no wait is subtracted that lies outside of the call's time.
        begin, waited = time.monotonic(), self._wait_seconds()
        result = function(*arguments)
        if time.monotonic() - begin > self.worst:
            waited = self._wait_seconds() - waited
            seconds = time.monotonic() - begin - waited
            if seconds > self.worst and not self._was_stopped:
                self.worst, self.worst_call = seconds, function.__name__
        return result

    def _note_stop(self, *_):
        self._was_stopped = True

    def _wait_seconds(self):
        return int(self._waited.read_text().split()[1]) / 1e9


class Soak:
    def __init__(self, config):
        self.manager = kvtiers.open_manager(config, LAYOUT)
        self.worker = kvtiers.open_worker(
            config, LAYOUT, [np.zeros((1, PAYLOAD), np.uint8)], engine_id=self.manager.engine_id
        )
        self.thread = Thread()
        self.random = random.Random()
        self.requests = []
        self.numbers = iter(range(1 << 60))
        self.counts = dict.fromkeys(("compared", "wrong", "stored", "hits", "left"), 0)

    def step(self):
        if len(self.requests) < 8:
            document, length = self.random.randrange(DOCUMENTS), self.random.randint(1, LONGEST)
            wanted = [key(document, chunk) for chunk in range(length)]
            self.requests.append([RequestContext(f"r{next(self.numbers)}"), wanted, 0])
        for request in list(self.requests):
            if self.advance(request):
                self.requests.remove(request)
                self.thread.call(self.manager.on_request_finished, request[0])
        self.thread.call(self.manager.on_schedule_end)

    def advance(self, request):
        """Do one thing for a request; True when it is over."""
        ctx, wanted, _ = request
        request[2] += 1
        reach = self.thread.call(self.manager.reach, [PromptGroup(wanted)], ctx)
        hits = reach.in_chunks(self.manager.tokens_per_chunk[0])
        if hits.waits and request[2] < PATIENCE_STEPS:
            return False
        if hits.waits:
            self.counts["left"] += 1
            return True
        if hits.ready:
            self.check(self.thread.call(self.manager.prepare_load, wanted[: hits.ready], ctx))
        if hits.ready < len(wanted):
            self.store(self.thread.call(self.manager.prepare_store, wanted[hits.ready :], ctx))
        return True

    def check(self, plan):
        for chunk, row in zip(plan.keys, plan.chunk_ids, strict=True):
            self.counts["compared"] += 1
            if self.row(row) != payload(chunk):
                self.counts["wrong"] += 1
                print(
                    json.dumps({"wrong": chunk.hex(), "row": int(row), "got": bytes(self.row(row)[:64]).hex()}),
                    flush=True,
                )
        self.counts["hits"] += len(plan.keys)
        self.thread.call(self.manager.complete_load, plan)

    def store(self, plan):
        if plan is None:
            return
        for chunk, row in zip(plan.keys, plan.chunk_ids, strict=True):
            self.row(row)[:] = payload(chunk)
        self.counts["stored"] += len(plan.keys)
        self.thread.call(self.manager.complete_store, plan)

    def row(self, row):
        return self.manager._primary.get_kv_memoryview()[row * VALUE : row * VALUE + PAYLOAD]

    def say(self, **more):
        tiers = self.manager.stats()["tiers"]
        landed = {name: tier["loaded_chunks"] for name, tier in tiers.items()}
        damaged = {name: tier["own"].get("seal_failures", 0) for name, tier in tiers.items()}
        worst = {"stall": self.thread.worst, "call": self.thread.worst_call}
        line = self.counts | worst | {"engine": self.manager.engine_id, "landed": landed, "damaged": damaged} | more
        print(json.dumps(line), flush=True)

    def run(self, seconds):
        until, printed = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < until:
            self.step()
            if now - printed > 1.0:
                printed = now
                self.say()
            time.sleep(0.001)
        for ctx, _, _ in self.requests:
            self.manager.on_request_finished(ctx)
        self.say(end=True)
        self.worker.shutdown()
        self.manager.shutdown(5.0)


if __name__ == "__main__":
    faulthandler.enable()  # a SIGABRT: a call does not return, and here is the stack of it
    Soak(json.loads(sys.argv[2])).run(float(sys.argv[1]))
