"""Claims: the use that a client's caller gives the tier hosts of a value in its own shared memory, for one call.

A claim is a record in the memory that client and hosts map, with a row number behind those of the rows: a job on it is
like any other. It says where the value's parts lie, and whether the call still goes on. A host that still works on a
value whose call has ended cannot be called back, so it asks::

    a store   hashes the parts, or copies them together, and asks then: the call was not over, so the bytes were those
              to be stored. Changed later, they do not fit the hash any more, which shows when they are read.
    a load    is checked in a bounce buffer, and copied from there while the host holds the record's lock; or read in
              place, where the call allows it, under the lock all the time.

A call that ends early takes the lock for itself, once, and writes that it is over: no host begins to write into its
memory after that. Where a host has the lock, the call waits until it has copied, or has been killed.

The locks are the kernel's record locks (``fcntl``): they end with their process, however it ends, and they order what
one process has written before what the other one reads after it. A process has no conflict with itself: claims are for
hosts alone.
"""

import contextlib
import fcntl
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

__all__ = ["RECORD_BYTES", "ClaimRevoked", "ClaimState", "ClaimTable", "HeldClaim"]

RECORD_BYTES = 4096
_HEAD = struct.Struct("<III")  # state, number of parts, whether it may be read in place
_PART = struct.Struct("<QQ")
_PARTS_AT = 16
_BLANK = bytes(_HEAD.size)


class ClaimState(IntEnum):
    """What may be done with a claim's memory."""

    REVOKED = 0
    """Nothing: its call is over, or there is none."""
    OPEN = 1
    LANDED = 2
    """It holds the value that it was to be loaded with; its call goes on."""


class ClaimTable:
    """The records in ``memory``, which is all of the mapped ``fd``: ``count`` of them, from byte ``at`` on.

    ``first``: the row number of the first one. ``region``: the memory that parts lie in.
    """

    MOST_PARTS = (RECORD_BYTES - _PARTS_AT) // _PART.size

    def __init__(self, fd: int, memory: memoryview, region: memoryview, *, first: int, at: int, count: int) -> None:
        self.memory = memory
        self.region = region
        self.first = first
        self.count = count
        self._fd = fd
        self._at = at
        self._is_closed = False

    # -- the client's side

    def open(self, row: int, parts: Sequence[tuple[int, int]], *, in_place: bool) -> None:
        """Open a claim on these parts of a value: (offset in the region, length), at most ``MOST_PARTS``."""
        at = self._record(row)
        _HEAD.pack_into(self.memory, at, ClaimState.REVOKED, len(parts), in_place)
        for place, part in enumerate(parts):
            _PART.pack_into(self.memory, at + _PARTS_AT + place * _PART.size, *part)
        _HEAD.pack_into(self.memory, at, ClaimState.OPEN, len(parts), in_place)

    def revoke(self, row: int) -> ClaimState | None:
        """End a claim and return its last state; None, and it goes on: a host is writing into its memory."""
        if self._is_closed:
            return ClaimState.REVOKED
        at = self._record(row)
        if not self._lock(at, fcntl.LOCK_EX):
            return None
        try:
            state = self._state(at)
            self.memory[at : at + len(_BLANK)] = _BLANK
        finally:
            self._unlock(at)
        return state

    def state(self, row: int) -> ClaimState:
        """Return a claim's state. No host is using it."""
        return ClaimState.REVOKED if self._is_closed else self._state(self._record(row))

    def close(self) -> None:
        """Drop the memory, when there are no hosts any more: no claim can be used then."""
        self._is_closed = True
        self.memory = self.region = memoryview(b"")
        self._fd = -1

    # -- a host's side

    def parts(self, row: int, nbytes: int) -> tuple[list[tuple[int, int]], bool]:
        """Return (offset, length) of each part of a value, and whether it may be read in place.

        ClaimRevoked if its call is over; IndexError if they are not ``nbytes``, or lie elsewhere.
        """
        at = self._record(row)
        state, count, in_place = _HEAD.unpack_from(self.memory, at)
        if state == ClaimState.REVOKED:
            raise ClaimRevoked
        end = len(self.region)
        found = [
            _PART.unpack_from(self.memory, at + _PARTS_AT + place * _PART.size)
            for place in range(min(count, self.MOST_PARTS))
        ]
        if sum(length for _, length in found) != nbytes or not all(
            0 < length <= end - offset for offset, length in found
        ):
            raise IndexError(f"claim {row} has no {nbytes} bytes")
        return found, bool(in_place)

    @contextlib.contextmanager
    def held(self, row: int) -> Iterator["HeldClaim"]:
        """Hold off the end of a claim meanwhile, unless it has come before (``is_open``)."""
        at = self._record(row)
        held = HeldClaim(self._lock(at, fcntl.LOCK_SH) and self._state(at) is not ClaimState.REVOKED)
        try:
            yield held
        finally:
            if held.has_landed:
                _HEAD.pack_into(self.memory, at, ClaimState.LANDED, *_HEAD.unpack_from(self.memory, at)[1:])
            if not held.is_kept:
                self._unlock(at)

    def unland(self, row: int) -> None:
        """Take back, within ``held``, that a claim's memory holds the value: other bytes are about to come."""
        at = self._record(row)
        _HEAD.pack_into(self.memory, at, ClaimState.OPEN, *_HEAD.unpack_from(self.memory, at)[1:])

    def release(self, row: int) -> None:
        """End a ``held`` that was kept: nothing of this process uses the claim's memory any more."""
        self._unlock(self._record(row))

    # -- inside

    def _record(self, row: int) -> int:
        if not 0 <= row - self.first < self.count:
            raise IndexError(f"no claim {row}; there are {self.count} from {self.first} on")
        return self._at + (row - self.first) * RECORD_BYTES

    def _state(self, at: int) -> ClaimState:
        return ClaimState(_HEAD.unpack_from(self.memory, at)[0])

    def _lock(self, at: int, kind: int) -> bool:
        try:
            fcntl.lockf(self._fd, kind | fcntl.LOCK_NB, 1, at)
        except BlockingIOError:
            return False
        return True

    def _unlock(self, at: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, at)


class HeldClaim:
    """A claim while its end is held off.

    ``is_kept``: a store kept a buffer, so it stays so, until ``release`` or the end of this process.
    """

    __slots__ = ("has_landed", "is_kept", "is_open")

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.has_landed = False
        self.is_kept = False


class ClaimRevoked(Exception):  # noqa: N818 -- the caller's doing, not the store's
    """A claim that is not open any more: its call is over."""
