"""The reference engine's GPU blocks: reference counts, a queue of free blocks, and a prefix cache over it."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 to ``num_blocks`` - 1. A free block keeps its content, and its place in the cache, until it is reused.

    ``caching`` False: a freed block is forgotten at once.
    """

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self._caching = caching
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next to be reused first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.allocated = 0
        """Blocks handed out since the start."""

    @property
    def free(self) -> int:
        """The number of blocks without a holder."""
        return len(self._free)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the leading run that is cached. They may be reused unless they are held."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """Return, and hold, that many blocks to be overwritten; None if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            old = self._hash_of.pop(block, None)
            if old is not None:
                del self._block_of[old]
        self.allocated += count
        return blocks

    def publish(self, hashes: Iterable[bytes], block_ids: Iterable[int]) -> None:
        """Put these computed blocks into the cache. A hash that is there already keeps its block."""
        if self._caching:
            for block_hash, block in zip(hashes, block_ids, strict=True):
                if self._block_of.setdefault(block_hash, block) == block:
                    self._hash_of[block] = block_hash

    def next_free(self, count: int) -> list[int]:
        """Return that many free blocks, or all there are, in the order in which they will be reused."""
        return list(islice(self._free, count))

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the hash under which the block is in the cache; None: it is not."""
        return self._hash_of.get(block_id)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Count one more holder for each of these blocks."""
        for block in block_ids:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one holder less for each of these blocks; of those that become free, the last is reused first."""
        for block in reversed(block_ids):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was released too often"
            if not self._holders[block]:
                self._free[block] = None

    def put_back(self, block_ids: Sequence[int]) -> None:
        """Count one holder less; those that become free are the next to be reused, the first of them first."""
        self.release(block_ids)
        for block in reversed(block_ids):
            if not self._holders[block]:
                self._free.move_to_end(block, last=False)
