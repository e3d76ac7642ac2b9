"""Byte streams between a connected socket and the caller's memory: without TLS nothing is copied on the way."""

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

__all__ = ["ByteStream", "PlainStream", "TlsStream", "stream_of"]

_Buffers = Sequence[bytes | memoryview]
_WORTH_WAITING = 16 << 10  # fewer bytes come at once
_MOST_WAITED = 512 << 10  # more would leave the processor's cache before they are taken
_SMALL_PART = 4 << 10
_MOST_BUFFERS = 1024  # of one sendmsg (IOV_MAX of Linux and macOS)
_CLOSED = "the server closed the connection"


class ByteStream(Protocol):
    """The interface of a link's socket. Every method raises OSError on failure, TimeoutError when it takes too long.

    ``until``: by the monotonic clock, when whatever is still to be received counts as too late. A server that sends a
    byte now and then keeps every single wait short, and is given up all the same.
    """

    until: float

    def send(self, parts: _Buffers) -> None:
        """Send all parts, in order."""

    def receive(self, into: memoryview, least: int = 1) -> int:
        """Receive available bytes into the front of ``into``; return how many, at least one.

        ``least``: so many are to come; it need not wake up for fewer.
        """

    def fill(self, whole: memoryview, spare: memoryview, least: int) -> int:
        """Fill ``whole``, then at least ``least`` bytes of ``spare``; return how many came into ``spare``."""


def stream_of(connected: socket.socket, seconds: float) -> ByteStream:
    """Wrap a connected socket; no single wait on it is longer than this."""
    if isinstance(connected, ssl.SSLSocket):
        return TlsStream(connected, seconds)
    return PlainStream(connected, seconds)


class PlainStream:
    """A TCP or UNIX socket. One call moves a whole value: each return from the kernel waits for the GIL."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self._socket = connected
        self.until = 0.0
        # Not settimeout: Python would poll before each call and make MSG_WAITALL end at the first bytes.
        connected.settimeout(None)
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def send(self, parts: _Buffers) -> None:
        """Send all parts with one call, or with as many as it takes."""
        left = sum(map(len, parts))
        rest = list(parts)
        while True:
            try:
                sent = self._socket.sendmsg(rest[:_MOST_BUFFERS])
            except BlockingIOError:
                raise TimeoutError("the server takes no more bytes") from None
            left -= sent
            if not left:
                return
            if time.monotonic() > self.until:
                raise TimeoutError("the server takes the bytes too slowly")
            done = 0
            while sent >= len(rest[done]):
                sent -= len(rest[done])
                done += 1
            rest = [memoryview(rest[done])[sent:], *rest[done + 1 :]]

    def receive(self, into: memoryview, least: int = 1) -> int:
        """Wait for the next bytes; fewer than ``least`` do not wake the thread."""
        if least > 1:
            self._wait(least)
        try:
            count = self._socket.recv_into(into)
        except BlockingIOError:
            raise TimeoutError("no reply") from None
        return _received(count, self.until)

    def _wait(self, least: int) -> None:
        # With poll, and the mark is gone before the next call: one that receives would not count what it has taken.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        came = self._poll.poll(max(0.0, self.until - time.monotonic()) * 1e3)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not came:
            raise TimeoutError("no reply, or too short a one")

    def fill(self, whole: memoryview, spare: memoryview, least: int) -> int:
        """First receive what has arrived, with bytes behind the value if there are any; then wait for the rest at once.

        A wait ends when much of the rest is there. It would end with each packet that comes otherwise, and reading
        values of 1 MiB took nearly twice as many turns of the processor, and 7 % more of its time.
        """
        length = len(whole)
        done, buffers, flags = 0, [whole, spare], 0
        while True:
            try:
                count, _, _, _ = self._socket.recvmsg_into(buffers, 0, flags)
            except BlockingIOError:
                raise TimeoutError("the reply stopped in the middle") from None
            done += _received(count, self.until)
            if done >= length + least:
                return done - length
            if length + least - done > _WORTH_WAITING:
                self._wait(min(length + least - done, _MOST_WAITED))
            flags = socket.MSG_WAITALL
            end = spare[max(0, done - length) : least]
            buffers = [whole[done:], end] if done < length else [end]


class TlsStream:
    """A TLS socket: OpenSSL decrypts into the caller's memory, a record of at most 16 KiB a call."""

    def __init__(self, connected: ssl.SSLSocket, seconds: float) -> None:
        self._socket = connected
        self.until = 0.0
        connected.settimeout(seconds)

    def send(self, parts: _Buffers) -> None:
        """Send part by part, but what is small together: each call makes a record, which is taken for itself."""
        for small, group in groupby(parts, lambda part: len(part) <= _SMALL_PART):
            for part in [b"".join(group)] if small else group:
                self._socket.sendall(part)
                if time.monotonic() > self.until:
                    raise TimeoutError("the server takes the bytes too slowly")

    def receive(self, into: memoryview, least: int = 1) -> int:  # noqa: ARG002 -- a record is all that can be waited for
        """Wait for the next record."""
        count = self._socket.recv_into(into)
        return _received(count, self.until)

    def fill(self, whole: memoryview, spare: memoryview, least: int) -> int:
        """Fill both, record by record."""
        receive, length, done = self._socket.recv_into, len(whole), 0
        while done < length:
            count = receive(whole[done:])
            done += _received(count, self.until)
        done = 0
        while done < least:
            done += self.receive(spare[done:])
        return done


def _received(count: int, until: float) -> int:
    if not count:
        raise ConnectionResetError(_CLOSED)
    if time.monotonic() > until:
        raise TimeoutError("the replies take too long")
    return count
