"""Lanes on a played device that runs its streams in any order that events allow, as late and as mixed as it likes."""

import ctypes
import random
import weakref
from collections import deque
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtiers.gpu.copier import CudaError
from kvtiers.gpu.copy_plan import plan_copy
from kvtiers.gpu.cuda.copy import _CudaCopy
from kvtiers.gpu.cuda.driver import CudaDriver
from kvtiers.gpu.cuda.geometry import group_geometry
from kvtiers.gpu.cuda.lane import CudaLane, KernelGroup, UnitTable
from kvtiers.gpu.cuda.pieces import page_pieces, staged_pieces
from kvtiers.gpu.tensors import kv_pages
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import runs_of_rank
from kvtiers.types import BlockSpec

PAGES = (24, 40, 16)
LAYOUT = CacheLayout(
    ModelIdentity("m"),
    (KVGroup("g", 16),),
    tuple(KVTensor(f"t{i}", 0, page) for i, page in enumerate(PAGES)),
    blocks_per_chunk=4,
)
BLOCKS, ROWS, ENGINE = 48, 16, 1
METHODS = ["staged", "direct", "pages"]


class Device:
    """Streams are queues of work; nothing of it is done before a wait or a query.

    Then the next stream is any that can go on, or, with every other seed, the one that is the favourite of those.
    """

    OF_THE_PLAY = frozenset({"OF_THE_PLAY", "end_maybe", "refuse_maybe", "give", "run_some", "run_one"})

    def __init__(self, seed):
        self.random, self.favours = random.Random(seed), seed % 2
        self.favour = {}
        self.streams, self.recorded, self.handles = {}, {}, count(10)
        self.refused = None
        self.reports_ends = True
        self.settled_sources = set()

    # -- the driver's calls that a lane makes

    def current(self):
        return nullcontext()

    def new_event(self, *, timed=False):
        del timed
        return next(self.handles)

    def record(self, event, stream):
        done = self.recorded[event] = SimpleNamespace(yes=False)
        self.give(stream, lambda: setattr(done, "yes", True))

    def order_after(self, stream, event):
        done = self.recorded[event]
        self.streams.setdefault(stream, deque()).append((lambda: done.yes, lambda: None))

    def has_ended(self, event):
        self.end_maybe()
        self.run_some()
        return self.recorded[event].yes

    def is_idle(self, stream):
        return not self.streams.get(stream)

    def wait(self, event):
        self.end_maybe()
        while not self.recorded[event].yes:
            self.run_one()

    def synchronize(self, stream):
        while self.streams.get(stream):
            self.run_one()

    def seconds_between(self, begin, end):
        assert self.recorded[begin].yes
        assert self.recorded[end].yes
        return 1.0

    def copy_batch(self, to, source, nbytes, stream, *, source_is_settled):
        self.settled_sources.add(source_is_settled)
        self.refuse_maybe()
        alive = [weakref.ref(array) for array in (to, source, nbytes)]

        def copy():
            arrays = [array() for array in alive]
            assert all(array is not None for array in arrays), "the descriptors went before the copy had read them"
            for destination, origin, size in zip(*arrays, strict=True):
                ctypes.memmove(int(destination), int(origin), int(size))

        self.give(stream, copy)

    def copy_each(self, to, source, nbytes, stream):
        assert not self.streams.get(stream), "a copy without pinning would wait inside the driver, and its callers too"
        for destination, origin, size in zip(to, source, nbytes, strict=True):
            ctypes.memmove(int(destination), int(origin), int(size))

    def launch(self, params, programs, threads, stream):
        assert programs > 0
        assert threads > 0
        self.refuse_maybe()
        taken = type(params).from_buffer_copy(params)  # the arguments are copied at once
        self.give(stream, lambda: kernel(taken))

    # -- the play

    def end_maybe(self):
        if not self.reports_ends:
            raise CudaError("the driver does not say")

    def refuse_maybe(self):
        if self.refused is not None:
            self.refused -= 1
            if self.refused < 0:
                raise CudaError("the driver said no")

    def give(self, stream, work):
        self.streams.setdefault(stream, deque()).append((lambda: True, work))

    def run_some(self):
        for _ in range(self.random.choice([0, 1, 3, 10])):
            if any(self.streams.values()):
                self.run_one()

    def run_one(self):
        ready = [stream for stream, queue in self.streams.items() if queue and queue[0][0]()]
        assert ready, "the streams wait for each other for ever"
        if self.favours:
            chosen = max(ready, key=lambda stream: self.favour.setdefault(stream, self.random.random()))
        else:
            chosen = self.random.choice(ready)
        self.streams[chosen].popleft()[1]()


def kernel(params):
    units = np.array((ctypes.c_int64 * (6 * params.num_units)).from_address(params.units)).reshape(-1, 6)
    entries = np.array(params.entries[: 3 * params.num_entries]).reshape(-1, 3)
    for block, row, place in entries.tolist():
        for kv, stride, tensor, page, within, nbytes in units.tolist():
            at = params.base + row * params.row_stride + tensor * params.places
            at += (place - params.first) * page + within
            there = kv + block * stride
            ctypes.memmove(*((at, there) if params.into_rows else (there, at)), nbytes)


