"""The compressed value: the form in which a store holds a value of a tier with ``compression``.

::

    0   8   magic "kvtPACK" and a line feed
    8   4   format number, little endian, like all numbers here
    12  1   codec: 1, zstd over byte planes
    13  1   planes: the bytes of one element, 1, 2 or 4
    14  2   zeros
    16  8   length of the value, seal included
    24  8   length of the data
    32  16  xxh3_128 over (the first 32 bytes || the data), as ``digest()`` gives it
    48  16  zeros
    64      the data: for each 128 KiB of the value, for each plane from the lowest byte: its stored length (4 bytes),
            and a zstd frame of so many bytes, or the plane itself where that is its length
            zeros up to a multiple of 4096

A plane has the first, second ... byte of each element. In bf16 the upper byte (sign and most of the exponent) takes few
values, which a Huffman code shortens by half; the lower one is noise. So what compresses best here is the entropy coder
alone: zstd's search for repetitions is kept as small as it can be, which is also twice as fast.

A compressed value is shorter than its value, by a page at least; what does not become shorter is stored as it is. So
its length says which of both a stored value is. The seal is inside, and is checked after decompression, as of any
value: the hash here is there so that what is damaged never reaches a decoder, and one that claims to be longer than
the value that is asked for is not read.
"""

import struct
import threading
from typing import Any

import xxhash

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import VALUE_ALIGN
from kvtiers.layout.seal import SealVerdict

__all__ = [
    "COMPRESSED_FORMAT",
    "COMPRESSED_FORMATS",
    "ValueCompressor",
    "compressed_format",
    "compressed_length",
    "is_compressed",
]

COMPRESSED_FORMATS = (1,)
"""The numbers of compressed values, in the order of their releases."""
COMPRESSED_FORMAT = COMPRESSED_FORMATS[-1]
_MAGIC = b"kvtPACK\n"
_HEADER = struct.Struct("<8sIBB2xQQ16s16x")
_HASHED = 32
_ZSTD = 1
_LENGTH = struct.Struct("<I")
_BLOCK = 128 << 10  # of the value: with its planes in a processor's own cache
_PLANES = (1, 2, 4)  # of fp8, bf16 and fp32
_CHOSEN_FOR = 64  # values, of one length, until the number of planes is looked at again
_ALIKE = 1.02  # of samples whose lengths differ by no more the one with fewer planes is read sooner
_AS_IT_IS = 31 / 32  # a plane that saves less is stored as it is, which is faster to read


class _Threads(threading.local):
    """One thread's zstd, which no two may use at a time, and its memory of one block."""

    encoder: Any = None
    decoder: Any = None
    plane: Any = None
    wide: Any = None


