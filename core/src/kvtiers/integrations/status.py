"""What ``kvtiers status`` asks: a local socket of an engine that answers one question, and only to its own user.

The socket is abstract, so nothing is left of it after any end, and named from the engine's process::

    @kvtiers-status-{pid}-{number}

Whoever connects gets one JSON object and the end of the stream; what it sends is not read. Answers are made on a
thread of its own, from figures that the engine's thread has put down before: nobody waits for a question.
"""

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvtiers.rows.handshake import peer_credentials

__all__ = ["LastTrouble", "StatusSocket", "ask", "running"]

_PREFIX = "kvtiers-status-"
_SEND_SECONDS = 2.0
_LARGEST_ANSWER = 1 << 20
_numbers = iter(range(1 << 62))


class StatusSocket:
    """Answers with ``status()``, plain data, until it is closed."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status
        self.name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(4)
        threading.Thread(target=self._serve, name="kvtiers-status", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone would not
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SEND_SECONDS)
                _, uid = peer_credentials(connection)
                if uid in {0, os.getuid()}:
                    connection.sendall(json.dumps(self._status(), default=str).encode())


class LastTrouble(logging.Handler):
    """The last warning or error in which a tier's name comes first, as its lines in the log do."""

    def __init__(self, tier: str) -> None:
        super().__init__(logging.WARNING)
        self._start = f"{tier}: "
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of this tier's."""
        text = record.getMessage()
        if text.startswith(self._start):
            self.text = text.removeprefix(self._start)


def running() -> list[str]:
    """Return the names of all engines' sockets on this machine."""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:  # noqa: PTH123 -- no file in a folder
            names = {line.split()[-1].removeprefix("@") for line in table if f" @{_PREFIX}" in line}
    except OSError:
        return []
    return sorted(names)


def ask(name: str, seconds: float = 2.0) -> dict[str, Any]:
    """Return an engine's answer; OSError or ValueError, with the reason, if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(f"\0{name}")
        answer = b"".join(_received(connection))
    if not answer:
        raise OSError("it answers only to its own user and to root")
    status: dict[str, Any] = json.loads(answer)
    return status


def _received(connection: socket.socket) -> Iterator[bytes]:
    size = 0
    while data := connection.recv(1 << 16):
        size += len(data)
        if size > _LARGEST_ANSWER:
            raise ValueError(f"more than {_LARGEST_ANSWER} bytes")
        yield data
