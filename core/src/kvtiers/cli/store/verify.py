"""The seal check of a store: reads every value and checks its seal, several at a time."""

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from threading import Event

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore
from kvtiers.cli.store.inventory import StoredValue
from kvtiers.layout.cache_layout import SEAL_BYTES
from kvtiers.layout.seal import SealVerdict, check_value, read_seal
from kvtiers.layout.storage_name import ParsedName

__all__ = ["SealCheck", "Verdict", "check_seal"]

_LAYOUT_ID_HEX = 16


class Verdict(Enum):
    """The verdict on one value."""

    OK = "ok"
    FOREIGN = "foreign"
    """Of another format of names or seals, or of another layout than its name says: not judged."""
    DAMAGED = "damaged"
    """Not the bytes that were stored under this name."""
    GONE = "gone"
    """Absent when it was read: evicted, or deleted by another process."""
    UNREADABLE = "unreadable"
    """The store raised."""


_VERDICTS = {
    SealVerdict.OK: Verdict.OK,
    SealVerdict.FOREIGN: Verdict.FOREIGN,
    SealVerdict.CORRUPT: Verdict.DAMAGED,
}


def check_seal(value: memoryview, name: str, parsed: ParsedName) -> Verdict:
    """Return whether these bytes are the value stored under this name."""
    layout_id = bytes.fromhex(parsed.fingerprint[:_LAYOUT_ID_HEX])
    # Where there is no seal of this format, any payload will do to get the reason.
    payload, _ = read_seal(value) or (0, b"")
    return _VERDICTS[check_value(value, payload, name, layout_id)]


class SealCheck:
    """Reads values with ``threads`` threads, each into a row of its own.

    ``open_store(nbytes)`` returns a store and a region of ``threads`` rows of at least that length. It is called again
    when a larger value comes; the caller closes what it opened.
    """

    def __init__(self, open_store: Callable[[int], tuple[ChunkStore, memoryview]], threads: int) -> None:
        self._open_store = open_store
        self._threads = threads
        self._row_bytes = 0
        self.error = ""
        """The error of the first value that could not be read."""

    def run(self, values: Iterable[StoredValue], stop: Event) -> Iterator[tuple[StoredValue, Verdict]]:
        """Yield each value with its verdict, in order, until ``stop`` is set."""
        window: deque[tuple[StoredValue, Future[Verdict]]] = deque()
        store, rows = self._open(0)
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtiers-verify")
        try:
            for value in values:
                if stop.is_set():
                    break
                if value.entry.nbytes > self._row_bytes:
                    while window:
                        yield self._result(window)
                    store, rows = self._open(value.entry.nbytes)
                window.append((value, pool.submit(self._check, store, rows, value)))
                if len(window) >= 2 * self._threads:
                    yield self._result(window)
            while window:
                yield self._result(window)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _open(self, nbytes: int) -> tuple[ChunkStore, queue.SimpleQueue[memoryview]]:
        store, region = self._open_store(nbytes)
        self._row_bytes = len(region) // self._threads
        rows: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for start in range(0, len(region), self._row_bytes):
            rows.put(region[start : start + self._row_bytes])
        return store, rows

    def _result(self, window: "deque[tuple[StoredValue, Future[Verdict]]]") -> tuple[StoredValue, Verdict]:
        value, future = window.popleft()
        with plugin_boundary() as reading:
            return value, future.result()
        self.error = self.error or f"{value.entry.name}: {reading.error}"
        return value, Verdict.UNREADABLE

    @staticmethod
    def _check(store: ChunkStore, rows: "queue.SimpleQueue[memoryview]", value: StoredValue) -> Verdict:
        entry, parsed = value
        if parsed is None:
            return Verdict.FOREIGN
        if entry.nbytes < SEAL_BYTES:
            return Verdict.DAMAGED
        row = rows.get()
        try:
            with row[: entry.nbytes] as read:
                if not store.read_into(entry.name, read):
                    return Verdict.GONE
                return check_seal(read, entry.name, parsed)
        finally:
            rows.put(row)
