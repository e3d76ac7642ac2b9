"""Every byte lands where the slow reference says, and no other byte changes: any layout, any rank, both directions."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtiers.gpu.worker import GpuWorker
from kvtiers.region.client import RegionJoin
from kvtiers.region.region import AnonymousRegion

from .cases import Case, cases, cases_of_many_groups
from .conftest import FIXED_CUDA_PLACES, HOST_PLACES, wait_until_pinned

FEW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Rank:
    """One rank's worker and tensors on a region."""

    def __init__(self, case: Case, rank: int, place, region) -> None:
        self.case, self.rank, self.place = case, rank, place
        self.tensors = [place.put(array) for array in case.kv[rank]]
        join = RegionJoin.in_process(region, case.layout, rank)
        self.worker = GpuWorker(
            case.layout, self.tensors, join, rank=rank, rank_map=case.rank_map(rank), copying=place.settings
        )
        if place.is_cuda and place.settings.pin:
            wait_until_pinned(self.worker)

    def store(self):
        self.worker.submit_store(1, self.case.spec, self.case.chunk_ids)
        return self._result()

    def load(self, expedited=False):
        self.worker.submit_load(2, self.case.chunk_ids, self.case.spec, expedited=expedited)
        return self._result()

    def _result(self):
        self.worker.wait([1, 2])
        (result,) = self.worker.get_finished()
        assert result.success, result.error
        return result

    def kv(self):
        return [self.place.get(tensor) for tensor in self.tensors]

    def close(self):
        self.worker.shutdown()


def region_of(case: Case) -> tuple[AnonymousRegion, np.ndarray]:
    region = AnonymousRegion.create(case.layout, num_rows=case.num_rows)
    memory = np.frombuffer(region.view, np.uint8)
    memory[:] = case.region
    return region, memory


def same(got, wanted) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def check_store(place, case: Case) -> None:
    region, memory = region_of(case)
    expected = case.region.copy()
    moved = 0
    for tensor, block, in_block, at, nbytes in case.written(case.rank):
        expected[at : at + nbytes] = case.kv[case.rank][tensor][block, in_block : in_block + nbytes]
        moved += nbytes
    rank = Rank(case, case.rank, place, region)
    assert rank.store().nbytes == moved
    np.testing.assert_array_equal(memory, expected)
    same(rank.kv(), case.kv[case.rank])
    rank.close()


def check_load(place, case: Case, *, expedited: bool) -> None:
    region, memory = region_of(case)
    expected = [None if tensor is None else tensor.copy() for tensor in case.kv[case.rank]]
    moved = 0
    for tensor, block, in_block, at, nbytes in case.fragments(case.rank):
        expected[tensor][block, in_block : in_block + nbytes] = case.region[at : at + nbytes]
        moved += nbytes
    rank = Rank(case, case.rank, place, region)
    assert rank.load(expedited).nbytes == moved
    np.testing.assert_array_equal(memory, case.region)
    same(rank.kv(), expected)
    rank.close()


@FEW
@given(case=cases())
def test_a_store_puts_every_byte_in_its_place_and_changes_no_other(place, case: Case) -> None:
    check_store(place, case)


@FEW
@given(case=cases(), expedited=st.booleans())
def test_a_load_puts_every_byte_in_its_place_and_changes_no_other(place, case: Case, expedited: bool) -> None:
    check_load(place, case, expedited=expedited)


@pytest.mark.parametrize("place", [*HOST_PLACES, *FIXED_CUDA_PLACES])  # "auto" would measure each group's shape
@settings(FEW, max_examples=6)
@given(case=cases_of_many_groups(), expedited=st.booleans())
def test_up_to_64_groups_with_empty_ones_anywhere_are_one_transfer(place, case: Case, expedited: bool) -> None:
    check_store(place, case)
    check_load(place, case, expedited=expedited)


@settings(FEW, max_examples=25)
@given(case=cases())
def test_what_all_ranks_store_each_of_them_loads_again(place, case: Case) -> None:
    region, _ = region_of(case)
    for rank in range(case.layout.world_size):
        storing = Rank(case, rank, place, region)
        storing.store()
        storing.close()
    stored, case.kv = case.kv, [[None if t is None else np.zeros_like(t) for t in kv] for kv in case.kv]
    for rank in range(case.layout.world_size):
        loading = Rank(case, rank, place, region)
        loading.load()
        kv = loading.kv()
        for tensor, block, in_block, _, nbytes in case.fragments(rank):
            some = slice(in_block, in_block + nbytes)
            np.testing.assert_array_equal(kv[tensor][block, some], stored[rank][tensor][block, some])
        loading.close()


@pytest.mark.parametrize("page", [1, 7, 8192 + 8, 100_003, 1 << 20, 16 << 20])
def test_pages_of_any_size_come_back(place, open_worker, page) -> None:
    from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
    from kvtiers.types import BlockSpec

    layout = CacheLayout(
        ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("a", 0, page), KVTensor("b", 0, 3)), blocks_per_chunk=3
    )
    rng = np.random.default_rng(page)
    kv = [rng.integers(0, 256, (5, size), np.uint8) for size in (page, 3)]
    tensors = [place.put(array) for array in kv]
    worker, region = open_worker(layout, tensors, place, num_rows=3)
    worker.submit_store(1, BlockSpec(np.array([4, 0, 2]), (3,), (2,)), np.array([2, 0]))
    worker.submit_load(2, np.array([0]), BlockSpec(np.array([1, 3]), (2,), (0,)))
    worker.wait([1])
    worker.wait([2])
    results = worker.get_finished()
    assert [r.error for r in results if not r.success] == []
    rows = np.frombuffer(region.view, np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(rows[2, 2 * page : 3 * page], kv[0][4])
    np.testing.assert_array_equal(rows[0, : 2 * page], kv[0][[0, 2]].ravel())
    np.testing.assert_array_equal(rows[0, 3 * page : 3 * page + 6], kv[1][[0, 2]].ravel())
