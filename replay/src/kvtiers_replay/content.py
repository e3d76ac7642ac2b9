"""Block content: the bytes of a block, generated from its hash, the same on every machine, different in every word.

Word i of a block is ``table[i] * multiplier + addend`` (64 bits, wrapping), where the table is one of random words and
multiplier (odd) and addend come from the block's hash, and from the rank if it is not the first. So a block that is
swapped, shifted, torn, stale or another rank's is found.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvtiers.gpu.device_blocks import DeviceBlocks

__all__ = ["CONTENT_VERSION", "BlockContent"]

CONTENT_VERSION = "replay-content-1"
_PIECE_BYTES = 4 << 20  # generated at a time, so that memory stays bounded

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int64]


class BlockContent:
    """Writes and checks blocks in KV tensors; a block's bytes lie in the tensors one after the other."""

    def __init__(self, kv_tensors: Sequence[Bytes | DeviceBlocks], rank: int = 0) -> None:
        self._tensors = kv_tensors
        self._salt = rank.to_bytes(2, "little") if rank else b""
        self._block_bytes = sum(tensor.shape[1] for tensor in kv_tensors)
        words = -(-self._block_bytes // 8)
        self._table = np.random.Generator(np.random.Philox(key=7)).integers(0, 2**64, words, np.uint64)
        self._step = max(1, _PIECE_BYTES // self._block_bytes)

    def bytes_of(self, hashes: Sequence[bytes]) -> Bytes:
        """Return the right bytes of these blocks, one block a row."""
        salt = self._salt
        seeds = np.frombuffer(b"".join([xxhash.xxh3_128_digest(each + salt) for each in hashes]), "<u8").reshape(-1, 2)
        words = self._table * (seeds[:, :1] | np.uint64(1))
        words += seeds[:, 1:]
        right: Bytes = words.astype("<u8", copy=False).view(np.uint8)
        return right[:, : self._block_bytes]

    def write(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Fill these blocks, as computing them would."""
        for ids, right in self._pieces(hashes, block_ids):
            at = 0
            for tensor in self._tensors:
                tensor[ids] = right[:, at : at + tensor.shape[1]]
                at += tensor.shape[1]

    def count_wrong(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Compare these blocks byte by byte; return how many bytes are wrong."""
        wrong = 0
        for ids, right in self._pieces(hashes, block_ids):
            at = 0
            for tensor in self._tensors:
                wrong += int(np.count_nonzero(tensor[ids] != right[:, at : at + tensor.shape[1]]))
                at += tensor.shape[1]
        return wrong

    def _pieces(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Iterator[tuple[Ids, Bytes]]:
        for start in range(0, len(hashes), self._step):
            ids = np.array(block_ids[start : start + self._step], np.int64)
            yield ids, self.bytes_of(hashes[start : start + self._step])
