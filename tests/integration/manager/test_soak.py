"""Many requests at once over a small primary and real tiers: no wrong byte, no row lost, nothing left waiting."""

import random

import pytest

from kvtiers.types import PromptGroup

MEMORY = {"type": "memory", "capacity": "400KiB", "io": "thread"}
ASYNC = {"type": "memory-async", "max_blocks": 60, "admission": "second_access"}
LATE = {"type": "memory", "name": "late", "capacity": "400KiB", "io": "thread", "admission": "on_eviction"}
DOCUMENTS, LONGEST = 12, 10


class Request:
    """One request on its way: asking, loading, storing."""

    def __init__(self, engine, wanted):
        self.ctx = engine.request()
        self.wanted = wanted
        self.load = self.store = None
        self.version = engine.version
        self.hits = None
        self.steps = 0


class Soak:
    def __init__(self, engine, keys, seed):
        self.engine = engine
        self.random = random.Random(seed)
        self.documents = [keys(LONGEST, f"d{number}-") for number in range(DOCUMENTS)]
        self.requests = []
        self.generation = 0

    def step(self):
        manager = self.engine.manager
        if len(self.requests) < 6:
            wanted = self.random.choice(self.documents)[: self.random.randint(1, LONGEST)]
            self.requests.append(Request(self.engine, wanted))
        for request in list(self.requests):
            request.steps += 1
            assert request.steps < 20_000, "a request does not come to its end"
            if self.advance(request):
                self.requests.remove(request)
                manager.on_request_finished(request.ctx)
        manager.on_schedule_end(prefill_tokens=1000, prefill_seconds=0.1)

    def advance(self, request):
        """Do one thing for a request; True when it is over."""
        manager, chance = self.engine.manager, self.random.random()
        if request.load is not None:
            self.engine.check(request.load, request.version)  # pinned, so it does not change
            if chance < 0.5:
                manager.complete_load(request.load, success=chance < 0.45)
                request.load = None
            return False
        if request.store is not None:
            if chance < 0.5:
                self.end_store(request, success=chance < 0.45)
                return True
            return False
        if request.hits is None:
            hits = manager.reach([PromptGroup(request.wanted)], request.ctx).in_chunks(manager.tokens_per_chunk[0])
            if hits.waits:
                return chance < 0.01  # the client has gone
            request.hits = hits.ready
            if hits.ready:
                request.version = self.engine.version
                request.load = manager.prepare_load(request.wanted[: hits.ready], request.ctx)
                assert request.load is not None, "a hit and its lease belong together"
                self.engine.check(request.load)
            return False
        request.version = self.engine.version
        request.store = manager.prepare_store(request.wanted, request.ctx)
        return request.store is None

    def end_store(self, request, *, success):
        if success and request.version == self.engine.version:
            self.engine.write(request.store)
        self.engine.manager.complete_store(request.store, success)
        request.store = None

    def trouble(self, number):
        """Now and then the cache is emptied, or the weights change."""
        if number % 400 == 399:
            self.engine.manager.reset_cache()
        if number % 900 == 899:
            self.generation += 1
            self.engine.version = f"v{self.generation}"
            self.engine.manager.set_weights_version(self.engine.version)

    def finish(self):
        manager = self.engine.manager
        for request in self.requests:
            if request.load is not None:
                manager.complete_load(request.load)
            if request.store is not None:
                self.end_store(request, success=True)
            manager.on_request_finished(request.ctx)
        self.engine.settle()


@pytest.mark.parametrize("seed", [1, 2])
def test_many_requests_at_once(start, keys, seed):
    engine = start(MEMORY, ASYNC, LATE, rows=48, lookup_wait="50ms", load_wait="200ms")
    soak = Soak(engine, keys, seed)
    for number in range(8000):
        soak.step()
        soak.trouble(number)
    soak.finish()
    stats = engine.manager.stats()
    primary = stats["primary"]
    assert primary["free_rows"] + primary["evictable_rows"] + primary["protected_rows"] == primary["rows"]
    assert primary["pinned_rows"] == primary["pending_rows"] == primary["quarantined_rows"] == primary["misuse"] == 0
    assert stats["engine"]["misuse"] == 0
    for tier in stats["tiers"].values():
        assert tier["pinned_rows"] == tier["running_jobs"] == tier["loading_chunks"] == tier["quarantined_rows"] == 0
        assert tier["raised"] == tier["refused_results"] == tier["own"]["seal_failures"] == 0
        assert tier["stored_chunks"] > 0
    assert sum(tier["hits"] for tier in stats["tiers"].values()) > 50
    assert stats["engine"]["primary_hits"] > 50
