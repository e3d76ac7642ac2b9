"""The limits of this machine that a tier is put beside: memory copy, a disk's files, a socket, the network's link."""

import contextlib
import mmap
import os
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Limits", "measure_limits"]

_BYTES = 64 << 20
_PIECE = 4 << 20
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second. None: not measured, since no tier stands on it, or this machine does not say.

    ``memory_copy``: one thread, from memory to memory. ``disk_write``, ``disk_read``: of one file past the page cache,
    in the folder of the tier. ``loopback``: one TCP connection inside this machine. ``link``: of the fastest network
    interface, as the kernel states it.
    """

    memory_copy: float
    loopback: float | None
    link: float | None
    disk_write: float | None = None
    disk_read: float | None = None


def measure_limits(folder: Path | None) -> Limits:
    """Measure this machine, in about a second. ``folder``: where a tier keeps its files."""
    write, read = _disk(folder) if folder else (None, None)
    return Limits(_memory_copy(), _loopback(), _link(), write, read)


def _memory_copy() -> float:
    source, target = (np.ones(_BYTES, np.uint8) for _ in range(2))
    return _BYTES / min(_timed(lambda: np.copyto(target, source)) for _ in range(_ROUNDS))


def _timed(action: object) -> float:
    begin = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - begin


def _disk(folder: Path) -> tuple[float | None, float | None]:
    """Write and read a file past the page cache, where the file system can; else None."""
    buffer = mmap.mmap(-1, _PIECE)  # aligned to pages, as O_DIRECT needs it
    buffer.write(os.urandom(_PIECE))
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=".kvtiers-bench-") as file:
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            begin = time.perf_counter()
            for at in range(0, _BYTES, _PIECE):
                os.pwritev(fd, [buffer], at)
            os.fsync(fd)
            write = _BYTES / (time.perf_counter() - begin)
            read = _BYTES / _timed(lambda: [os.preadv(fd, [buffer], at) for at in range(0, _BYTES, _PIECE)])
        finally:
            os.close(fd)
        return write, read
    return None, None


def _loopback() -> float | None:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(),))
        sender.start()
        try:
            server.settimeout(10.0)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10.0)
                buffer = bytearray(1 << 20)
                got, begin = 0, time.perf_counter()
                while more := connection.recv_into(buffer):
                    got += more
                return got / (time.perf_counter() - begin)
        finally:
            sender.join(10.0)
    return None


def _send(address: tuple[str, int]) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, 10.0) as connection:
        piece = bytes(1 << 20)
        for _ in range(_BYTES >> 20):
            connection.sendall(piece)


def _link() -> float | None:
    """Return what the fastest interface that is up states, in bytes per second; virtual ones often state nothing."""
    speeds = []
    for file in Path("/sys/class/net").glob("*/speed"):
        with contextlib.suppress(OSError, ValueError):
            if (megabits := int(file.read_text())) > 0:
                speeds.append(megabits * 1e6 / 8)
    return max(speeds, default=None)
