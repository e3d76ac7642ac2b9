"""The format of a slab: its index file, its segments, and the list of names beside each of these.

::

    slab-index                     page 0: header; then the segments' rows, what died in each, and the buckets
    slab-{id}-{birth}.values       a segment: values one behind the other, each from a multiple of 4096 on; no headers
    slab-{id}-{birth}.names        its list of names: a record for each value, in the order in which they were complete

A *bucket* is one page of entries; the hash of a name says which. An *entry* states where a value lies: the segment, the
segment's *edition*, the page in it, the length. An edition is a number that no segment ever had before: it is
raised when a segment is used again, and by that alone all entries that still point there are dead, however many.

Every record ends in a CRC32 of its own, so that one that was torn or damaged is none. All numbers are little endian.
"""

import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

__all__ = [
    "BUCKET_BYTES", "BUCKET_ENTRIES", "DEAD_BYTES", "ENTRY_BYTES", "PAGE", "PLACES", "ROW_BYTES", "SLAB_FORMAT",
    "Dead", "Entry", "Header", "NameRecord", "Row", "digest_of", "is_core_record", "name_records", "pages_of",
]  # fmt: skip

SLAB_FORMAT = 1
PAGE = 4096
_MAGIC = b"kvtSLAB\n"
_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<8sIIQII")
_ENTRY = struct.Struct("<16sIHHIII")
_ROW = struct.Struct("<IIIIIIQ")
_DEAD = struct.Struct("<IIQ")
_NAME = struct.Struct("<IIIIHH")
ENTRY_BYTES = _ENTRY.size + _CRC.size
BUCKET_ENTRIES = PAGE // ENTRY_BYTES
BUCKET_BYTES = BUCKET_ENTRIES * ENTRY_BYTES
PLACES = struct.Struct("<16xIH18x")
"""Of each entry of a bucket its edition and its segment, unchecked."""
assert PLACES.size == ENTRY_BYTES
ROW_BYTES, DEAD_BYTES = 64, 32  # with room for more; none of them crosses a page
_ALIGN = 8


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(crc32(body))


def _is_whole(data: bytes, at: int, size: int) -> bool:
    end = at + size
    if len(data) < end + _CRC.size:
        return False
    whole: bool = crc32(data[at:end]) == _CRC.unpack_from(data, end)[0]
    return whole


def digest_of(name: str) -> bytes:
    """Return the 16 bytes by which the index has a name."""
    return blake2b(name.encode(), digest_size=16).digest()


def is_core_record(name: str) -> bool:
    """Return whether this is a small value of core's own, as the epoch of a namespace: hardly any other name is so."""
    return "/_" in name


def pages_of(nbytes: int) -> int:
    """Return how many pages a value of this length takes."""
    return -(-nbytes // PAGE)


class Header(NamedTuple):
    """The first page of the index: the slab's random number, which its files' names have, and its geometry."""

    ident: int
    segment_bytes: int
    rows: int
    buckets: int

    @property
    def dead_at(self) -> int:
        """Return where the records of what died begin."""
        return PAGE + -(-self.rows * ROW_BYTES // PAGE) * PAGE

    @property
    def buckets_at(self) -> int:
        """Return where the buckets begin."""
        return self.dead_at + -(-self.rows * DEAD_BYTES // PAGE) * PAGE

    @property
    def index_bytes(self) -> int:
        """Return the length of the index file."""
        return self.buckets_at + self.buckets * PAGE

    def encode(self) -> bytes:
        """Return the record."""
        body = _HEADER.pack(_MAGIC, SLAB_FORMAT, self.ident, self.segment_bytes, self.rows, self.buckets)
        return _sealed(body)

    @classmethod
    def decode(cls, data: bytes) -> "Header | None":
        """Return the header in this page; None if there is none of this format."""
        if not _is_whole(data, 0, _HEADER.size):
            return None
        magic, number, *fields = _HEADER.unpack_from(data)
        return cls(*fields) if magic == _MAGIC and number == SLAB_FORMAT else None


class Entry(NamedTuple):
    """One value in the index. ``used``: it was read since it was written. ``time``: its last use, in Unix seconds."""

    digest: bytes
    edition: int
    segment: int
    used: int
    page: int
    nbytes: int
    time: int

    def encode(self) -> bytes:
        """Return the record."""
        return _sealed(_ENTRY.pack(*self))

    @classmethod
    def decode(cls, data: bytes, at: int) -> "Entry | None":
        """Return the entry at this place of a bucket; None: there is none, or it is torn."""
        entry = cls(*_ENTRY.unpack_from(data, at))
        return entry if entry.edition and _is_whole(data, at, _ENTRY.size) else None

    def is_at(self, other: "Entry") -> bool:
        """Return whether both mean the same bytes."""
        return self[:3] == other[:3] and self.page == other.page

    @property
    def at(self) -> int:
        """Return where in its segment the value begins."""
        return self.page * PAGE


class Row(NamedTuple):
    """One segment. ``birth``: the edition that its files were made with; 0: it has none.

    ``filled``: 0 while values may come, then a number that is higher the later that ended; ``values`` and ``nbytes``
    were stored in this edition; ``pages`` and ``names_bytes``: the ends of what is taken of both files.
    """

    edition: int = 0
    birth: int = 0
    filled: int = 0
    values: int = 0
    pages: int = 0
    names_bytes: int = 0
    nbytes: int = 0

    def encode(self) -> bytes:
        """Return the record."""
        return _sealed(_ROW.pack(*self))

    @property
    def age(self) -> tuple[bool, int]:
        """Return what puts rows in order: the one that was full first is the first, those to be filled are the last."""
        return not self.filled, self.filled or self.edition

    @classmethod
    def decode(cls, data: bytes, at: int) -> "Row":
        """Return the row at this place; one that was never used, or is torn or damaged, has no edition."""
        return cls(*_ROW.unpack_from(data, at)) if _is_whole(data, at, _ROW.size) else cls()


class Dead(NamedTuple):
    """The values of a segment that were deleted or replaced, if the segment is still of this edition."""

    edition: int = 0
    values: int = 0
    nbytes: int = 0

    def encode(self) -> bytes:
        """Return the record."""
        return _sealed(_DEAD.pack(*self))

    @classmethod
    def decode(cls, data: bytes, at: int) -> "Dead":
        """Return the record at this place."""
        return cls(*_DEAD.unpack_from(data, at)) if _is_whole(data, at, _DEAD.size) else cls()


class NameRecord(NamedTuple):
    """One value of a segment, with its name."""

    edition: int
    page: int
    nbytes: int
    time: int
    name: str

    def encode(self) -> bytes:
        """Return the record, padded so that the next one is aligned."""
        name = self.name.encode()
        head = _NAME.pack(self.edition, self.page, self.nbytes, self.time, len(name), 0)
        record = _sealed(head + name)
        return record + bytes(-len(record) % _ALIGN)


def name_records(data: bytes, edition: int) -> Iterator[NameRecord]:
    """Yield the records of this edition, up to the first one that is damaged."""
    at = 0
    while at + _NAME.size <= len(data):
        found_edition, page, nbytes, when, length, _ = _NAME.unpack_from(data, at)
        size = _NAME.size + length
        if found_edition != edition or not _is_whole(data, at, size):
            return
        yield NameRecord(edition, page, nbytes, when, data[at + _NAME.size : at + size].decode())
        at += size + _CRC.size
        at += -at % _ALIGN
