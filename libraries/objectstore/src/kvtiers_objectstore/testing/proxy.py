"""A proxy before an object store that does, request by request, what a test wants: refuse, delay, cut off, drip.

It is also one that clients are told of: then it opens the tunnels that they ask for by CONNECT.
"""

import contextlib
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

__all__ = ["Fault", "Proxy", "Request", "refusal"]

_PIECE = 1 << 16
_LINK_PIECE = 1 << 18


class Request(NamedTuple):
    """One request, as it arrived. ``number``: how many there were before it."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    ``answer``: sent instead of asking the server. ``first_byte``: seconds until the answer begins, or with ``early``
    from the answer until the request's body is read. ``cut``: the connection ends after so many bytes of the answer's
    body, with ``reset`` rudely. ``drip``: seconds between pieces of 1 KiB of the body.
    """

    answer: bytes = b""
    early: bool = False
    first_byte: float = 0.0
    cut: int | None = None
    reset: bool = False
    drip: float = 0.0


def refusal(status: int, code: str, headers: str = "", message: str = "no") -> bytes:
    """Return an answer as object stores refuse."""
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return f"HTTP/1.1 {status} No\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode()


NOT_THERE = refusal(404, "NoSuchKey")
Script = Callable[[Request], Fault | None]


@dataclass
class Proxy:
    """Listens on a free port. ``upstream``: the server's port; 0: there is none, and what no fault answers is a 404.

    ``posted``: the bodies of POST requests.
    """

    upstream: int = 0
    script: Script = lambda _request: None
    tls: ssl.SSLContext | None = None
    bytes_per_second: float = 0.0
    log: list[Request] = field(default_factory=list)
    posted: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._lock = threading.Lock()
        self._link = 0.0
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self.hang_up()

    @property
    def endpoint(self) -> str:
        """Return its URL."""
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"

    def hang_up(self) -> None:
        """End all connections."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def methods(self) -> list[str]:
        """Return the methods of all requests, in order."""
        return [request.method for request in self.log]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = None
        with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as stack:
            client = stack.enter_context(client)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                client = stack.enter_context(self.tls.wrap_socket(client, server_side=True))
            self._keep(client, stack)
            if self.upstream:
                server = stack.enter_context(socket.create_connection(("127.0.0.1", self.upstream)))
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._keep(server, stack)
            rest = b""
            while True:
                rest = self._one(client, server, rest)

    def _keep(self, connection: socket.socket, stack: contextlib.ExitStack) -> None:
        def forget() -> None:
            with self._lock:
                self._open.discard(connection)

        with self._lock:
            self._open.add(connection)
        stack.callback(forget)

    def _one(self, client: socket.socket, server: socket.socket | None, rest: bytes) -> bytes:
        """Serve one request; return what was read behind it."""
        head, rest = _head(client, rest)
        method, path, _ = head.decode().partition("\r\n")[0].split(" ")
        headers = _headers(head)
        with self._lock:
            request = Request(len(self.log), method, path, headers)
            self.log.append(request)
        fault = self.script(request) or Fault()
        if method == "CONNECT" and not fault.answer:
            self._tunnel(client, path)
        length = int(headers.get("content-length", 0))
        if headers.get("expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.early:
            client.sendall(fault.answer)
            time.sleep(fault.first_byte)
        body, rest = _exactly(client, rest, length)
        if method == "POST":
            self.posted.append(body)
        begin = time.monotonic() + fault.first_byte
        if fault.early:
            return rest
        answer = fault.answer or NOT_THERE
        if server is not None and not fault.answer:
            server.sendall(_without_expect(head) + body)
            if self.bytes_per_second and method == "GET" and "?" not in path:
                self._pass_on(client, server, begin)
                return rest
            answer = _answer_of(server, has_body=method != "HEAD")
        time.sleep(max(0.0, begin - time.monotonic()))
        self._send(client, answer, fault)
        return rest

    def _tunnel(self, client: socket.socket, where: str) -> None:
        """Pass bytes both ways until one side ends; raises EOFError then."""
        host, _, port = where.rpartition(":")
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_connection((host.strip("[]"), int(port))))
            self._keep(server, stack)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()
        raise EOFError

    def _pass_on(self, client: socket.socket, server: socket.socket, begin: float) -> None:
        """Send an answer at the rate of the link while it comes, so that this machine's speed is not in it twice."""
        head, piece = _head(server, b"")
        left = int(_headers(head)["content-length"])
        time.sleep(max(0.0, begin - time.monotonic()))
        client.sendall(head)
        while left:
            piece = piece or _some(server, _LINK_PIECE)
            self._wait_for_the_link(len(piece))
            client.sendall(piece)
            left -= len(piece)
            piece = b""

    def _send(self, client: socket.socket, answer: bytes, fault: Fault) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n")
        view = memoryview(body)[: fault.cut]
        step = 1024 if fault.drip else _PIECE if self.bytes_per_second else max(1, len(view))
        for start in range(0, len(view), step):
            self._wait_for_the_link(len(view[start : start + step]))
            client.sendall(view[start : start + step])
            time.sleep(fault.drip)
        if fault.reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault.reset or (fault.cut is not None and fault.cut < len(body)):
            raise EOFError

    def _wait_for_the_link(self, nbytes: int) -> None:
        """Let through as many bytes a second as the link has, all connections together."""
        if self.bytes_per_second:
            with self._lock:
                self._link = max(self._link, time.monotonic()) + nbytes / self.bytes_per_second
                pause = self._link - time.monotonic()
            time.sleep(max(0.0, pause))


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _answer_of(server: socket.socket, *, has_body: bool) -> bytes:
    """Return a server's whole answer."""
    head, rest = _head(server, b"")
    headers = _headers(head)
    if headers.get("transfer-encoding") == "chunked":
        while not rest.endswith(b"0\r\n\r\n"):
            rest += _some(server)
        return head + rest
    body, _ = _exactly(server, rest, int(headers.get("content-length", 0)) if has_body else 0)
    return head + body


def _some(connection: socket.socket, most: int = _PIECE) -> bytes:
    piece = connection.recv(most)
    if not piece:
        raise EOFError
    return piece


def _head(connection: socket.socket, rest: bytes) -> tuple[bytes, bytes]:
    while b"\r\n\r\n" not in rest:
        rest += _some(connection)
    head, _, rest = rest.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return _head(connection, rest)
    return head + b"\r\n\r\n", rest


def _headers(head: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in head.decode().split("\r\n")[1:] if line]
    return {name.lower(): value.strip() for name, _, value in lines}


def _exactly(connection: socket.socket, rest: bytes, length: int) -> tuple[bytes, bytes]:
    body = bytearray(rest)
    while len(body) < length:
        body += _some(connection)
    return bytes(body[:length]), bytes(body[length:])


def _without_expect(head: bytes) -> bytes:
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"expect:"))


def main() -> None:
    """Stand before a server until killed; arguments: its port, seconds to the first byte, bytes a second."""
    port, first_byte, rate = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    with Proxy(port, lambda _request: Fault(first_byte=first_byte), bytes_per_second=rate) as proxy:
        sys.stdout.write(f"{proxy.endpoint}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
