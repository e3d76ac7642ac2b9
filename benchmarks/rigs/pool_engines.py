"""A pool's keeper in a process of its own, and engines' primaries over its memory; or primaries of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtiers.api import OffloadKey
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import StorageNames
from kvtiers.pool.loan import PoolLoan, is_served
from kvtiers.primary.pooled import PooledPrimaryTier
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.region.memfd import map_memory

PATIENCE = 60.0


def layout_of(tensors: int, nbytes: int) -> CacheLayout:
    """Return a layout of chunks of so many tensors with so many bytes each."""
    kv = tuple(KVTensor(f"layer{i}", 0, nbytes) for i in range(tensors))
    return CacheLayout(ModelIdentity("bench", weights="bench"), (KVGroup("full", 16),), kv)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return when the condition holds; SystemExit after a minute."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"error: {what} after {PATIENCE:.0f} s")
        time.sleep(0.0005)


class KeeperProcess:
    """A keeper of memory for so many rows, for so many engines; its socket is ``path``."""

    def __init__(self, path: Path, rows: int, layout: CacheLayout, engines: int) -> None:
        self.path = path
        command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "pool", "serve"]
        options = [f"--size={rows * layout.row_stride}B", f"--engines={engines}", f"--socket={path}"]
        self._process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
        wait_until(lambda: is_served(str(path)) or self._process.poll() is not None, "the keeper does not serve")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the keeper do nothing until the end of the block."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(PATIENCE)


@contextlib.contextmanager
def keeper(rows: int, layout: CacheLayout, engines: int) -> Iterator[KeeperProcess]:
    """Run a keeper until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        running = KeeperProcess(Path(folder) / "pool.sock", rows, layout, engines)
        try:
            yield running
        finally:
            running.close()


class Engine:
    """An engine's primary without ranks and tiers, whose chunks' bytes are made from their keys.

    ``path``: of the socket of a pool's keeper, whose memory it has a part of; None: ``rows`` of its own.
    """

    def __init__(self, layout: CacheLayout, path: Path | None = None, rows: int = 0, **options: Any) -> None:
        self._layout = layout
        self._payload = layout.payload_bytes(0)
        self._stride = stride = layout.row_stride
        self.loan: Any = None
        if path is None:
            self._mapping = map_memory(-1, rows * stride, rows * stride)
            self.tier = CPUPrimaryTier(rows, stride, self._mapping.view, **options)
        else:
            prefix = StorageNames.of_layout("default", layout).prefix
            self.loan = PoolLoan.take(str(path), prefix, layout, PATIENCE)
            fd = self.loan.take_rows()
            self._mapping = map_memory(fd, self.loan.nbytes, self.loan.num_rows * stride)
            os.close(fd)
            self.tier = PooledPrimaryTier(self.loan, stride, self._mapping.view, **options)

    @property
    def view(self) -> memoryview:
        """All rows."""
        return self._mapping.view

    def row(self, row: int) -> memoryview:
        """Return the payload of a row."""
        return self.view[row * self._stride : row * self._stride + self._payload]

    def bytes_of(self, key: OffloadKey) -> bytes:
        """Return the payload of a chunk."""
        return (key * (self._payload // len(key) + 1))[: self._payload]

    def store(self, keys: Sequence[OffloadKey], request: str) -> list[int] | None:
        """Store a request's chunks; return the rows, None if the primary refuses."""
        allocation = self.tier.prepare_store(keys, request)
        if allocation is None:
            return None
        for key, row in zip(allocation.keys, allocation.rows, strict=True):
            self.row(row)[:] = self.bytes_of(key)
        self.tier.complete_store(allocation.rows, success=True)
        return allocation.rows

    def await_run(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading chunks are here, once all of them are readable."""
        hits, pending = self.tier.resident_run(keys)
        while pending:
            time.sleep(0.0002)
            self.tier.poll()
            hits, pending = self.tier.resident_run(keys)
        return hits

    def wrong(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> int:
        """Return how many of these rows hold other bytes than those of the chunk that they are for."""
        return sum(self.row(row) != self.bytes_of(key) for key, row in zip(keys, rows, strict=True))

    def sees(self, rows: Sequence[int]) -> bool:
        """Return whether it has seen what other engines have published of these rows of theirs."""
        places: Any = self.loan._neighbours._followed  # noqa: SLF001 -- nothing else says how far it is
        return all(places.editions[row] == self.loan._plane.edition(row) for row in rows)  # noqa: SLF001

    def close(self) -> None:
        """Give the memory back."""
        self.tier.close()
        self._mapping.close()
        if self.loan is not None:
            self.loan.close()