class ValueCompressor:
    """Compresses and decompresses values. Used by many threads. ConfigError if the libraries for it are not there."""

    def __init__(self) -> None:
        # Imported here: a tier without compression needs neither, and numpy brings threads of its own.
        try:
            import numpy as np
            import zstandard
        except ImportError as error:
            raise ConfigError(
                f"'compression' needs the package {error.name}, which is not installed: pip install "
                "'kvtiers[compression]', or set 'compression: none'"
            ) from None
        self._np: Any = np
        self._zstd: Any = zstandard
        self._dtypes = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
        self._threads = _Threads()
        self._chosen: dict[int, tuple[int, int]] = {}

    def compress(self, value: memoryview, memory: memoryview) -> int:
        """Put the compressed value into ``memory``, which is as long as ``value``; return its length.

        0: it would not be a page shorter, or its length is no value's.
        """
        if len(value) % VALUE_ALIGN:
            return 0
        planes, most = self._planes_of(value), len(value) - VALUE_ALIGN
        at = _HEADER.size
        for start in range(0, len(value), _BLOCK):
            for piece in self._packed(value[start : start + _BLOCK], planes):
                end = at + _LENGTH.size + len(piece)
                if end > most:
                    return 0
                _LENGTH.pack_into(memory, at, len(piece))
                memory[at + _LENGTH.size : end] = piece
                at = end
        head = (_MAGIC, COMPRESSED_FORMAT, _ZSTD, planes, len(value), at - _HEADER.size)
        _HEADER.pack_into(memory, 0, *head, bytes(16))
        _HEADER.pack_into(memory, 0, *head, _digest(memory, at))
        nbytes = -(-at // VALUE_ALIGN) * VALUE_ALIGN
        memory[at:nbytes] = bytes(nbytes - at)
        return nbytes

    def decompress(self, stored: memoryview, value: memoryview) -> SealVerdict:
        """Fill ``value`` with what ``stored`` is the compressed form of.

        Unless OK, what ``value`` holds does not matter. FOREIGN: of another format or codec, or of a value of another
        length. Writes nothing outside of ``value``, takes memory for one block, and never raises for what is stored.
        """
        if len(stored) < _HEADER.size:
            return SealVerdict.FOREIGN
        magic, number, codec, planes, length, data, digest = _HEADER.unpack_from(stored)
        if magic != _MAGIC or number != COMPRESSED_FORMAT or codec != _ZSTD or length != len(value):
            return SealVerdict.FOREIGN
        end = _HEADER.size + data
        if end > len(stored) or planes not in self._dtypes or length % planes or _digest(stored, end) != digest:
            return SealVerdict.CORRUPT
        try:
            return SealVerdict.OK if self._unpack(stored[:end], value, planes) else SealVerdict.CORRUPT
        except (self._zstd.ZstdError, MemoryError, struct.error):
            return SealVerdict.CORRUPT

    def _planes_of(self, value: memoryview) -> int:
        """Return the number of planes by which values of this length become shortest, by a sample now and then."""
        planes, left = self._chosen.get(len(value), (0, 0))
        if not left:
            middle = len(value) // 2 // _BLOCK * _BLOCK
            sample = value[middle : middle + _BLOCK]
            sizes = {count: sum(map(len, self._packed(sample, count))) for count in _PLANES}
            planes = next(count for count in _PLANES if sizes[count] <= _ALIKE * min(sizes.values()))
            left = _CHOSEN_FOR
        self._chosen[len(value)] = (planes, left - 1)
        return planes

    def _packed(self, block: memoryview, planes: int) -> list[Any]:
        """Return the stored bytes of a block's planes."""
        np, mine = self._np, self._mine()
        elements = np.frombuffer(block, self._dtypes[planes])
        plane = mine.plane[: len(elements)]
        wide = mine.wide.view(elements.dtype)[: len(elements)]
        packed = []
        for number in range(planes):
            if number:
                np.right_shift(elements, 8 * number, out=wide)
                np.copyto(plane, wide, casting="unsafe")
            else:
                np.copyto(plane, elements, casting="unsafe")
            frame = mine.encoder.compress(plane)
            packed.append(frame if len(frame) <= len(plane) * _AS_IT_IS else plane.tobytes())
        return packed

    def _unpack(self, stored: memoryview, value: memoryview, planes: int) -> bool:
        """Fill the value from the data; False if that is not what a value of this length is made of."""
        np, mine, at = self._np, self._mine(), _HEADER.size
        for start in range(0, len(value), _BLOCK):
            elements = np.frombuffer(value[start : start + _BLOCK], self._dtypes[planes])
            found = []
            for _ in range(planes):
                [nbytes] = _LENGTH.unpack_from(stored, at)
                at += _LENGTH.size
                piece = stored[at : at + nbytes]
                at += nbytes
                if len(piece) != nbytes or nbytes > len(elements):
                    return False
                if nbytes < len(elements):
                    # Before it is decoded: what it claims is allocated at once.
                    if self._zstd.frame_content_size(piece) != len(elements):
                        return False
                    piece = mine.decoder.decompress(piece, allow_extra_data=False)
                found.append(np.frombuffer(piece, np.uint8))
            self._join(found, elements)
        return at == len(stored)

    def _join(self, planes: list[Any], elements: Any) -> None:
        """Put the planes of a block together, in as few passes as there are planes, in the processor's cache."""
        np, kind = self._np, elements.dtype
        np.multiply(planes[-1], 256 ** (len(planes) - 1), out=elements, dtype=kind, casting="unsafe")
        wide = self._mine().wide.view(kind)[: len(elements)]
        for number, plane in enumerate(planes[:-1]):
            if number:
                np.multiply(plane, 256**number, out=wide, dtype=kind, casting="unsafe")
            np.add(elements, wide if number else plane, out=elements)

    def _mine(self) -> _Threads:
        mine, zstd = self._threads, self._zstd
        if mine.encoder is None:
            as_is = zstd.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, write_content_size=True)
            mine.encoder = zstd.ZstdCompressor(compression_params=as_is)
            mine.decoder = zstd.ZstdDecompressor()
            mine.plane = self._np.empty(_BLOCK, self._np.uint8)
            mine.wide = self._np.empty(_BLOCK, self._np.uint8)
        return mine


def is_compressed(stored: memoryview) -> bool:
    """Return whether this looks like a compressed value, of any format."""
    return stored[: len(_MAGIC)] == _MAGIC


def compressed_format(stored: memoryview) -> int | None:
    """Return the number in the header, which is in this place in every format; None where there is no header."""
    if len(stored) < _HEADER.size:
        return None
    magic, number, *_ = _HEADER.unpack_from(stored)
    return int(number) if magic == _MAGIC else None


def compressed_length(stored: memoryview) -> int | None:
    """Return the length of the value whose compressed form this is, as it states it; None where it is of no use."""
    if len(stored) < _HEADER.size:
        return None
    magic, number, codec, _, length, _, _ = _HEADER.unpack_from(stored)
    return int(length) if (magic, number, codec) == (_MAGIC, COMPRESSED_FORMAT, _ZSTD) else None


def _digest(stored: memoryview, end: int) -> bytes:
    """Return the hash of a compressed value whose data ends there."""
    state = xxhash.xxh3_128(stored[:_HASHED])
    state.update(stored[_HEADER.size : end])
    return state.digest()
