"""A network with a round trip and a link speed, in a process of its own, and raw streams to measure it with.

Each direction is one link, which all connections share in turns. What is read from a socket takes its bytes' time on
the link, behind all that was read before, and goes out so much later; it waits in a pipe, whose pages the kernel moves
by reference, so that the proxy copies no byte. While the link is taken, bytes stay with their senders, as they do
before a network card. A wake-up that comes late lengthens the way, but costs no rate: the link makes up for it, within
bounds.
"""

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from collections import deque

from baselines.redis_lanes import Lane, connect

_PIECE = 256 << 10  # 0.2 ms at 10 Gbit/s
_TICK = 0.0001  # no shorter sleep: each wake-up takes of the processors that servers and clients share
_PIPE_BYTES = 1 << 20  # room for 256 references to memory, of 4 to 32 KiB each
_LATE_SECONDS = 0.001
_NEVER = float("inf")


class _Link:
    """One direction of the network. ``rate``: bytes a second, infinite for no limit."""

    def __init__(self, delay: float, rate: float) -> None:
        self._delay = delay
        self._rate = rate
        self.free_at = 0.0

    def take(self, nbytes: int, now: float) -> float:
        """Put so many bytes on the link; return when they have come to its other end."""
        self.free_at = max(self.free_at, now - _LATE_SECONDS) + nbytes / self._rate
        return max(self.free_at, now) + self._delay


class _Flow:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, target: socket.socket, link: _Link) -> None:
        self.source, self.target = source, target
        self._link = link
        self._pieces: deque[tuple[float, int]] = deque()  # when it is due, and where in the stream it ends
        self._came = self._due = self._gone = 0  # bytes, since the beginning
        self._going, self._has_room = True, True
        self.is_blocked = False
        """Whether the target has taken no more."""
        self._out, self._into = os.pipe()
        fcntl.fcntl(self._into, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @property
    def has_ended(self) -> bool:
        """Whether all that has come is gone, and no more will come."""
        return not self._going and not self._pieces and self._gone == self._due

    @property
    def reads_at(self) -> float:
        """When more can be put on the link."""
        return self._link.free_at if self._going and self._has_room else _NEVER

    @property
    def writes_at(self) -> float:
        """When there is something to hand over."""
        return self._pieces[0][0] if self._pieces and not self.is_blocked else _NEVER

    def read(self, now: float) -> None:
        """Put the next piece on the link."""
        try:
            count = os.splice(self.source.fileno(), self._into, _PIECE, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            self._has_room = self._came == self._gone
            return
        except OSError:
            count = 0
        self._going = count > 0
        self._came += count
        self._pieces.append((self._link.take(count, now), self._came))

    def write(self, now: float) -> None:
        """Hand over what is due."""
        while self._pieces and self._pieces[0][0] <= now:
            self._due = self._pieces.popleft()[1]
        self.is_blocked = False
        while self._gone < self._due:
            try:
                count = os.splice(self._out, self.target.fileno(), self._due - self._gone, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                self.is_blocked = True
                return
            except OSError:
                self._going, self._gone = False, self._due
                return
            self._gone += count
            self._has_room = True


def slow_network(listener: socket.socket, port: int, delay: float, rate: float) -> None:
    """Forward every connection to the port, ``delay`` seconds each way, ``rate`` bytes a second in each direction."""
    forth, back = _Link(delay, rate), _Link(delay, rate)
    flows: deque[_Flow] = deque()
    while True:
        now = time.monotonic()
        sources = {flow.source: flow for flow in flows if flow.reads_at <= now}
        targets = {flow.target: flow for flow in flows if flow.is_blocked}
        waits = [at - now for flow in flows for at in (flow.reads_at, flow.writes_at) if now < at < _NEVER]
        if any(flow.writes_at <= now for flow in flows):
            timeout: float | None = 0.0
        else:
            timeout = max(_TICK, min(waits)) if waits else None
        readable, writable, _ = select.select([listener, *sources], [*targets], [], timeout)
        now = time.monotonic()
        for flow in flows:
            if flow.writes_at <= now or flow.target in writable:
                flow.write(now)
        for source in readable:
            if source is listener:
                flows += _connection(listener, port, forth, back)
            elif sources[source].reads_at <= now:
                sources[source].read(now)
        for flow in [flow for flow in flows if flow.has_ended]:
            flows.remove(flow)
            for one in (flow.source, flow.target):
                with contextlib.suppress(OSError):  # the other direction may have done so
                    one.shutdown(socket.SHUT_RDWR)
        flows.rotate()


def _connection(listener: socket.socket, port: int, forth: _Link, back: _Link) -> list[_Flow]:
    near, _ = listener.accept()
    far = connect(port)
    for one in (near, far):
        one.setblocking(False)
    return [_Flow(near, far, forth), _Flow(far, near, back)]


def raw_server(listener: socket.socket) -> None:
    """Take as many bytes as the first 8 bytes of a request say (negative: send them), then answer with one byte."""

    def serve(connected: socket.socket) -> None:
        buffer = memoryview(bytearray(_PIECE))
        while head := connected.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big", signed=True)
            while left < 0:
                connected.sendall(buffer[: min(_PIECE, -left)])
                left += min(_PIECE, -left)
            while left > 0:
                left -= connected.recv_into(buffer, min(_PIECE, left))
            if int.from_bytes(head, "big", signed=True) > 0:
                connected.sendall(b".")

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def raw_stream(port: int, rows: memoryview, connections: int) -> Lane:
    """Move the rows through a socket to or from ``raw_server``, each connection its share."""
    links = [connect(port) for _ in range(connections)]
    share = len(rows) // connections

    def move_one(link: socket.socket, part: memoryview, way: str) -> None:
        link.sendall((len(part) if way == "write" else -len(part)).to_bytes(8, "big", signed=True))
        if way == "write":
            link.sendall(part)
            assert link.recv(1) == b"."
        else:
            assert link.recv_into(part, len(part), socket.MSG_WAITALL) == len(part)

    def move(way: str) -> None:
        threads = [
            threading.Thread(target=move_one, args=(link, rows[i * share : (i + 1) * share], way))
            for i, link in enumerate(links)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return move
