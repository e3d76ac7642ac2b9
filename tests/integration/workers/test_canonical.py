"""Canonical rows do not depend on tensor parallelism: stored by one size, loaded bit-exactly by others."""

import pytest

from .conftest import Request, layout_of


def canonical(tp, **options):
    return layout_of(tp=tp, row_layout="canonical", **options)


def test_layouts_that_may_share_have_one_fingerprint():
    assert len({canonical(tp).fingerprint for tp in (1, 2, 4, 8, 16)}) == 1
    assert canonical(2, stages=((0,), (1, 2))).fingerprint == canonical(1).fingerprint
    assert canonical(2).fingerprint != layout_of(tp=2).fingerprint
    assert layout_of(tp=1).fingerprint != layout_of(tp=2).fingerprint


@pytest.mark.parametrize("tp", [1, 4, 8, 16])
def test_what_tensor_parallel_2_stored_in_a_tier_loads_into_another_size(start, tmp_path, tp):
    tier = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0, "io": "thread"}
    storing = start(canonical(2), 2, processes=False, secondary=[tier])
    storing.serve(Request("a", 0, 6))
    loading = start(canonical(tp), tp, processes=False, secondary=[tier], page_order="NHD" if tp == 4 else "HND")
    tokens, wrong = loading.load(Request("a", 20, 6))
    assert tokens == 24
    assert wrong == [0] * tp


def test_what_stages_of_a_pipeline_stored_in_a_tier_loads_into_another_split_and_into_none(start, tmp_path):
    tier = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0, "io": "thread"}
    storing = start(canonical(2, stages=((0,), (1, 2))), 2, processes=False, secondary=[tier])
    storing.serve(Request("a", 0, 6))
    for layout, tp in ((canonical(4, stages=((0, 1), (2,))), 4), (canonical(1), 1)):
        loading = start(layout, tp, processes=False, secondary=[tier])
        assert loading.load(Request("a", 20, 6)) == (24, [0] * layout.world_size)


def test_ranks_with_the_same_bytes_write_by_turns_and_all_read(start):
    engine = start(canonical(16), 16, processes=False)  # two ranks for each of 8 heads
    engine.serve(Request("a", 1, 6))
    engine.on_all("clear")
    tokens, wrong = engine.load(Request("a", 30, 6))
    assert tokens == 24
    assert wrong == [0] * 16


def test_real_processes_share_canonical_rows(start):
    engine = start(canonical(2), 2)
    engine.serve(Request("a", 0, 6))
    engine.on_all("clear")
    assert engine.load(Request("a", 20, 6)) == (24, [0, 0])
