"""One end of the connection between a rank and the region's owner, the watch over its peer, and the rate limits.

Used by one thread, with that thread's selector; nothing here blocks. The selector's data are callbacks that take the
ready events.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable

from kvtiers.region.handshake import Message, MessageReader, peer_credentials, peer_pidfd

__all__ = ["AcceptRate", "Connection", "Refusals"]

_RECEIVE_BYTES = 1 << 16
_REFUSALS_LOGGED = 20
_REFUSAL_SECONDS = 1.0
_REFUSALS_IN_A_ROW = 50
_REFUSAL_PAUSE_SECONDS = 0.05
_WINDOW_SECONDS = 0.1
_IN_A_WINDOW = 100  # 1,000 a second: 2 % of a processor; a full backlog of 1,024 is through in a second
_IN_A_WINDOW_AT_THE_START = 400


class Connection:
    """A connected socket. ``pid`` and ``uid``: the process at the other end. ``rank``: for the owner to note down."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, on_ready: Callable[[int], None]) -> None:
        sock.setblocking(False)
        self.pid, self.uid = peer_credentials(sock)
        self.rank: int | None = None
        self.open = True
        self._sock = sock
        self._selector = selector
        self._reader = MessageReader()
        self._outbox = b""
        self._pidfd: int | None = None
        selector.register(sock, selectors.EVENT_READ, on_ready)

    @property
    def busy(self) -> bool:
        """Not all that was said has been taken by the socket."""
        return bool(self._outbox)

    def send(self, message: bytes) -> None:
        """Send a message, or what the socket does not take now when it is writable again."""
        self._outbox += message
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the socket takes it."""
        if not self.open:
            return
        with contextlib.suppress(OSError):  # full; or broken, which is seen when it is read
            self._outbox = self._outbox[self._sock.send(self._outbox) :]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        key = self._selector.get_key(self._sock)
        if key.events != wanted:
            self._selector.modify(self._sock, wanted, key.data)

    def hand_over(self, message: bytes, fd: int) -> None:
        """Send a short message together with a descriptor; OSError if the other end is gone."""
        # Some hundred bytes into an empty socket buffer: it takes them whole, or it is broken.
        if socket.send_fds(self._sock, [message], [fd]) != len(message):
            raise ConnectionError("the message did not fit")

    def receive(self) -> tuple[list[Message], list[int]]:
        """Return the messages that are whole, and descriptors that came along: the caller closes them.

        EOFError at the end of the stream, HandshakeError if the peer does not keep to the handshake.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return [], []
        except OSError as error:
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("hung up")
        try:
            return list(self._reader.feed(data)), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def watch_exit(self, on_exit: Callable[[int], None]) -> bool:
        """Call back when the other process has ended. False where the kernel has no pidfd of it.

        ProcessLookupError if it has ended already.
        """
        self._pidfd = peer_pidfd(self._sock)
        if self._pidfd is not None:
            self._selector.register(self._pidfd, selectors.EVENT_READ, on_exit)
        return self._pidfd is not None

    @property
    def watched(self) -> bool:
        """The other process's end will be noticed."""
        return self._pidfd is not None

    def hang_up(self) -> None:
        """Close the socket; the watch goes on. May be called again."""
        if self.open:
            self.open = False
            self._selector.unregister(self._sock)
            self._sock.close()

    def close(self) -> None:
        """Close the socket and end the watch. May be called again."""
        self.hang_up()
        if self._pidfd is not None:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def detach(self) -> None:
        """Close the descriptors in a forked child; its selector is the parent's too, so it is left alone."""
        self._sock.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Refusals:
    """Rate limits for refused processes at a region's socket, of which any local user can start many. For one thread.

    The first refusals each get a log line and an answer; then one a second does. While all ranks are joined, the socket
    is not served for a moment after several refusals in a row, so that a process that connects in a loop costs the
    engine no time; a rank that comes back waits for that moment at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = _REFUSALS_LOGGED
        self._next = 0.0
        self._since_pause = 0
        self.unlogged = 0
        """Refusals since the last one that was logged."""

    def should_log(self) -> bool:
        """Count one refusal; return whether it is to be logged and answered."""
        self._since_pause += 1
        now = self._clock()
        if self._left > 0:
            self._left -= 1
        elif now < self._next:
            self.unlogged += 1
            return False
        self._next = now + _REFUSAL_SECONDS
        return True

    def take_unlogged(self) -> str:
        """Return text about the refusals that were not logged, "" if there are none; reset their count."""
        unlogged, self.unlogged = self.unlogged, 0
        return f" ({unlogged} more since the last such line)" if unlogged else ""

    def pause(self) -> float:
        """Return for how many seconds no connection is to be accepted now; 0: for none."""
        if self._since_pause < _REFUSALS_IN_A_ROW:
            return 0.0
        self._since_pause = 0
        return _REFUSAL_PAUSE_SECONDS


class AcceptRate:
    """Bounds how many connections are accepted. For one thread.

    A connection that is closed without a message is not refused, and costs as much as one that is: so all of them are
    accepted at a bounded rate. While ranks are missing, it is high enough for all ranks at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = 0.0
        self._left = 0

    def accepted(self, *, at_start: bool) -> float:
        """Count a connection; return for how many seconds no other is to be accepted, 0: for none.

        ``at_start``: ranks are missing.
        """
        now = self._clock()
        if now >= self._ends:
            self._ends = now + _WINDOW_SECONDS
            self._left = _IN_A_WINDOW_AT_THE_START if at_start else _IN_A_WINDOW
        self._left -= 1
        return self._ends - now if self._left <= 0 else 0.0
