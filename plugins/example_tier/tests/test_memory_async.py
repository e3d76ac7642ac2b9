import threading
from collections import OrderedDict

import pytest

from kvtiers.api import LookupResult, TierContext, TransferJob, make_offload_key
from kvtiers_example.example_tier import ExampleSecondaryTier

STRIDE, NBYTES, ROWS = 8192, 4096, 8
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(12)]


class Request:
    request_id = "r"
    params = {}  # noqa: RUF012 -- as the engine gives it


class Engine:
    """A region of eight rows, each filled with its number, and a tier of four chunks."""

    def __init__(self, *, simulate_async):
        self.memory = bytearray(b"".join(bytes([row]) * STRIDE for row in range(ROWS)))
        region = memoryview(self.memory)
        context = TierContext("t", NBYTES, "ns", read_only=False, region=region, row_stride=STRIDE)
        self.tier = ExampleSecondaryTier(context, max_blocks=4, simulate_async=simulate_async)
        region.release()
        self.jobs = 0

    def submit(self, kind, keys, rows):
        self.jobs += 1
        chunk_ids = memoryview(bytearray(4 * len(rows))).cast("i")
        for i, row in enumerate(rows):
            chunk_ids[i] = row
        job = TransferJob(self.jobs, [KEYS[k] for k in keys], chunk_ids, kind == "load", Request())
        (self.tier.submit_load if kind == "load" else self.tier.submit_store)(job)

    def run(self, kind, keys, rows):
        self.submit(kind, keys, rows)
        assert self.tier.drain(30)
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def held(self):
        return [k for k in range(len(KEYS)) if self.tier.lookup(KEYS[k], Request()) is LookupResult.HIT]

    def row(self, row):
        return self.memory[row * STRIDE : (row + 1) * STRIDE]


@pytest.fixture(params=[True, False], ids=["thread", "within_the_submit"])
def engine(request):
    engine = Engine(simulate_async=request.param)
    yield engine
    engine.tier.close()


def test_a_load_fills_value_bytes_of_its_rows(engine):
    engine.run("store", [0, 1], [1, 2])
    result = engine.run("load", [1, 0], [5, 6])
    assert result.success
    assert result.nbytes == 2 * NBYTES
    assert engine.row(5) == bytes([2]) * NBYTES + bytes([5]) * (STRIDE - NBYTES)
    assert engine.row(6) == bytes([1]) * NBYTES + bytes([6]) * (STRIDE - NBYTES)


def test_the_least_recently_used_chunks_make_room(engine):
    engine.run("store", [0, 1, 2, 3], [0, 1, 2, 3])
    engine.run("load", [1], [7])
    engine.run("store", [2], [2])
    engine.run("store", [4, 5], [4, 5])
    assert engine.held() == [1, 2, 4, 5]


def test_the_tail_of_a_job_goes_before_its_head(engine):
    engine.run("store", [0, 1, 2, 3], [0, 1, 2, 3])
    engine.run("store", [4], [4])
    assert engine.held() == [0, 1, 2, 4]


def test_a_store_never_evicts_keys_of_its_own_job(engine):
    engine.run("store", [0], [0])
    engine.run("store", [1, 2, 3], [1, 2, 3])
    assert engine.run("store", [4, 5, 0], [4, 5, 0]).success  # 0 is the oldest of all
    assert {0, 4, 5} < set(engine.held())


def test_a_chunk_that_is_evicted_while_its_job_is_on_its_way_is_back_when_the_job_is_reported(engine):
    engine.run("store", [0], [0])
    engine.submit("store", [1, 2, 3, 4], [1, 2, 3, 4])  # pushes 0 out
    engine.submit("store", [0, 5], [0, 5])  # has it still
    assert engine.tier.drain(30)
    assert [result.success for result in engine.tier.get_finished_jobs()] == [True, True]
    assert {0, 5} < set(engine.held())


def test_a_job_that_cannot_fit_fails_and_changes_nothing(engine):
    engine.run("store", [0, 1], [0, 1])
    result = engine.run("store", [3, 4, 5, 6, 7], [3, 4, 5, 6, 7])
    assert (result.success, result.successful_keys, result.nbytes) == (False, None, 0)
    assert engine.held() == [0, 1]


def test_a_load_of_absent_chunks_names_those_that_landed(engine):
    engine.run("store", [0, 2], [1, 2])
    result = engine.run("load", [0, 1, 2], [5, 6, 7])
    assert not result.success
    assert set(result.successful_keys) == {KEYS[0], KEYS[2]}
    assert engine.row(6) == bytes([6]) * STRIDE


def test_a_value_that_is_held_is_not_copied_again(engine):
    engine.run("store", [0], [1])
    assert engine.run("store", [0], [2]).nbytes == 0
    engine.run("load", [0], [5])
    assert engine.row(5)[:NBYTES] == bytes([1]) * NBYTES


def test_a_job_takes_no_time_for_what_else_is_held(engine):
    """On the engine's thread: a tier may hold a million chunks."""

    class Values(OrderedDict):
        def __iter__(self):
            raise AssertionError("all that is held was looked at")

    engine.run("store", [0, 1], [1, 2])
    engine.tier._values = Values(engine.tier._values.items())
    assert engine.run("store", [2, 3, 4], [3, 4, 5]).success
    assert engine.run("load", [3, 4], [6, 7]).success


@pytest.mark.parametrize("row", [ROWS, -1])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_row_outside_the_region_is_a_failed_job(engine, caplog, kind, row):
    engine.run("store", [0, 1], [0, 1])
    keys = [2, 3] if kind == "store" else [0, 1]
    assert not engine.run(kind, keys, [2, row]).success
    assert "is not in the region" in caplog.text
    assert engine.held() == [0, 1]
    assert engine.run("load", [1], [7]).success


def test_jobs_finish_in_a_later_step_and_in_order():
    engine = Engine(simulate_async=True)
    with engine.tier.hold():
        engine.submit("store", [0], [0])
        engine.submit("load", [1], [1])
        assert engine.tier.get_finished_jobs() == []
        assert engine.held() == []
        assert not engine.tier.drain(0.0)
    assert engine.tier.drain(30)
    assert [(r.job_id, r.success) for r in engine.tier.get_finished_jobs()] == [(1, True), (2, False)]
    assert engine.held() == [0]
    engine.tier.close()


def test_without_simulate_async_there_is_no_thread():
    before = set(threading.enumerate())
    engine = Engine(simulate_async=False)
    assert set(threading.enumerate()) <= before
    engine.submit("store", [0], [0])
    assert [r.success for r in engine.tier.get_finished_jobs()] == [True]
    engine.tier.close()


def test_close_releases_the_region(engine):
    engine.run("store", [0], [0])
    engine.run("load", [0], [1])
    engine.tier.close()
    engine.memory.clear()  # BufferError while a view is held
    engine.tier = Engine(simulate_async=False).tier
