"""Where a rank's heads lie in a canonical page, and maps that cannot be right."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import CopyRun, RankMap, heads_rank_map, runs_of_rank


def canonical(page, whole, world=1, tokens=16):
    return CacheLayout(
        ModelIdentity("m"),
        (KVGroup("g", tokens),),
        (KVTensor("t", 0, page, canonical_page_bytes=whole),),
        world_size=world,
        row_layout="canonical",
    )


@settings(deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4, 6]),
    tp_size=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    parts=st.integers(1, 2),
    tokens=st.integers(1, 5),
    vector=st.integers(1, 4),
    order=st.sampled_from(["HND", "NHD"]),
)
def test_a_ranks_heads_go_to_their_place_among_all_heads(heads, tp_size, parts, tokens, vector, order):
    mine = max(1, heads // tp_size)
    layout = canonical(parts * mine * tokens * vector, parts * heads * tokens * vector, tp_size, tokens)
    if heads % tp_size and tp_size % heads:
        with pytest.raises(ConfigError, match="no even share"):
            heads_rank_map(layout, rank=0, kv_heads=heads, tp_rank=0, tp_size=tp_size, parts=parts)
        return
    whole = np.arange(heads * parts * tokens * vector).reshape(heads, parts, tokens, vector)
    wanted, seen, turns = whole.ravel(), np.full(whole.size, -1), []
    for rank in range(tp_size):
        rank_map = heads_rank_map(
            layout, rank=rank, kv_heads=heads, tp_rank=rank, tp_size=tp_size, parts=parts, page_order=order
        )
        first = rank * heads // tp_size
        page = whole[first : first + mine].transpose((1, 0, 2, 3) if order == "HND" else (1, 2, 0, 3)).ravel()
        for run in runs_of_rank(layout, rank, rank_map)[0]:
            for (start, end), (at, to) in zip(run.local(), run.canonical(), strict=True):
                seen[at:to] = page[start:end]
        turns.append((first, rank_map.writer_index, rank_map.num_writers))
    np.testing.assert_array_equal(seen, wanted)
    assert len(set(turns)) == tp_size  # of the ranks with the same heads, each has a turn of its own
    assert all(writers == max(1, tp_size // heads) for _, _, writers in turns)


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([CopyRun(0, 0, 0, 4)], "the runs do not cover its 8 bytes exactly once"),
        ([CopyRun(0, 0, 0, 8), CopyRun(0, 4, 8, 4)], "the runs do not cover its 8 bytes exactly once"),
        ([CopyRun(0, 0, 0, 4), CopyRun(0, 4, 2, 4)], "the runs overlap, or leave its canonical 16 bytes"),
        ([CopyRun(0, 0, 10, 8)], "the runs overlap, or leave its canonical 16 bytes"),
        ([CopyRun(0, 0, 0, 4, 2, 4, 16)], "the runs overlap, or leave its canonical 16 bytes"),
        ([CopyRun(1, 0, 0, 8)], "tensor 1 does not exist, expected 0 to 0"),
        ([CopyRun(0, 0, 0, 0)], "1 fragments of 0 bytes"),
    ],
)
def test_a_map_that_cannot_be_right_is_refused(runs, problem):
    with pytest.raises(ConfigError) as refused:
        runs_of_rank(canonical(8, 16), 0, RankMap(tuple(runs)))
    assert problem in str(refused.value)


def test_a_turn_that_never_comes_is_refused():
    with pytest.raises(ConfigError, match="writer_index is 2, expected"):
        runs_of_rank(canonical(8, 8), 0, RankMap((CopyRun(0, 0, 0, 8),), 2, 2))


def test_a_canonical_row_needs_a_map_where_a_rank_holds_but_a_part():
    assert runs_of_rank(canonical(8, 8), 0, None) == ((CopyRun(0, 0, 0, 8),),)
    for layout in (canonical(8, 16), canonical(8, 8, world=2)):
        with pytest.raises(ConfigError, match="rank map: missing"):
            runs_of_rank(layout, 0, None)


def test_rows_that_hold_cells_have_no_map():
    direct = dataclasses.replace(canonical(8, 8), row_layout="direct")
    with pytest.raises(ConfigError, match="only a canonical row has one"):
        runs_of_rank(direct, 0, RankMap((CopyRun(0, 0, 0, 8),)))


def test_pages_that_are_not_made_of_heads_are_refused_by_name():
    with pytest.raises(
        ConfigError, match="tensor 't': a page of 100 bytes, canonical 200, is not 2 parts of 1 of 2 heads"
    ):
        heads_rank_map(canonical(100, 200, 2), rank=0, kv_heads=2, tp_rank=0, tp_size=2)
