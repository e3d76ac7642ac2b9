"""Streams of bytes between two processes and nothing else: what the kernel alone takes to move a store's values.

The other process has memory of its own for all of them, as a store has: it receives into that, and sends out of it. It
parses nothing and looks at nothing. A request goes for as many bytes as a window has, so that there are as few calls as
there can be.
"""

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from baselines.redis_lanes import Lane, connect, send_at_once

_DONE = b"."


@contextlib.contextmanager
def other_process(total: int, connections: int, path: Path | None = None) -> Iterator[tuple[int, int | str]]:
    """Start it; give its process id and its port, or with ``path`` the UNIX socket there."""
    with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as listener:
        if path is None:
            send_at_once(listener)
        listener.bind(str(path) if path else ("127.0.0.1", 0))
        listener.listen(connections)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve_all, args=(listener, total, connections), daemon=True)
        process.start()
        assert process.pid
        try:
            yield process.pid, str(path) if path else listener.getsockname()[1]
        finally:
            process.kill()
            process.join()


def _serve_all(listener: socket.socket, total: int, connections: int) -> None:
    memory, share = memoryview(bytearray(b"\x5a") * total), total // connections
    for number in count():
        start = number % connections * share
        part = memory[start : start + share]
        threading.Thread(target=_serve, args=(listener.accept()[0], part), daemon=True).start()


def _serve(link: socket.socket, memory: memoryview) -> None:
    at = 0
    while head := link.recv(8, socket.MSG_WAITALL):
        nbytes = int.from_bytes(head, "big", signed=True)
        at = at if at + abs(nbytes) <= len(memory) else 0
        view = memory[at : at + abs(nbytes)]
        at += len(view)
        if nbytes < 0:
            link.sendall(view)
        else:
            _fill(link, view)
            link.send(_DONE)


def kernel_alone(address: int | str, rows: memoryview, connections: int, window: int) -> Lane:
    """Move the rows to or from ``other_process``, each connection its share, a window at a time."""
    links, share = [connect(address) for _ in range(connections)], len(rows) // connections

    def move_share(link: socket.socket, part: memoryview, way: str) -> None:
        for start in range(0, len(part), window):
            view = part[start : start + window]
            if way == "write":
                link.sendall(len(view).to_bytes(8, "big"))
                link.sendall(view)
                assert link.recv(1) == _DONE
            else:
                link.sendall((-len(view)).to_bytes(8, "big", signed=True))
                _fill(link, view)

    def move(way: str) -> None:
        threads = [
            threading.Thread(target=move_share, args=(link, rows[i * share : (i + 1) * share], way))
            for i, link in enumerate(links)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return move


def _fill(link: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        count = link.recv_into(view[got:], 0, socket.MSG_WAITALL)
        assert count, "the other side is gone"
        got += count