class Rig:
    """KV tensors, rows and a lane on a played device."""

    def __init__(self, monkeypatch, seed, *, to_rows, urgent=False, slot_bytes=4096, slots=3):
        self.device = Device(seed)
        handles = count(100)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=next(handles)))
        fill = np.random.default_rng(seed)
        self.kv = [fill.integers(0, 256, (BLOCKS, page), np.uint8) for page in PAGES]
        self.region = fill.integers(0, 256, ROWS * LAYOUT.row_stride, np.uint8)
        pages = kv_pages(LAYOUT, 0, self.kv)
        geometry = group_geometry(LAYOUT, 0, 0, pages, runs_of_rank(LAYOUT, 0, None))
        self.tables = [torch.from_numpy(geometry.units(image=image)) for image in (False, True)]
        self.group = KernelGroup(geometry, *map(UnitTable, self.tables))
        ring = torch.zeros(slots * slot_bytes, dtype=torch.uint8)
        self.lane = CudaLane(
            self.device,
            ring,
            to_rows=to_rows,
            slots=slots,
            urgent=urgent,
            staging_programs=2,
            direct_programs=2,
        )
        self.lane.region = self.region.ctypes.data

    def mark(self):
        event = self.device.new_event()
        self.device.record(event, ENGINE)
        return event

    def job(self, method, blocks, chunks, *, first=0, pinned=True):
        """Launch one job's pieces; return its two events."""
        spec = BlockSpec(np.array(blocks), (len(blocks),), (first,))
        limits = {"num_blocks": [BLOCKS], "num_rows": ROWS, "into_rows": self.lane.to_rows}
        (part,) = plan_copy(LAYOUT, spec, np.array(chunks), **limits)
        geometry, mark = self.group.geometry, self.mark()
        begin = self.lane.begin_event()
        if method == "staged":
            for piece in staged_pieces(part, geometry, 3 * 80 * 4, 8):
                self.lane.staged(self.group, piece, mark, pinned=pinned)
        else:
            for piece in page_pieces(part, geometry, 3):
                if method == "direct":
                    self.lane.direct(self.group, piece, mark)
                else:
                    self.lane.pages(geometry, piece, mark, pinned=pinned)
        return begin, self.lane.end_event()

    def jobs(self, times, *args):
        for _ in range(times):
            self.job(*args)

    def finish(self, begin, end):
        while not self.lane.has_ended(end):
            self.device.run_one()
        assert self.lane.recycle(begin, end) == 1.0

    def row_bytes(self, chunk, place):
        """Return the bytes at a place of a row, tensor by tensor."""
        row, at = self.region[chunk * LAYOUT.row_stride :], 0
        found = []
        for page in PAGES:
            found.append(row[at + place * page :][:page])
            at += page * LAYOUT.blocks_per_chunk
        return np.concatenate(found)

    def block_bytes(self, block):
        return np.concatenate([tensor[block] for tensor in self.kv])


