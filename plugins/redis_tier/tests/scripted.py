"""A server that says what a test wants it to, whatever it is asked: replies cut, wrong, late, or none."""

import contextlib
import socket
import threading
from collections.abc import Sequence

_QUESTIONS = (b"GET\r\n", b"SET\r\n", b"EXISTS\r\n")


class Scripted:
    """Accepts every client; the first question about a value gets the next script's pieces, a send each.

    Then the connection is closed, or kept in silence. The last script is for all further connections.
    """

    def __init__(self, *scripts: Sequence[bytes], close: bool = True) -> None:
        self._scripts = list(scripts)
        self._close = close
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append(connected)
                self.connections += 1
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                asked = connected.recv(1 << 16)
                if not asked:
                    return
                if any(word in asked for word in _QUESTIONS):
                    break
                connected.sendall(b"+OK\r\n" * asked.count(b"*"))
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            for piece in script:
                connected.sendall(piece)
            if self._close:
                connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connected in self._open:
            connected.close()
        self._thread.join(10)
