"""CUDA driver bindings: the functions that torch does not offer, and the copy kernel, compiled for this device.

Called through ctypes. Short calls keep the GIL: releasing it would cost a busy engine's thread, and this one, far more
than the microsecond that the call takes. Calls that can take long release it.
"""

import contextlib
import ctypes
import functools
import glob
import os
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

from kvtiers.gpu.copier import CudaError, LostDeviceError
from kvtiers.gpu.copy_plan import Indexes

__all__ = ["MAX_ENTRIES", "CudaDriver", "KernelParams", "device_of"]

MAX_ENTRIES = 330
"""Blocks of one launch: they travel as the kernel's arguments, which may take 4 KiB."""

_SUCCESS, _NOT_READY = 0, 600
_ORDER_STREAM, _ORDER_ANY = 1, 3  # CUmemcpySrcAccessOrder
_REGISTER_FLAGS = 0x1 | 0x2  # portable, mapped
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_EVENT_SLEEPS, _EVENT_UNTIMED = 0x1, 0x2
_STREAM_NON_BLOCKING = 0x1
_POINTER_DEVICE = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_QUICK_BATCH = 32
"""A batch of this many takes some 0.1 ms; getting the interpreter back from a busy engine takes 5 ms."""
_MOST_IN_BATCH = 256
"""Copies of one batched call: driver 580 on an H100 loses the context (Xid 32) over some calls of 1,020, not of 512."""


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class KernelParams(ctypes.Structure):
    """The kernel's one argument; ``copy_kernel.cu`` says what each field is."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("row_stride", ctypes.c_uint64),
        ("units", ctypes.c_uint64),
        ("num_units", ctypes.c_uint32),
        ("num_entries", ctypes.c_uint32),
        ("places", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("into_rows", ctypes.c_uint32),
        ("entries", ctypes.c_uint32 * (3 * MAX_ENTRIES)),
    )


class CudaDriver:
    """One device's driver calls, for a thread of our own after ``enter``, for any other inside ``current``.

    Streams and events are the driver's handles, as integers.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._slow, self._quick = _load(ctypes.CDLL), _load(ctypes.PyDLL)
        handle = ctypes.c_int()
        self._check("cuInit", self._slow.cuInit(0))
        self._check("cuDeviceGet", self._slow.cuDeviceGet(ctypes.byref(handle), device))
        self._context = ctypes.c_void_p()
        self._check(
            "cuDevicePrimaryCtxRetain", self._slow.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), handle)
        )
        self._batched = hasattr(self._slow, "cuMemcpyBatchAsync")  # a driver of CUDA 12.8 or later
        self._any_order, self._stream_order = (_CopyAttributes(order=o) for o in (_ORDER_ANY, _ORDER_STREAM))
        self._first, self._failed = (ctypes.byref(ctypes.c_size_t()) for _ in range(2))
        self._kernel, self._module = ctypes.c_void_p(), ctypes.c_void_p()
        self._handle = handle
        self._events: list[int] = []

    def close(self) -> None:
        """Free the events and the kernel; nothing uses them any more."""
        with self.current():
            for event in self._events:
                self._quick.cuEventDestroy_v2(event)
            self._quick.cuModuleUnload(self._module)
        self._events.clear()
        self._slow.cuDevicePrimaryCtxRelease_v2(self._handle)

    def enter(self) -> None:
        """Make this device the one that the calling thread's driver calls mean, from now on.

        The thread is ours, so none of its calls belongs to a graph that the engine captures meanwhile on another one.
        Without setting the capture mode the driver would fail these calls, and invalidate the capture.
        """
        self._check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(self._context))
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        status = self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._check("cuThreadExchangeStreamCaptureMode", status)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this device, and that mode, those of a thread that is not ours, for the length of a block."""
        self._check("cuCtxPushCurrent", self._quick.cuCtxPushCurrent_v2(self._context))
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        try:
            self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            yield
        finally:
            self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            self._quick.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    # -- streams and events

    def new_stream(self) -> int:
        """Return a new stream, which does not wait for the legacy stream."""
        stream = ctypes.c_void_p()
        self._check("cuStreamCreate", self._quick.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING))
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream that ``new_stream`` has made."""
        self._check("cuStreamDestroy", self._quick.cuStreamDestroy_v2(stream))

    def new_event(self, *, timed: bool = False) -> int:
        """Return a new event; waiting for it sleeps instead of spinning."""
        event = ctypes.c_void_p()
        flags = _EVENT_SLEEPS | (0 if timed else _EVENT_UNTIMED)
        self._check("cuEventCreate", self._quick.cuEventCreate(ctypes.byref(event), flags))
        assert event.value is not None
        self._events.append(event.value)
        return event.value

    def record(self, event: int, stream: int) -> None:
        """Record the event after everything that the stream holds now."""
        self._check("cuEventRecord", self._quick.cuEventRecord(event, stream))

    def order_after(self, stream: int, event: int) -> None:
        """Make the stream's later work wait for the event."""
        self._check("cuStreamWaitEvent", self._quick.cuStreamWaitEvent(stream, event, 0))

    def has_ended(self, event: int) -> bool:
        """Return whether everything before the event has ended."""
        status = self._quick.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def wait(self, event: int) -> None:
        """Wait for everything before the event."""
        self._check("cuEventSynchronize", self._slow.cuEventSynchronize(event))

    def seconds_between(self, begin: int, end: int) -> float:
        """Return the seconds between two timed events that have ended."""
        milliseconds = ctypes.c_float()
        self._check("cuEventElapsedTime", self._quick.cuEventElapsedTime(ctypes.byref(milliseconds), begin, end))
        return milliseconds.value / 1e3

    # -- work

    def load_kernel(self, major: int, minor: int) -> None:
        """Compile the copy kernel for this compute capability. OSError or CudaError if that cannot be."""
        cubin = _compiled_kernel(major, minor)
        self._check("cuModuleLoadData", self._slow.cuModuleLoadData(ctypes.byref(self._module), cubin))
        found = self._slow.cuModuleGetFunction(ctypes.byref(self._kernel), self._module, b"kvtiers_copy")
        self._check("cuModuleGetFunction", found)

    def launch(self, params: KernelParams, programs: int, threads: int, stream: int) -> None:
        """Launch the copy kernel; the arguments are copied before this returns."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        status = self._quick.cuLaunchKernel(self._kernel, programs, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        self._check("cuLaunchKernel", status)

    def copy_batch(
        self, to: Indexes, source: Indexes, nbytes: Indexes, stream: int, *, source_is_settled: bool
    ) -> None:
        """Begin these copies (addresses, lengths) on a stream; all host memory among them is pinned.

        ``source_is_settled``: nothing in flight writes to the sources, so they may be read at any time; else
        they are read in the stream's order.
        """
        if not self._batched:
            self.copy_each(to, source, nbytes, stream)
            return
        attributes = ctypes.byref(self._any_order if source_is_settled else self._stream_order)
        for start in range(0, len(to), _MOST_IN_BATCH):
            end = min(start + _MOST_IN_BATCH, len(to))
            some = (_address(array[start:end]) for array in (to, source, nbytes))
            count = end - start
            library = self._quick if count <= _QUICK_BATCH else self._slow
            status = library.cuMemcpyBatchAsync(*some, count, attributes, self._first, 1, self._failed, stream)
            self._check("cuMemcpyBatchAsync", status)

    def copy_each(self, to: Indexes, source: Indexes, nbytes: Indexes, stream: int) -> None:
        """Make these copies on a stream, one call each; with memory that is not pinned each call waits for its copy.

        It waits inside the driver, also for what the stream holds before, and other threads' calls with it.
        """
        for destination, origin, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            self._check("cuMemcpyAsync", self._slow.cuMemcpyAsync(destination, origin, size, stream))

    def synchronize(self, stream: int) -> None:
        """Wait for everything that the stream holds."""
        self._check("cuStreamSynchronize", self._slow.cuStreamSynchronize(stream))

    # -- pinning, losses

    def pin(self, address: int, nbytes: int) -> None:
        """Lock this memory and let the device reach it."""
        self._check("cuMemHostRegister", self._slow.cuMemHostRegister_v2(address, nbytes, _REGISTER_FLAGS))

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self._check("cuMemHostUnregister", self._slow.cuMemHostUnregister(address))

    def is_idle(self, stream: int) -> bool:
        """Return whether all that the stream holds has ended.

        LostDeviceError if the context is gone: then every call fails with what ended it.
        """
        with self.current():
            status = self._quick.cuStreamQuery(stream)
        if status not in {_SUCCESS, _NOT_READY}:
            raise LostDeviceError(f"cuda:{self.device} is lost: {self._describe(status)}")
        return bool(status == _SUCCESS)

    def _check(self, call: str, status: int) -> None:
        if status != _SUCCESS:
            raise CudaError(f"{call} on cuda:{self.device} failed: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        return _describe(self._quick, status)


def device_of(address: int) -> int:
    """Return the device whose memory lies at this address. CudaError if it is no device's; OSError without a driver."""
    driver = _initialised()
    device = ctypes.c_int()
    status = driver.cuPointerGetAttribute(ctypes.byref(device), _POINTER_DEVICE, address)
    if status != _SUCCESS:
        raise CudaError(f"no GPU memory at {address:#x}: {_describe(driver, status)}")
    return device.value


