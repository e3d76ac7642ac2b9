"""Tensor parallel: the ranks' bytes lie in one row, and engines of different sizes share what the layout certifies."""

from pathlib import Path

from .conftest import PROMPTS, WHOLE
from .engines import TWO_RANKS, wait_until
from .models import make_prompt
from .ways import fs, tiers, whole_stack


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
    assert both.id not in Path("/proc/net/unix").read_text()
    left = list(Path("/dev/shm").glob(f"*{both.id}*"))
    assert not left or way is tiers, "vLLM's own region stays behind, as without kvtiers; ours has no name"
    again = start(model, config, **TWO_RANKS)
    assert right(again, *reversed(PROMPTS)) == WHOLE[::-1]
    again.shutdown()
    alone = start(model, config)
    assert right(alone, *PROMPTS) == [0, 0]
    assert alone.metrics().get("kvtiers_tier_loaded_chunks{fs}", 0) == 0
    alone.shutdown()


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
