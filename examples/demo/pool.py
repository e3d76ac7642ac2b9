"""The engine's KV blocks: who holds them, which are free, and a prefix cache over all that still have their content."""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 to ``num_blocks`` - 1. A free one keeps its content until it is reused, the longest free one first.

    ``hold`` and ``release`` are what kvtiers' scheduler asks of a pool: blocks in transfers must stay what they are.
    """

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def hold(self, block_ids: Sequence[int]) -> None:
        """Count one more holder for each of these blocks."""
        for block in block_ids:
            self._free.pop(block, None)
            self._holders[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one holder less for each of these blocks. A prefix is of no use without its beginning: that stays."""
        for block in reversed(block_ids):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def allocate(self, hashes: Sequence[bytes], count: int) -> list[int] | None:
        """Return, and hold, ``count`` blocks, of which the first are those with these hashes; None: too few are free.

        The hashes are a leading run that ``match`` has found.
        """
        cached = [self._block_of[block_hash] for block_hash in hashes]
        fresh = count - len(cached)
        if fresh > len(self._free) - sum(block in self._free for block in cached):
            return None
        self.hold(cached)
        taken = [self._free.popitem(last=False)[0] for _ in range(fresh)]
        for block in taken:
            self._holders[block] = 1
            self._block_of.pop(self._hash_of.pop(block, b""), None)
        return cached + taken

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of the leading run are in the cache."""
        return next((index for index, one in enumerate(hashes) if one not in self._block_of), len(hashes))

    def publish(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Let these blocks, which are computed, be found again."""
        for block_hash, block in zip(hashes, block_ids, strict=True):
            if self._block_of.setdefault(block_hash, block) == block:
                self._hash_of[block] = block_hash