@pytest.fixture(params=range(6))
def seed(request):
    return request.param


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_that_has_ended_has_what_the_engine_wrote_before_it(monkeypatch, seed, method, pinned):
    rig = Rig(monkeypatch, seed, to_rows=True)
    for job in range(2):
        blocks, chunks = range(job * 20, job * 20 + 20), range(job * 6, job * 6 + 6)
        written = [np.full((20, page), 7 + job, np.uint8) for page in PAGES]
        for tensor, values in zip(rig.kv, written, strict=True):
            rig.device.give(ENGINE, lambda t=tensor, v=values, b=blocks: t.__setitem__(list(b), v))
        events = rig.job(method, blocks, chunks, first=2, pinned=pinned or method == "direct")
        if job == 0:
            first = events
    rig.finish(*first)
    for at in range(20):
        assert (rig.row_bytes((at + 2) // 4, (at + 2) % 4) == 7).all()
    rig.finish(*events)
    for at in range(20):
        assert (rig.row_bytes(6 + (at + 2) // 4, (at + 2) % 4) == 8).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("urgent", [False, True])
def test_a_load_that_has_ended_is_in_its_blocks_whatever_was_written_there_before(monkeypatch, seed, method, urgent):
    rig = Rig(monkeypatch, seed, to_rows=False, urgent=urgent, slots=2 if urgent else 3)
    ended = []
    for job in range(2):
        blocks, chunks = range(job * 20, job * 20 + 20), range(job * 5, job * 5 + 5)
        for tensor in rig.kv:
            rig.device.give(ENGINE, lambda t=tensor, b=blocks: t.__setitem__(list(b), 0))
        ended.append(rig.job(method, blocks, chunks))
    for job, events in enumerate(ended):
        rig.finish(*events)
        for at in range(20):
            np.testing.assert_array_equal(rig.block_bytes(job * 20 + at), rig.row_bytes(job * 5 + at // 4, at % 4))


@pytest.mark.parametrize("to_rows", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_after_a_copy_that_was_refused_on_the_way_the_lane_works_on(monkeypatch, seed, method, to_rows):
    rig = Rig(monkeypatch, seed, to_rows=to_rows)
    rig.device.refused = seed
    with pytest.raises(CudaError):
        rig.jobs(4, method, range(20), range(5))
    rig.lane.settle()
    rig.device.refused = None
    assert not any(queue for stream, queue in rig.device.streams.items() if stream != ENGINE)
    rig.finish(*rig.job(method, range(20, 40), range(5, 10)))
    for at in range(20):
        np.testing.assert_array_equal(rig.block_bytes(20 + at), rig.row_bytes(5 + at // 4, at % 4))


@pytest.mark.parametrize("to_rows", [True, False])
def test_staged_pieces_are_launched_far_ahead_of_the_device_and_no_further(monkeypatch, to_rows):
    """A thread that has to wait for the interpreter keeps the link busy all the same."""
    rig = Rig(monkeypatch, 0, to_rows=to_rows)
    monkeypatch.setattr(rig.device, "run_some", lambda: None)
    monkeypatch.setattr(rig.device, "has_ended", lambda event: rig.device.recorded[event].yes)
    waits = []
    monkeypatch.setattr(rig.device, "wait", lambda event: (waits.append(event), Device.wait(rig.device, event)))
    pieces = 0
    while not waits:
        assert pieces <= 24
        rig.jobs(1, "staged", range(8), range(2))
        pieces += 1
    assert pieces == 25, "a piece a job, and three slots"


@pytest.mark.parametrize("to_rows", [True, False])
@pytest.mark.parametrize("method", ["staged", "pages"])
def test_only_a_load_may_be_read_ahead_of_what_is_in_flight(monkeypatch, method, to_rows):
    rig = Rig(monkeypatch, 0, to_rows=to_rows)
    rig.finish(*rig.job(method, range(20), range(5)))
    assert rig.device.settled_sources == {not to_rows}


def test_the_played_device_has_no_method_that_the_driver_has_not():
    played = {name for name in vars(Device) if not name.startswith("_")} - Device.OF_THE_PLAY
    assert played <= set(dir(CudaDriver))


@pytest.mark.parametrize("launched", [0, 1])
def test_a_job_that_fails_gives_its_event_back(monkeypatch, launched):
    rig = Rig(monkeypatch, 0, to_rows=True)
    copies = SimpleNamespace(raise_if_lost=lambda: None)

    def pieces():
        yield from [80] * launched
        raise CudaError("the driver said no")

    made = []
    for _ in range(5):
        copy = _CudaCopy(copies, rig.lane, pieces(), None)
        assert all(copy.advance() for _ in range(launched))
        with pytest.raises(CudaError):
            copy.advance()
        assert copy.ended()
        made.append(len(rig.device.recorded))
    assert made == [1] * 5


@pytest.mark.parametrize("waits", [False, True])
def test_a_job_whose_end_the_driver_does_not_report_fails_once_nothing_of_it_runs_and_gives_its_events_back(
    monkeypatch, waits
):
    rig = Rig(monkeypatch, 0, to_rows=True)
    copies, moved, made = SimpleNamespace(raise_if_lost=lambda: None), [], []

    def pieces():
        rig.device.give(rig.lane.stream, lambda: moved.append(80))
        yield 80

    for job in range(5):
        copy = _CudaCopy(copies, rig.lane, pieces(), None)
        while copy.advance():
            pass
        rig.device.reports_ends = False
        assert not copy.ended()  # its row would be given to others while it is written to
        assert len(moved) == job
        if waits:
            copy.wait()
        else:
            rig.lane.settle()
        assert len(moved) == job + 1
        with pytest.raises(CudaError, match="does not say"):
            copy.ended()
        rig.device.reports_ends = True
        made.append(len(rig.device.recorded))
    assert made == [2] * 5


def test_events_are_used_again(monkeypatch):
    rig = Rig(monkeypatch, 0, to_rows=False)
    made = []
    for job in range(30):
        rig.finish(*rig.job(METHODS[job % 3], range(20), range(5)))
        made.append(sum(event in rig.device.recorded for event in range(10, 10_000)) - job)
    assert made[-1] == made[5]  # but for the engine's own mark of each job


@pytest.mark.parametrize("urgent", [False, True])
def test_bulk_copies_have_the_lowest_priority_and_staging_kernels_do_not(monkeypatch, urgent):
    priorities = []

    def stream(_, *, priority):
        priorities.append(priority)
        return SimpleNamespace(cuda_stream=len(priorities))

    rig = Rig(monkeypatch, 0, to_rows=True)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    ring = torch.zeros(3 * 4096, dtype=torch.uint8)
    CudaLane(rig.device, ring, to_rows=True, slots=3, urgent=urgent, staging_programs=2, direct_programs=2)
    assert priorities == ([-1] if urgent else [0, -1, -1, -1])  # CUDA's lowest is 0, and its default
