"""The reference engine over the real stack: what it must notice, and where its hits come from."""

import os
import signal
import threading

import numpy as np
import pytest

from kvtiers.api import ConfigError
from kvtiers_example.memory_store import MemoryStore
from kvtiers_replay.options import replay_layout
from kvtiers_replay.run import ReplayOptions, replay

from .setups import config, named

MEMORY = {"type": "memory", "io": "thread", "capacity": "64MiB"}
MEMORY_ASYNC = {"type": "memory-async", "max_blocks": 5000}


def test_a_flipped_bit_in_a_row_is_counted_as_a_wrong_byte(workload, regions) -> None:
    layout = replay_layout(config(), 512, ReplayOptions())
    damaged = []

    def damage(report) -> None:
        if report.requests >= 100 and not damaged:
            damaged.append(report)
            rows = np.frombuffer(regions[-1].view, np.uint8).reshape(-1, layout.row_stride)
            rows[:, 1234] ^= 4

    good = replay(config(), workload, ReplayOptions())
    bad = replay(config(), workload, ReplayOptions(), progress=damage)
    assert good.wrong_bytes == 0
    assert 0 < bad.wrong_bytes <= bad.prefix_hits
    assert bad.verdict[0].startswith("WRONG")


def test_damage_in_a_tier_costs_hits_and_never_gives_a_wrong_byte(workload, monkeypatch) -> None:
    read_into = MemoryStore.read_into

    def read_with_a_flipped_bit(store, name, dst) -> bool:
        found = read_into(store, name, dst)
        if found:
            dst[1234] ^= 4
        return found

    options = ReplayOptions(primary_chunks=150)
    good = replay(config(MEMORY), workload, options)
    monkeypatch.setattr(MemoryStore, "read_into", read_with_a_flipped_bit)
    bad = replay(config(MEMORY), workload, options)
    assert bad.hits["memory"] == 0
    assert good.wrong_bytes == bad.wrong_bytes == 0
    assert bad.prefix_hits < good.prefix_hits


def test_a_directory_that_does_not_answer_any_more_costs_hits_and_nothing_else(workload, tmp_path) -> None:
    options = ReplayOptions(concurrency=4, primary_chunks=200)
    stopped: set[int] = set()

    def hang(progress) -> None:
        if progress.requests >= 40:
            new = set(named(os.getpid(), "fs")) - stopped  # each host that is restarted hangs as well
            for pid in new:
                os.kill(pid, signal.SIGSTOP)
            stopped.update(new)

    tier = {"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "deadline": "4s", "grace": "200ms"}
    tier["processes"] = 1  # all of its hosts are to hang, whatever the machine
    hung = replay(config(tier, lookup_wait="100ms", load_wait="500ms"), workload, options, progress=hang)
    assert stopped
    assert hung.requests == len(workload.requests)
    assert hung.wrong_bytes == 0
    assert hung.prefix_hits < hung.infinite_hits
    assert hung.stalls.p99 < 4.0  # no step has waited for the tier's deadline
    assert not named(os.getpid(), "fs")


@pytest.mark.parametrize("tier", [MEMORY, MEMORY_ASYNC], ids=["memory", "memory-async"])
@pytest.mark.parametrize("bytes_per_chunk", [1, 4032, 4033, 20_001])
def test_every_size_of_chunk_comes_back_right_through_a_tier(workload, tier, bytes_per_chunk) -> None:
    options = ReplayOptions(bytes_per_chunk, primary_chunks=150)
    report = replay(config(tier), workload, options)
    assert report.wrong_bytes == 0
    assert report.hits[tier["type"]] > 100
    assert report.prefix_hits == report.infinite_hits
    assert report.links["gpu -> primary"].nbytes % bytes_per_chunk == 0
    assert report.links[f"{tier['type']} -> primary"].nbytes > 0


def test_the_engines_own_prefix_cache_comes_first_and_together_they_are_as_good_as_without(workload) -> None:
    with_cache = replay(config(), workload, ReplayOptions(gpu_blocks=200))
    without = replay(config(), workload, ReplayOptions())
    assert with_cache.wrong_bytes == 0
    assert with_cache.hits["gpu"] > 100
    assert with_cache.hits["primary"] > 100
    assert with_cache.prefix_hits == with_cache.infinite_hits == without.prefix_hits
    assert with_cache.links["primary -> gpu"].nbytes < without.links["primary -> gpu"].nbytes


def test_a_second_run_finds_nothing_of_the_first(workload) -> None:
    first = replay(config(MEMORY), workload, ReplayOptions())
    second = replay(config(MEMORY), workload, ReplayOptions())
    assert first.hits == second.hits
    assert first.prefix_hits == second.prefix_hits


def test_a_pool_that_cannot_hold_the_longest_request_is_refused(workload) -> None:
    with pytest.raises(ConfigError, match=f"--gpu-blocks 3: the longest request has {workload.longest} full blocks"):
        replay(config(), workload, ReplayOptions(gpu_blocks=3))


def test_a_wish_to_stop_gives_the_report_so_far(workload) -> None:
    stop = threading.Event()

    def at_twenty(report) -> None:
        if report.requests == 20:
            stop.set()

    report = replay(config(MEMORY), workload, ReplayOptions(), stop=stop, progress=at_twenty)
    assert (report.interrupted, report.requests) == (True, 20)
    assert report.references == sum(len(request.block_hashes) for request in workload.requests[:20])


def test_nothing_is_left_running_after_a_replay(workload) -> None:
    before = set(threading.enumerate())
    replay(config(MEMORY, MEMORY_ASYNC), workload, ReplayOptions())
    assert set(threading.enumerate()) <= before


def test_a_config_with_a_model_of_its_own_is_replayed_under_that_name(workload) -> None:
    model = {"name": "org/Model-7B", "revision": "abc123", "kv_dtype": "bfloat16"}
    ours = replay_layout(config(model=model), 512, ReplayOptions())
    assert (ours.model.name, ours.model.weights, ours.model.kv_dtype) == ("org/Model-7B", "abc123", "bfloat16")
    assert replay(config(MEMORY, model=model), workload, ReplayOptions()).wrong_bytes == 0
