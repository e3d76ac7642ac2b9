"""A primary whose memory turns out not to be there, in the middle of serving."""

import logging
import time

import numpy as np
import pytest

import kvtiers
from kvtiers._log_queue import flush_logs
from kvtiers.api import StartError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.prefault import Prefault
from kvtiers.types import BlockSpec, RequestContext

LAYOUT = CacheLayout(ModelIdentity("m", weights="w"), (KVGroup("full", 16),), (KVTensor("t", 0, 4000),))
ROW = LAYOUT.row_stride
SHORT = f"""
import os
os.write(0, b".")  # as the program that populates: it is tied to its parent, and gets the memory
assert os.read(0, 1)
print("populated", {8 * ROW}, flush=True)
while int(os.read(0, 100).split()[-1]) <= {8 * ROW}:  # b"want 65536": the first one may be what it has populated
    pass
print("populated", {10 * ROW}, flush=True)
print("failed at byte {10 * ROW}: Cannot allocate memory", flush=True)
"""


@pytest.fixture
def primary_that_runs_short(tmp_path, monkeypatch):
    """A manager and its worker, of 64 rows, where memory for 10 is there; 8 are populated at first."""
    program = tmp_path / "short.py"
    program.write_text(SHORT)
    monkeypatch.setattr(Prefault, "program", program)
    config = {"version": 1, "primary": {"capacity": f"{64 * ROW}B", "prefault_window": f"{8 * ROW}B"}}
    manager = kvtiers.open_manager(config, LAYOUT)
    tensors = [np.arange(64 * 4000, dtype=np.uint8).reshape(64, 4000)]
    worker = kvtiers.open_worker(config, LAYOUT, tensors, engine_id=manager.engine_id)
    manager.wait_ready(60)
    yield manager, worker, tensors[0]
    worker.shutdown()
    manager.shutdown(1)


def errors(caplog):
    """Return the lines of errors, also those of the fixture: a fast machine has written them by then."""
    records = (*caplog.get_records("setup"), *caplog.get_records("call"))
    return [record.getMessage() for record in records if record.levelno >= logging.ERROR]


def keys(first, count):
    return [b"%032d\0\0\0\0" % number for number in range(first, first + count)]


def test_rows_whose_memory_is_not_there_are_never_leased_from_then_on_and_one_line_says_so(
    primary_that_runs_short, caplog
):
    manager, worker, kv = primary_that_runs_short
    caplog.set_level(logging.WARNING)
    context = RequestContext("r")
    manager.on_new_request(context)
    plan = manager.prepare_store(keys(0, 6), context)
    assert plan.chunk_ids.tolist() == list(range(6))
    worker.submit_store(1, BlockSpec(np.arange(6), (6,), (0,)), plan.chunk_ids)
    worker.wait([1])
    manager.complete_store(plan, success=all(result.success for result in worker.get_finished()))

    end = time.monotonic() + 60
    while not manager.stats()["primary"]["retired_rows"]:
        assert time.monotonic() < end, "the manager never heard that memory is short"
        manager.on_schedule_end()  # steps: the first asks for more memory, a later one hears that there is none
    stats = manager.stats()["primary"]
    assert (stats["retired_rows"], stats["free_rows"], stats["evictable_rows"]) == (54, 4, 6)
    flush_logs(60)
    (line,) = errors(caplog)
    assert line == (
        f"pre-faulting failed after 10 of 64 rows, and no row after these is used any more: at byte {10 * ROW}: "
        "Cannot allocate memory; lower primary.capacity, or make room"
    )

    with pytest.raises(StartError, match="its memory cannot be populated") as refusal:
        manager.wait_ready(0)  # the region is not ready; the engine goes on with what there is of it
    assert "\n" not in str(refusal.value)
    for _ in range(10):
        manager.on_schedule_end()
    flush_logs(60)
    assert errors(caplog) == [line]

    assert manager.prepare_store(keys(100, 11), context) is None
    plan = manager.prepare_store(keys(200, 9), context)
    assert max(plan.chunk_ids) < 10
    worker.submit_store(2, BlockSpec(np.arange(20, 29), (9,), (0,)), plan.chunk_ids)
    worker.wait([2])
    manager.complete_store(plan, success=all(result.success for result in worker.get_finished()))
    loaded = manager.prepare_load(keys(200, 9), context)
    kv[40:49] = 0
    worker.submit_load(3, loaded.chunk_ids, BlockSpec(np.arange(40, 49), (9,), (0,)))
    worker.wait([3])
    assert all(result.success for result in worker.get_finished())
    np.testing.assert_array_equal(kv[40:49], kv[20:29])
    manager.complete_load(loaded)
    manager.on_request_finished(context)
