"""SGLang's own pool of an indexer's keys, beside the MLA pool whose slots it uses: every byte, hit policy, damage."""

from pathlib import Path

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvtiers.api import ConfigError

from .parts import indexer_pool, mamba_pool, mha_pool, mla_pool

PAGE = 64  # tokens, which SGLang's indexer asks for


@pytest.fixture
def sparse(serve):
    """Start servers of a model with sparse attention and recurrent states: pools for MLA, index keys and states.

    ``on_device``: attributes of SGLang's pool of index keys on the device that are other than it has made them.
    """

    def sparse(layout="page_first", allocator="default", on_device=None, **more):
        kv = mla_pool(layout, page=PAGE, allocator=allocator)
        indexer = indexer_pool(kv, allocator=allocator, **more)
        for name, value in (on_device or {}).items():
            assert getattr(indexer.decl.device_pool, name) != value
            setattr(indexer.decl.device_pool, name, value)
        return serve(kv, sidecars={"indexer": indexer, "mamba": mamba_pool()}, is_mla_model=True)

    return sparse


def transfer(keys, slots=None):
    return PoolTransfer(name=PoolName.INDEXER, keys=keys, host_indices=slots, hit_policy=PoolHitPolicy.ALL_PAGES)


def store(server, pages, seed=0):
    """Store pages of both pools under the same slots, as SGLang does; return keys, slots and what each pool holds."""
    keys, slots = server.keys(pages, seed), server.take(pages)
    kv, indexer = server.fill(slots, seed), server.fill(slots, seed + 1, "indexer")
    assert server.backend.batch_set_v1(keys, slots) == [True] * pages
    assert server.backend.batch_set_v2([transfer(keys, slots)]) == {"indexer": [True] * pages}
    return keys, slots, kv, indexer


def load(server, keys, slots):
    server.fill(slots, 99, "indexer")
    found = server.backend.batch_get_v2([transfer(keys, slots)])
    return found["indexer"], server.content(slots, "indexer")


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_every_byte_of_the_index_keys_comes_back_from_plain_memory_and_from_a_memfd(sparse, layout):
    """Pages of 264 KiB: those of less than 256 are not mapped, since their copy costs less."""
    plain, mapped = (sparse(layout, it, skips=[False, True] * 32) for it in ("default", "shm"))
    for writer, reader, seed in ((plain, mapped, 1), (mapped, plain, 2)):
        keys, _, kv, indexer = store(writer, 3, seed)
        assert len(indexer) == 3 * 32 * PAGE * (128 + 4), "half of the layers have index keys, a scale for each token"
        assert reader.load(keys) == ([True] * 3, kv)
        slots = reader.take(3)
        assert load(reader, keys, slots) == ([True] * 3, indexer)
        reader.pool.free(slots)
    assert [server.backend.stats()["indexer"]["direct_values"] for server in (plain, mapped)] == [0, 6]


def test_a_prefix_ends_where_the_index_keys_do_and_at_a_state_alone(sparse):
    server = sparse()
    keys, slots = server.keys(4), server.take(4)
    server.fill(slots, 1)
    assert server.backend.batch_set_v1(keys, slots) == [True] * 4
    asked = PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert server.backend.batch_exists_v2(keys, [asked]).restorable_prefix_pages == []
    assert server.backend.batch_set_v2([transfer(keys[:3], slots[: 3 * PAGE])]) == {"indexer": [True] * 3}
    assert server.backend.batch_exists_v2(keys, [asked]).restorable_prefix_pages == [1, 2, 3]
    states = PoolTransfer(name=PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    for key in (keys[1], keys[3]):
        state = PoolTransfer(name=PoolName.MAMBA, keys=[key], host_indices=server.take(1, "mamba"))
        assert server.backend.batch_set_v2([state]) == {"mamba": [True]}
    found = server.backend.batch_exists_v2(keys, [asked, states])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])


def test_a_damaged_page_of_index_keys_is_a_miss_of_its_pool_alone(sparse, tmp_path):
    server = sparse()
    keys, slots, kv, indexer = store(server, 3)
    page = len(indexer) // 3
    wanted = indexer[:page]
    files = [it for it in (tmp_path / "fs").rglob("*") if it.is_file() and holds(it, wanted)]
    assert len(files) == 1
    damaged = bytearray(files[0].read_bytes())
    damaged[damaged.index(wanted) + 123] ^= 1
    files[0].write_bytes(damaged)
    found, got = load(server, keys, slots)
    assert found == [False, True, True]
    assert got[page:] == indexer[page:]
    assert got[:page] != wanted
    assert server.load(keys) == ([True] * 3, kv)
    assert server.backend.batch_exists_v2(keys, [transfer(None)]).restorable_prefix_pages == []
    store(server, 3)
    assert load(server, keys, slots) == ([True] * 3, indexer)


def holds(path: Path, content: bytes) -> bool:
    return content in path.read_bytes()


def test_index_keys_of_other_layers_are_misses(sparse):
    """Of the same size and under the same page keys: the second layer's, or the third's."""
    one, other = sparse(skips=(False, True, False)), sparse(skips=(False, False, True))
    keys, _, _, _ = store(one, 2)
    assert load(other, keys, other.take(2))[0] == [False, False]
    assert other.backend.batch_exists(keys) == 2, "the KV is the same"


@pytest.mark.parametrize(
    "changed",
    [
        {"index_head_dim": 64},
        {"quant_block_size": 64},
        {"index_page_size": 32},
        {"index_kpool": 2},
        {"index_kpool_compress": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_index_keys_that_are_made_in_another_way_are_misses_where_nothing_else_differs(sparse, changed):
    """Not even the size of a page, which some of these decide in SGLang's own pool."""
    one, other = sparse(), sparse(on_device=changed)
    keys, _, _, indexer = store(one, 2)
    assert load(other, keys, other.take(2))[0] == [False, False]
    assert other.backend.batch_exists(keys) == 2, "the KV is the same"
    assert load(sparse(), keys, one.take(2)) == ([True, True], indexer)


def test_the_layout_in_which_sglang_does_not_show_where_index_keys_lie_is_refused_in_one_line(sparse):
    with pytest.raises(ConfigError, match="DSAIndexerPoolHost with layout 'layer_first' does not show") as refused:
        sparse("layer_first")
    assert "\n" not in str(refused.value)
    assert "--hicache-mem-layout" in str(refused.value)


def test_a_window_is_resumed_where_its_last_pages_are(serve):
    """SGLang makes the pool of a sliding window of the class of the KV's, with layers of its own."""
    server = serve(mha_pool(layers=2), sidecars={"swa": mha_pool(layers=4)})
    keys, _ = server.store(pages=5)
    slots = server.take(2, "swa")
    content = server.fill(slots, 1, "swa")
    last = PoolTransfer(name=PoolName.SWA, keys=keys[2:4], host_indices=slots)
    assert server.backend.batch_set_v2([last]) == {"swa": [True, True]}
    asked = PoolTransfer(name=PoolName.SWA, keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert server.backend.batch_exists_v2(keys, [asked]).restorable_prefix_pages == [4]
    server.fill(slots, 2, "swa")
    assert server.backend.batch_get_v2([last]) == {"swa": [True, True]}
    assert server.content(slots, "swa") == content
