"""The seal check of a store: reads every value and checks its seal, several at a time.

Encrypted values are checked with the live keys of the config, in the scope of their own names, or of their tenants.
"""

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import cache
from threading import Event, Lock
from typing import TypeAlias

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, ConfigError
from kvtiers.cli.store.inventory import StoredValue
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keys import KeyRing
from kvtiers.encryption.seal import ENCRYPTED_SEAL_FORMATS, decrypt_value, read_encrypted_seal
from kvtiers.layout.cache_layout import SEAL_BYTES
from kvtiers.layout.compressed_value import (
    COMPRESSED_FORMATS,
    ValueCompressor,
    compressed_format,
    compressed_length,
    is_compressed,
)
from kvtiers.layout.seal import SEAL_FORMATS, SealVerdict, check_value, read_seal, seal_format
from kvtiers.layout.storage_name import ParsedName

__all__ = ["Judge", "LiveKeys", "SealCheck", "Verdict", "check_seal", "check_stored"]

_LONGEST = 1 << 30  # that a compressed value may say it is: memory of that length is taken for it
Judge: TypeAlias = Callable[[ChunkStore, memoryview, StoredValue], "Verdict"]
"""Judges a value that a store has just read, in memory that it may change."""


class Verdict(Enum):
    """The verdict on one value."""

    OK = "ok"
    FOREIGN = "foreign"
    """Of another format of names or seals, or of another layout than its name says: not judged."""
    LOCKED = "locked"
    """Encrypted with a key that the config does not have: not judged."""
    OLDER = "older"
    """Stored by an older release, in a format that this one does not read: not judged."""
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


class LiveKeys:
    """The live keys by namespace and tenant, derived when they are first wanted; for many threads.

    None: nothing is encrypted.
    """

    def __init__(self, encryption: EncryptionConfig | None) -> None:
        self._encryption = encryption
        self._rings: dict[tuple[str, str], KeyRing | None] = {}
        self._lock = Lock()
        self.problems: list[str] = []
        """Why keys of tenants cannot be had: their values are locked."""

    @property
    def is_on(self) -> bool:
        """Return whether the config has keys."""
        return self._encryption is not None

    def of(self, parsed: ParsedName) -> KeyRing | None:
        """Return the live keys of a value. ConfigError if those of its namespace cannot be had, None if a tenant's."""
        return self.of_scope(parsed.namespace, parsed.tenant if self.are_own(parsed.tenant) else "")

    def are_own(self, tenant: str) -> bool:
        """Return whether this tenant has keys of its own."""
        return self._encryption is not None and self._encryption.has_own(tenant)

    def of_scope(self, namespace: str, tenant: str = "") -> KeyRing | None:
        """Return the live keys of a namespace, or of a tenant that has its own, as ``of`` does."""
        if self._encryption is None:
            return None
        with self._lock:
            if (namespace, tenant) not in self._rings:
                self._rings[namespace, tenant] = self._opened(self._encryption, namespace, tenant)
            return self._rings[namespace, tenant]

    def _opened(self, encryption: EncryptionConfig, namespace: str, tenant: str) -> KeyRing | None:
        try:
            return open_keys(encryption, namespace, tenant)
        except ConfigError as error:
            if not tenant:
                raise
            self.problems.append(f"{error}; its values are left as they are")
        return None


_compressor = cache(ValueCompressor)  # not before a compressed value comes: its libraries may not be there


def check_stored(stored: memoryview, name: str, parsed: ParsedName, keys: LiveKeys) -> Verdict:
    """Return whether these bytes, compressed or not, are the value stored under this name.

    ConfigError if that takes a library which is not installed.
    """
    if parsed.key_id or not is_compressed(stored):  # what is encrypted is never compressed
        return check_seal(stored, name, parsed, keys)
    if keys.is_on:  # as every value that is not encrypted
        return Verdict.FOREIGN
    length = compressed_length(stored)
    if length is None:
        return _older_or_foreign(compressed_format(stored), COMPRESSED_FORMATS)
    if not SEAL_BYTES <= length <= _LONGEST:
        return Verdict.DAMAGED
    value = memoryview(bytearray(length))
    verdict = _compressor().decompress(stored, value)
    return check_seal(value, name, parsed, keys) if verdict is SealVerdict.OK else _VERDICTS[verdict]


def check_seal(value: memoryview, name: str, parsed: ParsedName, keys: LiveKeys) -> Verdict:
    """Return whether these bytes are the value stored under this name; an encrypted one is decrypted in its place."""
    if parsed.key_id:
        return _check_encrypted(value, name, parsed, keys)
    if keys.is_on:
        return Verdict.FOREIGN
    # Where there is no seal of this format, any payload will do to get the reason.
    payload, _ = read_seal(value) or (0, b"")
    verdict = _VERDICTS[check_value(value, payload, name, parsed.layout_id)]
    return _older_or_foreign(seal_format(value), SEAL_FORMATS) if verdict is Verdict.FOREIGN else verdict


def _check_encrypted(value: memoryview, name: str, parsed: ParsedName, keys: LiveKeys) -> Verdict:
    ring = keys.of(parsed)
    key = ring.find(parsed.key_id) if ring is not None else None
    if key is None:
        return Verdict.LOCKED
    seal = read_encrypted_seal(value)
    payload = seal.payload_bytes if seal is not None else 0
    verdict = _VERDICTS[decrypt_value(value, payload, name, parsed.layout_id, key)]
    return _older_or_foreign(seal_format(value), ENCRYPTED_SEAL_FORMATS) if verdict is Verdict.FOREIGN else verdict


def _older_or_foreign(number: int | None, formats: Sequence[int]) -> Verdict:
    """Return OLDER if the value's format number is an earlier one of ``formats``, else FOREIGN.

    A number that is not among them belongs to a newer release, or to another form of value.
    """
    return Verdict.OLDER if number in formats[:-1] else Verdict.FOREIGN


class SealCheck:
    """Reads values with ``threads`` threads, each into a row of its own.

    ``open_store(nbytes)`` returns a store and a region of ``threads`` rows of at least that length. It is called again
    when a larger value comes; the caller closes what it opened. ``judge``: what is made of a value that was read.
    """

    def __init__(self, open_store: Callable[[int], tuple[ChunkStore, memoryview]], threads: int, judge: Judge) -> None:
        self._judge = judge
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

    def _check(self, store: ChunkStore, rows: "queue.SimpleQueue[memoryview]", value: StoredValue) -> Verdict:
        entry, parsed = value
        if parsed is None:
            return Verdict.FOREIGN
        if entry.nbytes < SEAL_BYTES:
            return Verdict.DAMAGED
        row = rows.get()
        try:
            with row[: entry.nbytes] as read:
                if store.read_into(entry.name, read) != entry.nbytes:
                    return Verdict.GONE
                return self._judge(store, read, value)
        finally:
            rows.put(row)
