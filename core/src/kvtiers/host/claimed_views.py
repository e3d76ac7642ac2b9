"""Claimed views: views of values that lie in a client's caller's memory, which may get it back at any time.

``region/claims.py`` says how a host finds out. A value's seal, and the value where it has to be in one piece, lie in
bounce buffers.
"""

from collections.abc import Sequence

from kvtiers.host.bounce_buffers import BounceBufferViews, copy_memory
from kvtiers.layout.borrowed_views import Place
from kvtiers.region.claims import ClaimRevoked, ClaimTable

__all__ = ["ClaimedViews"]


class ClaimedViews(BounceBufferViews):
    """Views of claimed values: their payloads in a caller's memory, seals and whole values in memory of this thread.

    ClaimRevoked where a method needs the parts of a value whose call is over.
    """

    def __init__(self, table: ClaimTable, value_bytes: int) -> None:
        super().__init__(memoryview(b""), 1, value_bytes)
        self.table = table

    def join(self, row: int, payload: int) -> None:
        """Copy a value's parts into its bounce buffer; ClaimRevoked if they may be any bytes by now."""
        super().join(row, payload)
        if not self._is_open(row):
            raise ClaimRevoked

    def is_in_place(self, row: int, payload: int) -> bool:
        """Return whether a value may be read straight into its parts."""
        return self.table.parts(row, payload)[1]

    def _payload(self, row: int, payload: int) -> list[Place]:
        region = self.table.region
        return [(region, offset, nbytes) for offset, nbytes in self.table.parts(row, payload)[0]]

    def is_given(self, row: int) -> bool:
        """Return whether the call was not over when the parts had been read."""
        return row in self._stage.joined or self._is_open(row)

    def _is_open(self, row: int) -> bool:
        with self.table.held(row) as held:
            return held.is_open

    def land(self, row: int, nbytes: int) -> bool:
        """Copy the first ``nbytes`` of the value into its parts; False, with nothing copied, if its call is over."""
        memory, [at] = self._places([row], [nbytes])
        with self.table.held(row) as held:
            if not held.is_open:
                return False
            self.table.unland(row)  # as another tier's host may have landed it: this one may die in the middle
            for offset, length in self.table.parts(row, nbytes)[0]:
                copy_memory(memory, at, self.table.region, offset, length)
                at += length
            held.has_landed = True
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Let the calls of those of the rows that are claims end: no buffer of theirs is kept any more."""
        for row in rows:
            if row >= self.table.first:
                self.table.release(row)
