"""The worker: jobs in, exactly one result each out, whatever happens in between."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtiers.gpu.copier import LostDeviceError
from kvtiers.gpu.worker import GpuWorker
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.client import JoinStatus, RegionJoin
from kvtiers.region.region import AnonymousRegion, SharedOffloadRegion
from kvtiers.types import BlockSpec, TransferResult

PAGE = 1024
LAYOUT = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, PAGE),))


class HeldJoin(RegionJoin):
    """A rank of an anonymous region whose next answer a test can hold back, and with it the copy thread."""

    asked: threading.Event
    answer: threading.Event

    def poll(self) -> JoinStatus:
        self.asked.set()
        assert self.answer.wait(60)
        return super().poll()

    @property
    def rows(self) -> np.ndarray:
        return np.frombuffer(self.view, np.uint8).reshape(-1, self.layout.row_stride)


def join_region(layout: CacheLayout = LAYOUT, num_rows: int = 64, rank: int = 0) -> HeldJoin:
    join = HeldJoin.in_process(AnonymousRegion.create(layout, num_rows=num_rows), layout, rank)
    assert isinstance(join, HeldJoin)
    join.asked, join.answer = threading.Event(), threading.Event()
    join.answer.set()
    return join


@pytest.fixture
def region():
    region = join_region()
    yield region
    region.answer.set()


@pytest.fixture
def kv() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (64, PAGE), np.uint8)


@pytest.fixture
def worker(region, kv):
    worker = GpuWorker(LAYOUT, [kv], region, max_queued=3)
    yield worker
    region.answer.set()
    worker.shutdown()


def blocks(*ids: int) -> BlockSpec:
    return BlockSpec(np.array(ids, np.int64), (len(ids),), (0,))


def rows(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def ended(worker: GpuWorker, *job_ids: int) -> dict[int, TransferResult]:
    worker.wait(job_ids)
    results = worker.get_finished()
    assert len({result.job_id for result in results}) == len(results)
    return {result.job_id: result for result in results}


def test_a_stored_block_comes_back_and_each_job_is_reported_once(worker, region, kv) -> None:
    worker.submit_store(1, blocks(3, 5), rows(8, 9))
    assert ended(worker, 1)[1].success
    np.testing.assert_array_equal(region.rows[8:10, :PAGE], kv[[3, 5]])
    wanted = kv[[5, 3]].copy()
    worker.submit_load(2, rows(9, 8), blocks(20, 21))
    result = ended(worker, 2)[2]
    assert (result.success, result.nbytes, result.error) == (True, 2 * PAGE, "")
    assert result.seconds > 0
    np.testing.assert_array_equal(kv[[20, 21]], wanted)
    assert worker.get_finished() == []


def test_a_refused_job_is_a_failed_result_and_the_next_one_works(worker, region, kv) -> None:
    worker.submit_store(1, blocks(3), rows(99))
    worker.submit_store(2, blocks(3), rows(1))
    results = ended(worker, 1, 2)
    assert not results[1].success
    assert results[1].error == "store job 1: chunk id 99 does not exist; there are 64 rows in the region"
    assert results[2].success
    np.testing.assert_array_equal(region.rows[1, :PAGE], kv[3])


@pytest.mark.parametrize("chunk_ids", [None, "no rows", object()])
def test_a_submit_with_nonsense_never_raises_into_the_engine(worker, chunk_ids) -> None:
    worker.submit_load(1, chunk_ids, blocks(3))
    assert not ended(worker, 1)[1].success


def test_the_engine_may_reuse_its_arrays_as_soon_as_submit_returns(worker, region, kv) -> None:
    region.answer.clear()
    ids, chunk_ids = blocks(3), rows(8)
    worker.submit_store(1, ids, chunk_ids)
    ids.block_ids[:] = 60
    chunk_ids[:] = 1
    region.answer.set()
    ended(worker, 1)
    np.testing.assert_array_equal(region.rows[8, :PAGE], kv[3])
    assert not region.rows[1].any()


def test_each_direction_is_first_in_first_out_and_an_expedited_load_overtakes(worker, region) -> None:
    region.answer.clear()
    worker.submit_store(1, blocks(0), rows(0))
    assert region.asked.wait(60)  # the copy thread holds job 1; all others are behind it
    worker.submit_load(2, rows(0), blocks(10))
    worker.submit_load(3, rows(0), blocks(11))
    worker.submit_store(4, blocks(1), rows(1))
    worker.submit_load(5, rows(0), blocks(12), expedited=True)
    region.answer.set()
    worker.wait([1, 2, 3, 4, 5])
    order = [result.job_id for result in worker.get_finished()]
    assert order.index(5) <= 1  # only what was in flight is ahead of it
    assert order.index(1) < order.index(4)
    assert order.index(2) < order.index(3)


def test_an_expedited_load_waits_for_a_piece_not_for_a_whole_bulk_transfer() -> None:
    layout = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, 1 << 20),))
    region = join_region(layout, 32)
    kv = np.ones((32, 1 << 20), np.uint8)
    worker = GpuWorker(layout, [kv], region)
    region.answer.clear()
    worker.submit_store(1, blocks(*range(30)), rows(*range(30)))
    assert region.asked.wait(60)
    worker.submit_load(2, rows(31), blocks(31), expedited=True)
    region.answer.set()
    worker.wait([1, 2])
    assert [result.job_id for result in worker.get_finished()] == [2, 1]
    worker.shutdown()


def test_a_full_queue_refuses_and_says_so(worker, region) -> None:
    region.answer.clear()
    worker.submit_load(1, rows(0), blocks(0))
    assert region.asked.wait(60)
    for job_id in (2, 3, 4, 5):
        worker.submit_load(job_id, rows(0), blocks(0))
    worker.submit_store(6, blocks(0), rows(0))  # the other direction has room
    region.answer.set()
    results = ended(worker, 1, 2, 3, 4, 5, 6)
    assert [job_id for job_id, result in results.items() if not result.success] == [4, 5]
    assert results[4].error == "load job 4: 3 transfers are waiting already, and no more are taken"


@pytest.fixture
def shared():
    region = SharedOffloadRegion.create(f"worker-test-{os.getpid()}", LAYOUT, 16 * LAYOUT.row_stride, prefault="off")
    yield region
    region.close()


def test_when_the_manager_is_gone_the_worker_leaves_the_region_and_fails_what_comes_then(shared, kv) -> None:
    join = RegionJoin.start(shared.engine_id, LAYOUT, 0)
    worker = GpuWorker(LAYOUT, [kv], join)
    join.wait(60)
    worker.submit_store(1, blocks(3), rows(8))
    assert ended(worker, 1)[1].success
    shared.close()
    seen = join.poll()
    while seen.state != "closed":
        changed = join.wait_change(seen, 60)
        assert changed != seen, f"nothing has happened for 60 s: {seen}"
        seen = changed
    worker.submit_load(2, rows(8), blocks(4))
    result = ended(worker, 2)[2]
    assert not result.success
    assert "has ended or closed the region" in result.error
    worker.shutdown()


def test_a_job_that_comes_before_the_rank_has_joined_waits_for_it(kv) -> None:
    engine_id = f"worker-late-{os.getpid()}"
    worker = GpuWorker(LAYOUT, [kv], RegionJoin.start(engine_id, LAYOUT, 0))
    worker.submit_store(1, blocks(4), rows(8))
    shared = SharedOffloadRegion.create(engine_id, LAYOUT, 16 * LAYOUT.row_stride, prefault="off")
    assert ended(worker, 1)[1].success
    assert bytes(shared.view[8 * LAYOUT.row_stride :][:PAGE]) == kv[4].tobytes()
    worker.shutdown()
    shared.close()


def test_shutdown_does_not_wait_for_a_region_that_never_comes(kv) -> None:
    worker = GpuWorker(LAYOUT, [kv], RegionJoin.start(f"worker-none-{os.getpid()}", LAYOUT, 0))
    worker.submit_load(1, rows(8), blocks(4))
    worker.shutdown()
    (result,) = worker.get_finished()
    assert not result.success


def test_waiting_for_an_unknown_job_returns(worker) -> None:
    worker.wait([12345])


def test_shutdown_ends_the_running_copy_fails_the_queued_ones_and_leaves_the_region(worker, region, kv) -> None:
    memory = region.rows
    region.answer.clear()
    worker.submit_store(1, blocks(3), rows(8))
    assert region.asked.wait(60)
    worker.submit_store(2, blocks(4), rows(9))
    closer = threading.Thread(target=worker.shutdown)
    closer.start()
    worker.wait([2])
    region.answer.set()
    closer.join(60)
    assert not closer.is_alive()
    results = {result.job_id: result for result in worker.get_finished()}
    assert results[1].success
    assert results[2].error == "store job 2: the worker was shut down before the copy began"
    np.testing.assert_array_equal(memory[8, :PAGE], kv[3])
    assert not memory[9].any()
    assert region.state == "closed"
    worker.submit_store(3, blocks(3), rows(8))
    assert ended(worker, 3)[3].error == "store job 3: the worker is shut down"


def test_shutdown_leaves_no_thread_and_may_come_again(region, kv) -> None:
    before = set(threading.enumerate())
    worker = GpuWorker(LAYOUT, [kv], region)
    worker.submit_store(1, blocks(3), rows(8))
    worker.shutdown()
    worker.shutdown()
    assert set(threading.enumerate()) <= before
    assert [result.job_id for result in worker.get_finished()] == [1]


class LateCopies:
    """A copier whose one copy ends only when it is released, as a device's may; notes what comes after what."""

    def __init__(self) -> None:
        self.nbytes, self.seconds, self.notes = 0, 0.0, []
        self.waited_for, self.settled, self.closed = threading.Event(), threading.Event(), threading.Event()

    def mark(self) -> None:
        return None

    def attach(self, region, is_busy) -> None:
        del region, is_busy

    def copy(self, *_) -> "LateCopies":
        return self

    def advance(self) -> bool:
        return False

    def ended(self) -> bool:
        return self.settled.is_set()

    def wait(self) -> None:
        self.waited_for.set()
        assert self.settled.wait(60)
        self.closed.wait(0.1)  # the time that a wait for an event takes to return
        self.notes.append("waited")

    def detach(self) -> None:
        self.settled.set()

    def close(self) -> None:
        self.notes.append("closed")
        self.closed.set()


