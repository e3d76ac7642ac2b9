"""A connection: requests go out, replies are read in order, values straight into their destination.

A reply is read whole or the connection is closed: no byte of it is ever read as a part of the next one. So an absent
value, an error or a value of another size never shifts the values behind it.
"""

import select
import socket
import time
from collections.abc import Sequence
from typing import TypeAlias

from kvtiers_redis.sockets import stream_of

__all__ = ["SHORTEST_STATUS", "GarbageReply", "Link", "ReplyError", "Status"]

_BUFFER_BYTES = 4096
_HEAD_BYTES = 48  # a value's header, and as little as possible of the value, which would have to be copied
_SCRATCH_BYTES = 64 << 10
SHORTEST_STATUS = 3  # "_", or an empty status, and the end of its line
_LONGEST_LENGTH = 10  # digits


class ReplyError(Exception):
    """The server's error reply: ``OOM ...``, ``MOVED ...``, ``ERR ...``."""

    @property
    def code(self) -> str:
        """Its first word, by which clients distinguish errors."""
        return str(self).partition(" ")[0]


Status: TypeAlias = str | int | ReplyError | None
"""A reply that is no value: a status, a number, an error, or nothing."""


class GarbageReply(ConnectionError):  # noqa: N818 -- named after what came
    """The received bytes are no reply to the request; the connection cannot be used any further."""


class Link:
    """A logged-in connection. Used by one thread at a time; after any exception it has to be closed.

    ``seconds``: the longest time of an exchange, from ``begin`` to its last reply.
    """

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self._stream = stream_of(connected, seconds)
        self._seconds = seconds
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of what has been received and not been taken yet
        self._expect(0)

    def is_idle(self, seconds: float = 0.0) -> bool:
        """Return whether the connection is there and stays silent so long; one that was closed is not idle."""
        return self._start == self._end and not self._poll.poll(seconds * 1e3)

    def begin(self, seconds: float | None = None) -> None:
        """Start an exchange, which may take ``seconds``: None for all of its time, less for one that goes on."""
        self._stream.until = time.monotonic() + (self._seconds if seconds is None else seconds)

    @property
    def seconds_left(self) -> float:
        """Return the seconds left of an exchange's time."""
        return self._stream.until - time.monotonic()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts, in order."""
        self._stream.send(parts)

    def read_values(self, dsts: Sequence[Sequence[memoryview]]) -> list[int | ReplyError]:
        """Read the replies to as many reads, each into the start of its views; return the values' lengths.

        0: there is none, or it is longer.
        """
        return [self._read_value(views) for views in dsts]

    def _read_value(self, views: Sequence[memoryview]) -> int | ReplyError:
        room = sum(map(len, views))
        if room != self._length:
            self._expect(room)
        head = self._head
        if not self._buffer.startswith(head, self._start, self._end):
            return self._read_other(views, room)
        if self._start + len(head) == self._end and len(views) == 1:  # and nothing of the value, as is so for most
            self._start, self._end = 0, self._stream.fill(views[0], self._behind, 2)
            self._take_break()
        else:
            self._start += len(head)
            self._fill(views)
        return room

    def _expect(self, length: int) -> None:
        """Note what comes before a value of this length, and where to put what comes behind it."""
        self._length, self._head = length, b"$%d\r\n" % length
        self._behind = self._view[: 2 + len(self._head)]  # the next one's header, most likely

    def _read_other(self, views: Sequence[memoryview], room: int) -> int | ReplyError:
        """Read the reply to a read whose header is missing, or is not the one of a value of that length."""
        length = self._value_length()
        if isinstance(length, ReplyError) or length is None:
            return length or 0
        if length > room:
            self._skip(length)
            return 0
        left = length
        parts = list[memoryview]()
        for view in views:
            parts.append(view[:left])
            left -= len(parts[-1])
        self._fill(parts)
        return length

    def _value_length(self) -> int | ReplyError | None:
        """Read a value's header, or what is there in place of a value; None: there is none."""
        line = self._line(_HEAD_BYTES)
        if line[:1] == b"-":
            return _error(line)
        if line == b"$-1":
            return None
        if line[:1] != b"$":
            raise _garbage(line, "a value")
        return _length(line)

    def read_statuses(self, least: int, most: int, shortest: int = SHORTEST_STATUS) -> list[Status]:
        """Read replies that are no values: the next one, and equal ones behind it that have arrived.

        ``least``: this many have to arrive before the caller can act; no more than ``most`` are read.
        ``shortest``: no reply is shorter, its line break included.
        """
        line = self._line(_BUFFER_BYTES, least * shortest if least > 1 else 1)
        text = line + b"\r\n"
        alike = min(most - 1, (self._end - self._start) // len(text))
        while not self._buffer.startswith(text * alike, self._start, self._end):
            alike //= 2
        self._take(alike * len(text))
        return [_status(line)] * (1 + alike)

    def read_status(self) -> Status:
        """Read a reply that is no value."""
        return _status(self._line(_BUFFER_BYTES))

    def _line(self, ahead: int, least: int = 1) -> bytes:
        """Read the next line, without its end. At most ``ahead`` bytes are received at a time; ``least`` will come."""
        least -= self._end - self._start
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end == _BUFFER_BYTES:
                if not self._start:
                    raise _garbage(bytes(self._buffer[:64]), "a line")
                rest = self._buffer[self._start : self._end]
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            self._end += self._stream.receive(self._view[self._end : self._end + ahead], least)
            least = 1
        line = bytes(self._buffer[self._start : at])
        self._take(at + 2 - self._start)
        return line

    def _take(self, count: int) -> None:
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Fill the views, then take the line break behind them."""
        left = sum(map(len, views))
        for view in views:
            left -= len(view)
            early = self._view[self._start : min(self._end, self._start + len(view))]
            view[: len(early)] = early
            self._start += len(early)
            if len(early) < len(view):  # nothing is left in the buffer, so that what follows goes to its front
                spare, least = (self._view[:0], 0) if left else (self._behind, 2)
                self._start, self._end = 0, self._stream.fill(view[len(early) :], spare, least)
        self._take_break()

    def _skip(self, length: int) -> None:
        """Skip a value of another length."""
        early = min(length, self._end - self._start)
        self._start += early
        left = length - early
        scratch = memoryview(bytearray(min(left, _SCRATCH_BYTES)))
        while left:
            left -= self._stream.receive(scratch[:left])
        self._take_break()

    def _take_break(self) -> None:
        while self._end - self._start < 2:
            if self._start == self._end:
                self._start = self._end = 0
            self._end += self._stream.receive(self._view[self._end : self._end + _HEAD_BYTES])
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise _garbage(bytes(self._buffer[self._start : self._start + 2]), "the end of a value")
        self._start += 2


def _status(line: bytes) -> Status:
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest.decode("ascii", "replace")
    if kind == b":" and rest.removeprefix(b"-").isdigit() and len(rest) <= 2 * _LONGEST_LENGTH:
        return int(rest)
    if kind == b"-":
        return _error(line)
    if line in {b"$-1", b"_"}:
        return None
    raise _garbage(line, "a status")


def _length(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > _LONGEST_LENGTH:
        raise _garbage(line, "a value's length")
    return int(digits)


def _error(line: bytes) -> ReplyError:
    return ReplyError(line[1:].decode("utf-8", "replace"))


def _garbage(line: bytes, expected: str) -> GarbageReply:
    return GarbageReply(f"expected {expected}, got {line[:64]!r}")
