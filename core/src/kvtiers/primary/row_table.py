"""The row table: the state of each row of the primary.

One signed number a row, its state, and the key that the row is bound to::

    state       key      the row is
    -2          none     free
    -1          a key    pending: leased to one writer, not readable
     0          a key    ready, without readers
     n > 0      a key    ready, with n readers
    -1, n > 0   none     in quarantine: its chunk is forgotten, but the writer or n readers may still touch it

A row stays leased until what leased it completes, so a completion by row is never about another lease of it.

In a pool only some of the rows are this engine's (``own``), and the others are never allocated. One of those that is
*borrowed* has a key, and one reader more than there are: the loan itself.
Completing a row that is not leased that way (a plan completed twice) changes nothing and is counted as ``misuse``.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvtiers.api import OffloadKey

__all__ = ["RowTable"]

_FREE = -2
_PENDING = -1


class RowTable:
    """The states of all rows. Engine's thread only; every method takes a batch.

    ``free + closed + pending + idle + pinned + quarantined + retired == num_rows`` at all times, idle being the ready
    rows without a reader, and closed the fresh ones that are not opened yet. Borrowed rows come on top of that.
    """

    def __init__(self, num_rows: int, own: range | None = None) -> None:
        """Start with all rows free. ``own``: those that may be allocated, of ``num_rows``; None: all."""
        self._own = own = range(num_rows) if own is None else own
        self._all_rows = num_rows
        self.num_rows = len(own)
        self.pending = 0
        self.idle = 0
        self.pinned = 0
        self.quarantined = 0
        self.retired = 0
        self.misuse = 0
        self.state = [_FREE] * num_rows  # for others to read
        self._key_of: list[OffloadKey | None] = [None] * num_rows
        # The row that was freed last goes first, then fresh ones in increasing order: memory is populated and pinned
        # ahead of the highest row that was ever used, so that what is used again costs none.
        self._next_fresh = own.start
        self._freed: list[int] = []
        self._end = own.stop
        self._opened = num_rows
        self._wanted = 0
        self.leaving: set[int] = set()
        """Retired rows that hold a chunk, or that a lease holder may still touch."""

    @property
    def free(self) -> int:
        """The number of rows that can be allocated."""
        return max(0, min(self._opened, self._end) - self._next_fresh) + len(self._freed)

    @property
    def closed(self) -> int:
        """How many fresh rows may not be allocated yet."""
        return max(0, self._end - max(self._opened, self._next_fresh))

    def open(self, rows: int) -> None:
        """From now on, allocate fresh rows only among the first ``rows``; others that were used before stay in use."""
        self._opened = rows

    @property
    def wanted(self) -> int:
        """Rows, from the first, that were used since all chunks were last forgotten or that wait to be opened."""
        return max(self._next_fresh, self._wanted)

    def want(self, fresh: int) -> None:
        """Take note that so many fresh rows more were wanted: memory for them is to be made ready, if there are any."""
        if self._opened < self._end:
            self._wanted = min(self._next_fresh + fresh, self._end)

    def allocate(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Lease one free row for each key to a writer."""
        assert len(keys) <= self.free, "more rows allocated than are free"
        again = min(len(keys), len(self._freed))
        rows: list[int] = []
        if again:
            rows += self._freed[: -again - 1 : -1]
            del self._freed[-again:]
        if (fresh := len(keys) - again) > 0:
            rows += range(self._next_fresh, self._next_fresh + fresh)
            self._next_fresh += fresh
        state, key_of = self.state, self._key_of
        for key, row in zip(keys, rows, strict=True):
            state[row] = _PENDING
            key_of[row] = key
        self.pending += len(rows)
        return rows

    def adopt(self, row_of: Mapping[OffloadKey, int]) -> None:
        """Begin with these chunks in these rows, ready and without readers. All rows count as used before."""
        for key, row in row_of.items():
            self.state[row] = 0
            self._key_of[row] = key
        self.idle = len(row_of)
        if row_of:
            self._next_fresh = self._own.stop
            self._freed = [row for row in reversed(self._own) if self.state[row] == _FREE]

    def borrow(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Bind these rows of another engine to these keys, as if a write to them were in flight."""
        state, key_of = self.state, self._key_of
        for key, row in zip(keys, rows, strict=True):
            state[row] = _PENDING
            key_of[row] = key
        self.pending += len(rows)

    def give_back(self, rows: Sequence[int]) -> tuple[list[int], list[OffloadKey]]:
        """Free those of these borrowed rows that nobody reads; return them, and the keys that they were bound to."""
        state, key_of = self.state, self._key_of
        gone = [row for row in rows if state[row] == 1]
        keys = []
        for row in gone:
            key, state[row], key_of[row] = key_of[row], _FREE, None
            if key is None:  # a reset came first
                self.quarantined -= 1
            else:
                keys.append(key)
        self.pinned -= len(keys)
        return gone, keys

    def is_ready(self, row: int) -> bool:
        """Return whether this row holds a readable chunk."""
        return self.state[row] >= 0 and self._key_of[row] is not None

    def is_own(self, row: int) -> bool:
        """Return whether this row is this engine's."""
        return row in self._own

    def is_free(self, row: int) -> bool:
        """Return whether this row has neither a chunk nor a lease."""
        return self.state[row] == _FREE

    def keys_of(self, rows: Iterable[int]) -> list[OffloadKey]:
        """Return the keys that these rows are bound to, of those that are."""
        return [key for key in map(self._key_of.__getitem__, rows) if key is not None]

    def evict(self, rows: Sequence[int]) -> None:
        """Free these idle rows."""
        state, key_of = self.state, self._key_of
        for row in rows:
            assert state[row] == 0, "evicted a row that is in use"
            state[row] = _FREE
            key_of[row] = None
        if self.leaving:
            for row in rows:
                self._put_back(row)
        else:
            self._freed += [row for row in rows if row in self._own]
        self.idle -= len(rows)

    def retire(self, end: int) -> None:
        """Never allocate this row or a higher one again. Those that are not free are ``leaving``, until they are."""
        self._end = min(self._end, end)
        self._freed = [row for row in self._freed if row < self._end]
        self.leaving = {row for row in range(self._end, self._next_fresh) if self.state[row] != _FREE}
        self.retired = self._own.stop - self._end - len(self.leaving)

    def any_pending(self, rows: Sequence[int]) -> bool:
        """Return whether one of these bound rows is not readable yet."""
        return bool(self.pending) and min(map(self.state.__getitem__, rows), default=0) == _PENDING

    def count_pending(self, rows: Sequence[int]) -> int:
        """Return how many of these bound rows are not readable yet."""
        return list(map(self.state.__getitem__, rows)).count(_PENDING) if self.pending else 0

    def idle_keys(self, rows: Collection[int]) -> list[OffloadKey]:
        """Return the keys of those of these rows that are ready and have no readers."""
        return [key for row in rows if not self.state[row] and (key := self._key_of[row]) is not None]

    def pin(self, rows: Sequence[int]) -> list[OffloadKey]:
        """Add one reader to each of these ready rows; return the keys of those that had none."""
        state, key_of = self.state, self._key_of
        first: list[OffloadKey] = []
        for row in rows:
            readers = state[row]
            if not readers:
                first.append(key_of[row])  # type: ignore[arg-type]  # a ready row has a key
            state[row] = readers + 1
        self.idle -= len(first)
        self.pinned += len(first)
        return first

    def unpin(self, rows: Sequence[int]) -> list[OffloadKey]:
        """Take one reader from each of these rows; return the keys of those that have none left."""
        state, key_of = self.state, self._key_of
        last: list[OffloadKey] = []
        for row in self._real(rows):
            readers = state[row]
            if readers <= 0:
                self.misuse += 1
                continue
            state[row] = readers - 1
            if readers > 1:
                continue
            key = key_of[row]
            if key is None:
                self._release(row)
            else:
                last.append(key)
        self.pinned -= len(last)
        self.idle += len(last)
        return last

    def complete_write(
        self, rows: Sequence[int], success: bool, landed: Collection[OffloadKey] = (), readers: int = 0
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """End the lease of these rows' writer; return the keys that became readable and those that are lost.

        Without ``success`` only the keys in ``landed`` became readable. They start with this many readers.
        """
        state, key_of = self.state, self._key_of
        readable: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        for row in self._real(rows):
            if state[row] != _PENDING:
                self.misuse += 1
                continue
            key = key_of[row]
            if key is None:
                self._release(row)
            elif success or key in landed:
                state[row] = readers
                readable.append(key)
            else:
                lost.append(key)
                state[row] = _FREE
                key_of[row] = None
                self._put_back(row)
        self.pending -= len(readable) + len(lost)
        if readers:
            self.pinned += len(readable)
        else:
            self.idle += len(readable)
        return readable, lost

    def abandon(self, rows: Sequence[int]) -> list[OffloadKey]:
        """Forget the chunks of these pending rows and return their keys; the writer keeps the rows."""
        forgotten: list[OffloadKey] = []
        for row in self._real(rows):
            key = self._key_of[row]
            if self.state[row] != _PENDING:
                self.misuse += 1
            elif key is not None:  # else a reset came first
                self._key_of[row] = None
                forgotten.append(key)
        self.pending -= len(forgotten)
        self.quarantined += len(forgotten)
        return forgotten

    def forget_all(self) -> None:
        """Forget all chunks. Rows with a writer or readers go to quarantine, all others are free."""
        held = [row for row, state in enumerate(self.state) if state > 0 or state == _PENDING]
        states = [self.state[row] for row in held]
        self.state = [_FREE] * self._all_rows
        self._key_of = [None] * self._all_rows
        for row, state in zip(held, states, strict=True):
            self.state[row] = state
        self.leaving = {row for row in held if self._end <= row < self._own.stop}
        self.retired = self._own.stop - self._end - len(self.leaving)
        if held:
            untouchable = set(held)
            usable = min(self._next_fresh, self._end)
            self._freed = [row for row in range(usable - 1, self._own.start - 1, -1) if row not in untouchable]
        else:
            self._freed = []
            self._next_fresh = self._own.start
        self.pending = self.idle = self.pinned = 0
        self.quarantined = len(held)

    def _release(self, row: int) -> None:
        self.state[row] = _FREE
        self._put_back(row)
        self.quarantined -= 1

    def _put_back(self, row: int) -> None:
        if row not in self._own:
            return  # its owner's
        if row < self._end:
            self._freed.append(row)
        else:
            self.leaving.discard(row)
            self.retired += 1

    def _real(self, rows: Sequence[int]) -> Sequence[int]:
        if not rows or (min(rows) >= 0 and max(rows) < self._all_rows):
            return rows
        real = [row for row in rows if 0 <= row < self._all_rows]
        self.misuse += len(rows) - len(real)
        return real
