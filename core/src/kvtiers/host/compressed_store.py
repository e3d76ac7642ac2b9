"""The compressed store: a tier's store as the rest of its host sees it where the tier has ``compression``.

It stands between the seal and the store's calls. Values come sealed, and are checked once they are read; here they are
compressed and decompressed, in memory of the calling thread. A stored value that is as long as the value is not
compressed, as from before the option was set: it is read all the same. What cannot be decompressed is given on without
a seal, and so is found to be damaged, counted and deleted like any such value; what is of another format is absent.

It moves batches by whatever moves the store's values (``one_by_one``), but takes a value in one view alone, since it
needs it in one piece: the mover copies together what lies in several. Pieces of a compressed value are of no use here,
and are not asked for.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, Compression, NotKept, StoreContractError, SupportsBatch, SupportsStats
from kvtiers.api.answers import kept_each, lengths_each, present_each
from kvtiers.host.bounce_buffers import copy_memory
from kvtiers.host.one_by_one import OneByOne
from kvtiers.layout.borrowed_views import Loan
from kvtiers.layout.cache_layout import SEAL_BYTES
from kvtiers.layout.compressed_value import ValueCompressor, compressed_length, is_compressed
from kvtiers.layout.seal import SealVerdict
from kvtiers.region.memfd import HUGE_PAGE_BYTES, Mapping, prefer_huge_pages

__all__ = ["CompressedStore", "compressed_store"]

_KEPT = "kept the buffer that it was given, or something made of it, after its return. Copy what is kept: bytes(...)"
_NO_SEAL = bytes(SEAL_BYTES)
_Answer = TypeVar("_Answer")
_Place = tuple[int, int]


def compressed_store(store: ChunkStore, compression: Compression) -> ChunkStore:
    """Return the store as a host is to use it with this option."""
    return store if compression == "none" else CompressedStore(store, ValueCompressor(), writes=compression != "read")


class _Memory(threading.local):
    """One thread's memory for the stored forms of one call's values."""

    mapping: Mapping | None = None


class CompressedStore(ChunkStore):
    """A store of values that are compressed on their way to ``store`` (unless not ``writes``), and back.

    ``store`` gets views that are checked after each call, as is done without compression.
    """

    batch_values = 1

    def __init__(self, store: ChunkStore, compressor: ValueCompressor, *, writes: bool) -> None:
        self.transient_errors = store.transient_errors  # type: ignore[misc]  # this store's, as they are that one's
        self.asks_one_by_one = store.asks_one_by_one  # type: ignore[misc]
        self._store = store
        self._batches: SupportsBatch = store if isinstance(store, SupportsBatch) else OneByOne(store)
        self.batch_values = self._batches.batch_values
        self._methods = ("read_into", "write") if self._batches is not store else ("read_many_into", "write_many")
        self._compressor = compressor
        self._writes = writes
        self._memory = _Memory()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("values", "value_bytes", "stored_bytes", "unchanged_values", "damaged_values"), 0)

    def read_into(self, name: str, dst: memoryview) -> int:
        """Read the stored form of the value, and decompress it into ``dst``."""
        return self.read_many_into([name], [[dst]])[0]

    def write(self, name: str, src: memoryview) -> None:
        """Write the compressed value, or the value as it is where it does not become shorter."""
        [answer] = self.write_many([name], [[src]])
        if answer is not None:
            raise answer

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> list[int]:
        """Read the stored forms in one call of the store, and decompress them."""
        whole = [dst for [dst] in dsts]
        sizes = [len(dst) for dst in whole]
        memory, places = self._places(sizes)
        method = self._methods[0]

        def read(forms: list[memoryview]) -> list[int]:
            answers = self._batches.read_many_into(names, [[form] for form in forms])
            return lengths_each(self._store, method, sizes, answers)

        lengths = self._with_views(method, places, read, readonly=False)
        found = zip(places, lengths, whole, strict=True)
        return [self._restore(memory, at, nbytes, dst) for (at, _), nbytes, dst in found]

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> list[NotKept | None]:
        """Write the compressed values in one call of the store; as they are those that do not become shorter."""
        whole = [src for [src] in srcs]
        sizes = [len(src) for src in whole]
        lengths, at, places = self._compress(whole), 0, list[_Place]()
        for size, nbytes in zip(sizes, lengths, strict=True):
            if nbytes:
                places.append((at, nbytes))
            at += size

        def write(views: list[memoryview]) -> list[NotKept | None]:
            shorter = iter(views)
            forms = [[next(shorter) if nbytes else view] for view, nbytes in zip(whole, lengths, strict=True)]
            return kept_each(self._store, names, self._batches.write_many(names, forms))

        answers = self._with_views(self._methods[1], places, write, readonly=True) if places else write([])
        kept = [(size, nbytes) for size, nbytes, no in zip(sizes, lengths, answers, strict=True) if no is None]
        self._count(
            values=len(kept),
            value_bytes=sum(size for size, _ in kept),
            stored_bytes=sum(nbytes or size for size, nbytes in kept),
            unchanged_values=sum(not nbytes for _, nbytes in kept),
        )
        return answers

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

    def _restore(self, stored: memoryview, at: int, nbytes: int, dst: memoryview) -> int:
        """Fill the start of ``dst`` from a stored form; return the value's length, 0 if it is of another format."""
        form = stored[at : at + nbytes]
        if nbytes == len(dst) or not is_compressed(form):
            copy_memory(stored, at, dst, 0, nbytes)
            return nbytes
        length = compressed_length(form) or 0
        if not SEAL_BYTES <= length <= len(dst):
            return 0
        verdict = self._compressor.decompress(form, dst[:length])
        if verdict is SealVerdict.CORRUPT:
            dst[length - SEAL_BYTES : length] = _NO_SEAL  # its verdict is the seal's check's, which deletes it
            self._count(damaged_values=1)
        return 0 if verdict is SealVerdict.FOREIGN else length

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

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count
