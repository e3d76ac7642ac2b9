"""Hybrid models: a prefix is resumed only where every pool of the model has what its hit policy asks for."""

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvtiers_sglang.backend import ALL, TRAILING, restorable

from .parts import mamba_pool, mha_pool

POLICIES = {PoolHitPolicy.ALL_PAGES: ALL, PoolHitPolicy.TRAILING_PAGES: TRAILING}


@pytest.mark.parametrize(
    ("policy", "there", "trailing", "lengths"),
    [
        (ALL, [1, 1, 0, 1], 1, {1, 2}),
        (ALL, [], 1, set()),
        (ALL, [0, 1], 1, set()),
        (TRAILING, [0, 1, 0, 1], 1, {2, 4}),
        (TRAILING, [1, 1, 0, 1, 1], 2, {1, 2, 5}),
        (TRAILING, [1, 1, 1], 5, {1, 2, 3}),
        ("block_groups", [1, 1], 1, set()),
    ],
)
def test_the_prefixes_that_a_pool_can_serve(policy, there, trailing, lengths):
    assert restorable(policy, [bool(one) for one in there], trailing) == lengths


def test_our_names_of_the_policies_are_sglangs():
    assert {policy.value for policy in POLICIES} == set(POLICIES.values())


@pytest.fixture
def hybrid(serve):
    """A model with full attention and a recurrent state, and a draft model's pool of the KV's shape."""
    return lambda: serve(mha_pool(), sidecars={"mamba": mamba_pool(), "draft": mha_pool()})


def transfer(name, keys, slots=None, policy=PoolHitPolicy.ALL_PAGES):
    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=slots, hit_policy=policy)


def put(server, name, keys, seed):
    slots = server.take(len(keys), name)
    content = server.fill(slots, seed, name)
    assert server.backend.batch_set_v2([transfer(name, keys, slots)]) == {name: [True] * len(keys)}
    return content


def test_states_are_restored_where_they_were_taken_and_nowhere_else(hybrid):
    server = hybrid()
    keys, _ = server.store(pages=6)
    state = put(server, "mamba", [keys[1]], 1)
    put(server, "mamba", [keys[3]], 2)
    wanted = transfer("mamba", [""], policy=PoolHitPolicy.TRAILING_PAGES)
    found = server.backend.batch_exists_v2(keys, [wanted])
    assert found.kv_hit_pages == 4
    assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 4}
    assert found.restorable_prefix_pages == [2, 4]
    slots = server.take(1, "mamba")
    server.fill(slots, 77, "mamba")
    assert server.backend.batch_get_v2([transfer("mamba", [keys[1]], slots)]) == {"mamba": [True]}
    assert server.content(slots, "mamba") == state


def test_a_sidecar_that_ends_earlier_ends_the_prefix_of_the_model(hybrid):
    server = hybrid()
    keys, _ = server.store(pages=4)
    put(server, "draft", keys[:2], 1)
    found = server.backend.batch_exists_v2(keys, [transfer("draft", None)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    put(server, "mamba", [keys[2]], 1)
    both = [transfer("draft", None), transfer("mamba", [""], policy=PoolHitPolicy.TRAILING_PAGES)]
    found = server.backend.batch_exists_v2(keys, both)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])


def test_pools_of_the_same_shape_and_key_never_give_each_others_pages(hybrid):
    server = hybrid()
    keys, content = server.store(pages=2)
    slots = server.take(2, "draft")
    before = server.fill(slots, 5, "draft")
    assert server.backend.batch_get_v2([transfer("draft", keys, slots)]) == {"draft": [False, False]}
    assert server.content(slots, "draft") == before
    other = put(server, "draft", keys, 6)
    assert server.load(keys) == ([True, True], content)
    assert server.backend.batch_get_v2([transfer("draft", keys, slots)]) == {"draft": [True, True]}
    assert server.content(slots, "draft") == other


def test_several_pools_in_one_call_and_what_does_not_fit_is_a_miss_of_its_pool_alone(hybrid):
    server = hybrid()
    keys = server.keys(2)
    slots, too_few = server.take(2, "draft"), server.take(1, "mamba")
    server.fill(slots, 1, "draft")
    stored = server.backend.batch_set_v2([transfer("draft", keys, slots), transfer("mamba", keys, too_few)])
    assert stored == {"draft": [True, True], "mamba": [False, False]}
    assert server.backend.batch_get_v2([transfer("swa", keys, slots)]) == {"swa": [False, False]}
    assert server.backend.batch_get_v2([transfer("draft", keys, None)]) == {"draft": [False, False]}
    assert server.backend.batch_exists_v2(keys, None).kv_hit_pages == 0
