"""A plain loop over Mooncake's client, in a process of its own: what anyone gets who calls it as its manual says.

It maps the rows, registers them, and moves them in batches of 16 MiB or a value, as core does, in one thread or
several; it seals and checks nothing. Commands come line by line.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

BATCH_BYTES, BATCH_VALUES = 16 << 20, 32


class PlainLoop:
    """The process's other end."""

    def __init__(self, master: str, fd: int, nbytes: int) -> None:
        command = [sys.executable, __file__, master, str(fd), str(nbytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd]
        )
        self._call("hello")

    def _call(self, word: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([word, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the plain loop has ended"
        return json.loads(line)

    def rate(self, way: str, nbytes: int, threads: int) -> float:
        """Return the GB/s at which all values are written, under new names, or read."""
        return float(self._call("move", way=way, nbytes=nbytes, threads=threads))

    def delete(self, *names: str) -> None:
        """Remove these values."""
        self._call("delete", names=names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the process: it is closed by ``close``."""

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class _Client:
    """The client and the rows."""

    def __init__(self, master: str, fd: int, nbytes: int) -> None:
        import mmap

        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        assert code == 0, code
        self._rows = mmap.mmap(fd, nbytes)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._rows))
        self._client.register_buffer(self._at, nbytes)
        self._nbytes = nbytes

    def delete(self, names: list[str]) -> None:
        self._client.batch_remove(names, True)

    def move(self, way: str, nbytes: int, threads: int) -> float:
        names = [f"plain/{threads}/{number}" for number in range(self._nbytes // nbytes)]
        if way == "write":
            self.delete(names)
        each = max(1, min(BATCH_VALUES, BATCH_BYTES // nbytes))
        batches = iter([range(start, min(start + each, len(names))) for start in range(0, len(names), each)])
        lock = threading.Lock()
        expected = 0 if way == "write" else nbytes
        call = self._client.batch_put_from if way == "write" else self._client.batch_get_into

        def work() -> None:
            while True:
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                places = [self._at + number * nbytes for number in batch]
                codes = call([names[number] for number in batch], places, [nbytes] * len(batch))
                assert all(code == expected for code in codes), codes

        workers = [threading.Thread(target=work) for _ in range(threads)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self._nbytes / 1e9 / (time.perf_counter() - begin)


def main() -> None:
    master, fd, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    client = _Client(master, fd, nbytes)
    for line in sys.stdin:
        word, arguments = json.loads(line)
        answer = None if word == "hello" else getattr(client, word)(**arguments)
        print(json.dumps(answer), flush=True)
    os._exit(0)


@contextlib.contextmanager
def plain_loop(master: str, fd: int, nbytes: int) -> Iterator[PlainLoop]:
    """Give a plain loop over these rows."""
    loop = PlainLoop(master, fd, nbytes)
    try:
        yield loop
    finally:
        loop.close()


if __name__ == "__main__":
    main()
