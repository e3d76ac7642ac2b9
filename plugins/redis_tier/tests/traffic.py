"""Values whose content follows from their name, and threads that write and read them while something happens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

BYTES = 16384
_JOIN_SECONDS = 60


def content_of(name: str) -> bytes:
    return (name.encode() * (BYTES // len(name) + 1))[:BYTES]


def read_all(store, many) -> list[bytes | None]:
    backs = [memoryview(bytearray(BYTES)) for _ in many]
    found = store.read_many_into(many, [[back] for back in backs])
    return [bytes(back) if there == BYTES else None for back, there in zip(backs, found, strict=True)]


def write_all(store, many) -> list[bool]:
    return [answer is None for answer in store.write_many(many, [[memoryview(content_of(name))] for name in many])]


def works(store, many) -> bool:
    try:
        return all(write_all(store, many)) and read_all(store, many) == [content_of(name) for name in many]
    except type(store).transient_errors:
        return False


class Cuts:
    """Cuts all clients off again and again: each time when the server has done so many commands since the last."""

    def __init__(self, server, commands: int) -> None:
        self._server = server
        self._commands = commands
        self._done = 0
        self._made = 0

    def make(self) -> int:
        """Make a cut if one is due; return how many there have been."""
        done = self._server.info("stats")["total_commands_processed"]
        if done - self._done >= self._commands:
            self._server.call("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
            self._done = done
            self._made += 1
        return self._made


@contextmanager
def under_load(store, many) -> Iterator[None]:
    """Write and read all in three threads meanwhile; every value that comes back is the one of its name, or absent."""
    assert all(write_all(store, many))
    wrong, stop = [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                write_all(store, many)
                found = read_all(store, many)
            except type(store).transient_errors:
                continue
            wrong.extend(name for name, got in zip(many, found, strict=True) if got not in {None, content_of(name)})

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
