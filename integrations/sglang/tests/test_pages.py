"""Pages of SGLang's real pools: every byte comes back, in every layout, and only under the same identity."""

import threading

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvtiers._log_queue import flush_logs
from kvtiers.api import ConfigError
from kvtiers_sglang.weight_updates import begin_update

from .parts import MHA_LAYOUTS, MLA_LAYOUTS, mamba_pool, mha_pool, mla_pool

LARGE = {mha_pool: {"heads": 64}, mla_pool: {"rank": 4096}}
"""For pages of 384 KiB: those of less than 256 are not mapped, since their copy costs less."""
POOLS = [*[(mha_pool, layout) for layout in MHA_LAYOUTS], *[(mla_pool, layout) for layout in MLA_LAYOUTS]]


@pytest.mark.parametrize(("make", "layout"), POOLS, ids=lambda it: getattr(it, "__name__", it))
def test_every_byte_comes_back_in_every_layout_and_pages_of_a_pool_in_a_memfd_pass_no_bounce_row(serve, make, layout):
    plain, mapped = (
        serve(make(layout, allocator=it, **LARGE[make]), is_mla_model=make is mla_pool) for it in ("default", "shm")
    )
    keys, content = plain.store(pages=5)
    assert mapped.backend.batch_exists([*keys, "0" * 64]) == 5
    assert mapped.load(keys) == ([True] * 5, content)
    keys, content = mapped.store(pages=5, seed=1)
    assert plain.load(keys) == ([True] * 5, content)
    assert [server.backend.stats()["kv"]["direct_values"] for server in (plain, mapped)] == [0, 10]


@pytest.mark.parametrize(("tokens", "direct"), [(16, 0), (512, 1)])
def test_a_page_whose_copy_costs_less_than_a_claim_passes_a_bounce_row(serve, tokens, direct):
    """Of 12 KiB, and of 384."""
    server = serve(mha_pool(page=tokens, allocator="shm"))
    server.store(pages=1)
    assert server.backend.stats()["kv"]["direct_values"] == direct


def test_a_pool_of_several_memfds_passes_bounce_rows(serve):
    """With states of 256 KiB."""
    server = serve(sidecars={"mamba": mamba_pool(heads=4096, allocator="shm")})
    assert len(server.pools["mamba"].allocator.fds) == 2
    keys, slots = server.keys(1), server.take(1, "mamba")
    content = server.fill(slots, 1, "mamba")
    states = PoolTransfer(name=PoolName("mamba"), keys=keys, host_indices=slots)
    assert server.backend.batch_set_v2([states]) == {"mamba": [True]}
    server.fill(slots, 2, "mamba")
    assert server.backend.batch_get_v2([states]) == {"mamba": [True]}
    assert server.content(slots, "mamba") == content
    assert server.backend.stats()["mamba"]["direct_values"] == 0


def test_a_pool_that_cannot_be_mapped_passes_bounce_rows_with_one_line(serve, caplog):
    """As where a descriptor is not that of the memory that the pool lies in."""
    pool, other = (mha_pool(allocator="shm", **LARGE[mha_pool]) for _ in range(2))
    fds = pool.allocator.fds
    pool.allocator.fds = other.allocator.fds
    server = serve(pool)
    pool.allocator.fds = fds
    keys, content = server.store(pages=3)
    assert server.load(keys) == ([True] * 3, content)
    assert server.backend.stats()["kv"]["direct_values"] == 0
    flush_logs(30.0)
    (line,) = [it.getMessage() for it in caplog.records if "is not mapped" in it.getMessage()]
    assert "pool kv" in line
    assert "no shared mapping of descriptor" in line
    assert "\n" not in line


