import pytest

from kvtiers.api import StartError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.client import RegionJoin
from kvtiers.region.region import AnonymousRegion


@pytest.fixture
def layout():
    return CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, 4096),))


def test_it_has_as_many_rows_as_asked_or_as_fit(layout):
    assert AnonymousRegion.create(layout, num_rows=3).num_rows == 3
    region = AnonymousRegion.create(layout, capacity_bytes=5 * layout.row_stride - 1)
    assert region.num_rows == 4
    assert region.view.nbytes == 4 * layout.row_stride == region.map_bytes


def test_it_looks_like_a_region_whose_ranks_are_all_there(layout):
    region = AnonymousRegion.create(layout, num_rows=3)
    region.wait_ready(0)
    assert (region.all_joined, region.lost_ranks, region.poll(), region.fd) == (True, set(), [], None)
    assert (region.layout, region.row_stride) == (layout, layout.row_stride)
    assert region.engine_id != AnonymousRegion.create(layout, num_rows=3).engine_id


def test_a_rank_of_the_same_process_shares_its_bytes(layout):
    region = AnonymousRegion.create(layout, num_rows=3)
    join = RegionJoin.in_process(region, layout, 0)
    join.wait(0)
    join.view[-1] = 6
    assert region.view[-1] == 6
    assert join.num_rows == 3
    assert join.poll().prefault_ended
    join.close()
    region.close()


def test_a_rank_of_another_layout_is_refused(layout):
    region = AnonymousRegion.create(layout, num_rows=3)
    other = CacheLayout(layout.model, layout.groups, layout.tensors, blocks_per_chunk=2)
    join = RegionJoin.in_process(region, other, 0)
    with pytest.raises(StartError, match="blocks_per_chunk: 1 here, 2 there"):
        join.wait(0)
    join.close()


def test_a_closed_region_has_no_view(layout):
    region = AnonymousRegion.create(layout, num_rows=3)
    region.close()
    region.close()
    assert not region.all_joined
    with pytest.raises(ValueError, match="closed"):
        _ = region.view


@pytest.mark.parametrize("rows", [{"num_rows": 0}, {"capacity_bytes": 100}, {}])
def test_no_row_at_all_is_refused(layout, rows):
    with pytest.raises(StartError, match="no row"):
        AnonymousRegion.create(layout, **rows)
