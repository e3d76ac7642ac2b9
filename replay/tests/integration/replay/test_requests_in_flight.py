"""Requests side by side: blocks that run out, chunks of prompts and of blocks; no wrong byte, and nothing left over."""

import numpy as np
import pytest

from kvtiers.api import ConfigError
from kvtiers_replay.engine import task
from kvtiers_replay.engine.block_pool import BlockPool
from kvtiers_replay.engine.ranks import Ranks
from kvtiers_replay.options import replay_layout
from kvtiers_replay.run import ReplayOptions, replay

from .setups import config

MEMORY = {"type": "memory", "capacity": "64MiB"}
MEMORY_THREAD = MEMORY | {"io": "thread"}


@pytest.fixture
def pools(monkeypatch) -> list[BlockPool]:
    """The block pools of replays in this process."""
    made = []

    class NotedPool(BlockPool):
        def __init__(self, num_blocks: int, *, caching: bool) -> None:
            super().__init__(num_blocks, caching=caching)
            self.num_blocks = num_blocks
            made.append(self)

    monkeypatch.setattr(task, "BlockPool", NotedPool)
    return made


@pytest.fixture
def steps(monkeypatch) -> list:
    """The orders that replays in this process have given."""
    seen = []
    execute = Ranks.execute

    def execute_and_note(ranks, orders):
        seen.append(orders)
        return execute(ranks, orders)

    monkeypatch.setattr(Ranks, "execute", execute_and_note)
    return seen


def assert_nothing_is_in_flight(managers, pools) -> None:
    stats = managers[-1].stats()
    assert pools[-1].free == pools[-1].num_blocks
    assert stats["primary"]["pinned_rows"] == stats["primary"]["pending_rows"] == 0
    assert stats["primary"]["quarantined_rows"] == stats["engine"]["misuse"] == 0
    for tier in stats["tiers"].values():
        assert tier["pinned_rows"] == tier["running_jobs"] == tier["loading_chunks"] == 0


@pytest.mark.parametrize("tier", [MEMORY, MEMORY_THREAD], ids=["process", "thread"])
@pytest.mark.parametrize("gpu_blocks", [0, 200], ids=["no prefix cache", "prefix cache"])
def test_requests_side_by_side_are_all_served_with_the_right_bytes(workload, managers, pools, tier, gpu_blocks) -> None:
    results = replay(config(tier), workload, ReplayOptions(gpu_blocks=gpu_blocks, concurrency=8, primary_chunks=300))
    assert results.requests == len(workload.requests)
    assert results.references == sum(len(request.block_hashes) for request in workload.requests)
    assert results.wrong_bytes == 0
    assert results.prefix_hits == sum(results.hits.values()) > 0.5 * results.infinite_hits
    assert_nothing_is_in_flight(managers, pools)


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_who_loses_its_blocks_is_served_again_and_nothing_is_left(
    workload, managers, pools, store, blocks_per_chunk
) -> None:
    options = ReplayOptions(
        gpu_blocks=workload.longest,
        concurrency=8,
        step_tokens=4096,
        store=store,
        blocks_per_chunk=blocks_per_chunk,
        primary_chunks=300,
    )
    results = replay(config(MEMORY), workload, options)
    assert results.preemptions > 0
    assert results.requests == len(workload.requests)
    assert results.references == sum(len(request.block_hashes) for request in workload.requests)
    assert results.wrong_bytes == 0
    assert not results.errors.keys() & {"gpu: loads that failed", "gpu: stores that failed"}
    assert_nothing_is_in_flight(managers, pools)


def test_without_a_prefix_cache_a_preempted_request_loads_again_what_it_had_stored(workload, monkeypatch) -> None:
    # All blocks that there are, so that they run out though none is kept.
    monkeypatch.setattr(task, "BlockPool", lambda _blocks, *, caching: BlockPool(workload.longest, caching=caching))
    results = replay(config(), workload, ReplayOptions(concurrency=8, primary_chunks=5000))
    assert results.preemptions > 0
    assert results.wrong_bytes == 0
    loaded = results.links["primary -> gpu"].nbytes // 4032
    assert loaded > results.prefix_hits  # the rest was loaded by requests that had been preempted: no request's hits
    assert results.prefix_hits <= results.infinite_hits