@functools.cache
def _initialised() -> Any:
    driver = _load(ctypes.PyDLL)
    if (status := driver.cuInit(0)) != _SUCCESS:
        raise CudaError(f"cuInit failed: {_describe(driver, status)}")
    return driver


def _describe(driver: Any, status: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    driver.cuGetErrorString(status, ctypes.byref(text))
    return f"{(name.value or b'?').decode()} ({(text.value or b'?').decode()})"


def _load(kind: type[ctypes.CDLL]) -> Any:
    """Load the driver, with the types of those arguments that are not 32-bit integers."""
    library: Any = kind("libcuda.so.1")
    handle, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    types = {
        "cuEventRecord": [handle, handle],
        "cuStreamWaitEvent": [handle, handle, number],
        "cuEventQuery": [handle],
        "cuEventSynchronize": [handle],
        "cuEventElapsedTime": [handle, handle, handle],
        "cuEventDestroy_v2": [handle],
        "cuPointerGetAttribute": [handle, number, handle],
        "cuStreamCreate": [handle, number],
        "cuStreamDestroy_v2": [handle],
        "cuStreamQuery": [handle],
        "cuStreamSynchronize": [handle],
        "cuLaunchKernel": [handle, *[number] * 7, handle, handle, handle],
        "cuMemcpyBatchAsync": [handle, handle, handle, length, handle, handle, length, handle, handle],
        "cuMemcpyAsync": [handle, handle, length, handle],
        "cuMemHostRegister_v2": [handle, length, number],
        "cuMemHostUnregister": [handle],
    }
    for name, arguments in types.items():
        if hasattr(library, name):  # cuMemcpyBatchAsync is missing in old drivers
            getattr(library, name).argtypes = arguments
    return library


def _address(array: Indexes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@functools.cache
def _compiled_kernel(major: int, minor: int) -> bytes:
    """Return the kernel's machine code for this compute capability, by the CUDA runtime compiler."""
    compiler = _runtime_compiler()
    source = resources.files("kvtiers.gpu.cuda").joinpath("copy_kernel.cu").read_bytes()
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", f"-DMAX_ENTRIES={MAX_ENTRIES}"]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    created = compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"copy_kernel.cu", 0, None, None)
    _compiler_check(created, "nvrtcCreateProgram")
    try:
        status = compiler.nvrtcCompileProgram(program, len(options), encoded)
        _compiler_check(status, f"nvrtcCompileProgram: {_compiler_log(compiler, program)}" if status else "")
        size = ctypes.c_size_t()
        _compiler_check(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _compiler_check(compiler.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _compiler_check(status: int, what: str) -> None:
    if status:
        raise CudaError(f"the copy kernel cannot be compiled: {what} failed with status {status}")


def _compiler_log(compiler: Any, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    return " ".join(log.value.decode(errors="replace").split())


def _runtime_compiler() -> Any:
    """Load NVRTC: the one that is loaded already, torch's wheels bring, or the system has. OSError if there is none."""
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    folders = [os.path.join(path, "nvidia", "*", "lib") for path in sys.path]  # noqa: PTH118 -- patterns, not paths
    found = [file for name in names for folder in folders for file in glob.glob(os.path.join(folder, name))]  # noqa: PTH118,PTH207
    for candidate in (*names, *found, "/usr/local/cuda/lib64/libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError("the CUDA runtime compiler (libnvrtc) is not installed; it comes with torch's CUDA wheels")
