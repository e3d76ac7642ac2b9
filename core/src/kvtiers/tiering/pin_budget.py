"""The pin budget: the most rows that jobs, reservations and quarantine may hold, of one tier and of all.

Rows are taken by a reservation and given back by it, nowhere else. It goes with its rows: from the lookup or the
completed store that makes it to the job that moves them, which releases it when it has ended.
"""

from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["PinBudget", "Reservation"]


class PinBudget:
    """The rows that each tier, and all tiers together, may hold: shares of all rows of the primary.

    A row that several tiers read counts for each of them.
    """

    def __init__(self, num_rows: int, all_tiers: float, one_tier: float) -> None:
        self.set_shares(num_rows, all_tiers, one_tier)
        self.held = 0
        """Rows that all tiers together hold."""

    def set_shares(self, num_rows: int, all_tiers: float, one_tier: float) -> None:
        """Use other shares from now on; what is held above them is not taken back."""
        # Never above the share, but for the one row that each gets. The small number is floating point's.
        self._all_rows = max(1, int(all_tiers * num_rows + 1e-9))
        self._tier_rows = max(1, int(one_tier * num_rows + 1e-9))

    @property
    def room_in_all(self) -> int:
        """Rows that all tiers together may still hold."""
        return max(0, self._all_rows - self.held)

    def room(self, slot: TierSlot) -> int:
        """Rows that this tier may still hold, by its own budget and that of all tiers."""
        return max(0, min(self._tier_rows - slot.metrics.pinned_rows, self._all_rows - self.held))

    def count_over(self, slot: TierSlot, chunks: int) -> None:
        """Count chunks for which this tier had no room, for the budget that has the least left."""
        if self._tier_rows - slot.metrics.pinned_rows <= self._all_rows - self.held:
            slot.metrics.over_one_tier += chunks
        else:
            slot.metrics.over_all_tiers += chunks

    def reserve(self, slot: TierSlot, rows: int = 0) -> "Reservation":
        """Set aside so many rows for a tier; the caller has checked that there is room for them."""
        slot.metrics.pinned_rows += rows
        self.held += rows
        return Reservation(self, slot, rows)

    def give_back(self, slot: TierSlot, rows: int) -> None:
        """Take so many rows back from a reservation of this tier: for ``Reservation`` alone."""
        slot.metrics.pinned_rows -= rows
        self.held -= rows


class Reservation:
    """Rows of the budgets that are set aside for one tier, until they are released, all at once or a few at a time."""

    __slots__ = ("_budget", "rows", "slot")

    def __init__(self, budget: PinBudget, slot: TierSlot, rows: int) -> None:
        self._budget = budget
        self.slot = slot
        self.rows = rows

    def add(self, rows: int) -> None:
        """Set aside so many rows more."""
        self._budget.reserve(self.slot, rows).move(rows, self)

    def release(self, rows: int | None = None) -> None:
        """Give back so many rows, or all; when all are back nothing more happens."""
        back = self.rows if rows is None else min(rows, self.rows)
        self.rows -= back
        self._budget.give_back(self.slot, back)

    def split(self, rows: int) -> "Reservation":
        """Return a reservation of so many of these rows; this one keeps the others."""
        part = Reservation(self._budget, self.slot, 0)
        self.move(rows, part)
        return part

    def move(self, rows: int, to: "Reservation") -> None:
        """Let another reservation of the same tier have so many of these rows."""
        self.rows -= rows
        to.rows += rows