def test_a_block_that_a_transfer_has_damaged_is_noticed_among_many_requests(workload, regions) -> None:
    stride = replay_layout(config(), 512, ReplayOptions()).row_stride

    damaged = []

    def damage(progress) -> None:
        if progress.requests >= 80 and not damaged:
            damaged.append(progress)
            rows = np.frombuffer(regions[-1].view, np.uint8).reshape(-1, stride)
            rows[:, 1234] ^= 4

    results = replay(config(), workload, ReplayOptions(concurrency=6, primary_chunks=2000), progress=damage)
    assert results.wrong_bytes > 0
    assert results.verdict[0].startswith("WRONG")


@pytest.mark.parametrize("blocks_per_chunk", [2, 7])
def test_chunks_of_several_blocks_are_hit_as_far_as_they_are_full(workload, blocks_per_chunk) -> None:
    options = ReplayOptions(blocks_per_chunk=blocks_per_chunk, primary_chunks=2000, bytes_per_chunk=4032)
    results = replay(config(), workload, options)
    assert results.wrong_bytes == 0
    seen: set[bytes] = set()
    expected = 0
    for request in workload.requests:
        # Chained hashes: a chunk is known by its last block. Of a chunk that is there, a part may be loaded.
        ends = [h in seen for h in request.block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]]
        chunks = ends.index(False) if False in ends else len(ends)
        expected += min(chunks * blocks_per_chunk, (request.num_tokens - 1) // 512)
        seen.update(request.block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk])
    assert results.prefix_hits == expected < results.infinite_hits


def test_a_step_computes_no_more_than_its_tokens_and_long_prompts_take_several(workload, steps) -> None:
    results = replay(config(), workload, ReplayOptions(concurrency=4, step_tokens=2048, primary_chunks=2000))
    blocks = [sum(len(run.block_ids) for run in orders.computes) for orders in steps]
    # With a part of a block left over from the step before, one more of them may become full.
    assert 4 <= max(blocks) <= 2048 // 512 + 4
    assert sum(blocks) == results.references - results.prefix_hits


def test_lazy_stores_cost_nothing_while_the_engine_keeps_everything_itself(workload) -> None:
    big = ReplayOptions(gpu_blocks=3000, concurrency=4, store="lazy")
    results = replay(config(), workload, big)
    assert results.hits["gpu"] == results.prefix_hits
    assert results.links["gpu -> primary"].nbytes == 0
    small = ReplayOptions(gpu_blocks=150, concurrency=2, store="lazy", primary_chunks=2000)
    results = replay(config(), workload, small)
    assert results.hits["primary"] > 100
    assert results.wrong_bytes == 0


def test_lazy_stores_without_a_prefix_cache_are_refused(workload) -> None:
    with pytest.raises(ConfigError, match="--store lazy stores what the engine's own prefix cache is about to lose"):
        replay(config(), workload, ReplayOptions(store="lazy"))


def test_a_chunk_that_cannot_be_shared_out_is_refused(workload) -> None:
    with pytest.raises(
        ConfigError, match="--bytes-per-chunk 4032: a chunk has 5 blocks of 2 ranks; give a multiple of 10"
    ):
        replay(config(), workload, ReplayOptions(blocks_per_chunk=5, workers=2))


def test_requests_that_arrive_at_their_times_are_not_served_before(workload) -> None:
    recorded = workload.requests[-1].arrival - workload.requests[0].arrival
    results = replay(config(), workload, ReplayOptions(concurrency=4, speed=recorded / 2.0))
    assert results.seconds >= 2.0
    assert results.requests == len(workload.requests)


def test_every_figure_is_there_for_requests_side_by_side(workload) -> None:
    options = ReplayOptions(concurrency=4, primary_chunks=150, prefill_speed=5000.0)
    results = replay(config(MEMORY), workload, options)
    assert results.latencies["lookup"].count == results.first_token.without.count == len(workload.requests)
    assert results.latencies["load to the gpu"].count > 50
    assert results.latencies["promotion from memory"].count > 10
    assert results.latencies["promotion from memory"].p99 > 0
    assert results.stalls.count > len(workload.requests)
    assert 0 < results.stalls.p50 <= results.stalls.p99 <= results.stalls.worst < 60
    assert results.first_token.without.total == pytest.approx(results.tokens / 5000)
    computed = (results.tokens - results.tokens_saved) / 5000
    assert computed < results.first_token.with_tiers.total < computed + results.seconds * 4
    assert set(results.over_time.hit_rates) == {"primary", "memory"}
    assert {"memory: chunks to load", "memory: chunks to store"} <= set(results.over_time.queue_depths)
    assert any(map(any, results.over_time.queue_depths.values()))
    assert len(results.over_time.seconds) > 5
    assert results.over_time.seconds[-1] == pytest.approx(results.seconds)
    assert all(link.nbytes and link.seconds for link in results.links.values())
