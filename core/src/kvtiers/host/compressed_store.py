"""The compressed store: a tier's store as the rest of its host sees it where the tier has ``compression``.

It stands between the seal and the store's calls. Values come sealed, and are checked once they are read; here they are
compressed and decompressed, in memory of the calling thread. A stored value that is as long as the value is not
compressed, as from before the option was set: it is read all the same. What cannot be decompressed is given on without
a seal, and so is found to be damaged, counted and deleted like any such value; what is of another format is absent.

Abilities by which a store moves bytes between its backend and a row are of no use here, and are not asked for.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtiers._failures import plugin_boundary
from kvtiers.api import (
    ChunkStore,
    Compression,
    ConfigError,
    Refused,
    StoreContractError,
    SupportsAnyLength,
    SupportsBatch,
    SupportsStats,
)
from kvtiers.api.answers import kept_each, lengths_each, present_each
from kvtiers.host.bounce_buffers import copy_memory
from kvtiers.layout.borrowed_views import Loan
from kvtiers.layout.cache_layout import SEAL_BYTES
from kvtiers.layout.compressed_value import ValueCompressor
from kvtiers.layout.seal import SealVerdict
from kvtiers.region.memfd import HUGE_PAGE_BYTES, Mapping, prefer_huge_pages

__all__ = ["CompressedStore", "compressed_store"]

_KEPT = "kept the buffer that it was given, or something made of it, after its return. Copy what is kept: bytes(...)"
_NO_SEAL = bytes(SEAL_BYTES)
_Answer = TypeVar("_Answer")
_Place = tuple[int, int]


def compressed_store(store: ChunkStore, compression: Compression) -> ChunkStore:
    """Return the store as a host is to use it with this option. ConfigError, one line, if it cannot be used with it."""
    if compression == "none":
        return store
    kind = _CompressedBatches if isinstance(store, SupportsBatch) else CompressedStore
    return kind(store, ValueCompressor(), writes=compression != "read")


class _Memory(threading.local):
    """One thread's memory for the stored forms of one call's values."""

    mapping: Mapping | None = None


class CompressedStore(ChunkStore):
    """A store of values that are compressed on their way to ``store`` (unless not ``writes``), and back.

    ``store`` gets views that are checked after each call, as is done without compression.
    """

    def __init__(self, store: ChunkStore, compressor: ValueCompressor, *, writes: bool) -> None:
        if not isinstance(store, SupportsAnyLength):
            raise ConfigError(
                f"'compression' needs a store that reads values of any length, and {type(store).__name__} has no "
                "read_any_into() (SupportsAnyLength); set 'compression: none'"
            )
        self.transient_errors = store.transient_errors  # type: ignore[misc]  # this store's, as they are that one's
        self.exists_per_call = store.exists_per_call  # type: ignore[misc]
        self._store: ChunkStore = store
        self._reads: SupportsAnyLength = store
        self._compressor = compressor
        self._writes = writes
        self._memory = _Memory()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("values", "value_bytes", "stored_bytes", "unchanged_values", "damaged_values"), 0)

    def read_into(self, name: str, dst: memoryview) -> bool:
        """Read the stored form of the value, and decompress it into ``dst``."""
        return self._read([name], [dst])[0]

    def write(self, name: str, src: memoryview) -> None:
        """Write the compressed value, or the value as it is where it does not become shorter."""
        [nbytes] = self._compress([src])
        if nbytes:
            self._with_views("write", [(0, nbytes)], lambda views: self._store.write(name, views[0]), readonly=True)
        else:
            self._store.write(name, src)
        self._count_written([src], [nbytes])

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask the store."""
        return present_each(self._store, names, self._store.exists(names))

    def delete(self, names: Sequence[str]) -> None:
        """Delete from the store."""
        self._store.delete(names)

    def stats(self) -> dict[str, float]:
        """Return the store's own figures, and what was compressed."""
        figures: dict[str, float] = {}
        if isinstance(self._store, SupportsStats):
            with plugin_boundary():
                figures |= self._store.stats()
        with self._lock:
            return figures | {f"compression_{name}": float(count) for name, count in self._counts.items()}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _read(self, names: Sequence[str], dsts: Sequence[memoryview]) -> list[bool]:
        sizes = [len(dst) for dst in dsts]
        memory, places = self._places(sizes)
        lengths = self._with_views(
            "read_any_into",
            places,
            lambda views: lengths_each(self._store, names, sizes, self._reads.read_any_into(names, views)),
            readonly=False,
        )
        return [
            self._restore(memory, at, nbytes, dst) for (at, _), nbytes, dst in zip(places, lengths, dsts, strict=True)
        ]

    def _restore(self, memory: memoryview, at: int, nbytes: int, dst: memoryview) -> bool:
        """Fill ``dst`` from its stored form; False if it is none."""
        if nbytes == len(dst):
            copy_memory(memory, at, dst, 0, nbytes)
            return True
        verdict = self._compressor.decompress(memory[at : at + nbytes], dst)
        if verdict is SealVerdict.CORRUPT:
            dst[-SEAL_BYTES:] = _NO_SEAL  # its verdict is the seal's check's, which deletes and counts it
            self._count(damaged_values=1)
        return verdict is not SealVerdict.FOREIGN

    def _compress(self, srcs: Sequence[memoryview]) -> list[int]:
        """Put the values' compressed forms into this thread's memory; return their lengths, 0: as it is."""
        if not self._writes:
            return [0] * len(srcs)
        memory, places = self._places([len(src) for src in srcs])
        return [
            self._compressor.compress(src, memory[at : at + nbytes])
            for src, (at, nbytes) in zip(srcs, places, strict=True)
        ]

    def _places(self, sizes: Sequence[int]) -> tuple[memoryview, list[_Place]]:
        """Return this thread's memory, and a place in it for a value of each size."""
        mapping, total = self._memory.mapping, sum(sizes)
        if mapping is None or mapping.nbytes < total:
            page = HUGE_PAGE_BYTES["2MiB"]
            nbytes = max(1, -(-total // page)) * page
            mapping = self._memory.mapping = Mapping(-1, nbytes, nbytes)
            prefer_huge_pages(mapping)
        places, at = list[_Place](), 0
        for nbytes in sizes:
            places.append((at, nbytes))
            at += nbytes
        return mapping.view, places

    def _with_views(
        self, method: str, places: Sequence[_Place], call: Callable[[list[memoryview]], _Answer], *, readonly: bool
    ) -> _Answer:
        """Call the store with views of this thread's memory. StoreContractError if it has kept one."""
        mapping, self._memory.mapping = self._memory.mapping, None  # unused from here on, unless all is given back
        assert mapping is not None, "no places"
        loan = Loan(mapping.view, places, readonly=readonly)
        answer = call([*loan.views])
        if not loan.take_back():
            raise StoreContractError(self._store, method, _KEPT)
        self._memory.mapping = mapping
        return answer

    def _count_written(self, srcs: Sequence[memoryview], lengths: Sequence[int]) -> None:
        sizes = [len(src) for src in srcs]
        stored = [nbytes or size for nbytes, size in zip(lengths, sizes, strict=True)]
        unchanged = sum(not nbytes for nbytes in lengths)
        self._count(values=len(sizes), value_bytes=sum(sizes), stored_bytes=sum(stored), unchanged_values=unchanged)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count


class _CompressedBatches(CompressedStore):
    """A compressed store over one with ``SupportsBatch``."""

    _store: SupportsBatch  # type: ignore[assignment]

    def read_many_into(self, names: Sequence[str], dsts: Sequence[memoryview]) -> Sequence[bool]:
        """Read the values in one call of the store."""
        return self._read(names, dsts) if names else []

    def write_many(self, names: Sequence[str], srcs: Sequence[memoryview]) -> Sequence[bool | Refused]:
        """Write the values in one call of the store."""
        lengths, at = self._compress(srcs), 0
        places = list[_Place]()
        for src, nbytes in zip(srcs, lengths, strict=True):
            if nbytes:
                places.append((at, nbytes))
            at += len(src)

        def write(views: list[memoryview]) -> list[bool | Refused]:
            shorter = iter(views)
            forms = [next(shorter) if nbytes else src for src, nbytes in zip(srcs, lengths, strict=True)]
            return kept_each(self._store, names, self._store.write_many(names, forms))

        kept = self._with_views("write_many", places, write, readonly=True) if places else write([])
        taken = [i for i, answer in enumerate(kept) if answer]
        self._count_written([srcs[i] for i in taken], [lengths[i] for i in taken])
        return kept
