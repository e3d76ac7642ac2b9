"""The memory of a pool: memfds, which the keeper makes and its processes map.

::

    rows    the chunks. Ranks, tier hosts and the engines write it; the keeper reads it, to hash
    index   an entry a row: edition, key and hash of what it holds. The keeper writes it, the engines read it
    plane   an edition and a last use a row, and who reads it. The engines write it, the keeper reads it

The rows' memory is in *parts* of equal size, one for each engine, which alone writes it. The others read it. Chunks of
different sizes make different rows of the same memory: each such layout has an index and a plane of its own, its
*arena*. The names of a part's chunks begin with a prefix of its engine's, which the head of one index has: the part
is in that arena, and engines share what has the same prefix.

An entry counts while its edition is the plane's. The engine raises a row's edition when it leases the row to a
writer, before a byte of it changes, so that no message is needed to make an entry void, and a process that is killed
in whatever instruction leaves no entry that counts for bytes which may have changed. The keeper hashes a row that it
is told of, looks at the edition again, and only then writes the entry: its edition last, after zero, which never
counts. Words are 32 or 64 bits, and are read and written at once. Where processors show stores out of order (not x86)
a barrier stands between raising an edition and looking at pins. None stands between an entry's body and its edition:
there a reader may see an older body, whose key is in the hash that it checks, and takes the chunk for damaged. That was
read, not run.
"""

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtiers.api import OffloadKey, StartError
from kvtiers.region.memfd import HugePages, Mapping, create_memfd, map_memory

__all__ = [
    "LONGEST_KEY",
    "MOST_PARTS",
    "Index",
    "Plane",
    "Rows",
    "Shape",
    "claim",
    "counting",
    "end_claim",
    "is_lent",
    "open_again",
    "prefix_bytes",
    "residents",
]

_FORMAT = 3
"""Of index and plane. The next keeper takes over no memory of another one."""
_HEAD = struct.Struct("<8sIIQQ")  # magic, format, parts, bytes of all rows, bytes from one row to the next
_CHANGES = struct.Struct("<Q")  # behind the head: how often the keeper has changed something
_PARTS_AT = _HEAD.size + _CHANGES.size
_HEAD_BYTES = 1 << 14
_PART = struct.Struct("<QQ")  # how often it was named, the bytes of its prefix, which follows
_PART_BYTES = 1000
MOST_PARTS = _HEAD_BYTES // _PART_BYTES
_MAGIC = b"kvtPOOL\n"
LONGEST_KEY = 104
"""Bytes of a key; a chunk with a longer one is not found again by the next engine."""
_BODY = struct.Struct(f"<B3x16s{LONGEST_KEY}s")
_ENTRY = np.dtype([("edition", "<u4"), ("key_bytes", "u1"), ("zeros", "V3"), ("digest", "V16"), ("key", "V104")])
_DEPTHS = 1 << 12
_LATEST = 1 << 50
_MOST_TOUCHED = 1024


def _lock(kind: int, part: int) -> bytes:
    """Return the argument of fcntl(2) for the byte that stands for a part."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, part, 1, 0)


def is_lent(rows: int, part: int) -> bool:
    """Return whether any process has a descriptor of ``Rows.lend`` for this part, open or mapped.

    ``rows``: a descriptor of the rows, but not one of that loan.
    """
    found = fcntl.fcntl(rows, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, part))
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


def claim(loan: int, part: int) -> bool:
    """Return whether this loan has claimed a part, from now on or before: no other one can, as long as it is there."""
    try:
        fcntl.fcntl(loan, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, MOST_PARTS + part))
    except OSError:
        return False
    return True


def end_claim(loan: int, part: int) -> None:
    """Let other loans claim this part."""
    fcntl.fcntl(loan, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, MOST_PARTS + part))


def open_again(fd: int, access: int) -> int:
    """Return another open file of this descriptor's, with an access and locks of its own."""
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


def prefix_bytes(prefix: str) -> bytes:
    """Return the bytes of a part's prefix; StartError if these are none, or too many."""
    name, most = prefix.encode(), _PART_BYTES - _PART.size
    if not 0 < len(name) <= most:
        raise StartError(f"a prefix of {len(name)} bytes, expected 1 to {most}")
    return name


