"""Requests are asked about on the thread that takes them in, by the keys that vLLM will look up."""

from types import SimpleNamespace

import pytest

from kvtiers.api import make_offload_key
from kvtiers_vllm.own_tiering.prefetch_on_arrival import follow_arrivals, is_idle, prefix_keys

HASHES = [bytes([number]) * 32 for number in range(7)]


class Core:
    def __init__(self):
        self.scheduler = SimpleNamespace(running=[])

    def preprocess_add_request(self, request):
        return f"prepared {request}", 3


def test_each_request_is_shown_as_vllm_has_prepared_it_and_vllm_gets_what_it_got_before():
    core, seen = Core(), []
    follow_arrivals(core, seen.append)
    assert core.preprocess_add_request("one") == ("prepared one", 3)
    assert seen == ["prepared one"]


def test_two_tiers_of_an_engine_see_the_same_requests():
    core, seen = Core(), []
    follow_arrivals(core, lambda request: seen.append(("first", request)))
    follow_arrivals(core, lambda request: seen.append(("second", request)))
    core.preprocess_add_request("one")
    assert seen == [("first", "prepared one"), ("second", "prepared one")]


@pytest.mark.parametrize("core", [None, SimpleNamespace()])
def test_an_engine_core_that_is_not_there_or_another_is_left_alone(core):
    follow_arrivals(core, print)
    assert not is_idle(core), "nobody rests in an engine of which nothing is known"


def test_an_engine_is_idle_while_it_has_begun_no_request():
    core = Core()
    assert is_idle(core)
    core.scheduler.running.append("one")
    assert not is_idle(core)


def offloading(*groups, blocks_per_chunk=1):
    cache = SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk)
    return SimpleNamespace(groups=groups, cache=cache)


@pytest.mark.parametrize(("blocks_per_chunk", "ends"), [(1, [1, 3, 5]), (3, [5])])
def test_a_chunks_key_is_that_of_its_last_hash(blocks_per_chunk, ends):
    group = SimpleNamespace(tokens_per_block=32, group_id=2)
    config = offloading(group, blocks_per_chunk=blocks_per_chunk)
    (keys,) = prefix_keys(config, SimpleNamespace(block_hashes=HASHES))
    assert keys == [make_offload_key(HASHES[end], 2) for end in ends]


def test_nothing_is_asked_ahead_where_groups_are_looked_up_in_several_ways():
    group = SimpleNamespace(tokens_per_block=32, group_id=0)
    assert not list(prefix_keys(offloading(group, group), SimpleNamespace(block_hashes=HASHES)))
