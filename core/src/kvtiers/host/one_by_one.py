"""The adapter of a store that has the four methods alone: ``SupportsBatch`` made of ``read_into`` and ``write``."""

from collections.abc import Sequence

from kvtiers.api import ChunkStore, NotKept

__all__ = ["OneByOne"]


class OneByOne:
    """Moves a value a call, in one view: the mover has copied together before what lies in several.

    What the store answers to a read is for the caller to check, as of a store that has ``SupportsBatch``.
    """

    batch_values = 1

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> list[int]:
        """Read each value."""
        return [self._store.read_into(name, dst) for name, [dst] in zip(names, dsts, strict=True)]

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> list[NotKept | None]:
        """Write each value; one that is not kept is an answer."""
        return [self._write(name, src) for name, [src] in zip(names, srcs, strict=True)]

    def _write(self, name: str, src: memoryview) -> NotKept | None:
        try:
            self._store.write(name, src)
        except NotKept as error:
            return error
        return None
