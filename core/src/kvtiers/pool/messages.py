"""The messages between an engine and the keeper of a pool, over a Unix socket that keeps them apart (SOCK_SEQPACKET).

::

    engine                                           keeper
    HELLO    what its rows hold                  ->  admits an engine to each part
                                                 <-  WAIT     others have all parts; as often as that changes
                                                 <-  REFUSED  why, in one line. The keeper hangs up
                                                 <-  WELCOME  with the descriptors of rows, index and plane
    WATCH    a rank, with its pidfd              ->  takes the memory back only after this process has ended, too
    UNWATCH  nothing of that rank touches a row
    PUBLISH  rows, editions and keys          ->  hashes the rows and writes their entries
    RENAME   the prefix of all later chunks      ->  forgets all others
    GOODBYE  it has unmapped the memory          ->  its process is not waited for
    STATUS                                       ->
                                                 <-  FIGURES
    CLEAR                                        ->  forgets all chunks, or says REFUSED while an engine has them
                                                 <-  CLEARED

A HELLO may bring back the descriptors of the memory, for a keeper that has none: another one was killed or replaced.
Nothing is acknowledged: what was published stands in the index, and an engine whose keeper was another one for a while
publishes again what does not. Each message is MessagePack, an array of a tag and fields.
"""

import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from kvtiers._process import receive_fds

__all__ = [
    "POOL_FORMAT",
    "Clear",
    "Cleared",
    "Figures",
    "Goodbye",
    "Hello",
    "Publish",
    "Refused",
    "Rename",
    "Report",
    "Request",
    "Status",
    "Unwatch",
    "Wait",
    "Watch",
    "Welcome",
    "decode_report",
    "decode_request",
    "encode",
    "receive",
    "send",
]

POOL_FORMAT = 3
"""Of the messages and the memory. A keeper serves one; REFUSED and each request's ``format`` stay as they are."""
LONGEST_MESSAGE = 1 << 17
_MOST_FDS = 253  # the kernel's limit of a message


class _Message(msgspec.Struct, array_like=True):
    """What all messages have in common."""


class Hello(_Message, tag="hello"):
    """An engine asks for the pool's memory. ``layout``: as JSON.

    ``holds``: it brings back what it had of a keeper, the ``part``, with the pidfds of the ranks and hosts that have
    it, ``watched``.
    """

    format: int
    prefix: str
    layout: str
    holds: bool = False
    watched: list[int] = []  # msgspec copies it
    part: int = 0


class Watch(_Message, tag="watch"):
    """A process of the engine gets the memory, as this rank; tier hosts have negative numbers, below -1."""

    rank: int


class Unwatch(_Message, tag="unwatch"):
    """Nothing of this rank touches a row any more."""

    rank: int


class Publish(_Message, tag="publish"):
    """These rows hold these chunks, as long as they are of these editions."""

    rows: list[int]
    editions: list[int]
    keys: list[bytes]


class Rename(_Message, tag="rename"):
    """All chunks that are published from now on have names with this prefix."""

    prefix: str


class Goodbye(_Message, tag="goodbye"):
    """The engine's own process has unmapped the memory."""


class Status(_Message, tag="status"):
    """Somebody asks for the keeper's figures."""

    format: int = POOL_FORMAT


class Clear(_Message, tag="clear"):
    """Somebody wants all chunks forgotten."""

    format: int = POOL_FORMAT


Request: TypeAlias = Hello | Watch | Unwatch | Publish | Rename | Goodbye | Status | Clear


class Welcome(_Message, tag="welcome"):
    """A part of the memory is the engine's, of so many. ``nbytes``: of all the memory."""

    nbytes: int
    row_stride: int
    part: int
    parts: int


class Wait(_Message, tag="wait"):
    """The memory is not to be had yet. ``ends``: it will be, soon; else its engine is at work."""

    reason: str
    ends: bool


class Refused(_Message, tag="refused"):
    """The engine gets nothing."""

    reason: str


class Figures(_Message, tag="figures"):
    """The keeper's figures, by name."""

    figures: dict[str, Any]


class Cleared(_Message, tag="cleared"):
    """So many chunks were forgotten."""

    chunks: int


Report: TypeAlias = Welcome | Wait | Refused | Figures | Cleared
_encode = msgspec.msgpack.Encoder().encode
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Request | Report) -> bytes:
    """Return the bytes of a message."""
    return _encode(message)


def send(sock: socket.socket, message: Request | Report, fds: Sequence[int] = ()) -> None:
    """Send a message, with descriptors; OSError if it cannot be sent."""
    if fds:
        socket.send_fds(sock, [encode(message)], fds)
    else:
        sock.send(encode(message))


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message, empty at the end of the stream, and its descriptors, which are the caller's."""
    return receive_fds(sock, LONGEST_MESSAGE, _MOST_FDS)


def decode_request(message: bytes) -> Request:
    """Read a message of an engine; ValueError if it is none."""
    return _REQUESTS.decode(message)


def decode_report(message: bytes) -> Report:
    """Read a message of a keeper; ValueError if it is none."""
    return _REPORTS.decode(message)
