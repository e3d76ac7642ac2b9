"""Pipelined loads: which rows go to the workers in which step, and what of them is reported as not loaded."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.types import LoadPlan, PromptGroup, Reach, TransferResult

from . import fake_vllm

KEYS = [bytes([number]) for number in range(6)]


class Manager:
    """A manager: how many of the leading chunks are ``here``, and how many ``come`` after those."""

    def __init__(self):
        self.lock = threading.Lock()
        self.tokens_per_chunk = (16,)
        self.here, self.come, self.unresolved = 0, 0, False
        self.pinned, self.asked = [], []
        self.late = 0

    def _left(self, keys):
        return self.here - KEYS.index(keys[0])

    def ready_run(self, keys):
        return max(0, min(len(keys), self._left(keys)))

    def reach(self, groups, _context, computed, end):
        keys = groups[0].keys[computed // 16 : end // 16]
        self.asked.append(list(keys))
        ready = self.ready_run(keys) * 16
        return Reach(ready, min(self.come * 16, len(keys) * 16 - ready), self.unresolved)

    def load_was_late(self):
        self.late += 1

    def prepare_load(self, keys, _context):
        self.pinned += keys
        return LoadPlan(len(self.pinned), keys, np.array([KEYS.index(key) for key in keys], np.int32))


class Request:
    def __init__(self, name="a"):
        self.context = SimpleNamespace(request_id=name)
        self.keys = SimpleNamespace(groups=lambda: [PromptGroup([b"before"] * 10 + KEYS)])
        self.load_failed = False


@pytest.fixture
def made(monkeypatch):
    """The loads over a scripted manager."""
    module = fake_vllm.load(monkeypatch, "stack.pipelined_loads", "0.32.0")
    manager = Manager()

    def start(plan, of):
        return module.PlannedRows(plan.plan_id, of.context.request_id, plan.chunk_ids)

    loads = module.PipelinedLoads(manager, start, is_possible=True)
    return SimpleNamespace(manager=manager, loads=loads, module=module, start=start)


def sent(loads):
    loads.advance()
    return [
        (part.load_id, None if part.rows is None else part.rows.chunk_ids.tolist(), part.is_last)
        for part in loads.take_parts()
    ]


def test_rows_follow_as_they_become_ready(made):
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    rows = loads.begin(Request(), KEYS, 10)
    assert (rows.chunk_ids.tolist(), rows.load_id, rows.chunks) == ([0, 1], 1, 6)
    assert sent(loads) == [], "nothing has come since"
    manager.here, manager.come = 3, 3
    assert sent(loads) == [(1, [2], False)]
    manager.here, manager.come = 6, 0
    assert sent(loads) == [(1, [3, 4, 5], True)]
    assert not loads.are_open()
    assert manager.pinned == KEYS
    assert manager.asked[-1] == KEYS[3:], "chunks that were sent are asked for no more"


def test_nothing_begins_before_the_first_row_is_there_and_only_so_many_at_a_time(made):
    manager, loads = made.manager, made.loads
    manager.come = 6
    assert not loads.can_begin(KEYS)
    assert loads.begin(Request(), KEYS, 10) is None
    manager.here = 1
    assert loads.begin(Request("a"), KEYS, 10)
    assert loads.begin(Request("b"), KEYS, 10)
    assert not loads.can_begin(KEYS)
    assert loads.begin(Request("c"), KEYS, 10) is None
    never = made.module.PipelinedLoads(manager, made.start, is_possible=False)
    assert not never.can_begin(KEYS), "vLLM takes a report about single blocks with one KV group alone"


@pytest.mark.parametrize("why", ["given up", "load failed", "no keys"])
def test_a_load_of_which_no_more_comes_ends_with_what_it_has_and_a_line_says_so(made, why, caplog):
    caplog.set_level("INFO", logger="kvtiers.vllm")
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    of = Request()
    loads.begin(of, KEYS, 10)
    manager.here = 3
    if why == "given up":
        manager.come = 0
        assert sent(loads) == [(1, [2], True)]
    else:
        of.load_failed, of.keys = why == "load failed", None if why == "no keys" else of.keys
        assert sent(loads) == [(1, None, True)]
    assert of.load_failed, "it is looked up no more"
    assert not loads.are_open()
    assert manager.late == 1
    (line,) = caplog.messages
    assert line.startswith(f"request a: {3 if why == 'given up' else 4} of 6 chunks from tiers came too late")
    assert "Recovered from KV load failure" in line


def test_one_whose_next_chunk_is_asked_for_again_goes_on(made):
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    loads.begin(Request(), KEYS, 10)
    manager.come, manager.unresolved = 0, True
    assert sent(loads) == []
    manager.here, manager.unresolved = 6, False
    assert sent(loads) == [(1, [2, 3, 4, 5], True)]
    assert manager.late == 0


def test_the_load_of_a_request_that_ends_is_closed_with_the_next_step(made):
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    of = Request()
    loads.begin(of, KEYS, 10)
    loads.drop(of)
    loads.drop(of)
    assert loads.are_open(), "a step is needed"
    assert sent(loads) == [(1, None, True)]
    assert not loads.are_open()


# -- the worker


class Gpu:
    """A rank's worker; its copies end when the test says so."""

    def __init__(self):
        self.begun, self.results = {}, []

    def submit_load(self, copy_id, rows, blocks, _expedited):
        self.begun[copy_id] = (rows.tolist(), blocks.block_ids.tolist(), blocks.group_sizes, blocks.block_indices)

    def wait(self, _copies):
        return

    def end(self, *, success=True):
        copy_id = next(iter(self.begun))
        self.results.append(TransferResult(copy_id, success, 100, 0.5))
        return self.begun.pop(copy_id)

    def get_finished(self):
        results, self.results = self.results, []
        return results


