"""The leaf-first LRU against models that are slow and obviously right: whole traces, and any mix of requests."""

import gzip
import itertools
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtiers.primary.eviction import LRUPolicy
from kvtiers.primary.tier import CPUPrimaryTier

REQUESTS = 3000


class SlowTraceLRU:
    """One list of all chunks, coldest first; each request puts its chunks at the hot end, its head last."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.order = []

    def serve(self, keys):
        present = set(self.order)
        hits = len(list(itertools.takewhile(present.__contains__, keys)))
        self._use(keys[:hits])
        offered = set(keys[hits:])
        missing = [key for key in keys[hits:] if key not in present]
        deficit = max(0, len(missing) - (self.capacity - len(self.order)))
        victims = [key for key in self.order if key not in offered][:deficit]
        if len(victims) < deficit:
            return hits, None
        gone = set(victims)
        self.order = [key for key in self.order if key not in gone] + missing
        self._use(keys)
        return hits, victims

    def _use(self, keys):
        used = set(keys)
        present = used.intersection(self.order)
        self.order = [key for key in self.order if key not in used] + [key for key in reversed(keys) if key in present]


def serve(tier, request_id, keys):
    hits, pending = tier.resident_run(keys)
    assert pending == 0
    tier.complete_load(tier.prepare_load(keys[:hits], request_id))
    allocation = tier.prepare_store(keys[hits:], request_id)
    if allocation is not None:
        tier.complete_store(allocation.rows, success=True)
    tier.on_request_finished(request_id)
    return hits, None if allocation is None else allocation.evicted


def generated_trace():
    """Prompts that share prefixes: each goes on from some point of an earlier one."""
    random.seed(20)
    names = (number.to_bytes(8, "big") + bytes(4) for number in itertools.count())
    prompts = [list(itertools.islice(names, 20))]
    for _ in range(800):
        start = random.choice(prompts[-60:])
        shared = start[: random.randint(0, len(start))]
        prompts.append(shared + list(itertools.islice(names, random.choice([0, 1, 5, 20, 60]))))
    return prompts


def conversation_trace():
    path = Path(os.environ["KVTIERS_TRACES"]) / "conversation_trace.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        requests = [json.loads(line) for line in itertools.islice(lines, REQUESTS)]
    return [
        [number.to_bytes(8, "big") + bytes(4) for number in request["hash_ids"][: request["input_length"] // 512]]
        for request in requests
    ]


# The recorded trace is one more case where there is one, not a test that is skipped elsewhere.
TRACES = [generated_trace, *([conversation_trace] if os.environ.get("KVTIERS_TRACES") else [])]


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("capacity", [40, 400, 2500])
def test_every_request_of_a_trace_hits_and_evicts_what_the_model_says(trace, capacity):
    tier = CPUPrimaryTier(capacity, 0, memoryview(b""))
    model = SlowTraceLRU(capacity)
    hits = evicted = 0
    for number, keys in enumerate(trace()):
        got, expected = serve(tier, str(number), keys), model.serve(keys)
        assert got == expected, f"request {number}"
        hits += got[0]
        evicted += len(got[1] or ())
    assert tier.coldest(capacity) == model.order
    assert hits > 0
    assert evicted > 0


class SlowRequest:
    def __init__(self, rank):
        self.rank = rank
        self.order = []

    def name(self, keys):
        """Put these keys in their order among those named before."""
        known = [key for key in keys if key in self.order]
        for index, key in enumerate(keys):
            if key in self.order:
                continue
            if not known:
                at = len(self.order)
            elif index:
                at = self.order.index(keys[index - 1]) + 1
            else:
                at = self.order.index(known[0])
            self.order.insert(at, key)
            known = known or [key]


class SlowLRU:
    """Each chunk belongs to the hottest request that has used it, at its place in that request's prefix."""

    def __init__(self):
        self.time = itertools.count(1)
        self.running = {}
        self.owner = {}
        self.evictable = set()

    def access(self, keys, request_id, new=()):
        request = self.running.get(request_id) or SlowRequest(next(self.time))
        if request_id:
            self.running[request_id] = request
        request.name(keys)
        for key in keys:
            if key in new or self.owner[key].rank < request.rank:
                self.owner[key] = request

    def request_finished(self, request_id):
        if request := self.running.pop(request_id, None):
            request.rank = next(self.time)
            self.owner.update((key, request) for key in request.order if key in self.owner)

    def coldest_first(self):
        return sorted(self.evictable, key=lambda key: (self.owner[key].rank, -self.owner[key].order.index(key)))

    def forget(self, keys):
        for key in keys:
            del self.owner[key]
            self.evictable.discard(key)


