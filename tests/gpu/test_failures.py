"""What goes wrong in a copy is that job's failure; only a lost device ends offloading, and never the engine."""

import logging
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from kvtiers.gpu.copier import CudaError
from kvtiers.gpu.settings import CopySettings
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import BlockSpec

from .conftest import Place

PAGE = 4096
LAYOUT = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, PAGE),))


def blocks(*ids):
    return BlockSpec(np.array(ids), (len(ids),), (0,))


def test_a_refused_job_is_a_failed_result_and_the_next_one_works(place, open_worker, rows_of) -> None:
    kv = place.put(np.full((8, PAGE), 9, np.uint8))
    worker, region = open_worker(LAYOUT, [kv], place)
    worker.submit_store(1, blocks(8), np.array([0]))
    worker.submit_store(2, blocks(3), np.array([99]))
    worker.submit_store(3, blocks(3), np.array([5]))
    worker.wait([1, 2, 3])
    results = {result.job_id: result for result in worker.get_finished()}
    assert "block id 8 does not exist" in results[1].error
    assert "chunk id 99 does not exist" in results[2].error
    assert results[3].success
    assert set(rows_of(region)[5, :PAGE]) == {9}
    assert not rows_of(region)[:5].any()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["staged", "direct", "pages"])
def test_a_copy_that_fails_on_the_way_fails_its_job_alone(open_worker, rows_of, method) -> None:
    place = Place("cuda", CopySettings(store=method, load=method, ring_bytes=1 << 16))
    kv = place.put(np.arange(8 * PAGE, dtype=np.uint32).astype(np.uint8).reshape(8, PAGE))
    worker, region = open_worker(LAYOUT, [kv], place)
    driver = worker._copier._driver
    for name in ("launch", "copy_batch"):
        setattr(driver, name, lambda *_, **__: (_ for _ in ()).throw(CudaError("the driver said no")))
    worker.submit_store(1, blocks(*range(8)), np.arange(8))
    worker.wait([1])
    (result,) = worker.get_finished()
    assert result.error == "store job 1: the driver said no"
    del driver.launch, driver.copy_batch
    worker.submit_store(2, blocks(*range(8)), np.arange(8))
    worker.wait([2])
    assert worker.get_finished()[0].success
    np.testing.assert_array_equal(rows_of(region)[:, :PAGE], place.get(kv))


@pytest.mark.gpu
def test_jobs_that_come_before_the_rows_are_pinned_are_served_at_once(open_worker, rows_of) -> None:
    place = Place("cuda", CopySettings(pin_piece_bytes=1 << 16))
    kv = place.put(np.full((64, PAGE), 7, np.uint8))
    worker, region = open_worker(LAYOUT, [kv], place, num_rows=4096, wait=False)
    for job in range(64):
        worker.submit_store(job, blocks(job), np.array([4095 - job]))
    worker.wait(range(64))
    assert [result.error for result in worker.get_finished() if not result.success] == []
    assert (rows_of(region)[-64:, :PAGE] == 7).all()


@pytest.mark.gpu
def test_where_pinning_fails_copies_go_on_and_one_line_says_so(open_worker, rows_of, monkeypatch, caplog) -> None:
    from kvtiers.gpu.cuda import driver as cuda_driver

    pin, calls = cuda_driver.CudaDriver.pin, []

    def pin_twice(self, address, nbytes):
        calls.append(address)
        if len(calls) == 3:
            raise CudaError("cuMemHostRegister on cuda:0 failed: CUDA_ERROR_NOT_PERMITTED")
        pin(self, address, nbytes)

    unpinned = []
    unpin = cuda_driver.CudaDriver.unpin
    monkeypatch.setattr(cuda_driver.CudaDriver, "pin", pin_twice)
    monkeypatch.setattr(
        cuda_driver.CudaDriver, "unpin", lambda self, address: (unpinned.append(address), unpin(self, address))
    )
    # Not "auto": that would pin memory to measure with.
    place = Place("cuda", CopySettings(store="staged", load="staged", pin_piece_bytes=4 * LAYOUT.row_stride))
    kv = place.put(np.full((64, PAGE), 7, np.uint8))
    with caplog.at_level(logging.WARNING, "kvtiers.gpu"):
        worker, region = open_worker(LAYOUT, [kv], place, num_rows=64, wait=False)
        for job in range(64):
            worker.submit_store(job, blocks(job), np.array([job]))
        worker.wait(range(64))
        assert not worker._copier.pinned.wait(30)
    assert [result.error for result in worker.get_finished() if not result.success] == []
    assert (rows_of(region)[:, :PAGE] == 7).all()
    assert unpinned == calls[1::-1]
    assert len([record for record in caplog.records if "cannot be pinned" in record.message]) == 1


LOST = """
    import ctypes, logging, sys
    import numpy as np, torch
    from kvtiers.types import BlockSpec
    from kvtiers.gpu.worker import GpuWorker
    from kvtiers.region.client import RegionJoin
    from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
    from kvtiers.region.region import AnonymousRegion

    logging.basicConfig(format="%(levelname)s %(message)s")
    layout = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, 4096),))
    kv = torch.zeros((8, 4096), dtype=torch.uint8, device="cuda")
    region = AnonymousRegion.create(layout, num_rows=8)
    worker = GpuWorker(layout, [kv], RegionJoin.in_process(region, layout, 0))
    spec = BlockSpec(np.array([1]), (1,), (0,))
    worker.submit_store(1, spec, np.array([1]))
    worker.wait([1])
    print("before:", worker.get_finished()[0].success)
    torch.zeros(4, device="cuda")[torch.tensor([10**9], device="cuda")]  # a device-side assertion: the context is lost
    for job in range(2, 12):
        worker.submit_store(job, spec, np.array([1]))
    worker.wait(range(2, 12))
    results = worker.get_finished()
    print("failed:", sum(not result.success for result in results), "of", len(results))
    worker.submit_load(20, np.array([1]), spec)
    worker.wait([20])
    print("later:", worker.get_finished()[0].error)
    worker.shutdown()
    region.close()
    print("the engine goes on")
"""


@pytest.mark.gpu
def test_when_the_device_is_lost_every_job_fails_at_once_and_the_engine_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOST)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "before: True" in done.stdout
    assert "failed: 10 of 10" in done.stdout
    assert "later: load job 20:" in done.stdout
    assert done.stdout.endswith("the engine goes on\n")
    assert done.stderr.count("KV offload has ended, and the engine goes on without it") == 1
