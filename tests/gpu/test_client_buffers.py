"""A client's values in GPU memory: torch's tensors on a device, and a played driver whose GPU memory is this process's.

The played one has the calls of libcuda that are made, with copies that happen at once.
"""

import contextlib
import ctypes
import threading
import time

import numpy as np
import pytest
import torch

from kvtiers import ModelIdentity, open_client
from kvtiers._log_queue import flush_logs
from kvtiers.gpu.cuda import driver as cuda_driver

NBYTES = 3 * 4096
NOT_READY, INVALID = 600, 1
PATIENCE = 60.0


class PlayedDriver:
    """``libcuda`` with one device. ``fails``: the calls that fail; ``is_working``: the caller's streams have work."""

    def __init__(self):
        self.arrays, self.calls = [], []
        self.pinned, self.streams, self.recorded = set(), set(), []
        self.fails, self.is_working = set(), False
        self.played = {
            "cuPointerGetAttribute": self._find, "cuStreamCreate": self._new_stream, "cuEventCreate": self._new_event,
            "cuStreamDestroy_v2": self._destroy_stream, "cuEventRecord": self._record, "cuEventQuery": self._query,
            "cuMemcpyBatchAsync": self._copy_batch, "cuMemcpyAsync": self._copy,
            "cuMemHostRegister_v2": self._pin, "cuMemHostUnregister": self._unpin,
        }  # fmt: skip

    def array(self, data, **about):
        """Return an array in GPU memory with these bytes."""
        self.arrays.append(data.copy())
        return PlayedArray(self.arrays[-1], **about)

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*given):
            self.calls.append(name)
            if name in self.fails:
                return INVALID
            played = self.played.get(name)
            return played(*given) if played else 0

        return call

    def _find(self, device, attribute, address):
        del attribute
        device._obj.value = 0
        ends = ((array.ctypes.data, array.ctypes.data + array.nbytes) for array in self.arrays)
        return 0 if any(begin <= address < end for begin, end in ends) else INVALID

    def _new_stream(self, stream, flags):
        del flags
        stream._obj.value = 77
        self.streams.add(77)
        return 0

    def _new_event(self, event, flags):
        del flags
        event._obj.value = 1 + self.calls.count("cuEventCreate")
        return 0

    def _copy_batch(self, to, source, nbytes, count, *rest):
        del rest
        assert self.pinned, "all host memory among them is pinned"
        for number in range(count):
            place, origin, size = (
                (ctypes.c_int64 * count).from_address(array)[number] for array in (to, source, nbytes)
            )
            ctypes.memmove(place, origin, size)
        return 0

    def _copy(self, to, source, nbytes, stream):
        del stream
        ctypes.memmove(to, source, nbytes)
        return 0

    def _pin(self, address, nbytes, flags):
        del nbytes, flags
        self.pinned.add(address)
        return 0

    def _unpin(self, address):
        self.pinned.remove(address)
        return 0

    def _destroy_stream(self, stream):
        self.streams.remove(stream)
        return 0

    def _record(self, event, stream):
        del event
        self.recorded.append(stream)
        return 0

    def _query(self, event):
        del event
        return NOT_READY if self.is_working else 0


class PlayedArray:
    """An array of the played device."""

    def __init__(self, data, *, read_only=False, strides=None, stream=None):
        self.data = data
        self.__cuda_array_interface__ = {
            "typestr": data.dtype.str, "shape": data.shape, "strides": strides,
            "data": (data.ctypes.data, read_only), "version": 3, "stream": stream,
        }  # fmt: skip


@pytest.fixture
def played(monkeypatch):
    played = PlayedDriver()
    monkeypatch.setattr(cuda_driver, "_load", lambda kind: played)
    cuda_driver._initialised.cache_clear()
    yield played
    cuda_driver._initialised.cache_clear()


@pytest.fixture(params=["played", pytest.param("cuda", marks=pytest.mark.gpu)])
def put_there(request):
    """Return a function from bytes to an array in GPU memory."""
    if request.param == "played":
        return request.getfixturevalue("played").array
    return lambda data: torch.from_numpy(data.copy()).cuda()


def bytes_of(array):
    return (array.data if isinstance(array, PlayedArray) else array.view(torch.uint8).cpu().numpy()).tobytes()


def value(seed, nbytes=NBYTES):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def opened(store_queue="auto", **more):
    config = {
        "version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s",
        "secondary": [{"type": "memory", "capacity": "64MiB", "store_queue": store_queue}],
    }  # fmt: skip
    return open_client(
        config, ModelIdentity("m", weights="w"), NBYTES, **{"bounce_bytes": 1 << 16, "deadline": PATIENCE} | more
    )


@pytest.fixture
def client():
    with opened() as client:
        yield client


def keys(count, first=0):
    return [number.to_bytes(8, "big") for number in range(first, first + count)]


