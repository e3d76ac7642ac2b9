"""The sockets of KV events: one that publishes batches, and one at which subscribers ask for them again.

The protocol is vLLM's (``ZmqEventPublisher`` in ``vllm/distributed/kv_events.py``)::

    published   topic, sequence number (8 bytes, big endian), batch
    asked       "", the first sequence number that is wanted            (of a REQ or DEALER socket)
    answered    "", topic, sequence number, batch ...  and at last  "", "", -1, ""

Nothing of a socket stays behind after any end: ports and abstract sockets are the kernel's. libzmq drops batches for a
subscriber that is ``hwm`` of them behind, which then misses numbers; it never blocks.
"""

import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from kvtiers.api import StartError
from kvtiers.config import EventsConfig
from kvtiers.kv_events.wire import END_OF_REPLAY, sequence_bytes

__all__ = ["EventSockets", "endpoint_of_rank"]

_REPLAYED_AT_ONCE = 64  # messages: as many as batches are published before it is their turn again
_NO_LINGER = 0


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank, as vLLM makes it: its port is ``rank`` higher."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if int(port) else endpoint


class EventSockets:
    """The sockets, opened by one thread and used by another, which also closes them.

    StartError, in one line, where an endpoint cannot be had. ``wake``: any thread.
    """

    def __init__(self, config: EventsConfig, rank: int) -> None:
        self._topic = config.topic.encode()
        self._steps, self._bytes = config.buffer_steps, config.buffer_bytes
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered = 0
        self._context = zmq.Context()
        self._waker, self._woken = socket.socketpair()
        self._replay: zmq.Socket[bytes] | None = None
        self._answer: Iterator[tuple[bytes, ...]] = iter(())
        self._is_answering = False
        self.replayed = 0
        """Batches that were sent again."""
        try:
            self._waker.setblocking(False)
            self._woken.setblocking(False)
            self._publish, self.endpoint = self._open(zmq.PUB, config.endpoint, config.bind, rank, config.hwm)
            self.replay_endpoint = ""
            if config.replay_endpoint is not None:
                most = self._steps + 2  # a whole answer: ROUTER drops what is beyond
                self._replay, self.replay_endpoint = self._open(zmq.ROUTER, config.replay_endpoint, True, rank, most)
        except BaseException:
            self.close(0.0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        if self._replay is not None:
            self._poller.register(self._replay, zmq.POLLIN)

    def wake(self) -> None:
        """End the ``wait`` of the other thread, or the next one. Never blocks."""
        with contextlib.suppress(OSError):  # full: it is being woken; or closed
            self._waker.send(b"\0")

    def wait(self, seconds: float) -> None:
        """Wait so long at most, unless a replay goes on; answer requests for one that have come."""
        self._poller.poll(0 if self._is_answering else int(seconds * 1e3))
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(1 << 10):
                pass
        self.serve_replays()

    def publish(self, number: int, batch: bytes) -> None:
        """Send a batch, and keep it for replays."""
        self._publish.send_multipart((self._topic, sequence_bytes(number), batch))
        if self._replay is None or not self._steps:
            return
        self._buffer.append((number, batch))
        self._buffered += len(batch)
        while len(self._buffer) > self._steps or self._buffered > self._bytes:
            self._buffered -= len(self._buffer.popleft()[1])

    def serve_replays(self) -> None:
        """Go on with the answers to requests for a replay, one after the other; a bounded part of them.

        Else those who ask without an end would keep the thread from publishing.
        """
        for _ in range(_REPLAYED_AT_ONCE if self._replay is not None else 0):
            assert self._replay is not None
            if message := next(self._answer, None):
                self._replay.send_multipart(message)
                continue
            self._is_answering = False
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[2]) <= 8:  # anything else is no subscriber
                self._answer = self._messages(frames[0], [*self._buffer], int.from_bytes(frames[2], "big"))
                self._is_answering = True

    def close(self, linger: float) -> None:
        """Close all; what libzmq still has to send gets ``linger`` seconds. The publishing thread, if there is one."""
        self._context.destroy(linger=int(linger * 1e3))
        self._waker.close()
        self._woken.close()

    # -- inside

    def _messages(
        self, client: bytes, buffered: Sequence[tuple[int, bytes]], first: int
    ) -> Iterator[tuple[bytes, ...]]:
        """Yield the messages of an answer: the batches that were there when it was asked for, and its end."""
        for number, batch in buffered:
            if number >= first:
                self.replayed += 1
                yield client, b"", self._topic, sequence_bytes(number), batch
        yield client, b"", b"", END_OF_REPLAY, b""

    def _open(
        self, kind: int, endpoint: str, bind: bool | None, rank: int, hwm: int
    ) -> "tuple[zmq.Socket[bytes], str]":
        endpoint = endpoint_of_rank(endpoint, rank)
        opened = self._context.socket(kind)
        opened.linger = _NO_LINGER
        opened.set_hwm(hwm)
        if "[" in endpoint or "::" in endpoint:
            opened.ipv6 = True
        try:
            if bind is None:
                bind = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
            if not bind:
                opened.connect(endpoint)
                return opened, endpoint
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(f"{endpoint}: {_reason(error)}") from None
        bound = opened.last_endpoint
        assert isinstance(bound, bytes)
        return opened, bound.rstrip(b"\0").decode() if endpoint.endswith(":0") else endpoint


def _reason(error: zmq.ZMQError) -> str:
    if error.errno in {errno.EADDRINUSE, zmq.EADDRINUSE}:
        return "it is in use; stop what has it, or choose another, one for each engine and one for vLLM's own events"
    return os.strerror(error.errno) if error.errno and error.errno < 1 << 16 else str(error)
