"""A server that gives the answers of a function, as those that give out tokens do."""

import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

__all__ = ["Answering", "Asked"]


class Asked(NamedTuple):
    """One request."""

    path: str
    headers: Message
    body: str


class Answering(ThreadingHTTPServer):
    """Answers GET and POST, by a function of the path: status and JSON text. ``asked``: the requests so far."""

    def __init__(self, answer: Callable[[str], tuple[int, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[Asked] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.asked.append(Asked(self.path, self.headers, body))
        status, text = self.server.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Metadata-Flavor", "Google")  # by which Google's clients recognise a machine's own service
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Log nothing."""
