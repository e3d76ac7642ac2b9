"""Buffers in GPU memory, as a client's values, and the copies between them and its bounce rows.

A buffer is any object with ``__cuda_array_interface__``: a CUDA tensor of torch, an array of CuPy or Numba. For each
call of a client::

    settle    wait until the work has ended that was queued on the buffers' streams before the call
    copy      a piece at a time, on a stream of our own; each returns when its copies have ended

So a call waits for the work that fills a buffer, or that still reads it, and for no later work. The rows are pinned at
the first use, in pieces of whole rows with a pause after each, since other calls of the driver wait for such a call:
256 MiB take some 20 ms in huge pages, and .1 s in small ones that were never used before.
"""

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtiers.gpu.copier import CudaError
from kvtiers.gpu.cuda.driver import CudaDriver, device_of
from kvtiers.gpu.pin_pace import whole_pages

__all__ = ["CudaBuffer", "CudaBuffers", "cuda_buffer"]

_log = logging.getLogger("kvtiers")
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY, which all blocking streams are ordered with
_POLL_SECONDS = (20e-6, 500e-6)  # the first pause, and the longest
_PIN_BYTES = 16 << 20


class CudaBuffer(NamedTuple):
    """``nbytes`` bytes of a device's memory. ``stream``: whose queued work may use them; None: no work does."""

    device: int
    address: int
    nbytes: int
    stream: int | None


def cuda_buffer(part: Any, *, writable: bool) -> CudaBuffer | None:
    """Return a buffer in GPU memory; None if it is not in GPU memory.

    ValueError if it is not C-contiguous, if it cannot be written and is to be, or if its type of numbers has no name
    in the interface (torch's 8-bit floats). CudaError or OSError if the driver has no such memory.
    """
    try:
        about = getattr(part, "__cuda_array_interface__", None)
        if about is None:
            return None
        address, is_read_only = about["data"]
        size = int(about["typestr"][2:])
        shape, strides = tuple(about["shape"]), about.get("strides")
        nbytes = math.prod(shape) * size
    except Exception as error:
        raise ValueError(f"a buffer in GPU memory: {error!r}; give it detached, and viewed as uint8") from error
    if strides is not None and tuple(strides) != _contiguous(shape, size):
        raise ValueError("a buffer in GPU memory is not C-contiguous")
    if writable and is_read_only:
        raise ValueError("a buffer to read into is read-only")
    if not nbytes:
        return CudaBuffer(0, 0, 0, None)
    device = device_of(address)
    stream = about["stream"] if "stream" in about else _current_stream(device)
    return CudaBuffer(device, address, nbytes, stream)


def _contiguous(shape: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _current_stream(device: int) -> int:
    """Return torch's current stream, whose arrays do not name theirs; the legacy stream where there is no torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _LEGACY_STREAM
    return int(torch.cuda.current_stream(device).cuda_stream)


class _Device:
    """One device's driver, our stream on it, and events that are not in use."""

    def __init__(self, number: int) -> None:
        self.driver = CudaDriver(number)
        try:
            with self.driver.current():
                self.stream = self.driver.new_stream()
        except CudaError:
            self.driver.close()
            raise
        self.events: list[int] = []

    def close(self) -> None:
        with self.driver.current():
            self.driver.destroy_stream(self.stream)
        self.driver.close()


class CudaBuffers:
    """Copies between buffers in GPU memory and rows of a client. ``rows``: all of its rows. Any thread.

    The methods raise CudaError or OSError if the driver fails, and after ``close``.
    """

    def __init__(self, rows: memoryview, row_stride: int) -> None:
        self._rows: npt.NDArray[np.uint8] | None = np.frombuffer(rows, np.uint8)
        self._row_stride = row_stride
        self._devices: dict[int, _Device] = {}
        self._pinned: list[int] = []
        """Addresses of the pinned pieces; none where rows cannot be pinned."""
        self._lock = threading.Lock()

    def settle(self, buffers: Iterable[CudaBuffer], until: float) -> bool:
        """Wait for the work queued on these buffers' streams; return False if it has not ended by ``until``."""
        for number, stream in {(buffer.device, buffer.stream) for buffer in buffers if buffer.stream is not None}:
            with self._lock:
                device = self._device(number)
                with device.driver.current():
                    event = device.events.pop() if device.events else device.driver.new_event()
                    device.driver.record(event, stream)
            pause, longest = _POLL_SECONDS
            while not (ended := self._has_ended(number, event)) and time.monotonic() < until:
                time.sleep(pause)
                pause = min(longest, 2 * pause)
            with self._lock:
                device.events.append(event)
            if not ended:
                return False
        return True

    def _has_ended(self, number: int, event: int) -> bool:
        with self._lock:  # close() destroys the events
            driver = self._device(number).driver
            with driver.current():
                return driver.has_ended(event)

    def copy(self, places: Sequence[tuple[CudaBuffer, npt.NDArray[np.uint8]]], *, into_rows: bool) -> None:
        """Copy between each buffer and its place in a row, and wait until that is done."""
        with self._lock:  # all copies share the link
            for number in {buffer.device for buffer, _ in places}:
                device = self._device(number)
                here = [(buffer, place) for buffer, place in places if buffer.device == number]
                buffers = np.array([buffer.address for buffer, _ in here], np.int64)
                rows = np.array([place.__array_interface__["data"][0] for _, place in here], np.int64)
                nbytes = np.array([buffer.nbytes for buffer, _ in here], np.int64)
                to, source = (rows, buffers) if into_rows else (buffers, rows)
                with device.driver.current():
                    try:
                        if self._pinned:
                            device.driver.copy_batch(to, source, nbytes, device.stream, source_is_settled=True)
                        else:
                            device.driver.copy_each(to, source, nbytes, device.stream)
                    finally:  # a copy that was begun must not write to rows that are another call's by then
                        device.driver.synchronize(device.stream)

    def close(self) -> None:
        """Unpin the rows, before their memory is unmapped; later calls raise."""
        with self._lock:
            self._rows = None
            for device in self._devices.values():
                with contextlib.suppress(CudaError):  # the device is lost, and its registrations with it
                    self._unpin(device.driver)
                with contextlib.suppress(CudaError):
                    device.close()
            self._devices.clear()

    def _device(self, number: int) -> _Device:
        """Return a device, made at its first use; the first one pins the rows, for all devices."""
        if self._rows is None:
            raise CudaError("the client is closed")
        if number not in self._devices:
            device = _Device(number)
            if not self._devices:
                self._pin(device.driver, self._rows)
            self._devices[number] = device
        return self._devices[number]

    def _pin(self, driver: CudaDriver, rows: npt.NDArray[np.uint8]) -> None:
        address, stride = rows.__array_interface__["data"][0], self._row_stride
        piece = stride * whole_pages(max(1, _PIN_BYTES // stride), stride)
        try:
            for start in range(0, rows.nbytes, piece):
                begun = time.perf_counter()
                with driver.current():
                    driver.pin(address + start, min(piece, rows.nbytes - start))
                self._pinned.append(address + start)
                time.sleep(time.perf_counter() - begun)
        except CudaError as error:
            _log.warning("client: the bounce rows cannot be pinned, so values in GPU memory move slowly: %s", error)
            self._unpin(driver)

    def _unpin(self, driver: CudaDriver) -> None:
        with driver.current():
            while self._pinned:
                driver.unpin(self._pinned.pop())
