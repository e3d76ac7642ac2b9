"""Several engines that share tiers: what one stored the others hit, none writes it again, and nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtiers.api import StartError
from kvtiers.config import OffloadConfig
from kvtiers_replay.engine import engines
from kvtiers_replay.engine.processes import ReplayError
from kvtiers_replay.run import ReplayOptions, replay
from kvtiers_replay.workload import ReplayRequest, Workload

from .setups import config, descendants, is_running, is_stopped, named, wait_until
from .test_replay_command import command

SYSTEM_PROMPT = [f"system {number}".encode() for number in range(40)]


def sharing(folder: Path) -> OffloadConfig:
    return config({"type": "fs", "path": str(folder), "capacity": "1GiB"}, primary={"capacity": "32MiB"})


def talks(requests: int) -> Workload:
    """Every prompt begins with one system prompt and goes on with something of its own; one comes each 100 ms."""
    prompts = [[*SYSTEM_PROMPT, *(f"{number}.{block}".encode() for block in range(4))] for number in range(requests)]
    return Workload(
        "talks", 512, [ReplayRequest(len(each) * 512 + 1, each, at / 10) for at, each in enumerate(prompts)]
    )


@pytest.fixture
def nothing_is_left() -> Callable[[], bool]:
    """Say whether all processes have ended that were started since: multiprocessing keeps one of its own."""
    before = descendants(os.getpid()).keys()
    return lambda: descendants(os.getpid()).keys() <= before


def test_what_one_engine_stored_another_hits(tmp_path) -> None:
    first, later = talks(40), talks(40)
    stored = replay(sharing(tmp_path), first, ReplayOptions(engines=2))
    assert stored.wrong_bytes == 0
    results = replay(sharing(tmp_path), later, ReplayOptions(engines=2))
    # Both begin cold, so all that they hit at first was stored by others.
    assert results.hits["fs"] >= 2 * 40
    assert results.prefix_hits == 40 * 44
    assert results.links["primary -> fs"].nbytes == 0
    assert results.wrong_bytes == 0


def test_engines_at_the_same_time_hit_what_the_others_have_just_stored(tmp_path) -> None:
    results = replay(sharing(tmp_path), talks(60), ReplayOptions(engines=2, speed=4.0))
    assert results.requests == 60
    assert results.wrong_bytes == 0
    assert results.prefix_hits >= (60 - 4) * 40  # each engine may compute the system prompt once or twice itself
    assert results.links["primary -> fs"].nbytes <= 1.2 * (40 + 60 * 4) * 4096


def test_eight_engines_write_hardly_more_than_one(tmp_path, workload) -> None:
    """Replicas behind a load balancer: conversations move between them, and all of them have the system prompts."""
    one = replay(sharing(tmp_path / "one"), workload, ReplayOptions(concurrency=2))
    eight = replay(sharing(tmp_path / "eight"), workload, ReplayOptions(concurrency=2, engines=8))
    assert one.dropped_cascades == eight.dropped_cascades == {"fs": 0}
    assert one.requests == eight.requests == len(workload.requests)
    assert one.wrong_bytes == eight.wrong_bytes == 0
    written, alone = (each.links["primary -> fs"].nbytes for each in (eight, one))
    assert alone <= written <= 1.2 * alone
    assert eight.hits["fs"] > 0


def test_the_figures_of_all_engines_are_summed_up(tmp_path, workload) -> None:
    seen = []
    results = replay(sharing(tmp_path), workload, ReplayOptions(engines=2, concurrency=2), progress=seen.append)
    assert results.references == sum(len(request.block_hashes) for request in workload.requests)
    assert results.tokens == sum(request.num_tokens for request in workload.requests)
    assert results.latencies["lookup"].count == results.first_token.without.count == len(workload.requests)
    assert results.prefix_hits == sum(results.hits.values())
    assert all(progress.requests_in_all == len(workload.requests) for progress in seen)
    assert set(results.over_time.hit_rates) == {"primary", "fs"}


def test_a_killed_engine_ends_the_replay_with_one_line_that_names_it(tmp_path, workload, nothing_is_left) -> None:
    killed = []

    def kill(progress) -> None:
        if not killed:
            killed.extend(named(os.getpid(), "engine 1"))
            os.kill(killed[0], signal.SIGKILL)

    options = ReplayOptions(engines=2, speed=1.0)
    with pytest.raises(ReplayError, match=r"^engine 1 \(process \d+\) was killed by signal 9; the replay cannot go on"):
        replay(sharing(tmp_path), workload, options, progress=kill)
    assert killed
    wait_until(nothing_is_left)


def test_an_engine_that_hangs_ends_the_replay_too(tmp_path, workload, nothing_is_left, monkeypatch) -> None:
    stopped, now = [], [0.0]
    monkeypatch.setattr(engines, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def stop(_progress) -> None:
        if not stopped:
            stopped.extend(named(os.getpid(), "engine 1"))
            os.kill(stopped[0], signal.SIGSTOP)
        now[0] += 1.0  # by this clock a second is a word of an engine's

    options = ReplayOptions(engines=2, speed=1.0, answer_seconds=2.5)
    with pytest.raises(ReplayError, match=r"^engine 1 \(process \d+\) has not answered for 5 s; the replay "):
        replay(sharing(tmp_path), workload, options, progress=stop)
    wait_until(nothing_is_left)


def test_engines_that_wait_for_the_next_arrival_say_that_they_do_not_hang(tmp_path) -> None:
    seldom = Workload("seldom", 512, [ReplayRequest(513, [b"one"], 0.0), ReplayRequest(513, [b"two"], 4.0)])
    seen = []
    results = replay(sharing(tmp_path), seldom, ReplayOptions(engines=2, speed=1.0), progress=seen.append)
    assert results.requests == 2
    assert len([progress for progress in seen if progress.requests < 2]) > 3


def test_an_engines_rank_that_is_killed_is_named_with_its_engine(tmp_path, workload, nothing_is_left) -> None:
    killed = []

    def kill(_progress) -> None:
        if not killed:
            (engine,) = named(os.getpid(), "engine 1")
            killed.extend(named(engine, "rank 0"))
            os.kill(killed[0], signal.SIGKILL)

    options = ReplayOptions(engines=2, workers=2, speed=1.0)
    with pytest.raises(ReplayError, match=r"^engine 1: rank 0 \(process \d+\) was killed by signal 9"):
        replay(sharing(tmp_path), workload, options, progress=kill)
    wait_until(nothing_is_left)


def test_what_an_engine_cannot_do_is_reported_with_its_name(tmp_path, workload, nothing_is_left, monkeypatch) -> None:
    monkeypatch.setenv("KVTIERS_NO_SUCH", "1")
    required = config({"type": "fs", "path": "/proc/no such folder", "capacity": "1GiB", "required": True})
    with pytest.raises(StartError, match=r"^engine [01]: fs: required, but cannot be opened"):
        replay(required, workload, ReplayOptions(engines=2))
    wait_until(nothing_is_left)


def test_a_wish_to_stop_reaches_all_engines(tmp_path, workload, nothing_is_left) -> None:
    stop = threading.Event()

    def stop_at_the_first(progress) -> None:
        if progress.requests:
            stop.set()

    options = ReplayOptions(engines=2, speed=1.0)
    results = replay(sharing(tmp_path), workload, options, stop=stop, progress=stop_at_the_first)
    assert results.interrupted
    assert 0 < results.requests < len(workload.requests)
    assert results.verdict[0].startswith(f"Stopped after {results.requests} of ")
    wait_until(nothing_is_left)


@pytest.fixture
def long_replay(tmp_path, trace_file):
    """A replay with everything in processes, that takes long; and all of these processes."""
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text(
        f"version: 1\nprimary: {{capacity: 8MiB}}\n"
        f"secondary: [{{type: fs, path: {tmp_path / 'store'}, capacity: 1GiB, processes: 1}}]\n",
        encoding="utf-8",
    )
    arguments = ("--config", tiers, "--trace", trace_file, "--speed", 1, "--engines", 2, "--workers", 2, "--json")
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        send_all(descendants(process.pid), signal.SIGKILL)
        process.kill()
        process.communicate(timeout=60)


def send_all(processes: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to all of them that are still there: the one that populates a region ends by itself."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def all_processes(process: subprocess.Popen) -> list[int]:
    """Two engines, each with two ranks and a tier's host."""
    wait_until(lambda: len(named(process.pid, "rank 1")) == len(named(process.pid, "fs")) == 2)
    found = list(descendants(process.pid))
    assert len(found) >= 2 + 4 + 2
    return found


