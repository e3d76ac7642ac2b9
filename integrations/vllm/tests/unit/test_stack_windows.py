"""A prompt of several KV groups is decided as a whole, and vLLM's scan finds exactly what was decided."""

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
from kvtiers_vllm.stack.steps import StepClock

from . import fake_vllm

GROUPS = {
    0: GroupKeys(0, 1, whole_prefix=True, tokens_per_chunk=16),
    1: GroupKeys(1, 1, whole_prefix=False, window=49, tokens_per_chunk=16),
    2: GroupKeys(2, 1, whole_prefix=False, window=49, tokens_per_chunk=16),
}


class Engine:
    """vLLM's scheduler over kvtiers' manager, as far as lookups go; a step lands what is loaded."""

    def __init__(self, module, digests, chunks, **more):
        options = TieringOptions(load_wait=5.0, lookup_wait=0.02, one_tier=0.9, all_tiers=0.9)
        self.bench = Bench(rows=2048, tokens_per_chunk=(16, 16, 16), windows=(0, 4, 4), options=options, **more)
        self.tier = self.bench.tier["a"]
        self.answers = module.LookupResult
        self.hashes = [number.to_bytes(2, "big") * 16 for number in range(chunks)]
        requests = RequestBook(GROUPS, Weights("w", lambda: "", lambda: 0), digests, lookup_wait=0.02)
        core = SimpleNamespace(request_arrived=[], sees_requests=True)
        self.manager = module.KvtiersManager(
            self.bench.manager, requests, 1, StepClock(), dict, lambda: None, core, alone=False
        )
        self.manager.pipelined = SimpleNamespace(can_begin=lambda _reach: False, advance=lambda: None)
        shown = SimpleNamespace(request_id="r", block_hashes=self.hashes, lora_request=None, cache_salt=None)
        requests.show(shown)
        request = requests.open("r", None)
        self.bench.manager.on_new_request(request.context, 16 * chunks)
        self.request, self.context = request, SimpleNamespace(req_id="r")

    def key(self, group, place):
        return self.hashes[place] + group.to_bytes(4, "big")

    def step(self, seconds=0.001, preempted=()):
        self.bench.clock.now += seconds
        self.manager.on_schedule_end(SimpleNamespace(preempted_req_ids=preempted))

    def scan(self, group, start, end):
        """vLLM 0.32's lookups of a group between these chunks; return up to where it finds what it needs."""
        hit = self.answers.HIT
        if not group:
            places = range(start, end)
            return next((p for p in places if self.look(group, p) is not hit), end)
        found = 0
        for place in range(end - 1, start - 1, -1):
            found = found + 1 if self.look(group, place) is hit else 0
            if found == 4:
                return place + 4
        return start + found

    def look(self, group, place):
        self.looked += 1
        return self.manager.lookup(self.key(group, place), self.context)

    def found(self, computed, end, steps=8):
        """How many chunks are loaded behind the computed ones: as decided, and as vLLM finds."""
        for _ in range(steps):
            if not self.manager.waits(self.context, 16 * computed, 16 * end):
                break
            self.step()
        else:
            raise AssertionError("it is deferred for ever")
        self.looked, last = 0, end
        for group in (0, 1, 2):
            last = self.scan(group, computed, last)
        assert [self.scan(group, computed, last) for group in (0, 1, 2)] == [last] * 3
        return last


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        module, digests = fake_vllm.load(patch, "stack.manager", "0.32.0"), AdapterDigests()
        yield lambda *args, **more: Engine(module, digests, *args, **more)
        digests.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_vllms_scan_finds_the_place_that_was_decided_and_all_of_it_can_be_loaded(engine, data):
    chunks = data.draw(st.integers(1, 40))
    had = set()
    for group in (0, 1, 2):
        runs = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4))
        runs += [(0, data.draw(st.integers(0, 40)))] if not group else []
        had |= {(group, place) for begin, length in runs for place in range(begin, begin + length) if place < chunks}
    start = data.draw(st.integers(0, chunks - 1))
    played = engine(chunks)
    played.tier.put([played.key(*one) for one in had])

    def needed(end):
        windows = {(group, place) for group in (1, 2) for place in range(max(start, end - 4), end)}
        return windows | {(0, place) for place in range(start, end)}

    truth = next(end for end in range(chunks, start - 1, -1) if end == start or needed(end) <= had)
    assert played.found(start, chunks) == truth
    keys = [played.key(*one) for one in needed(truth)] if truth > start else []
    assert played.bench.primary.ready_run(keys) == len(keys), "it can be loaded"
    assert played.manager.bugs.count == 0


def test_a_prompt_is_one_question_and_vllm_looks_up_no_more_than_is_loaded(engine):
    """Chunk by chunk a restart and a burst of 24 prompts of 8k tokens made hundreds of thousands of lookups."""
    played = engine(256)
    played.tier.answer = RETRY
    assert played.manager.waits(played.context, 0, 4096)
    wanted = [played.key(0, place) for place in range(256)]
    wanted += [played.key(group, place) for group in (1, 2) for place in range(252, 256)]
    assert played.tier.asked == [wanted]
    played.tier.answer = None
    played.tier.put(wanted)
    played.step()
    assert played.found(0, 256) == 256
    assert played.looked == 2 * len(wanted), "twice here"
    assert played.bench.figures()["lookups"] == 264
    assert [sorted(job.keys) for job in played.tier.loads] == [sorted(wanted)]


