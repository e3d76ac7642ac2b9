"""Tensor parallel: the ranks' bytes lie in one row, and engines of different sizes share what the layout certifies."""

import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import TWO_RANKS, EngineError, wait_until
from .models import make_prompt
from .ways import fs, tiers, whole_stack

NOTICED = 30.0
"""Seconds in which an engine whose rank has died says so: vLLM gives the others a few, and the machine may be busy."""


def ranks(engine):
    """Return the process ids of an engine's ranks."""
    return [pid for pid, command in engine.family().items() if "spawn_main" in command]


def left_behind(engine):
    """Return what bears an engine's name though the engine has ended: a socket's line, files of shared memory."""
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if engine.id in line]
    return sockets, list(Path("/dev/shm").glob(f"*{engine.id}*"))


def test_two_ranks_store_and_load_whole_rows_leave_nothing_when_killed_and_share_nothing_with_one_rank(
    start, model, tmp_path, right, way
):
    config = way(fs(tmp_path / "store"))
    both = start(model, config, **TWO_RANKS)
    assert right(both, *PROMPTS) == [0, 0]
    both.forget()
    assert right(both, *PROMPTS) == WHOLE
    assert len(both.family()) >= 4, "the engine, two ranks, the tier's host"
    both.crash()
    wait_until(lambda: not both.family(), f"processes outlive their engine: {both.family()}")
    sockets, files = left_behind(both)
    assert not sockets
    assert not files or way is tiers, "vLLM's own region stays behind, as without kvtiers; ours has no name"
    again = start(model, config, **TWO_RANKS)
    assert right(again, *reversed(PROMPTS)) == WHOLE[::-1]
    again.shutdown()
    alone = start(model, config)
    assert right(alone, *PROMPTS) == [0, 0]
    assert alone.metrics().get("kvtiers_tier_loaded_chunks{fs}", 0) == 0
    alone.shutdown()


def test_a_rank_that_is_killed_in_the_middle_of_requests_ends_the_engine_and_leaves_nothing_and_the_next_one_hits(
    start, model, tmp_path, right, way
):
    config = way(fs(tmp_path / "store"))
    both = start(model, config, **TWO_RANKS)
    assert right(both, *PROMPTS) == [0, 0]
    both.forget()
    one, other = ranks(both)
    assert both.hosts()
    os.kill(one, signal.SIGSTOP)  # so that no request can end before the rank does
    both.begin(*PROMPTS)
    os.kill(one, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(EngineError):
        both.end()
    assert time.monotonic() - begun < NOTICED
    wait_until(lambda: not ranks(both), f"rank {other} outlives the one that died")
    both.shutdown()
    sockets, files = left_behind(both)
    assert not sockets
    assert not files or way is tiers, "vLLM's own region stays behind, as without kvtiers; ours has no name"
    for file in files:
        file.unlink()
    again = start(model, config, **TWO_RANKS)
    assert right(again, *PROMPTS) == WHOLE
    again.shutdown()


def test_what_one_rank_stored_two_ranks_have_and_the_other_way_round_where_the_layout_certifies_it(
    start, model, tmp_path, right
):
    config = whole_stack(fs(tmp_path / "store"), canonical_layout=True)
    alone = start(model, config)
    assert right(alone, *PROMPTS) == [0, 0]
    alone.shutdown()
    both = start(model, config, **TWO_RANKS)
    assert right(both, *PROMPTS) == WHOLE
    more = make_prompt(5, 333)
    stored, cached = both.generate(more)
    assert cached == [0]
    both.shutdown()
    alone = start(model, config)
    assert alone.generate(more) == (stored, [WHOLE[1]])
    alone.shutdown()