def all_end_with_their_parents(process: subprocess.Popen) -> bool:
    """Whether the kernel sees to it, also while they are stopped.

    A host has asked for that before it catches a signal. The kernel ends a rank, in a group of its own, anyway.
    """
    lines = descendants(process.pid)
    return not any("populate.py" in line for line in lines.values()) and all(
        catches(pid, signal.SIGHUP) for pid in named(process.pid, "fs")
    )


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether this process has a handler for the signal."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_ctrl_c_gives_the_report_so_far_and_leaves_no_process(long_replay) -> None:
    assert long_replay.stderr is not None
    long_replay.stderr.readline()  # the first line of progress: requests are being served
    processes = all_processes(long_replay)
    long_replay.send_signal(signal.SIGINT)
    out, err = long_replay.communicate(timeout=500)
    assert long_replay.returncode == 130, err
    assert "Traceback" not in err
    figures = json.loads(out)
    assert figures["interrupted"]
    assert figures["wrong_bytes"] == 0
    assert figures["references"] > 0
    wait_until(lambda: not any(map(is_running, processes)))


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_replay_that_is_killed_takes_all_its_processes_with_it(long_replay, stopped) -> None:
    processes = all_processes(long_replay)
    if stopped:
        wait_until(lambda: all_end_with_their_parents(long_replay))
        processes = all_processes(long_replay)
        send_all(processes, signal.SIGSTOP)
        wait_until(lambda: not any(is_running(pid) and not is_stopped(pid) for pid in processes))
    long_replay.kill()
    wait_until(lambda: not any(map(is_running, processes)))