def test_what_a_tier_brings_while_a_step_is_computed_is_found_in_the_next_one(engine, monkeypatch):
    """vLLM before 0.33 offers the stores of a step when the manager has been told of its end."""
    played = engine(8, hold=True)
    played.tier.put([played.key(group, place) for group in (0, 1, 2) for place in range(8)])
    assert played.manager.waits(played.context, 0, 128)
    connector = object.__new__(fake_vllm.load(monkeypatch, "stack.connector", "0.32.0").KvtiersConnector)
    connector.bugs = BugCount("test")
    connector.connector_scheduler = SimpleNamespace(manager=played.manager)
    monkeypatch.setattr(type(played.manager), "back_off", lambda _manager, computes: None)
    played.manager.pipelined.take_parts = list

    def offer(_self, _step):
        played.step()
        assert played.bench.begin_store([b"another's" + bytes(4)]) is not None
        return fake_vllm.OffloadingConnectorMetadata()

    monkeypatch.setattr(fake_vllm.OffloadingConnector, "build_connector_meta", offer)
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    connector.build_connector_meta(
        SimpleNamespace(
            total_num_scheduled_tokens=0,
            num_scheduled_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            preempted_req_ids=None,
        )
    )
    played.tier.end_all()
    assert not played.manager.waits(played.context, 0, 128)
    assert connector.bugs.count == played.manager.bugs.count == 0


@pytest.mark.parametrize("why", ["vLLM computes it all", "no keys", "its load failed"])
def test_a_request_that_loads_nothing_waits_for_the_gpu_no_longer(engine, why):
    played = engine(64)
    played.bench.step(prefill_tokens=1000, prefill_seconds=1.0)
    gpu = played.bench.manager._waits.gpu
    assert gpu.waiting == 1024
    played.request.out, played.request.load_failed = why == "no keys", why == "its load failed"
    assert not played.manager.waits(played.context, 16, 16 if why == "vLLM computes it all" else 1024)
    assert (gpu.waiting, gpu.ahead) == (0, 1008)
    assert not played.tier.asked


def test_a_request_that_vllm_preempts_waits_for_its_chunks_anew(engine):
    played = engine(64, hold=True)
    played.tier.put([played.key(group, place) for group in (0, 1, 2) for place in range(64)])
    for _ in range(2):
        assert played.manager.waits(played.context, 0, 1024)
        played.step(6.0)
        assert not played.manager.waits(played.context, 0, 1024), "load_wait is over"
        played.step(preempted=["r", "of another manager"])
    played.tier.end_all()
    played.step()
    assert played.found(0, 64) == 64
    played.request.load_failed = True
    assert played.found(0, 64) == 0
    played.step(preempted=["r"])
    assert played.found(0, 64) == 64
    assert played.manager.bugs.count == 0


def test_of_a_window_that_is_there_in_part_nothing_is_loaded(engine):
    played = engine(64)
    there = [played.key(0, place) for place in range(64)]
    there += [played.key(group, place) for group in (1, 2) for place in (20, 21, 22, 23, 40, 41, 60, 61, 63)]
    played.tier.put(there)
    assert played.found(0, 64) == 24
    (job,) = played.tier.loads
    assert set(job.keys) == set(there[:24]) | {played.key(group, place) for group in (1, 2) for place in range(20, 24)}


def test_a_part_of_a_block_that_was_not_decided_about_is_looked_up_alone(engine):
    played = engine(8)
    part = b"part of a block" + (0).to_bytes(4, "big")
    played.request.keys._known.add(part[:-4])
    assert played.found(0, 8) == 0
    assert played.manager.lookup(part, played.context) is played.answers.MISS
    played.tier.put([part])
    played.step()
    assert played.manager.lookup(part, played.context) is played.answers.HIT_PENDING
    played.step()
    assert played.manager.lookup(part, played.context) is played.answers.HIT


def test_vllm_is_told_of_each_loaded_chunk_whether_a_near_tier_a_remote_one_or_the_primary_had_it(engine):
    scene = engine(8, tiers={"a": {}, "b": {"is_remote": True}})
    manager, bench = scene.manager, scene.bench
    keys = [scene.key(0, place) for place in range(8)]
    windows = [scene.key(group, place) for group in (1, 2) for place in range(4, 8)]
    bench.store(keys[:3])
    scene.tier.put(keys[3:6])
    bench.tier["b"].put(keys[6:] + windows)
    assert scene.found(0, 8) == 8

    def sources():
        manager.prepare_load(keys, scene.context)
        return [manager.get_load_source(key, scene.context) for key in keys]

    assert sources() == ["host"] * 3 + ["disk"] * 3 + ["external_unspecified"] * 2
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
