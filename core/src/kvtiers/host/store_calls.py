"""The calls of a store that move values: one by one, in batches or in pieces, by its abilities.

What a store has in memory of its own anyway is copied into the row and hashed piece by piece: a hash over what is in
the processor's cache takes a third of the time.
"""

from collections.abc import Callable, Sequence

from kvtiers._failures import error_text
from kvtiers.api import ChunkStore, StoreContractError, StoreFull, SupportsBatch, SupportsPieces
from kvtiers.api.answers import found, found_each
from kvtiers.layout.seal import PayloadHash

__all__ = ["StoreCalls"]

# Fits into a processor's own cache together with what it is copied from, and is hashed without releasing the GIL, as
# more than 100 kB would be: the next copy would have to wait for the GIL.
_STEP_BYTES = 64 << 10


class StoreCalls:
    """Makes the calls of one store, to be made as often as it takes. Used by many threads."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.full_because = ""
        """What the store's last ``StoreFull`` said."""
        # Looked at once: what a runtime Protocol is asked costs as much as moving a small value.
        self._batched = store if isinstance(store, SupportsBatch) else None
        self._pieces = store if isinstance(store, SupportsPieces) and self._batched is None else None

    @property
    def in_batches(self) -> bool:
        """Return whether several values are moved in one call."""
        return self._batched is not None

    def method(self, *, is_load: bool) -> str:
        """Return the name of the method that gets views of values to read or to write."""
        one, many = ("read_into", "read_many_into") if is_load else ("write", "write_many")
        return one if self._batched is None else many

    def in_pieces(self, nbytes: int) -> bool:
        """Return whether values of this length are read by ``read_pieces``."""
        return self._pieces is not None and self._pieces.reads_in_pieces(nbytes)

    def read(self, names: Sequence[str], views: Sequence[memoryview]) -> Callable[[], list[bool]]:
        """Return the call that fills the views, and says for each whether it has."""
        store, batched = self._store, self._batched
        if batched is not None:
            return lambda: found_each(store, "read_many_into", names, batched.read_many_into(names, views))
        return lambda: [found(store, "read_into", store.read_into(names[0], views[0]))]

    def read_pieces(self, name: str, view: memoryview, payload_bytes: int) -> Callable[[], list[bytes | None]]:
        """Return the call that fills core's own view, and gives the payload's hash, or None: there is no such value."""
        store = self._pieces
        assert store is not None, "ask in_pieces first"

        def read() -> list[bytes | None]:
            pieces = store.read_pieces(name, len(view))
            if pieces is None:
                return [None]
            hashed, at = PayloadHash(name), 0
            for piece in pieces:
                with memoryview(piece) as source:
                    if at + len(source) > len(view):
                        raise StoreContractError(
                            store, "read_pieces", f"gave more than the {len(view)} bytes of a value"
                        )
                    for start in range(0, len(source), _STEP_BYTES):
                        part = source[start : start + _STEP_BYTES]
                        end = at + len(part)
                        view[at:end] = part
                        # Of the row, so that what is judged is what is there.
                        hashed.update(view[at : min(end, payload_bytes)])
                        at = end
            if at < len(view):
                raise StoreContractError(store, "read_pieces", f"gave {at} of the {len(view)} bytes of a value")
            return [hashed.digest()]

        return read

    def write(self, names: Sequence[str], views: Sequence[memoryview]) -> Callable[[], list[bool]]:
        """Return the call that writes the views, and says for each whether there was room."""
        store, batched = self._store, self._batched

        def write() -> list[bool]:
            try:
                if batched is not None:
                    return found_each(store, "write_many", names, batched.write_many(names, views))
                store.write(names[0], views[0])
            except StoreFull as error:  # here, so that no definition of a transient error can have it retried
                self.full_because = error_text(error)
                return [False] * len(names)
            return [True]

        return write