def test_values_go_through_gpu_memory_byte_for_byte_with_more_of_them_than_rows(client, put_there) -> None:
    there = [put_there(value(seed)) for seed in range(40)]
    assert client.put(keys(40), there).stored == [True] * 40
    back = [put_there(np.zeros(NBYTES, np.uint8)) for _ in range(40)]
    on_host = np.zeros((40, NBYTES), np.uint8)
    assert all(client.get_into(keys(40), back))
    assert all(client.get_into(keys(40), list(on_host)))
    for seed in range(40):
        assert bytes_of(back[seed]) == on_host[seed].tobytes() == value(seed).tobytes()


def test_the_parts_of_a_value_may_lie_in_either_memory(client, put_there) -> None:
    whole = value(1)
    parts = [put_there(whole[:4096].view(np.float16).reshape(2, 1024)), whole[4096:8192], put_there(whole[8192:])]
    assert client.put(keys(1), [parts]).stored == [True]
    back = [np.zeros(4096, np.uint8), put_there(np.zeros(8000, np.uint8)), put_there(np.zeros(192, np.uint8))]
    assert client.get_into(keys(1), [back]) == [True]
    assert back[0].tobytes() + bytes_of(back[1]) + bytes_of(back[2]) == whole.tobytes()


def test_a_value_in_the_region_may_have_parts_in_gpu_memory(put_there) -> None:
    with opened(region_bytes=1 << 20) as client:
        inside = np.frombuffer(client.region, np.uint8)
        inside[:4096] = value(1, 4096)
        assert client.put(keys(1), [[inside[:4096], put_there(value(2, NBYTES - 4096))]]).stored == [True]
        back = np.zeros(NBYTES, np.uint8)
        assert client.get_into(keys(1), [back]) == [True]
        assert back.tobytes() == value(1, 4096).tobytes() + value(2, NBYTES - 4096).tobytes()
        assert client.stats()["direct_values"] == 0


