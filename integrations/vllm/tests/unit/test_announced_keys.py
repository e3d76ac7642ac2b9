"""The keys by which vLLM will look a request up are those that tiers are asked about when it comes."""

from types import SimpleNamespace

import pytest

from kvtiers.api import make_offload_key
from kvtiers_vllm.own_tiering.locked_tier import prompt_keys

HASHES = [bytes([number]) * 32 for number in range(7)]


def offloading(*groups, blocks_per_chunk=1):
    cache = SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk)
    return SimpleNamespace(groups=groups, cache=cache)


@pytest.mark.parametrize(("blocks_per_chunk", "ends"), [(1, [1, 3, 5]), (3, [5])])
def test_a_chunks_key_is_that_of_its_last_hash(blocks_per_chunk, ends):
    group = SimpleNamespace(tokens_per_block=32, group_id=2)
    config = offloading(group, blocks_per_chunk=blocks_per_chunk)
    assert prompt_keys(config, SimpleNamespace(block_hashes=HASHES)) == [
        make_offload_key(HASHES[end], 2) for end in ends
    ]


def test_nothing_is_announced_where_groups_are_looked_up_in_several_ways():
    group = SimpleNamespace(tokens_per_block=32, group_id=0)
    assert not prompt_keys(offloading(group, group), SimpleNamespace(block_hashes=HASHES))