def test_what_a_thread_waits_for_is_not_freed_before_it_has_returned(region, kv, monkeypatch) -> None:
    copies = LateCopies()
    monkeypatch.setattr("kvtiers.gpu.worker._open_copier", lambda *_: copies)
    worker = GpuWorker(LAYOUT, [kv], region)
    worker.submit_store(1, blocks(3), rows(8))
    waiter = threading.Thread(target=worker.wait, args=([1],))
    waiter.start()
    assert copies.waited_for.wait(60)
    worker.shutdown()
    waiter.join(60)
    assert not waiter.is_alive()
    assert copies.notes == ["waited", "closed"]
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(1, True)]


def test_a_copy_that_ends_by_itself_is_reported_by_the_next_call_that_asks(region, kv, monkeypatch) -> None:
    copies = LateCopies()
    monkeypatch.setattr("kvtiers.gpu.worker._open_copier", lambda *_: copies)
    worker = GpuWorker(LAYOUT, [kv], region)
    worker.submit_store(1, blocks(3), rows(8))
    until = time.monotonic() + 60
    while not worker._lanes["store"].launched:
        assert time.monotonic() < until, "the copy never begins"
    assert worker.get_finished() == []
    copies.settled.set()
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(1, True)]
    assert worker.get_finished() == []
    worker.shutdown()


