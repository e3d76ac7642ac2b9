"""Chained block hashes, for engines that have none of their own.

Each hash covers the block's tokens and, through the hash before it, the whole prefix and all that varies by request. So
equal hashes mean equal KV, given the model, which the layout's fingerprint covers.

Format 1, sha256, numbers little endian::

    first   = H("kvtiers block hash 1" | "seed" len seed | "adapter" len adapter | "salt" len salt)
    block   = H("block"  | previous | its tokens, 8 bytes each)
    other   = H("other"  | previous | tokens so far, 8 bytes | len digest)      takes the place of the previous hash

Every part is behind a tag or its length (8 bytes), so that no part can be read as another.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_HASH_ALGORITHM", "BlockHashChain"]

BLOCK_HASH_ALGORITHM = "kvtiers-sha256-1"
"""The ``ModelIdentity.hash_algorithm`` of a layout whose engine uses these hashes."""


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


class BlockHashChain:
    """The hashes of one request's full blocks, for the groups with this many tokens per block.

    ``adapter``: the identity of the adapter's weights (LoRA), not just its name. ``salt``: whatever keeps requests
    apart that must not share KV, as of two tenants. ``seed``: ``ModelIdentity.hash_seed``, the same for all engines
    that share a store.
    """

    def __init__(self, tokens_per_block: int, *, adapter: str = "", salt: str = "", seed: str = "0") -> None:
        self.hashes: list[bytes] = []
        """One for each full block, 32 bytes; only ever grows."""
        self._tokens_per_block = tokens_per_block
        self._open: npt.NDArray[np.int64] = np.empty(0, "<i8")
        self._tokens = 0
        root = hashlib.sha256(b"kvtiers block hash 1")
        for tag, text in ((b"seed", seed), (b"adapter", adapter), (b"salt", salt)):
            root.update(tag + _sized(text.encode()))
        self._previous = root.digest()

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Add tokens behind those so far; ``hashes`` grows by the blocks that are full now."""
        size = self._tokens_per_block
        added = np.asarray(tokens, "<i8")
        self._tokens += len(added)
        waiting = np.concatenate([self._open, added])
        full = len(waiting) // size * size
        for block in waiting[:full].reshape(-1, size):
            self._previous = hashlib.sha256(b"block" + self._previous + block.tobytes()).digest()
            self.hashes.append(self._previous)
        self._open = waiting[full:].copy()

    def mix(self, digest: bytes) -> None:
        """Make all blocks that are not full yet depend on something besides tokens.

        For what placeholder tokens stand for, an image for example: its digest, before the first of its placeholders.
        """
        place = self._tokens.to_bytes(8, "little")
        self._previous = hashlib.sha256(b"other" + self._previous + place + _sized(digest)).digest()
