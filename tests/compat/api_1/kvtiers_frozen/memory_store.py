"""The store of the tier type ``frozen``: the template to copy for a store of your own."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock

from kvtiers.api import ChunkStore, NotKept, StoreEntry


class MemoryStore(ChunkStore):
    """At most ``capacity`` bytes of values. A held value never changes, so it is copied outside the lock."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = Lock()
        self._values: OrderedDict[str, bytes] = OrderedDict()  # the least recently used first
        self._held = 0

    def read_into(self, name: str, dst: memoryview) -> int:
        """Fill the start of ``dst``; a value that is read is used, so it stays longer."""
        with self._lock:
            value = self._values.get(name, b"")
            if not 0 < len(value) <= len(dst):
                return 0
            self._values.move_to_end(name)
        dst[: len(value)] = value
        return len(value)

    def write(self, name: str, src: memoryview) -> None:
        """Keep a copy, the most recently used; others make room for it."""
        if len(src) > self._capacity:
            raise NotKept(f"a value of {len(src)} bytes is larger than the whole store of {self._capacity} bytes")
        value = bytes(src)
        with self._lock:
            self._held += len(value) - len(self._values.pop(name, b""))
            self._values[name] = value
            while self._held > self._capacity:
                self._held -= len(self._values.popitem(last=False)[1])

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Answer in order; being asked for is not use."""
        return [name in self._values for name in names]

    def delete(self, names: Sequence[str]) -> None:
        """Drop these values; an absent one has no bytes."""
        with self._lock:
            self._held -= sum(len(self._values.pop(name, b"")) for name in names)

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Yield what was held at the call; being listed is not use."""
        with self._lock:
            sizes = [(name, len(value)) for name, value in self._values.items() if name.startswith(prefix)]
        return (StoreEntry(name, nbytes) for name, nbytes in sizes)

    def stats(self) -> dict[str, float]:
        """Return what is held now."""
        return {"held_bytes": self._held, "held_values": len(self._values)}