class LostCopies(LateCopies):
    """A copier of a device that was lost while nothing ran."""

    def mark(self) -> None:
        raise LostDeviceError("cuda:0 is lost")


def test_a_device_lost_while_nothing_ran_is_said_to_be_lost_once_and_every_job_fails(
    region, kv, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("kvtiers.gpu.worker._open_copier", lambda *_: LostCopies())
    worker = GpuWorker(LAYOUT, [kv], region)
    for job_id in (1, 2):
        worker.submit_store(job_id, blocks(3), rows(8))
    worker.submit_load(3, rows(8), blocks(3))
    # At once: no thread has to wait for a result.
    assert [result.error for result in worker.get_finished()] == [
        "store job 1: cuda:0 is lost",
        "store job 2: cuda:0 is lost",
        "load job 3: cuda:0 is lost",
    ]
    (record,) = caplog.records
    assert record.message == "KV offload has ended, and the engine goes on without it: cuda:0 is lost"
    worker.shutdown()


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), LostDeviceError("cuda:0 is lost")])
def test_a_rank_that_cannot_prepare_its_copies_is_not_waited_for(region, kv, monkeypatch, error) -> None:
    copies = LateCopies()

    def attach(*_: object) -> None:
        raise error

    monkeypatch.setattr(copies, "attach", attach)
    monkeypatch.setattr("kvtiers.gpu.worker._open_copier", lambda *_: copies)
    settled = threading.Event()
    monkeypatch.setattr(region, "settle", settled.set)
    worker = GpuWorker(LAYOUT, [kv], region)
    assert settled.wait(60), "a start with prefault: all waits for it"
    copies.settled.set()
    worker.shutdown()


def test_a_replicated_row_is_written_by_rank_0_alone_and_acknowledged_by_all(kv) -> None:
    layout = CacheLayout(
        ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, PAGE),), world_size=2, row_layout="replicated"
    )
    region = join_region(layout, 4, rank=1)
    other = GpuWorker(layout, [kv], region, rank=1)
    other.submit_store(1, blocks(3), rows(2))
    result = ended(other, 1)[1]
    assert (result.success, result.nbytes) == (True, 0)
    assert not region.rows.any()
    other.shutdown()


