"""The least that answers like S3: objects in memory, no signatures, no XML; a ceiling for benchmarks.

``python trivial.py PORT`` serves until it is killed. It keeps the last GiB that was written.
"""

import contextlib
import ctypes
import re
import socket
import sys
import threading
from collections import OrderedDict

__all__ = ["serve"]

_MOST_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ABSENT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 36\r\n\r\n<Error><Code>NoSuchKey</Code></Error>"
_HEAD = b'ETag: "x"\r\nLast-Modified: Sun, 01 Nov 2026 00:00:00 GMT\r\nContent-Length: %d\r\n'
_FOUND = b"HTTP/1.1 200 OK\r\n" + _HEAD + b"\r\n"
_PART = b"HTTP/1.1 206 Partial Content\r\n" + _HEAD + b"Content-Range: bytes %d-%d/%d\r\n\r\n"
_GONE = b"HTTP/1.1 204 No Content\r\n\r\n"
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)


class _Objects:
    """The objects; the oldest go first."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, memoryview] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, path: bytes) -> memoryview | None:
        return self._held.get(path)

    def delete(self, path: bytes) -> None:
        with self._lock:
            self._nbytes -= len(self._held.pop(path, b""))

    def put(self, path: bytes, body: memoryview) -> None:
        with self._lock:
            self._nbytes += len(body) - len(self._held.pop(path, b""))
            self._held[path] = body
            while self._nbytes > _MOST_BYTES:
                self._nbytes -= len(self._held.popitem(last=False)[1])


_objects = _Objects()


def serve(connection: socket.socket) -> None:
    """Answer one connection's requests."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, EOFError), connection:
        rest = b""
        while True:
            while b"\r\n\r\n" not in rest:
                rest += _some(connection)
            head, _, rest = rest.partition(b"\r\n\r\n")
            method, path, _ = head.partition(b"\r\n")[0].split(b" ")
            if method == b"PUT":
                rest = _put(connection, head, path, rest)
            elif method == b"DELETE":
                _objects.delete(path.partition(b"?")[0])
                connection.sendall(_GONE)
            else:
                _get(connection, head, path.partition(b"?")[0], with_body=method == b"GET")


def _get(connection: socket.socket, head: bytes, path: bytes, *, with_body: bool) -> None:
    body = _objects.get(path)
    if body is None:
        connection.sendall(_ABSENT if with_body else _ABSENT.partition(b"<")[0])
        return
    part, answer = body, _FOUND % len(body)
    if wanted := _RANGE.search(head):
        start, end = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        part = body[start : end + 1]
        answer = _PART % (len(part), start, end, len(body))
    connection.sendall(answer)
    if with_body:
        connection.sendall(part)


def _put(connection: socket.socket, head: bytes, path: bytes, rest: bytes) -> bytes:
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"expect" in lines:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray(int(lines[b"content-length"]))
    view, at = memoryview(body), min(len(rest), len(body))
    view[:at] = rest[:at]
    while at < len(body):
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    _objects.put(path.partition(b"?")[0], view)
    connection.sendall(_FOUND % 0)
    return rest[len(body) :]


def _some(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise EOFError
    return piece


def _keep_memory() -> None:
    """Use the memory of what was dropped again: else one write costs many page faults, and the next none."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        for setting, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30)):
            ctypes.CDLL(None).mallopt(setting, value)


def main() -> None:
    """Listen."""
    _keep_memory()
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=256) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main()