@pytest.fixture
def rank(monkeypatch):
    """A worker with chunks of two blocks: a load of four chunks begins in the middle of the first one."""
    module = fake_vllm.load(monkeypatch, "stack.worker", "0.32.0")
    gpu = Gpu()
    worker = module.KvtiersWorker(gpu, 2)

    def rows(plan_id, first, end, **more):
        return module.PlannedRows(plan_id, "a", np.arange(first, end, dtype=np.int32), **more)

    def part(plan_id, first, end, *, is_last=False, load_id=1):
        return module.LoadPart(load_id, rows(plan_id, first, end) if plan_id else None, is_last)

    blocks = SimpleNamespace(block_ids=[*range(30, 37)], group_sizes=[7], block_indices=[1])
    assert worker.submit_load(9, rows(5, 0, 1, load_id=1, chunks=4), blocks)
    return SimpleNamespace(gpu=gpu, worker=worker, part=part, rows=rows, blocks=blocks)


def test_each_part_is_copied_into_its_own_blocks_and_the_job_ends_with_the_last(rank):
    gpu, worker = rank.gpu, rank.worker
    worker.continue_loads([rank.part(6, 1, 3)])
    assert gpu.end() == ([0], [30], (1,), (1,)), "the second half of the first chunk"
    assert worker.get_finished() == []
    assert gpu.end() == ([1, 2], [31, 32, 33, 34], (4,), (2,))
    assert worker.get_finished() == []
    worker.continue_loads([rank.part(7, 3, 4, is_last=True)])
    assert worker.get_finished() == []
    assert gpu.end() == ([3], [35, 36], (2,), (6,))
    (done,) = worker.get_finished()
    assert (done.job_id, done.success, done.transfer_size, done.transfer_time) == (9, True, 300, 1.5)
    report = worker.take_report()
    assert (dict(report.ended), report.failed) == ({5: 1, 6: 1, 7: 1}, set())
    assert (worker.take_missing_blocks(), worker.take_failed_loads()) == (set(), set())
    assert worker.get_finished() == []


def test_parts_that_come_before_their_load_wait_for_it(rank):
    """vLLM binds a step's metadata before it starts the loads of that step."""
    worker, gpu = rank.worker, rank.gpu
    worker.continue_loads([rank.part(6, 1, 2, load_id=2), rank.part(7, 2, 4, is_last=True, load_id=2)])
    assert worker.submit_load(10, rank.rows(8, 0, 1, load_id=2, chunks=4), rank.blocks)
    assert gpu.end() == ([0], [30], (1,), (1,)), "that of the other load"
    assert [gpu.end()[0] for _ in range(3)] == [[0], [1], [2, 3]]
    assert [done.job_id for done in worker.get_finished()] == [10]
    assert worker.take_missing_blocks() == set()


def test_what_never_came_is_missing(rank):
    rank.worker.continue_loads([rank.part(6, 1, 2), rank.part(0, 0, 0, is_last=True)])
    rank.gpu.end()
    assert rank.worker.get_finished() == [], "a copy is in flight"
    rank.gpu.end()
    assert [done.job_id for done in rank.worker.get_finished()] == [9]
    assert rank.worker.take_missing_blocks() == {33, 34, 35, 36}
    assert rank.worker.take_missing_blocks() == set()


def test_from_the_first_copy_that_failed_on_everything_is_missing(rank):
    rank.worker.continue_loads([rank.part(6, 1, 3), rank.part(7, 3, 4, is_last=True)])
    rank.gpu.end()
    rank.gpu.end(success=False)
    rank.gpu.end()
    assert [done.success for done in rank.worker.get_finished()] == [True], "vLLM asserts that copies succeed"
    assert rank.worker.take_missing_blocks() == {31, 32, 33, 34, 35, 36}
    assert rank.worker.take_report().failed == {6}
    assert rank.worker.take_failed_loads() == set(), "vLLM keeps what came before"


@pytest.mark.parametrize("early", [False, True])
def test_rows_for_a_load_that_was_refused_are_given_back(rank, caplog, early):
    worker = rank.worker
    if early:
        worker.continue_loads([rank.part(9, 1, 2, is_last=True, load_id=2)])
    bad = SimpleNamespace(block_ids=object(), group_sizes=[1], block_indices=[0])
    assert worker.submit_load(10, rank.rows(8, 0, 1, load_id=2, chunks=2), bad)
    if not early:
        worker.continue_loads([rank.part(9, 1, 2, is_last=True, load_id=2)])
    assert [done.job_id for done in worker.get_finished()] == [10]
    report = worker.take_report()
    assert (dict(report.ended), report.failed) == ({8: 1, 9: 1}, {8, 9})
    assert worker.take_failed_loads() == {"a"}
    assert "a bug of kvtiers" in caplog.text