@pytest.mark.parametrize("held", [((0, PAGE), (PAGE, 8)), ((PAGE, 0), (0, 8)), ((0, PAGE), (0, 8))])
def test_what_two_ranks_store_comes_back_where_one_of_them_holds_nothing_of_a_group(held) -> None:
    layout = CacheLayout(
        ModelIdentity("m"),
        (KVGroup("full", 16), KVGroup("window", 16, "sliding_window", 64)),
        tuple(KVTensor(f"t{group}", group, pages) for group, pages in enumerate(held)),
        blocks_per_chunk=2,
        world_size=2,
    )
    region = AnonymousRegion.create(layout, num_rows=8)
    fill = np.random.default_rng(1)
    kv = [
        [torch.from_numpy(fill.integers(0, 256, (64, page), np.uint8)) if page else None for page in pages]
        for pages in zip(*held, strict=True)
    ]
    ranks = [
        GpuWorker(layout, tensors, RegionJoin.in_process(region, layout, rank), rank=rank)
        for rank, tensors in enumerate(kv)
    ]
    try:
        taken, given = np.array([25, 3, 40, 60, 7]), np.array([10, 11, 12, 13, 14])
        sizes, first = (3, 2), (0, 1)  # places 0 to 2 of two chunks of one group, 1 and 2 of two chunks of the other
        wanted = [[None if tensor is None else tensor[taken].clone() for tensor in tensors] for tensors in kv]
        for rank in ranks:
            rank.submit_store(1, BlockSpec(taken, sizes, first), rows(4, 2, 7, 0))
        assert [ended(rank, 1)[1].error for rank in ranks] == ["", ""]
        for rank in ranks:
            rank.submit_load(2, rows(4, 2, 7, 0), BlockSpec(given, sizes, first))
        results = [ended(rank, 2)[2] for rank in ranks]
        assert [result.error for result in results] == ["", ""]
        assert [result.nbytes for result in results] == [
            sum(size * page for size, page in zip(sizes, pages, strict=True)) for pages in zip(*held, strict=True)
        ]
        for tensors, before in zip(kv, wanted, strict=True):
            for group, (tensor, values) in enumerate(zip(tensors, before, strict=True)):
                of_group = slice(0, 3) if group == 0 else slice(3, 5)
                if tensor is not None:
                    torch.testing.assert_close(tensor[given[of_group]], values[of_group], rtol=0, atol=0)
    finally:
        for rank in ranks:
            rank.shutdown()


def test_the_rows_are_taken_before_the_first_job_needs_them(region, kv, monkeypatch) -> None:
    attached = threading.Event()
    copies = LateCopies()
    monkeypatch.setattr(copies, "attach", lambda *_: attached.set())
    monkeypatch.setattr("kvtiers.gpu.worker._open_copier", lambda *_: copies)
    worker = GpuWorker(LAYOUT, [kv], region)
    assert attached.wait(60)
    assert worker.get_finished() == []
    copies.settled.set()
    worker.shutdown()


def test_an_engine_is_busy_from_its_step_or_job_on_until_nothing_was_heard_of_it_for_a_while(
    region, kv, monkeypatch
) -> None:
    worker = GpuWorker(LAYOUT, [kv], region)
    now = time.monotonic()
    monkeypatch.setattr("kvtiers.gpu.worker.time", SimpleNamespace(monotonic=lambda: now))
    assert not worker.is_busy()
    for heard in (worker.get_finished, lambda: worker.submit_store(1, blocks(3), rows(8))):
        heard()
        assert worker.is_busy()
        now += 0.9
        assert worker.is_busy()
        now += 0.2
        assert not worker.is_busy()
    worker.shutdown()


def test_an_engine_that_says_which_steps_compute_is_busy_with_those_alone(region, kv, monkeypatch) -> None:
    """One that waits for loads launches nothing: no moment is better to pin the rows that they need."""
    worker = GpuWorker(LAYOUT, [kv], region)
    now = time.monotonic()
    monkeypatch.setattr("kvtiers.gpu.worker.time", SimpleNamespace(monotonic=lambda: now))
    worker.note_step(computes=True)
    assert worker.is_busy()
    now += 0.9
    assert worker.is_busy(), "a step of a long prompt takes as long"
    worker.note_step(computes=False)
    worker.get_finished()
    worker.submit_load(1, rows(8), blocks(3))
    assert not worker.is_busy()
    worker.note_step(computes=True)
    now += 1.1
    assert not worker.is_busy(), "an engine without requests takes no steps"
    worker.shutdown()
