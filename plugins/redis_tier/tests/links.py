"""A link whose other end the test plays, and rows for what comes over it."""

import contextlib
import functools
import socket
import ssl
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from redis_servers import Tls

from kvtiers_redis.link import Link
from kvtiers_redis.windows import command, read_values, to_the_end, write_values

SECONDS = 60.0
POISON = 0xDB


class Rows:
    """Destinations between guard bytes, and what each is to hold when it is over."""

    def __init__(self, sizes: list[int]) -> None:
        self.memory = bytearray([POISON]) * (sum(sizes) + 16 * (len(sizes) + 1))
        self.places = []
        at = 16
        for size in sizes:
            self.places.append((at, size))
            at += size + 16

    @property
    def views(self) -> list[memoryview]:
        whole = memoryview(self.memory)
        return [whole[at : at + size] for at, size in self.places]

    def content(self, index: int) -> bytes:
        at, size = self.places[index]
        return bytes(self.memory[at : at + size])

    def guards(self) -> bytes:
        left = bytearray(self.memory)
        for at, size in reversed(self.places):
            del left[at : at + size]
        return bytes(left)


@functools.cache
def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a client and a server speak TLS with."""
    with tempfile.TemporaryDirectory() as folder:
        tls = Tls(Path(folder) / "ca")
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tls.folder / "server.crt", tls.folder / "server.key")
        return ssl.create_default_context(cafile=tls.ca), server


def secured(near: socket.socket, far: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return both ends with TLS."""
    client, server = tls_contexts()
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(server.wrap_socket, far, server_side=True)
        return client.wrap_socket(near, server_hostname="127.0.0.1"), accepted.result()


def pair(over: str, buffer: int = 0) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, over "tcp", "unix" or "tls". ``buffer``: the kernel holds so much for the first."""
    if over == "tls":
        return secured(*pair("unix"))
    if over == "unix":
        return socket.socketpair()
    near = socket.socket()
    if buffer:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@contextlib.contextmanager
def linked(*pieces: bytes, close: bool = True, seconds: float = SECONDS, over: str = "tcp", buffer: int = 0):
    """Give a link whose other end sends these pieces, one send each, and reads all that it is sent."""
    near, far = pair(over, buffer)

    def serve() -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                far.sendall(piece)
                time.sleep(0)
            if close:
                far.shutdown(socket.SHUT_WR)
            while far.recv(1 << 16):
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Link(near, seconds)
    finally:
        near.close()
        thread.join(SECONDS)
        far.close()


def value_reply(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)


def read_all(link: Link, rows: Rows, window: int = 1 << 20):
    requests = [command(b"GET", b"key%d" % i) for i in range(len(rows.places))]
    [answers] = to_the_end([read_values(link, requests, [[view] for view in rows.views], window=window)])
    return answers


def write_all(link: Link, count: int, nbytes: int, window: int):
    srcs = [[memoryview(bytes(nbytes))]] * count
    [answers] = to_the_end([write_values(link, [b"k"] * count, srcs, options=[], window=window)])
    return answers