KEYS = [bytes([number]) * 5 for number in range(14)]
SOME_KEYS = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=8)
RUN_OF_KEYS = st.builds(lambda first, length: KEYS[first : first + length], st.integers(0, 13), st.integers(1, 8))
REQUEST = st.sampled_from(["a", "b", "c", ""])


class AnyMixOfRequests(RuleBasedStateMachine):
    """Requests that run side by side, share chunks, retry, pin, end, and are evicted from in between."""

    def __init__(self):
        super().__init__()
        self.policy = LRUPolicy()
        self.model = SlowLRU()

    @rule(keys=st.one_of(SOME_KEYS, RUN_OF_KEYS), request_id=REQUEST, ready=st.booleans())
    def store_and_use(self, keys, request_id, ready):
        new = [key for key in keys if key not in self.model.owner]
        self.policy.access(keys, request_id, new)
        self.model.access(keys, request_id, new)
        if ready:
            self.make_evictable(new)

    @rule(keys=st.one_of(SOME_KEYS, RUN_OF_KEYS), request_id=REQUEST)
    def use(self, keys, request_id):
        known = [key for key in keys if key in self.model.owner]
        if known:
            self.policy.access(known, request_id)
            self.model.access(known, request_id)

    @rule(request_id=st.sampled_from(["a", "b", "c", "unknown"]))
    def finish(self, request_id):
        self.policy.request_finished(request_id)
        self.model.request_finished(request_id)

    @rule(keys=SOME_KEYS)
    def make_evictable(self, keys):
        keys = [key for key in keys if key in self.model.owner and key not in self.model.evictable]
        self.policy.mark_evictable(keys)
        self.model.evictable.update(keys)

    @rule(keys=SOME_KEYS)
    def pin(self, keys):
        keys = [key for key in keys if key in self.model.evictable]
        self.policy.mark_pinned(keys)
        self.model.evictable.difference_update(keys)

    @rule(count=st.integers(1, 14))
    def pin_the_coldest_for_a_moment(self, count):
        keys = self.model.coldest_first()[:count]
        self.policy.mark_pinned(keys)
        self.policy.mark_evictable(keys)

    @rule(count=st.integers(0, 6))
    def evict(self, count):
        assert self.policy.evict(len(self.model.evictable) + 1) is None
        expected = self.model.coldest_first()[:count]
        assert self.policy.evict(len(expected)) == expected
        self.model.forget(expected)

    @rule(keys=SOME_KEYS)
    def remove(self, keys):
        keys = [key for key in keys if key in self.model.owner]
        self.policy.remove(keys)
        self.model.forget(keys)

    @precondition(lambda self: len(self.model.owner) > 8)
    @rule()
    def clear(self):
        self.policy.clear()
        self.model = SlowLRU()

    @invariant()
    def the_order_of_eviction_is_the_models(self):
        assert list(self.policy.coldest()) == self.model.coldest_first()
        assert set(self.policy.known) == set(self.model.owner)
        assert self.policy.evictable == len(self.model.evictable)

    @invariant()
    def no_bucket_outlives_its_chunks_and_its_request(self):
        owners = {id(request) for request in self.model.owner.values()}
        running = {id(request) for request in self.model.running.values()}
        assert len(self.policy._buckets) == len(owners | running)
        assert len(self.policy._queue._heap) <= 64 + 2 * len(owners)


TestAnyMixOfRequests = AnyMixOfRequests.TestCase
TestAnyMixOfRequests.settings = settings(deadline=None, stateful_step_count=40)