def test_calls_of_several_threads_do_not_mix_up_their_values(client, put_there) -> None:
    wrong = []

    def move(first):
        there = [put_there(value(first + number)) for number in range(20)]
        stored = client.put(keys(20, first), there).stored
        back = [put_there(np.zeros(NBYTES, np.uint8)) for _ in range(20)]
        found = client.get_into(keys(20, first), back)
        if not all(stored + found) or any(
            bytes_of(one) != value(first + number).tobytes() for number, one in enumerate(back)
        ):
            wrong.append(first)

    threads = [threading.Thread(target=move, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []


@pytest.mark.gpu
def test_a_call_comes_after_the_work_that_is_queued_on_its_buffers(client) -> None:
    """A kernel that still writes a value before it is put; one that writes to a buffer before it is filled."""
    there, back = (torch.zeros(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    source = torch.from_numpy(value(3)).cuda()
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # some .1 s of the device
            there.copy_(source)
            assert client.put(keys(1), [there]).stored == [True]
            torch.cuda._sleep(200_000_000)
            back.fill_(7)
            assert client.get_into(keys(1), [back]) == [True]
        assert bytes_of(back) == value(3).tobytes()
        assert client.delete(keys(1)) == [True]
        there.zero_()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_bfloat16_is_taken_as_it_is_and_a_dtype_without_a_name_viewed_as_bytes(client) -> None:
    whole = torch.from_numpy(value(4)).cuda()
    assert client.put(keys(1), [whole.view(torch.bfloat16)]).stored == [True]
    assert client.put(keys(1, 1), [whole.view(torch.float8_e4m3fn)]).stored == [False]
    assert client.put(keys(1, 2), [whole.view(torch.float8_e4m3fn).view(torch.uint8)]).stored == [True]
    assert client.stats()["refused_values"] == 1


@pytest.mark.parametrize("stream", [1, 2, 4711])
def test_the_stream_that_an_array_names_is_waited_for_within_the_time_of_the_call(client, played, stream) -> None:
    there = played.array(value(1), stream=stream)
    played.is_working = True
    begun = time.monotonic()
    result = client.put(keys(1), [there], timeout=0.5)
    assert result.stored == [False]
    assert "the GPU has not ended its work" in result.error
    assert client.get_into(keys(1), [there], timeout=0.5) == [False]
    assert time.monotonic() - begun < PATIENCE / 2
    assert set(played.recorded) == {stream}
    assert client.stats()["expired_calls"] == 2
    played.is_working = False
    assert client.exists(keys(1)) == [False]
    assert client.put(keys(1), [there]).stored == [True]


def test_an_array_without_queued_work_is_not_waited_for(client, played) -> None:
    played.is_working = True
    assert client.put(keys(1), [played.array(value(1))]).stored == [True]
    assert played.recorded == []


def test_what_is_no_contiguous_buffer_of_a_device_is_refused_and_keeps_no_other_back(client, played, caplog) -> None:
    class Grads:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")

    unknown = PlayedArray(value(1))
    turned = played.array(value(1).reshape(3, 4096), strides=(1, 3))
    good = played.array(value(2).reshape(3, 4096), strides=(4096, 1))
    assert client.put(keys(4), [Grads(), unknown, turned, good]).stored == [False, False, False, True]
    flush_logs(PATIENCE)
    assert "requires grad" in caplog.text
    read_only = played.array(value(3), read_only=True)
    assert client.get_into(keys(1, 3), [read_only]) == [False]
    assert bytes_of(read_only) == value(3).tobytes()
    assert client.stats()["refused_values"] == 4


def test_rows_that_cannot_be_pinned_cost_speed_alone(client, played, caplog) -> None:
    played.fails = {"cuMemHostRegister_v2"}
    back = played.array(np.zeros(NBYTES, np.uint8))
    for seed in range(2):
        assert client.put(keys(1, seed), [played.array(value(seed))]).stored == [True]
        assert client.get_into(keys(1, seed), [back]) == [True]
        assert bytes_of(back) == value(seed).tobytes()
    assert "cuMemcpyBatchAsync" not in played.calls
    flush_logs(PATIENCE)
    assert caplog.text.count("cannot be pinned") == 1


@pytest.mark.parametrize("failing", ["cuMemcpyBatchAsync", "cuStreamSynchronize", "cuEventRecord"])
def test_a_device_that_fails_costs_its_call_alone(client, played, failing) -> None:
    there = played.array(value(1), stream=1)
    assert client.put(keys(1), [there]).stored == [True]
    played.fails = {failing}
    played.calls.clear()
    assert client.put(keys(1, 1), [there]).stored == [False]
    if failing == "cuMemcpyBatchAsync":
        assert "cuStreamSynchronize" in played.calls, "what was begun may still write to the rows"
    assert client.get_into(keys(1), [there]) == [False]
    played.fails = set()
    assert client.exists(keys(2)) == [True, False]
    free = client.stats()
    assert free["free_bounce_rows"] == free["bounce_rows"]
    assert client.get_into(keys(1), [there]) == [True]


def test_a_close_ends_a_call_that_waits_for_the_gpu_and_destroys_no_event_in_use(client, played) -> None:
    played.is_working = True
    there, results = played.array(value(1), stream=1), []
    waiting = threading.Thread(target=lambda: results.append(client.put(keys(1), [there])))
    waiting.start()
    until = time.monotonic() + PATIENCE
    while "cuEventQuery" not in played.calls:
        assert time.monotonic() < until
    client.close()
    waiting.join(PATIENCE)
    assert results[0].stored == [False]
    last = len(played.calls) - 1 - played.calls[::-1].index("cuEventQuery")
    assert last < played.calls.index("cuEventDestroy_v2")


@pytest.mark.gpu
def test_a_graph_that_another_thread_captures_is_not_disturbed(client) -> None:
    there, done = torch.from_numpy(value(1)).cuda(), threading.Event()
    assert client.put(keys(1), [there]).stored == [True]
    back, results = torch.zeros_like(there), []
    torch.cuda.synchronize()

    def move():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results.append(client.put(keys(1, 1), [there]).stored == [True])
            results.append(client.get_into(keys(1), [back]) == [True])
        done.set()

    graph, numbers = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        numbers += 1
        thread = threading.Thread(target=move)
        thread.start()
        assert done.wait(PATIENCE)
        numbers += 1
    thread.join(PATIENCE)
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [2.0] * 8
    assert results == [True, True]
    assert bytes_of(back) == value(1).tobytes()


def test_rows_are_pinned_in_pieces_of_whole_rows_and_pages(played) -> None:
    with contextlib.closing(opened(bounce_bytes=40 << 20, store_queue=1 << 20)) as client:
        assert client.put(keys(1), [played.array(value(1))]).stored == [True]
        first, *more = sorted(played.pinned)
        assert more
        assert all((place - first) % client._rows.row_stride == 0 and place % 4096 == 0 for place in more)


def test_one_bad_array_keeps_no_other_from_being_stored(client, played) -> None:
    bad = PlayedArray(value(1))
    bad.__cuda_array_interface__ = {"shape": (3,)}
    assert client.put(keys(2), [bad, played.array(value(2))]).stored == [False, True]


def test_a_close_unpins_the_rows_and_nothing_is_left(played) -> None:
    with contextlib.closing(opened()) as client:
        there = played.array(value(1))
        assert client.put(keys(1), [there]).stored == [True]
        assert len(played.pinned) == len(played.streams) == 1
    assert played.pinned == played.streams == set()
    assert client.put(keys(1), [there]).stored == [False]
    assert client.get_into(keys(1), [there]) == [False]
