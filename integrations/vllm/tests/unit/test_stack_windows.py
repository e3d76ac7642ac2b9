"""A window's chunks are looked up as one, and vLLM's scan from the right finds what it would find one by one."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tiering.harness import RETRY, Bench

from kvtiers.tiering.jobs import TieringOptions
from kvtiers_vllm.never_raise import BugCount
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.keys import GroupKeys
from kvtiers_vllm.stack.requests import RequestBook, Weights

from . import fake_vllm

GROUPS = {
    0: GroupKeys(0, 1, whole_prefix=True, tokens_per_chunk=16),
    1: GroupKeys(1, 1, whole_prefix=False, window=4, tokens_per_chunk=16),
    2: GroupKeys(2, 1, whole_prefix=False, window=4, tokens_per_chunk=16),
}


class Engine:
    """vLLM's scheduler over kvtiers' manager, as far as lookups go; a step lands what is loaded."""

    def __init__(self, module, digests, chunks, hold=False):
        options = TieringOptions(load_wait=5.0, lookup_wait=0.02, one_tier=0.9, all_tiers=0.9)
        self.bench = Bench(rows=512, tokens_per_chunk=(16, 16, 16), windows=(0, 4, 4), options=options, hold=hold)
        self.tier = self.bench.tier["a"]
        self.answers = module.LookupResult
        self.hashes = [number.to_bytes(2, "big") * 16 for number in range(chunks)]
        self.manager = object.__new__(module.KvtiersManager)
        self.manager.bugs = BugCount("test")
        self.manager.requests = RequestBook(GROUPS, Weights("w", lambda: "", lambda: 0), digests, lookup_wait=0.02)
        self.manager._manager = self.bench.manager
        self.manager._answered_for, self.manager._answers, self.manager._asked = None, {}, set()
        self.manager._began_idle = self.manager._alone = False
        self.manager._brought = set()
        self.manager.window_blocks = None
        self.manager._plans = SimpleNamespace(start=lambda _plan, _request: None)
        self.manager._describer = None
        self.manager.pipelined = SimpleNamespace(can_begin=lambda _keys: False)
        shown = SimpleNamespace(request_id="r", block_hashes=self.hashes, lora_request=None, cache_salt=None)
        self.manager.requests.show(shown)
        request = self.manager.requests.open("r", None)
        self.bench.manager.on_new_request(request.context)
        self.request, self.context = request, SimpleNamespace(req_id="r")

    def key(self, group, place):
        return self.hashes[place] + group.to_bytes(4, "big")

    def step(self, seconds=0.001):
        self.manager._forget_answers()
        self.request.runs.clear()
        self.bench.step(seconds)

    def scan(self, group, required, start, end, later=None):
        """vLLM 0.32's ``_sliding_window_lookup`` over the chunks from ``start`` to ``end``; None: it is deferred."""
        defer = pending = False
        found, later = 0, later or required
        for place in range(end - 1, start - 1, -1):
            answer = self.manager.lookup(self.key(group, place), self.context)
            if answer in (self.answers.HIT, self.answers.HIT_PENDING):
                pending = pending or answer is self.answers.HIT_PENDING
                found += 1
            else:
                defer = defer or answer is self.answers.RETRY
                found, pending, required = 0, False, later
            if found == required:
                return None if defer or pending else place + required
        return None if defer or pending else start + found

    def found(self, *scan, steps=8):
        for _ in range(steps):
            if (end := self.scan(*scan)) is not None:
                return end
            self.step()
        raise AssertionError("it is deferred for ever")


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        module, digests = fake_vllm.load(patch, "stack.manager", "0.32.0"), AdapterDigests()
        yield lambda *args, **more: Engine(module, digests, *args, **more)
        digests.close()


