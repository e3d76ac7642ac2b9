"""The handshake: the messages between a rank and the region's owner, over an abstract Unix socket.

::

    rank                                          owner (the scheduler's process)
    connects; checks the owner's uid              accepts; checks the rank's uid
    HELLO    JSON {"rank", "layout",       ->     compares the layouts, and what both sides speak
             "speaks"}
                                           <-     REFUSED  UTF-8 text: why, in one line. The owner hangs up
                                           <-     WELCOME  JSON of ``Welcome``, with the memfd (SCM_RIGHTS)
                                           <-     PROGRESS u64 rows populated, u8 0: more may come, 1: no more,
                                                         2: no more, there is no memory (again and again)
    PINNED   u64 rows: it has pinned so many, or ->
             will pin no more of them
    GOODBYE  empty: it has unmapped        ->     nothing of this rank is left
    end of the stream, either way: the other has died or hung up

A message is a header (magic "kvtR", u16 version, u16 kind, u32 length; little endian) and a body. The header and
REFUSED stay as they are in every version, so that two different versions can always recognise each other.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kvtiers.api import StartError
from kvtiers.region.memfd import require_linux

__all__ = [
    "HANDSHAKE_VERSION",
    "OTHER_RELEASE",
    "SETTLED",
    "SPEAKS",
    "HandshakeError",
    "Kind",
    "Message",
    "MessageReader",
    "Welcome",
    "decode_pinned",
    "decode_progress",
    "decode_welcome",
    "encode_message",
    "encode_pinned",
    "encode_progress",
    "listen",
    "peer_credentials",
    "peer_pidfd",
    "plain_id",
    "socket_name",
]

HANDSHAKE_VERSION = 1
_MAGIC = b"kvtR"
_HEADER = struct.Struct("<4sHHI")
_PROGRESS = struct.Struct("<QB")
_ROWS = struct.Struct("<Q")
SETTLED = 2**64 - 1
"""A rank that pins no more: it has pinned all rows, has none to pin, or cannot."""
_CREDENTIALS = struct.Struct("iII")
_LARGEST_BODY = 64 << 20
_BACKLOG = 1024
_SO_PEERPIDFD = 77  # Linux 6.5
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class HandshakeError(Exception):
    """The peer does not speak this protocol, or another version of it. Its text is one line."""


class Kind(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    REFUSED = 2
    WELCOME = 3
    PROGRESS = 4
    GOODBYE = 5
    PINNED = 6


@dataclass(frozen=True, slots=True)
class Message:
    """One whole message."""

    version: int
    kind: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The parameters with which a rank maps the region: ``map_bytes`` of the memfd, which begin with the rows."""

    num_rows: int
    row_stride: int
    map_bytes: int
    populated_rows: int
    prefault_ended: bool
    memory_is_short: bool = False


SPEAKS = " ".join([*(kind.name for kind in Kind), *(name for name in Welcome.__dataclass_fields__)])
"""The messages and the fields of a WELCOME, as each side has them: two installations whose sources differ can have one
version number, and must not be combined."""
OTHER_RELEASE = "it is of another release of kvtiers, with other messages; install the same kvtiers for both"


def decode_welcome(body: bytes) -> Welcome:
    """Return a WELCOME; HandshakeError if it has other fields."""
    fields = json.loads(body)
    if not isinstance(fields, dict) or fields.keys() != Welcome.__dataclass_fields__.keys():
        raise HandshakeError(f"the scheduler's process cannot be understood: {OTHER_RELEASE}")
    return Welcome(**fields)


def socket_name(engine_id: str, uid: int) -> str:
    """Return the abstract socket's name, with its leading NUL. At most 91 characters."""
    return f"\0kvtiers-{uid}-{plain_id(engine_id)}"


def plain_id(engine_id: str) -> str:
    """Return the engine id as it can stand in a name: itself, or its hash where it is long or has other characters."""
    if _PLAIN_ID.fullmatch(engine_id):
        return engine_id
    return f"sha256-{hashlib.sha256(engine_id.encode(errors='surrogatepass')).hexdigest()}"


def encode_message(kind: Kind, body: bytes = b"") -> bytes:
    """Return one message, ready to be sent."""
    return _HEADER.pack(_MAGIC, HANDSHAKE_VERSION, kind, len(body)) + body


def encode_progress(rows: int, ended: bool, memory_is_short: bool = False) -> bytes:
    """Return a PROGRESS message."""
    return encode_message(Kind.PROGRESS, _PROGRESS.pack(rows, ended + memory_is_short))


def encode_pinned(rows: int) -> bytes:
    """Return a PINNED message: a rank has pinned so many rows, or (``SETTLED``) will pin no more than it has."""
    return encode_message(Kind.PINNED, _ROWS.pack(rows))


def decode_pinned(body: bytes) -> int:
    """Return how many rows a rank has pinned, or ``SETTLED``; also for a body that makes no sense: nothing waits."""
    return int(_ROWS.unpack(body)[0]) if len(body) == _ROWS.size else SETTLED


def decode_progress(body: bytes) -> tuple[int, bool, bool]:
    """Return (rows populated, whether no more will be, whether that is for lack of memory)."""
    rows, ended = _PROGRESS.unpack(body)
    return rows, bool(ended), ended > 1


def listen(engine_id: str) -> socket.socket:
    """Return the listening socket of this engine id; StartError in one line if the name is in use."""
    require_linux()
    name = socket_name(engine_id, os.geteuid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"engine id {engine_id!r} is in use on this machine{_holder_of(name)}: {error}") from None
    listener.setblocking(False)
    return listener


def _holder_of(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.setblocking(False)
        probe.connect(name)
        pid, uid = peer_credentials(probe)
        return f" by process {pid} of user id {uid}; end it, or give this engine another id"
    return ""


class MessageReader:
    """Puts messages together from what a stream yields."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are whole now; HandshakeError where the peer speaks something else."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            magic, version, kind, length = _HEADER.unpack_from(self._buffer)
            if magic != _MAGIC or length > _LARGEST_BODY:
                raise HandshakeError("the peer does not speak kvtiers' handshake")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Message(version, kind, body)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, from the kernel; pid 0 if it is not visible here."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_pidfd(sock: socket.socket) -> int | None:
    """Return a descriptor that becomes readable when the process at the other end has ended.

    None where the kernel gives none; ProcessLookupError if the process has ended already.
    """
    try:
        # From the socket, where the kernel can: by its number, it could by now be another process.
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid, _ = peer_credentials(sock)
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except ProcessLookupError:
        raise
    except OSError:
        return None