@pytest.mark.parametrize("allocator", ["default", "shm"])
def test_a_page_that_is_not_there_ends_the_prefix_and_changes_nothing(serve, allocator):
    server = serve(mha_pool(allocator=allocator, **LARGE[mha_pool]))
    keys, content = server.store(pages=4)
    absent = server.keys(1, seed=7)
    slots = server.take(3)
    before = server.fill(slots, 5)
    found = server.backend.batch_get_v1([keys[0], *absent, keys[1]], slots)
    assert found == [True, False, True]
    page = len(before) // 3
    after = server.content(slots)
    assert after[page : 2 * page] == before[page : 2 * page]
    assert after[:page] == content[:page]
    assert server.backend.batch_exists([*keys[:2], *absent, keys[2]]) == 2
    assert server.backend.exists(keys[3])
    assert not server.backend.exists(absent[0])


def test_pages_of_one_prompt_are_chained_so_that_another_beginning_shares_nothing(serve):
    server = serve()
    keys, _ = server.store(pages=2, seed=1)
    assert server.backend.batch_exists(server.keys(2, seed=2)) == 0
    assert server.backend.batch_exists(keys) == 2


def test_a_batch_of_128_pages_with_fewer_bounce_rows_than_pages(serve):
    pool = mha_pool(page=1)
    server = serve(pool)
    keys, content = server.store(pages=128)
    assert server.load(keys) == ([True] * 128, content)


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (3, 4), (0, 1)])
def test_what_is_replicated_has_one_writer_and_readers_on_every_rank_of_any_number(serve, rank, size):
    writer = serve(mla_pool(), is_mla_model=True, tp_size=2)
    keys, content = writer.store(pages=3)
    reader = serve(mla_pool(), is_mla_model=True, tp_rank=rank, tp_size=size)
    assert reader.load(keys) == ([True] * 3, content)


def test_a_servers_pages_are_its_tenants_and_anothers_are_misses(serve, config, tmp_path):
    config["tenants"] = {}
    blue = serve(tenant="blue")
    keys, content = blue.store(pages=2)
    for tenant in ("red", ""):
        assert serve(tenant=tenant).backend.batch_exists(keys) == 0
    assert serve(tenant="blue").load(keys) == ([True, True], content)
    assert list((tmp_path / "fs").rglob("t-blue"))
    with pytest.raises(ConfigError, match="'tenant': tenant 'Blue' cannot be used"):
        serve(tenant="Blue")


def test_pages_of_other_weights_are_neither_stored_nor_found_and_no_backend_is_attached_after(serve, caplog):
    server = serve()
    keys, _ = server.store(pages=2)
    begin_update("update_weights_from_disk")
    assert server.backend.batch_exists(keys) == 0
    assert server.backend.batch_exists_v2(keys).kv_hit_pages == 0
    assert server.load(keys)[0] == [False, False]
    slots = server.take(2)
    assert server.backend.batch_set_v1(server.keys(2, seed=3), slots) == [False, False]
    with pytest.raises(ConfigError, match="update_weights_from_disk has changed the weights of this server"):
        serve()


def test_the_next_process_finds_the_pages_of_before_and_none_of_after_an_update(serve, monkeypatch):
    server = serve()
    keys, content = server.store(pages=2)
    begin_update("update_weights_from_tensor")
    assert server.backend.batch_set_v1(server.keys(2, seed=3), server.take(2)) == [False, False]
    monkeypatch.setattr("kvtiers_sglang.weight_updates._begun", "")
    fresh = serve()
    assert fresh.backend.batch_exists(server.keys(2, seed=3)) == 0
    assert fresh.load(keys) == ([True, True], content)


def test_many_threads_back_up_and_prefetch_and_every_byte_is_right(serve):
    server = serve()
    lock, failures = threading.Lock(), []

    def work(seed):
        for turn in range(3):
            with lock:
                keys, slots = server.keys(2, seed=10 * seed + turn), server.take(2)
                back = server.take(2)
            content = server.fill(slots, 10 * seed + turn)
            stored = server.backend.batch_set_v1(keys, slots)
            if stored != [True, True] or server.backend.batch_get_v1(keys, back) != [True, True]:
                failures.append((seed, turn, stored))
            elif server.content(back) != content:
                failures.append((seed, turn, "other bytes"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
