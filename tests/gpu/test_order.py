"""What comes before what: stores after the compute that wrote, loads after writes to their blocks; who overtakes."""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtiers.gpu.settings import CopySettings
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import BlockSpec

from .conftest import CUDA_PLACES, Place

PAGE, LAYERS, BLOCKS = 4096, 4, 256
LAYOUT = CacheLayout(
    ModelIdentity("m"),
    (KVGroup("g", 16),),
    tuple(KVTensor(f"t{i}", 0, PAGE) for i in range(LAYERS)),
    blocks_per_chunk=2,
)
SLOW = 2_000_000  # cycles: a millisecond or so


def blocks(*ids):
    return BlockSpec(np.array(ids), (len(ids),), (0,))


@contextlib.contextmanager
def other_work(place, kv):
    """Keep writing to the last blocks of every tensor, on another stream."""
    if not place.is_cuda:
        yield
        return
    stop = threading.Event()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                for tensor in kv:
                    tensor[-8:].random_(0, 256)
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def compute(place, kv, block, value):
    """Write a value into a block, on a CUDA device only after a while."""
    if place.is_cuda:
        torch.cuda._sleep(SLOW)
    for layer, tensor in enumerate(kv):
        tensor[block] = value + layer


def test_a_store_takes_what_the_compute_before_it_wrote(place, open_worker, rows_of) -> None:
    kv = [place.put(np.zeros((BLOCKS, PAGE), np.uint8)) for _ in range(LAYERS)]
    worker, region = open_worker(LAYOUT, kv, place, num_rows=32)
    with other_work(place, kv):
        for step in range(20):
            compute(place, kv, 2 * step, step)
            compute(place, kv, 2 * step + 1, step + 100)
            worker.submit_store(step, blocks(2 * step, 2 * step + 1), np.array([step]))
        worker.wait(range(20))
    assert [result.error for result in worker.get_finished() if not result.success] == []
    rows = rows_of(region)
    for step in range(20):
        for layer in range(LAYERS):
            row = rows[step, 2 * layer * PAGE : 2 * (layer + 1) * PAGE]
            assert set(row[:PAGE]) == {step + layer}
            assert set(row[PAGE:]) == {step + 100 + layer}


def test_a_load_comes_after_the_writes_to_its_blocks_that_were_in_flight(place, open_worker, rows_of) -> None:
    kv = [place.put(np.zeros((BLOCKS, PAGE), np.uint8)) for _ in range(LAYERS)]
    worker, region = open_worker(LAYOUT, kv, place, num_rows=32)
    rng = np.random.default_rng(5)
    rows = rows_of(region)
    rows[:] = rng.integers(0, 256, rows.shape, np.uint8)
    with other_work(place, kv):
        for step in range(20):
            compute(place, kv, 2 * step, 7)
            worker.submit_load(step, np.array([step]), blocks(2 * step, 2 * step + 1), expedited=step % 2 == 0)
        worker.wait(range(20))
    assert [result.error for result in worker.get_finished() if not result.success] == []
    for layer, tensor in enumerate(kv):
        wanted = rows[:20, 2 * layer * PAGE : 2 * (layer + 1) * PAGE].reshape(40, PAGE)
        np.testing.assert_array_equal(place.get(tensor)[:40], wanted)


def test_what_one_job_stored_a_later_one_loads(place, open_worker) -> None:
    """The scheduler submits a load of a chunk only once its store has been reported; then the bytes are there."""
    rng = np.random.default_rng(6)
    first = rng.integers(0, 256, (BLOCKS, PAGE), np.uint8)
    kv = [place.put(first) for _ in range(LAYERS)]
    worker, _ = open_worker(LAYOUT, kv, place, num_rows=64)
    ids, rows = rng.permutation(BLOCKS // 2)[:60], rng.permutation(64)[:30]
    worker.submit_store(1, blocks(*ids), rows)
    worker.wait([1])
    worker.submit_load(2, rows, blocks(*(ids + BLOCKS // 2)))
    worker.wait([2])
    assert all(result.success for result in worker.get_finished())
    for tensor in kv:
        np.testing.assert_array_equal(place.get(tensor)[ids + BLOCKS // 2], first[ids])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["staged", "direct", "pages"])
def test_an_expedited_load_does_not_queue_behind_bulk_loads(open_worker, method) -> None:
    page, count = 1 << 20, 512
    layout = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, page),))
    kv = torch.zeros((count + 1, page), dtype=torch.uint8, device="cuda")
    place = Place("cuda", CopySettings(store=method, load=method))
    worker, _ = open_worker(layout, [kv], place, num_rows=count + 1)
    bulk = BlockSpec(np.arange(count), (count,), (0,))
    for job in range(4):
        worker.submit_load(job, np.arange(count), bulk)
    worker.submit_load(9, np.array([count]), blocks(count), expedited=True)
    worker.wait([9])
    assert len(worker.get_finished()) <= 3, "it has waited for the bulk loads that were submitted before it"
    worker.wait(range(4))


@contextlib.contextmanager
def held_device(guard_seconds=60.0):
    """Hold what follows on the current stream until ``open`` is called; ``was_guarded`` if that came too late."""
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()

    def give_up():
        held.was_guarded = True
        gate[0] = 1

    guard = threading.Timer(guard_seconds, give_up)
    held = SimpleNamespace(open=lambda: gate.fill_(1), was_guarded=False)
    wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait_value.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert wait_value(torch.cuda.current_stream().cuda_stream, gate.data_ptr(), 1, 0) == 0  # until it is 1 or more
        guard.start()
        try:
            yield held
        finally:
            guard.cancel()
            held.open()
            torch.cuda.synchronize()  # the gate's memory is read until here


@pytest.mark.gpu
@pytest.mark.parametrize("place", CUDA_PLACES)
def test_to_submit_waits_for_no_device(place, open_worker) -> None:
    kv = [place.put(np.zeros((BLOCKS, PAGE), np.uint8)) for _ in range(LAYERS)]
    worker, _ = open_worker(LAYOUT, kv, place, num_rows=32)
    with held_device() as held:
        for job in range(10):
            worker.submit_store(job, blocks(2 * job, 2 * job + 1), np.array([job]))
            worker.submit_load(100 + job, np.array([20]), blocks(100 + job, 140 + job))
            assert worker.get_finished() == []
        assert not held.was_guarded, "a call waited until the device was released"
        held.open()
        worker.wait([*range(10), *range(100, 110)])
    assert [result.success for result in worker.get_finished()] == [True] * 20


def test_any_thread_may_submit_and_ask(place, open_worker) -> None:
    kv = [place.put(np.full((BLOCKS, PAGE), 3, np.uint8)) for _ in range(LAYERS)]
    worker, _ = open_worker(LAYOUT, kv, place, num_rows=32)
    found = []

    def engine():
        worker.submit_store(1, blocks(0, 1), np.array([3]))
        worker.wait([1])
        found.extend(worker.get_finished())
        worker.shutdown()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(60)
    assert [result.success for result in found] == [True]
