"""The memory of a pool: three memfds, which the keeper makes and each of its processes maps.

::

    rows    the chunks. Ranks, tier hosts and the engine write it; the keeper reads it, to hash
    index   an entry a row: edition, key and hash of what it holds. The keeper writes it, the engine reads it
    plane   an edition and a last use a row. The engine writes it, the keeper reads it

An entry counts while its edition is the plane's. The engine raises a row's edition when it leases the row to a
writer, before a byte of it changes, so that no message is needed to make an entry void, and a process that is killed
in whatever instruction leaves no entry that counts for bytes which may have changed. The keeper hashes a row that it
is told of, looks at the edition again, and only then writes the entry: its edition last, after zero, which never
counts. Words are 32 or 64 bits, and are read and written at once; processors that show stores out of order (not x86)
have a system call between the two sides' steps.
"""

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtiers.api import OffloadKey, StartError
from kvtiers.region.memfd import HugePages, Mapping, create_memfd, map_memory

__all__ = ["LONGEST_KEY", "Index", "Plane", "Rows", "Shape", "counting", "open_again", "residents"]

_FORMAT = 1
"""Of index and plane. The next keeper takes over no memory of another one."""
_HEAD = struct.Struct("<8sIIQ32s")
_PREFIX_AT = 24
_HEAD_BYTES = 4096
_MAGIC = b"kvtPOOL\n"
LONGEST_KEY = 104
"""Bytes of a key; a chunk with a longer one is not found again by the next engine."""
_BODY = struct.Struct(f"<B3x16s{LONGEST_KEY}s")
_ENTRY = np.dtype([("edition", "<u4"), ("key_bytes", "u1"), ("zeros", "V3"), ("digest", "V16"), ("key", "V104")])
_DEPTHS = 1 << 12
_LOCK = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
_EXCLUSIVE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def open_again(fd: int, access: int) -> int:
    """Return another open file of this descriptor's, with an access and locks of its own."""
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


class Shape(NamedTuple):
    """What the rows hold: how many there are, bytes from one to the next, and the prefix of the chunks' names.

    The prefix has namespace, model and fingerprint in it: nothing of another one is ever found.
    """

    num_rows: int
    row_stride: int
    prefix: str

    def head(self) -> bytes:
        """Return the first bytes of the index."""
        return _HEAD.pack(
            _MAGIC, _FORMAT, self.num_rows, self.row_stride, hashlib.sha256(self.prefix.encode()).digest()
        )


class Rows:
    """The rows' memfd, by a descriptor of the keeper's own, and the keeper's mapping of it, to read."""

    def __init__(self, fd: int, nbytes: int, huge_pages: HugePages = "off") -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.mapping: Mapping = map_memory(fd, nbytes, nbytes, huge_pages, writable=False)

    def lend(self) -> int:
        """Return a descriptor that ``is_lent`` as long as any process has it, or a copy of it, open or mapped."""
        loan = open_again(self.fd, os.O_RDWR)
        fcntl.fcntl(loan, fcntl.F_OFD_SETLK, _LOCK)
        return loan

    def is_lent(self) -> bool:
        """Return whether any process has a descriptor of ``lend``."""
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _EXCLUSIVE)
        return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)

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
        head = bytes(self._view[: _HEAD.size])
        if head[:_PREFIX_AT] != shape.head()[:_PREFIX_AT] or not (writable or head == shape.head()):
            super().close()
            raise StartError("an index of other rows, or of another format")
        self._entries: npt.NDArray[np.void] = np.frombuffer(self._view, _ENTRY, shape.num_rows, _HEAD_BYTES)
        self.editions: npt.NDArray[np.uint32] = self._entries["edition"]
        if head != shape.head():
            self.rename(shape)  # where the keeper before this one was ended

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
        self.void(row)
        _BODY.pack_into(self._view, at + 4, len(key), digest, key)
        self.editions[row] = edition

    def rename(self, shape: Shape) -> None:
        """Forget all entries: chunks of other names follow."""
        self.clear()
        self._view[: _HEAD.size] = shape.head()

    def clear(self) -> None:
        """Forget all entries."""
        self.editions[:] = 0

    def void(self, row: int) -> None:
        """Let this row's entry count no longer."""
        self.editions[row] = 0

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self.editions, self._entries = np.empty(0, np.uint32), np.empty(0, _ENTRY)
        super().close()


class Plane(_Words):
    """Editions and last uses of all rows."""

    def __init__(self, fd: int, num_rows: int, *, writable: bool) -> None:
        super().__init__(fd, 12 * num_rows, writable=writable)
        self.editions: npt.NDArray[np.uint32] = np.frombuffer(self._view, np.uint32, num_rows, 8 * num_rows)
        self.uses: npt.NDArray[np.uint64] = np.frombuffer(self._view, np.uint64, num_rows)
        self._words = self._view[8 * num_rows :].cast("I")  # of one row: without making a number of numpy's
        self._uses = self._view[: 8 * num_rows].cast("Q")
        self._tick = int(self.uses.max()) // _DEPTHS + 1

    @classmethod
    def create(cls, num_rows: int) -> "Plane":
        """Make the plane of rows that were never leased."""
        fd = create_memfd("kvtiers-pool-plane", 12 * num_rows)
        os.fchmod(fd, 0o600)
        return cls(fd, num_rows, writable=False)

    def edition(self, row: int) -> int:
        """Return this row's edition."""
        return self._words[row]

    def renew(self, rows: Sequence[int]) -> None:
        """Begin another edition of these rows: what the index says of them is void."""
        words = self._words
        for row in rows:
            words[row] = ((words[row] + 1) & 0xFFFFFFFF) or 1

    def renew_all(self) -> None:
        """Do ``renew`` for all rows."""
        editions = self.editions
        editions += 1  # one that comes to zero counts as void until its row's next lease

    def use(self, rows: Sequence[int]) -> None:
        """Record that these rows, in the order of a prefix, were used now."""
        self._tick += 1
        uses, word, last = self._uses, self._tick * _DEPTHS, (self._tick + 1) * _DEPTHS - 1
        for row in rows:
            uses[row] = word
            word = min(word + 1, last)

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self.editions, self.uses = np.empty(0, np.uint32), np.empty(0, np.uint64)
        self._words, self._uses = memoryview(bytes(4)).cast("I"), memoryview(bytes(8)).cast("Q")
        super().close()


def counting(index: Index, plane: Plane) -> list[int]:
    """Return the rows whose entries count."""
    editions = index.editions
    rows: list[int] = np.flatnonzero((editions == plane.editions) & (editions != 0)).tolist()
    return rows


def residents(index: Index, plane: Plane) -> Iterator[tuple[list[OffloadKey], list[int]]]:
    """Yield the chunks whose entries count, and their rows: those of each use together, the oldest use first.

    Within a use in the order of the prefix. A chunk that is in two rows, since its first one was free and nothing had
    been written to it yet, is in the one used last.
    """
    rows = np.array(counting(index, plane), np.int64)
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
