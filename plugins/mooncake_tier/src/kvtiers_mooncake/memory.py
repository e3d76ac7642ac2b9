"""Memory that the client library reads and writes by address: the registered region, and room beside it.

The rows are registered once, as one region, so that values move without a copy. What lies elsewhere (a value in a
bounce buffer) is reached by TCP all the same; a device reads registered memory alone, so there it is copied, through
memory of the calling thread that was registered for that. So is a value that lies in several places: the library takes
one address a value.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence

__all__ = ["RegisteredMemory", "address_of"]

_MOST_BATCH_BYTES = 16 << 20  # of a call, or one value
_Register = Callable[[int, int], int]


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the C API: ctypes itself has no address for what is read-only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Return where a contiguous view of bytes begins. Good for as long as the view is."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


class _Room(threading.local):
    """Registered memory of one thread."""

    memory: mmap.mmap | None = None


class RegisteredMemory:
    """The region, registered as long as the store is open, and each thread's room for what lies beside it.

    ``direct``: the transport also reads and writes memory that was not registered.
    """

    def __init__(
        self, region: memoryview, register: _Register, unregister: Callable[[int], int], *, direct: bool
    ) -> None:
        self._register, self._unregister, self._direct = register, unregister, direct
        self._start = address_of(region) if len(region) else 0
        self._end = self._start + len(region)
        self._rooms = _Room()
        self._lock = threading.Lock()
        self._registered: list[int] = []
        self.copied = 0
        """Values that were copied through a thread's room."""
        if len(region):
            self.add(self._start, len(region))

    @property
    def region_bytes(self) -> int:
        """The length of the region."""
        return self._end - self._start

    def add(self, start: int, nbytes: int) -> None:
        """Register so many bytes more, until the close."""
        code = self._register(start, nbytes)
        if code:
            raise OSError(
                f"the transport cannot register {nbytes} bytes: {code}; raise the limit of locked memory (ulimit -l)"
            )
        with self._lock:
            self._registered.append(start)

    def places(
        self, values: Sequence[Sequence[memoryview]], *, filled: bool
    ) -> tuple[list[int], Callable[[int], None]]:
        """Return the address of each value for one call, and what brings value ``i`` into its views after it.

        ``filled``: the values are to be sent. One view that is registered, or need not be, is its own place.
        """
        addresses = [address_of(views[0]) for views in values]
        sizes = [sum(map(len, views)) for views in values]
        beside = [
            i
            for i, at in enumerate(addresses)
            if len(values[i]) > 1 or not (self._direct or self._is_registered(at, sizes[i]))
        ]
        if not beside:
            return addresses, _keep
        at = address_of(self._room(sum(sizes[i] for i in beside)))
        with self._lock:
            self.copied += len(beside)
        for i in beside:
            addresses[i] = at
            if filled:
                _copy(values[i], at, out=True)
            at += sizes[i]

        def bring(index: int) -> None:
            if index in beside:
                _copy(values[index], addresses[index], out=False)

        return addresses, bring

    def _is_registered(self, start: int, nbytes: int) -> bool:
        return self._start <= start and start + nbytes <= self._end

    def _room(self, nbytes: int) -> memoryview:
        rooms = self._rooms
        if rooms.memory is None or len(rooms.memory) < nbytes:
            memory = mmap.mmap(-1, max(nbytes, _MOST_BATCH_BYTES))
            self.add(address_of(memoryview(memory)), len(memory))
            rooms.memory = memory
        return memoryview(rooms.memory)

    def close(self) -> None:
        """Unregister all of it."""
        with self._lock:
            registered, self._registered = self._registered, []
        for start in registered:
            self._unregister(start)


def _copy(views: Sequence[memoryview], at: int, *, out: bool) -> None:
    """Copy a value ``out`` of its views to an address, or from there into them, without holding the GIL."""
    for view in views:
        source, target = (address_of(view), at) if out else (at, address_of(view))
        ctypes.memmove(target, source, len(view))
        at += len(view)


def _keep(_: int) -> None:
    """Do nothing: the value is in its place."""
