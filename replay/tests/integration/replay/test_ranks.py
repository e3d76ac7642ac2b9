"""Ranks in processes of their own: every rank's bytes are right, and one that is lost ends the replay in one line."""

import os
import signal

import numpy as np
import pytest

from kvtiers_replay.engine.processes import ReplayError
from kvtiers_replay.run import ReplayOptions, replay

from .setups import config, is_running, named, wait_until

MEMORY = {"type": "memory", "io": "thread", "capacity": "64MiB"}


@pytest.mark.parametrize(("workers", "blocks_per_chunk"), [(1, 1), (2, 1), (4, 3)])
def test_all_ranks_store_and_load_their_own_parts(workload, managers, workers, blocks_per_chunk) -> None:
    options = ReplayOptions(
        bytes_per_chunk=4032,
        workers=workers,
        blocks_per_chunk=blocks_per_chunk,
        concurrency=4,
        primary_chunks=200 // blocks_per_chunk,
    )
    results = replay(config(MEMORY), workload, options)
    assert results.requests == len(workload.requests)
    assert results.wrong_bytes == 0
    assert results.hits["primary"] > 50
    assert results.hits["memory"] > 50
    # A job is over when every rank has reported it: all of a chunk's bytes have moved, not one rank's.
    stored = managers[-1].stats()["engine"]["stored_chunks"]
    assert results.links["gpu -> primary"].nbytes == stored * 4032
    assert results.preemptions == 0


def test_each_rank_has_bytes_of_its_own_so_that_a_mix_up_would_be_seen(workload, regions) -> None:
    seen = []

    def look(_progress) -> None:
        first_row = np.frombuffer(regions[-1].view, np.uint8, 4032)
        seen.append((first_row[:2016].copy(), first_row[2016:].copy()))

    replay(config(), workload, ReplayOptions(workers=2, primary_chunks=200), progress=look)
    first, second = seen[10]
    assert first.any()
    assert np.count_nonzero(first != second) > 1900


def test_ranks_whose_blocks_run_out_never_hold_wrong_bytes(workload) -> None:
    options = ReplayOptions(workers=2, gpu_blocks=workload.longest, concurrency=8, primary_chunks=300, step_tokens=4096)
    results = replay(config(MEMORY), workload, options)
    assert results.preemptions > 0
    assert results.wrong_bytes == 0
    assert results.requests == len(workload.requests)


def test_with_two_ranks_and_one_request_at_a_time_the_hits_are_those_of_one_rank(workload) -> None:
    alone = replay(config(), workload, ReplayOptions(primary_chunks=150))
    two = replay(config(), workload, ReplayOptions(primary_chunks=150, workers=2))
    assert two.prefix_hits == alone.prefix_hits > 0
    assert two.wrong_bytes == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_rank_ends_the_replay_with_one_line_that_names_it(workload, workers) -> None:
    seen: dict[int, int] = {}

    def kill(progress) -> None:
        if progress.requests >= 30 and not seen:
            (seen[workers],) = named(os.getpid(), f"rank {workers - 1}")
            os.kill(seen[workers], signal.SIGKILL)

    options = ReplayOptions(workers=workers, concurrency=4, primary_chunks=200)
    with pytest.raises(ReplayError, match=rf"^rank {workers - 1} \(process \d+\) was killed by signal 9; the replay "):
        replay(config(MEMORY), workload, options, progress=kill)
    assert seen
    assert not named(os.getpid(), "rank 0") + named(os.getpid(), "rank 1")


def test_a_rank_that_hangs_ends_the_replay_too(workload) -> None:
    """It is the first to be waited for, so that the other's answer may come as late as a busy machine has it."""
    stopped: list[int] = []

    def stop(progress) -> None:
        if progress.requests >= 30 and not stopped:
            stopped.extend(named(os.getpid(), "rank 0"))
            os.kill(stopped[0], signal.SIGSTOP)

    options = ReplayOptions(workers=2, concurrency=4, primary_chunks=200, answer_seconds=10.0)
    with pytest.raises(ReplayError) as found:
        replay(config(), workload, options, progress=stop)
    process = f"rank 0 (process {stopped[0]})"
    assert str(found.value) == f"{process} has not answered for 10 s; the replay cannot go on without it"
    wait_until(lambda: not is_running(stopped[0]))
