"""The state of one prefetch: its keys on their way from given to loaded, what is in flight, and its figures.

::

    given --asked--> found --submitted--> loaded
          resident           missing      failed
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtiers.api import OffloadKey
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import Reservation, TierSlot

__all__ = ["Bandwidth", "Flight", "Prefetch"]

_FIRST_QUESTION, _LONGEST_QUESTION = 8, 256  # keys
_SOON, _LATE = 0.005, 0.020  # seconds to an answer: the next question is longer, or shorter
_BURST_SECONDS = 0.1  # of a bandwidth limit


class Bandwidth:
    """A bandwidth limit: a token bucket of bytes."""

    def __init__(self, bytes_per_second: float, least: int, now: float) -> None:
        self._rate = bytes_per_second
        self._most = max(float(least), bytes_per_second * _BURST_SECONDS)
        self._left = float(least)
        self._at = now

    def chunks(self, nbytes: int, now: float) -> int:
        """Return how many chunks of this size may be loaded now."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        return int(self._left / nbytes)

    def take(self, nbytes: int) -> None:
        """Count bytes as loaded."""
        self._left -= nbytes


@dataclass(slots=True, eq=False)
class Flight:
    """A job in flight. ``reserved``: its rows of the budgets, until they are released."""

    slot: TierSlot
    reserved: Reservation
    state: RequestState
    keys: Sequence[OffloadKey]
    landed: list[OffloadKey] = field(default_factory=list)

    def owns(self, slot: TierSlot) -> int:
        """Return how many chunks this tier is loading for it."""
        return len(self.keys) if slot is self.slot and not self.state.lost else 0


@dataclass(slots=True, eq=False)
class Prefetch:
    """One prefetch, and what has come of its keys so far. ``ended``: why it has ended; "" while it goes on.

    ``tiers``: the names of those to load from, in the config's order; None: all. ``is_complete``: no more keys will be
    given.
    """

    tiers: Collection[str] | None = None
    most_chunks: float = math.inf
    bandwidth: Bandwidth | None = None
    is_complete: bool = False
    ended: str = ""
    given: int = 0
    loaded: int = 0
    resident: int = 0
    """Keys whose chunk was in the primary already."""
    missing: int = 0
    """Keys that no tier has, or that are no chunk's."""
    failed: int = 0
    heard_at: float = 0.0
    is_closed: bool = False
    """Its last figures have been taken."""
    number: int = 0
    run: str = ""
    """The request id under which the policy sees the chunks of the present prefix."""
    waiting: deque[OffloadKey | None] = field(default_factory=deque)
    """Keys in order; None: the end of a prefix."""
    asking: list[OffloadKey] = field(default_factory=list)
    asked_at: float = 0.0
    question: int = _FIRST_QUESTION
    found: deque[tuple[TierSlot, OffloadKey]] = field(default_factory=deque)
    flights: list[Flight] = field(default_factory=list)
    storing: list[Reservation] = field(default_factory=list)
    """Chunks that are being stored in the near tier."""

    @property
    def is_warm_up(self) -> bool:
        """It is an operator's, and not a prefix's."""
        return self.number > 0

    @property
    def in_flight(self) -> int:
        """Chunks on their way."""
        return sum(len(flight.keys) for flight in self.flights)

    @property
    def is_moving(self) -> bool:
        """Something of it is in flight."""
        return bool(self.flights or self.storing)

    def has_work(self) -> bool:
        """Return whether there is something to be done for it in the next steps."""
        left = self.waiting or self.asking or self.found or self.is_moving
        return bool(left or (self.is_complete and not self.ended))

    def give(self, keys: Sequence[OffloadKey], *, ends_prefix: bool) -> None:
        """Take in keys, the head of a prefix first."""
        self.waiting.extend(keys)
        self.given += len(keys)
        if ends_prefix and keys:
            self.waiting.append(None)

    def is_over(self) -> bool:
        """Return whether nothing of it is left to do or in flight."""
        left = self.waiting or self.asking or self.found or self.is_moving
        if self.is_complete and not (self.ended or left):
            self.ended = "done"
        return bool(self.ended) and not self.is_moving

    def answered_in(self, seconds: float) -> None:
        """Make the next question longer or shorter, by the time to the answer of this one."""
        if seconds <= _SOON:
            self.question = min(_LONGEST_QUESTION, self.question * 2)
        elif seconds > _LATE:
            self.question = max(1, self.question // 2)

    def stop(self, why: str) -> None:
        """Begin nothing more."""
        self.ended = self.ended or why
        self.waiting.clear()
        self.asking.clear()
        self.found.clear()

    def figures(self, chunk_bytes: int) -> dict[str, Any]:
        """Return its figures as plain data."""
        return {
            "id": self.number,
            "given": self.given,
            "loaded": self.loaded,
            "loaded_bytes": self.loaded * chunk_bytes,
            "resident": self.resident,
            "missing": self.missing,
            "failed": self.failed,
            "in_flight": self.in_flight,
            "waiting": sum(key is not None for key in self.waiting) + len(self.asking) + len(self.found),
            "ended": self.ended if self.is_closed or not self.is_moving else "",
        }
