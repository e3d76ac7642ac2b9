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
        self.waiting = {}

    def ready_of(self, keys):
        return max(0, min(len(keys), self.here - KEYS.index(keys[0]))) if keys else 0

    def reach(self, groups, _context, computed, end):
        keys = groups[0].keys[computed // 16 : end // 16]
        self.asked.append(list(keys))
        ready = self.ready_of(keys) * 16
        return Reach(ready, min(self.come * 16, len(keys) * 16 - ready), self.unresolved)

    def waits_on(self, _context, computed, end):
        return self.waiting.get((computed, end))

    def load_was_late(self):
        self.late += 1

    def prepare_part(self, runs, _context):
        ready = [self.ready_of(run) for run in runs]
        keys = [key for run, chunks in zip(runs, ready, strict=True) for key in run[:chunks]]
        self.pinned += keys
        return (LoadPlan(len(self.pinned), keys, np.frombuffer(b"".join(keys), np.uint8)), ready) if keys else None


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

    loads = module.PipelinedLoads(manager, start, is_whole=False)
    return SimpleNamespace(manager=manager, loads=loads, module=module, start=start)


def begin(loads, request=None):
    """Begin to load all chunks, behind ten that are there."""
    return loads.begin(request or Request(), [KEYS], 160, 256)


def sent(loads):
    loads.advance()
    return [
        (part.load_id, None if part.rows is None else part.rows.chunk_ids.tolist(), part.is_last)
        for part in loads.take_parts()
    ]


def test_rows_follow_as_they_become_ready(made):
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    rows = begin(loads)
    assert (rows.chunk_ids.tolist(), rows.load_id, rows.by_group) == ([0, 1], 1, (2,))
    assert sent(loads) == [], "nothing has come since"
    manager.here, manager.come = 3, 3
    assert sent(loads) == [(1, [2], False)]
    manager.here, manager.come = 6, 0
    assert sent(loads) == [(1, [3, 4, 5], True)]
    assert not loads.are_open()
    assert manager.pinned == KEYS
    assert manager.asked[-1] == KEYS[3:], "chunks that were sent are asked for no more"


def test_a_load_that_waits_on_sends_what_has_come_and_is_not_asked_about(made):
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    begin(loads)
    manager.waiting[160, 256] = Reach(32, 64, False, begins=True)
    manager.here = 3
    assert sent(loads) == [(1, [2], False)]
    assert sent(loads) == []
    assert not manager.asked
    manager.waiting.clear()
    manager.here, manager.come = 5, 1
    assert sent(loads) == [(1, [3, 4], False)]
    manager.waiting[208, 256] = Reach(32, 16, False, begins=True)
    assert sent(loads) == []
    assert manager.asked == [KEYS[3:]]
    manager.waiting.clear()
    manager.here, manager.come = 6, 0
    assert sent(loads) == [(1, [5], True)]


def test_nothing_begins_before_the_first_row_is_there_and_only_so_many_at_a_time(made):
    manager, loads = made.manager, made.loads
    manager.come = 6
    assert not loads.can_begin(Reach(16, 80, False)), "another one than the first is readable"
    assert begin(loads) is None
    assert (loads.begun, loads.are_open()) == (0, False)
    manager.here = 1
    assert loads.can_begin(Reach(16, 80, False, begins=True))
    assert begin(loads, Request("a"))
    assert begin(loads, Request("b"))
    assert not loads.can_begin(Reach(16, 80, False, begins=True))
    assert begin(loads, Request("c")) is None


@pytest.mark.parametrize("why", ["given up", "load failed", "no keys"])
def test_a_load_of_which_no_more_comes_ends_with_what_it_has_and_a_line_says_so(made, why, caplog):
    caplog.set_level("INFO", logger="kvtiers.vllm")
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    of = Request()
    begin(loads, of)
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
    begin(loads)
    manager.come, manager.unresolved = 0, True
    assert sent(loads) == []
    manager.here, manager.unresolved = 6, False
    assert sent(loads) == [(1, [2, 3, 4, 5], True)]
    assert manager.late == 0


def test_the_load_of_a_request_that_ends_is_closed_with_the_next_step(made):
    manager, loads = made.manager, made.loads
    manager.here, manager.come = 2, 4
    of = Request()
    begin(loads, of)
    loads.drop(of)
    loads.drop(of)
    assert loads.are_open(), "a step is needed"
    assert sent(loads) == [(1, None, True)]
    assert not loads.are_open()


# -- several groups


class Whole(Manager):
    """A manager of a model with two groups: ``here`` names the chunks that are readable; ``tokens``: of a reach."""

    def __init__(self):
        super().__init__()
        self.here, self.tokens, self.are_ready = "", 96, False

    def ready_of(self, keys):
        return next((at for at, key in enumerate(keys) if key.decode() not in self.here), len(keys))

    def reach(self, groups, _context, computed, end):
        self.asked.append((computed, end))
        return Reach(self.tokens, 0, False) if self.are_ready else Reach(0, self.tokens, self.unresolved)


@pytest.fixture
def whole(made):
    """A load of the chunks A to D of full attention and x, y of windows, of which A is there."""
    manager = Whole()
    manager.here = "A"
    loads = made.module.PipelinedLoads(manager, made.start, is_whole=True)
    of = Request()
    runs = [[bytes([number]) for number in run] for run in (b"ABCD", b"xy")]
    return SimpleNamespace(manager=manager, loads=loads, of=of, rows=loads.begin(of, runs, 160, 256))


def parts(loads):
    loads.advance()
    return [
        (None, (), part.is_last)
        if part.rows is None
        else (bytes(part.rows.chunk_ids.tolist()), part.rows.by_group, part.is_last)
        for part in loads.take_parts()
    ]


def test_of_several_groups_each_part_has_the_leading_rows_of_each(whole):
    manager, loads = whole.manager, whole.loads
    assert (bytes(whole.rows.chunk_ids.tolist()), whole.rows.by_group) == (b"A", (1, 0))
    manager.here = "ABxD"
    assert parts(loads) == [(b"Bx", (1, 1), False)]
    assert parts(loads) == []
    manager.here = "ABCDxy"
    assert parts(loads) == [(b"CDy", (2, 1), True)]
    assert (loads.are_open(), manager.late, whole.of.load_failed) == (False, 0, False)
    assert set(manager.asked) == {(160, 256)}, "a boundary needs all of it"


def test_of_several_groups_a_load_that_lacks_a_chunk_ends_at_once_and_its_prompt_is_computed(whole, caplog):
    caplog.set_level("INFO", logger="kvtiers.vllm")
    manager, loads = whole.manager, whole.loads
    manager.here, manager.tokens = "AB", 32
    manager.unresolved = True
    assert parts(loads) == [(b"B", (1, 0), False)], "it may come from another tier"
    manager.here, manager.unresolved = "ABC", False
    assert parts(loads) == [(None, (), True)], "what is there is no use"
    assert (loads.are_open(), manager.late, whole.of.load_failed) == (False, 1, True)
    (line,) = caplog.messages
    assert line.startswith("request a: 4 of 6 chunks from tiers came too late")
    assert line.endswith("its prompt is computed")


def test_of_several_groups_a_load_ends_if_a_chunk_beside_the_boundarys_has_left(whole):
    """The end of a prompt inside a block has a key of its own, about which no boundary says anything."""
    whole.manager.here, whole.manager.are_ready = "ABCDx", True
    assert parts(whole.loads) == [(b"BCDx", (3, 1), True)]
    assert (whole.loads.are_open(), whole.manager.late) == (False, 1)


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
        chunks = np.arange(first, end, dtype=np.int32)
        return module.PlannedRows(plan_id, "a", chunks, by_group=(len(chunks),), **more)

    def part(plan_id, first, end, *, is_last=False, load_id=1):
        return module.LoadPart(load_id, rows(plan_id, first, end) if plan_id else None, is_last)

    blocks = SimpleNamespace(block_ids=[*range(30, 37)], group_sizes=[7], block_indices=[1])
    assert worker.submit_load(9, rows(5, 0, 1, load_id=1), blocks)
    return SimpleNamespace(gpu=gpu, worker=worker, part=part, rows=rows, blocks=blocks, module=module)


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


def test_a_load_begins_before_vllm_submits_it_and_with_its_parts_once(rank):
    """vLLM binds a step's metadata, launches the model, and submits the loads of that step then."""
    worker, gpu = rank.worker, rank.gpu
    worker.begin_load(10, rank.rows(8, 0, 1, load_id=2), rank.blocks)
    worker.continue_loads([rank.part(6, 1, 2, load_id=2), rank.part(7, 2, 4, is_last=True, load_id=2)])
    assert gpu.end() == ([0], [30], (1,), (1,)), "that of the other load"
    assert [gpu.end()[0] for _ in range(3)] == [[0], [1], [2, 3]]
    assert worker.submit_load(10, rank.rows(8, 0, 1, load_id=2), rank.blocks)
    assert not gpu.begun, "it was begun already"
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


@pytest.fixture
def rank_of_groups(rank):
    """The same worker with a load of three groups: chunks of two blocks, three of the first group, one of the third."""
    blocks = SimpleNamespace(block_ids=[*range(30, 35), 70, 71], group_sizes=[5, 0, 2], block_indices=[1, 4, 8])

    rank.gpu.end()
    rank.worker.get_finished()
    rank.blocks = blocks
    return rank


def given(rank, plan_id, first, by_group, **more):
    rows = rank.rows(plan_id, first, first + sum(by_group), **more)
    rows.by_group = by_group
    return rows


@pytest.mark.parametrize("ends", ["whole", "copy failed", "closed"])
def test_of_several_groups_each_part_is_copied_into_its_blocks_and_a_part_that_lacks_fails_the_load(
    rank_of_groups, ends
):
    rank = rank_of_groups
    gpu, worker, module = rank.gpu, rank.worker, rank.module
    assert worker.submit_load(10, given(rank, 20, 0, (1, 0), load_id=2), rank.blocks)
    worker.continue_loads([module.LoadPart(2, given(rank, 21, 1, (1, 1)), is_last=False)])
    assert gpu.end() == ([0], [30], (1, 0, 0), (1, 0, 8)), "the second half of the first chunk"
    assert gpu.end(success=ends != "copy failed") == ([1, 2], [31, 32, 70, 71], (2, 0, 2), (2, 0, 8))
    assert worker.get_finished() == []
    rows = None if ends == "closed" else given(rank, 22, 3, (1, 0))
    worker.continue_loads([module.LoadPart(2, rows, is_last=True)])
    if rows is not None:
        assert gpu.end() == ([3], [33, 34], (2, 0, 0), (4, 0, 10))
    assert [done.job_id for done in worker.get_finished()] == [10]
    assert worker.take_failed_loads() == (set() if ends == "whole" else {"a"})
    assert worker.take_missing_blocks() == set(), "vLLM takes no report about single blocks there"


def test_of_several_groups_a_part_that_does_not_fit_its_load_fails_it(rank_of_groups, caplog):
    rank = rank_of_groups
    assert rank.worker.submit_load(10, given(rank, 20, 0, (1,), load_id=2), rank.blocks)
    rank.worker.continue_loads([rank.module.LoadPart(2, None, is_last=True)])
    assert [done.job_id for done in rank.worker.get_finished()] == [10]
    assert rank.worker.take_failed_loads() == {"a"}
    assert rank.worker.take_report().failed == {20}
    assert "a bug of kvtiers" in caplog.text


def test_rows_for_a_load_that_was_refused_are_given_back(rank, caplog):
    worker = rank.worker
    bad = SimpleNamespace(block_ids=object(), group_sizes=[1], block_indices=[0])
    assert worker.submit_load(10, rank.rows(8, 0, 1, load_id=2), bad)
    worker.continue_loads([rank.part(9, 1, 2, is_last=True, load_id=2)])
    assert [done.job_id for done in worker.get_finished()] == [10]
    report = worker.take_report()
    assert (dict(report.ended), report.failed) == ({8: 1, 9: 1}, {8, 9})
    assert worker.take_failed_loads() == {"a"}
    assert "a bug of kvtiers" in caplog.text