class Shape(NamedTuple):
    """How many bytes of memory there are, from one row to the next, and how many parts of the memory."""

    nbytes: int
    row_stride: int
    parts: int = 1

    @property
    def num_rows(self) -> int:
        """How many rows the memory has."""
        return self.nbytes // self.row_stride

    def head(self) -> bytes:
        """Return the first bytes of the index."""
        return _HEAD.pack(_MAGIC, _FORMAT, self.parts, self.nbytes, self.row_stride)

    def rows_of(self, part: int) -> range:
        """Return the rows that lie in a part: a row across the end of one, which others may write to, is in none."""
        start, end = (at * self.nbytes // self.parts for at in (part, part + 1))
        return range(-(-start // self.row_stride), end // self.row_stride)


class Rows:
    """The rows' memfd, by a descriptor of the keeper's own, and the keeper's mapping of it, to read."""

    def __init__(self, fd: int, nbytes: int, huge_pages: HugePages = "off") -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.mapping: Mapping = map_memory(fd, nbytes, nbytes, huge_pages, writable=False)

    def lend(self, part: int) -> int:
        """Return a descriptor for this part's engine, which ``is_lent`` as long as any process has a copy of it."""
        loan = open_again(self.fd, os.O_RDWR)
        fcntl.fcntl(loan, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, part))
        return loan

    def is_lent(self, part: int) -> bool:
        """Return whether any process has a descriptor of ``lend`` for this part, open or mapped."""
        return is_lent(self.fd, part)

    def close(self) -> None:
        """Unmap the rows and close the descriptor."""
        self.mapping.close()
        os.close(self.fd)


class _Words:
    """A mapped memfd. ``fd``: this object's own, closed where StartError is raised."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        self.fd = fd
        if (size := os.fstat(fd).st_size) < nbytes:
            self.detach()
            raise StartError(f"memory of {size} bytes, expected {nbytes}")
        self._mapping = map_memory(fd, nbytes, nbytes, writable=writable)
        self._view = self._mapping.view

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self._mapping.close()
        self._view = memoryview(b"")
        self.detach()

    def detach(self) -> None:
        """Close the descriptor in a forked child. The mapping does the same."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class Index(_Words):
    """The entries of all rows. StartError where the memory is another pool's, or of another format."""

    def __init__(self, fd: int, shape: Shape, *, writable: bool) -> None:
        super().__init__(fd, _HEAD_BYTES + shape.num_rows * _ENTRY.itemsize, writable=writable)
        self._shape = shape
        if bytes(self._view[: _HEAD.size]) != shape.head():
            super().close()
            raise StartError("an index of other rows, or of another format")
        self._entries: npt.NDArray[np.void] = np.frombuffer(self._view, _ENTRY, shape.num_rows, _HEAD_BYTES)
        self.editions: npt.NDArray[np.uint32] = self._entries["edition"]

    @staticmethod
    def parts_of(fd: int) -> int:
        """Return how many parts the rows of an index are in; StartError if it is of another format."""
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or head[:12] != _HEAD.pack(_MAGIC, _FORMAT, 0, 0, 0)[:12]:
            raise StartError("an index of another format")
        return int(_HEAD.unpack(head)[2])

    @classmethod
    def create(cls, shape: Shape) -> "Index":
        """Make an empty index, which its own descriptor's mode keeps other users from opening again."""
        fd = create_memfd("kvtiers-pool-index", _HEAD_BYTES + shape.num_rows * _ENTRY.itemsize)
        os.fchmod(fd, 0o600)
        os.pwrite(fd, shape.head(), 0)
        return cls(fd, shape, writable=True)

    def key(self, row: int) -> OffloadKey:
        """Return the key in this row's entry."""
        at = _HEAD_BYTES + row * _ENTRY.itemsize
        return bytes(self._view[at + 24 : at + 24 + self._view[at + 4]])

    def keys(self, rows: npt.NDArray[np.int64]) -> list[OffloadKey]:
        """Return the keys in these rows' entries."""
        entries = self._entries[rows]
        every, lengths = entries["key"].tobytes(), entries["key_bytes"].tolist()
        starts = range(0, LONGEST_KEY * len(lengths), LONGEST_KEY)
        return [every[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def digest(self, row: int) -> bytes:
        """Return the hash in this row's entry."""
        at = _HEAD_BYTES + row * _ENTRY.itemsize
        return bytes(self._view[at + 8 : at + 24])

    def write(self, row: int, edition: int, key: OffloadKey, digest: bytes) -> None:
        """Write an entry, which counts only when all of it is there."""
        at = _HEAD_BYTES + row * _ENTRY.itemsize
        self.editions[row] = 0
        _BODY.pack_into(self._view, at + 4, len(key), digest, key)
        self.editions[row] = edition
        self._count_change()

    def prefix(self, part: int) -> tuple[int, str]:
        """Return how often a part was named, and what the names of its chunks begin with; "": of none."""
        times, length = _PART.unpack_from(self._view, at := _PARTS_AT + part * _PART_BYTES)
        at += _PART.size
        return times, bytes(self._view[at : at + length]).decode(errors="replace")

    def rename(self, part: int, prefix: str) -> None:
        """Forget a part's entries: chunks of other names follow. StartError as of ``prefix_bytes``."""
        self._name(part, prefix_bytes(prefix))

    def release(self, part: int) -> None:
        """Forget a part's entries, and its name: it is no part of these."""
        self._name(part, b"")

    def _name(self, part: int, name: bytes) -> None:
        at = _PARTS_AT + part * _PART_BYTES
        self.clear(part)
        times, length = _PART.unpack_from(self._view, at)
        # It is never without a name meanwhile: a keeper that is killed here leaves the part in its arena.
        _PART.pack_into(self._view, at, times + 1, length)
        self._view[at + _PART.size : at + _PART.size + len(name)] = name
        _PART.pack_into(self._view, at, times + 1, len(name))
        self._count_change()

    @property
    def changes(self) -> int:
        """Another number after each change."""
        return int(_CHANGES.unpack_from(self._view, _HEAD.size)[0])

    def _count_change(self) -> None:
        _CHANGES.pack_into(self._view, _HEAD.size, self.changes + 1)

    def clear(self, part: int) -> None:
        """Forget a part's entries."""
        rows = self._shape.rows_of(part)
        self.editions[rows.start : rows.stop] = 0
        self._count_change()

    def void(self, row: int) -> None:
        """Let this row's entry count no longer."""
        self.editions[row] = 0
        self._count_change()

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self.editions, self._entries = np.empty(0, np.uint32), np.empty(0, _ENTRY)
        super().close()


class Plane(_Words):
    """Editions, last uses and pins of all rows. ``part``: that of the engine whose this object is."""

    def __init__(self, fd: int, shape: Shape, part: int = 0, *, writable: bool) -> None:
        rows, parts = shape.num_rows, shape.parts
        super().__init__(fd, (13 + parts) * rows, writable=writable)
        self.own = own = shape.rows_of(part)
        self.uses: npt.NDArray[np.uint64] = np.frombuffer(self._view, np.uint64, rows)
        self.editions: npt.NDArray[np.uint32] = np.frombuffer(self._view, np.uint32, rows, 8 * rows)
        self._touched: npt.NDArray[np.uint8] = np.frombuffer(self._view, np.uint8, rows, 12 * rows)
        self._pins: npt.NDArray[np.uint8] = np.frombuffer(self._view, np.uint8, parts * rows, 13 * rows)
        self._pins = self._pins.reshape(parts, rows)
        self._words = self._view[8 * rows : 12 * rows].cast("I")  # of one row: without making a number of numpy's
        self._uses = self._view[: 8 * rows].cast("Q")
        self._touches = self._view[12 * rows : 13 * rows]
        self._my_pins = self._view[(13 + part) * rows : (14 + part) * rows]
        latest = int(self.uses[own.start : own.stop].max(initial=0)) // _DEPTHS
        if latest > _LATEST:  # no engine comes so far: some process has written here that should not have
            self.uses[own.start : own.stop] = latest = 0
        self._tick = latest + 1

    @classmethod
    def create(cls, shape: Shape) -> "Plane":
        """Make the plane of rows that were never leased."""
        fd = create_memfd("kvtiers-pool-plane", (13 + shape.parts) * shape.num_rows)
        os.fchmod(fd, 0o600)
        return cls(fd, shape, writable=True)

    def edition(self, row: int) -> int:
        """Return this row's edition."""
        return self._words[row]

    def renew(self, rows: Sequence[int]) -> None:
        """Begin another edition of these rows: what the index says of them is void."""
        words = self._words
        for row in rows:
            words[row] = ((words[row] + 1) & 0xFFFFFFFF) or 1

    def renew_all(self) -> None:
        """Do ``renew`` for all rows of this engine's."""
        editions = self.editions[self.own.start : self.own.stop]
        editions += 1  # one that comes to zero counts as void until its row's next lease

    def use(self, rows: Sequence[int]) -> None:
        """Record that these rows, in the order of a prefix, were used now."""
        self._tick += 1
        uses, own, touches = self._uses, self.own, self._touches
        word, last = self._tick * _DEPTHS, (self._tick + 1) * _DEPTHS - 1
        for row in rows:
            if row in own:
                uses[row] = word
            else:
                touches[row] = 1
            word = min(word + 1, last)

    def take_touched(self) -> list[int]:
        """Return rows of this engine's that others have used since they were last returned, not all at once."""
        touched = self._touched[self.own.start : self.own.stop] != 0  # an array that others do not write to meanwhile
        rows: list[int] = (np.flatnonzero(touched)[:_MOST_TOUCHED] + self.own.start).tolist()
        for row in rows:
            self._touches[row] = 0
        return rows

    def pin(self, places: Iterable[tuple[int, int]]) -> list[bool]:
        """Keep other engines' rows as they are until ``unpin``; False, and no pin, for one of another edition."""
        pins, words = self._my_pins, self._words
        pinned = []
        for row, edition in places:
            pins[row] = 1
            pinned.append(is_same := words[row] == edition)
            if not is_same:
                pins[row] = 0
        return pinned

    def unpin(self, rows: Sequence[int]) -> None:
        """End the pins of these rows."""
        pins = self._my_pins
        for row in rows:
            pins[row] = 0

    def pinned(self, rows: Sequence[int]) -> list[int]:
        """Return those of these rows that others have pinned. After ``renew`` and a barrier: nobody pins more."""
        pinned = self._pins[:, list(rows)].any(axis=0)  # this engine's own are of others' rows
        return [rows[at] for at in np.flatnonzero(pinned).tolist()]

    def all_pinned(self) -> list[int]:
        """Return the rows of this engine's that others have pinned."""
        rows: list[int] = np.flatnonzero(self._pins[:, self.own.start : self.own.stop].any(axis=0)).tolist()
        return [row + self.own.start for row in rows]

    def unpin_all(self, part: int) -> None:
        """End all pins of a part's engine, which has ended."""
        self._pins[part] = 0

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self.editions, self.uses = np.empty(0, np.uint32), np.empty(0, np.uint64)
        self._touched = self._pins = np.empty(0, np.uint8)
        self._words, self._uses = memoryview(bytes(4)).cast("I"), memoryview(bytes(8)).cast("Q")
        self._touches = self._my_pins = memoryview(b"")
        super().close()


def counting(index: Index, plane: Plane, rows: range) -> list[int]:
    """Return those of these rows whose entries count."""
    editions = index.editions[rows.start : rows.stop]
    counts = (editions == plane.editions[rows.start : rows.stop]) & (editions != 0)
    found: list[int] = (np.flatnonzero(counts) + rows.start).tolist()
    return found


def residents(index: Index, plane: Plane, part: range) -> Iterator[tuple[list[OffloadKey], list[int]]]:
    """Yield a part's chunks whose entries count, and their rows: those of each use together, the oldest use first.

    Within a use in the order of the prefix. A chunk that is in two rows, since its first one was free and nothing had
    been written to it yet, is in the one used last.
    """
    rows = np.array(counting(index, plane, part), np.int64)
    uses = plane.uses[rows]
    order = np.argsort(uses, kind="stable")
    rows, ticks = rows[order], uses[order] // _DEPTHS
    keys = index.keys(rows)
    last = dict(zip(keys, rows.tolist(), strict=True))
    if len(last) < len(keys):
        once = np.array([last[key] for key in keys], np.int64) == rows
        rows, ticks = rows[once], ticks[once]
        keys = [key for key, is_last in zip(keys, once.tolist(), strict=True) if is_last]
    changes = (np.flatnonzero(np.diff(ticks)) + 1).tolist()
    for start, end in pairwise([0, *changes, len(keys)] if keys else ()):
        yield keys[start:end], rows[start:end].tolist()