def truth(there, required, start, end):
    """Where the last window before ``end`` is present, chunk by chunk."""
    found = 0
    for place in range(end - 1, start - 1, -1):
        found = found + 1 if place in there else 0
        if found == required:
            return place + required
    return start + found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_scan_finds_the_window_that_it_would_find_chunk_by_chunk(engine, data):
    chunks = data.draw(st.integers(1, 40))
    runs = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=5))
    there = {place for begin, length in runs for place in range(begin, begin + length) if place < chunks}
    start = data.draw(st.integers(0, chunks - 1))
    required = data.draw(st.sampled_from([4, 5]))  # one more for speculative decoding
    played = engine(chunks)
    played.request.computed = 16 * start
    played.tier.put([played.key(1, place) for place in there])
    end = played.found(1, required, start, chunks)
    assert end == truth(there, required, start, chunks)
    window = [played.key(1, place) for place in range(max(start, end - required), end)]
    assert played.bench.primary.ready_run(window) == len(window), "it can be loaded"
    assert played.manager.bugs._bugs == 0


def test_a_window_is_one_question_and_what_is_not_answered_is_asked_once_a_step(engine):
    """Chunk by chunk a restart and a burst of 24 prompts of 8k tokens made hundreds of thousands of lookups."""
    played = engine(512)
    played.tier.answer = RETRY
    for group in (1, 2):
        assert played.scan(group, 4, 0, 512) is None
    assert [len(keys) for keys in played.tier.asked] == [4, 4]
    played.tier.answer = None
    for group in (1, 2):
        played.tier.put([played.key(group, place) for place in range(508, 512)])
    played.step()
    played.tier.asked.clear()
    assert [played.scan(group, 4, 0, 512) for group in (1, 2)] == [None, None], "on their way"
    assert [len(keys) for keys in played.tier.asked] == [4, 4]
    played.step()
    assert [played.scan(group, 4, 0, 512) for group in (1, 2)] == [512, 512]
    assert len(played.tier.asked) == 2
    assert played.bench.figures()["lookups"] == 8


def test_of_a_window_that_is_there_in_part_nothing_is_loaded(engine):
    played = engine(64)
    played.tier.put([played.key(1, place) for place in (20, 21, 22, 23, 40, 41, 60, 61, 63)])
    assert played.found(1, 4, 0, 64) == 24
    played.step()
    assert [list(job.keys) for job in played.tier.loads] == [[played.key(1, place) for place in range(20, 24)]]
    assert len(played.tier.asked) <= 2 * 64 / 4, "in two scans"


def test_vllm_is_told_of_each_loaded_chunk_whether_a_tier_or_the_primary_had_it(engine):
    scene = engine(8)
    manager, bench = scene.manager, scene.bench
    manager._limit = SimpleNamespace(load_found=lambda: None)
    keys = [scene.key(0, place) for place in range(8)]
    bench.store(keys[:3])
    scene.tier.put(keys[3:])
    while manager.lookup(keys[0], scene.context) is not scene.answers.HIT:
        scene.step()

    def sources():
        manager.prepare_load(keys, scene.context)
        return [manager.get_load_source(key, scene.context) for key in keys]

    assert sources() == ["host"] * 3 + ["disk"] * 5
    assert sources() == ["host"] * 8, "the next one has them from the primary"


def test_a_chunk_of_which_a_window_has_lost_a_block_is_left_out_and_the_others_are_stored(engine):
    """vLLM copies what blocks it has one after the other: two such chunks would hold each other's bytes."""
    scene = engine(8)
    blocks = {(1, 5): [0, 7], (1, 7): [7, 0]}
    scene.manager.window_blocks = lambda _name, group, chunk: blocks.get((group, chunk), [7, 7] if group else None)
    offered = [scene.key(0, place) for place in range(8)] + [scene.key(1, place) for place in range(4, 8)]
    stored = scene.manager.prepare_store(offered, scene.context)
    assert stored.keys_to_store == [key for key in offered if key not in (scene.key(1, 5), scene.key(1, 7))]
    assert not scene.manager.prepare_store([scene.key(1, 5)], scene.context).keys_to_store
