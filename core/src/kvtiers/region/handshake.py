"""The handshake: the messages between a rank and the region's owner, over an abstract Unix socket that stays open.

::

    rank                                           owner (the scheduler's process)
    connects; checks the owner's uid               accepts; checks the rank's uid
    HELLO    JSON {"format", "rank", "layout"} ->  compares formats and layouts
                                               <-  REFUSED  text: why, in one line. The owner hangs up
                                               <-  WELCOME  empty, with the descriptors of rows, state and desk
    GOODBYE  empty: it has unmapped            ->  nothing of this rank is left
    end of the stream, either way: the other has died or hung up

The socket keeps the messages apart (SOCK_SEQPACKET): a byte for the kind, and a body. All that changes later is in the
pages that the descriptors lead to (``state.py``). Who is at the other end, and that it has ended, is the kernel's word:
a process states no id of itself, which would be another one's outside its PID namespace.
"""

import contextlib
import hashlib
import os
import re
import socket
import struct
from enum import IntEnum

from kvtiers.api import StartError
from kvtiers.region.memfd import require_linux

__all__ = [
    "FORMAT", "Kind", "connect", "listen", "peer_credentials", "peer_pidfd", "plain_id", "process_name", "socket_name",
]  # fmt: skip

FORMAT = 2
"""Of the messages and the pages; a rank of another one is refused. HELLO's "format" and REFUSED are in each of them."""
_CREDENTIALS = struct.Struct("iII")
_BACKLOG = 1024
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Kind(IntEnum):
    """The kinds of messages: the first byte of each."""

    HELLO = 1
    REFUSED = 2
    WELCOME = 3
    GOODBYE = 4

    def message(self, body: bytes = b"") -> bytes:
        """Return a message of this kind."""
        return bytes([self]) + body


def socket_name(engine_id: str, uid: int) -> str:
    """Return the abstract socket's name, with its leading NUL. At most 91 characters."""
    return f"\0kvtiers-{uid}-{plain_id(engine_id)}"


def plain_id(engine_id: str) -> str:
    """Return the engine id as it can stand in a name: itself, or its hash where it is long or has other characters."""
    if _PLAIN_ID.fullmatch(engine_id):
        return engine_id
    return f"sha256-{hashlib.sha256(engine_id.encode(errors='surrogatepass')).hexdigest()}"


def listen(engine_id: str) -> socket.socket:
    """Return the listening socket of this engine id; StartError in one line if the name is in use."""
    require_linux()
    name = socket_name(engine_id, os.geteuid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"engine id {engine_id!r} is in use on this machine{_holder_of(engine_id)}: {error}") from None
    listener.setblocking(False)
    return listener


def connect(engine_id: str) -> socket.socket:
    """Return a socket that is connected to the owner of this engine id's region; OSError if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(socket_name(engine_id, os.geteuid()))
    except BaseException:
        sock.close()
        raise
    return sock


def _holder_of(engine_id: str) -> str:
    with contextlib.suppress(OSError), connect(engine_id) as probe:
        pid, uid = peer_credentials(probe)
        return f" by process {pid} of user id {uid}; end it, or give this engine another id"
    return ""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, from the kernel; pid 0 if it is not visible here."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def process_name(pid: int) -> str:
    """Return what a process is called in what people read; 0: its id is not visible here."""
    return f"process {pid}" if pid else "a process of another PID namespace"


def peer_pidfd(sock: socket.socket) -> int | None:
    """Return a descriptor that becomes readable when the process at the other end has ended.

    None where the kernel gives none: before Linux 6.5, of a process in a PID namespace that is not visible here.
    ProcessLookupError if the process has ended already.
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
