"""The rank table: the state of each rank of a region, and the events about it.

::

    absent --> joined --> lost --> gone --> (another process of this rank may join)

    joined   its connection is there
    lost     its connection ended; the process, and its GPU's copies, may still touch the rows
    gone     its process has ended, or it has said that it has unmapped the region: nothing of it touches a row

The region's accept thread writes; any thread reads. The lock is never held during anything that can block.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

from kvtiers.api import StartError
from kvtiers.api.units import waitable
from kvtiers.region.state import SETTLED

__all__ = ["PrefaultEnded", "RankGone", "RankJoined", "RankLost", "RankTable", "RegionEvent"]


@dataclass(frozen=True, slots=True)
class RankJoined:
    """This rank has the region's memory."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """This rank's connection ended. Its jobs have failed; its rows are not free yet."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankGone:
    """Nothing of this rank can touch a row any more. Always follows its ``RankLost``."""

    rank: int


@dataclass(frozen=True, slots=True)
class PrefaultEnded:
    """No more rows will be populated ahead. ``error``: there is no memory for the rows from ``rows`` on."""

    rows: int
    error: str


RegionEvent: TypeAlias = RankJoined | RankLost | RankGone | PrefaultEnded


class RankTable:
    """The ranks of one region, by number.

    ``settled_first``: the region is ready only when its memory is populated and all ranks have settled, too: they have
    pinned all rows, or will pin no more.
    """

    def __init__(self, region: str, world_size: int, *, settled_first: bool = False) -> None:
        self._region = region
        self.world_size = world_size
        self._populating = settled_first
        self._settled_first = settled_first
        self._pinned: dict[int, int] = {}
        self._settled = 0
        self.least_pinned: int | None = None
        """Rows that all ranks have pinned which pin on; None where no rank does. Read without the lock."""
        self._events: SimpleQueue[RegionEvent] = SimpleQueue()
        self.are_quiet = self._events.empty
        self._changed = threading.Condition()
        self._joined: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._setback = ""  # a rank that will not come; moot once all have joined after all
        self._broken = ""
        self.all_joined = False
        """Every rank has joined, and none has been lost."""

    @property
    def all_ready(self) -> bool:
        """Every rank has joined, what else the region is to wait for has come, and nothing of it is broken."""
        if not self.all_joined or self._broken:
            return False
        return not self._settled_first or not (self._populating or self.pins)

    @property
    def pins(self) -> bool:
        """A rank that has joined pins rows, or has yet to say so."""
        return self._settled < len(self._joined)

    def pinned(self, rank: int, rows: int) -> bool:
        """Record that this rank has pinned so many rows, or (``SETTLED``) pins no more; return whether that is new."""
        with self._changed:
            if self._pinned.get(rank) == rows:
                return False
            self._pinned[rank] = rows
            self._count_pinned()
            self._changed.notify_all()
            return True

    def _count_pinned(self) -> None:
        pinning = [rows for rows in self._pinned.values() if rows != SETTLED]
        self._settled = len(self._pinned) - len(pinning)
        self.least_pinned = min(pinning, default=None)

    def occupant(self, rank: int) -> int | None:
        """Return the process that is this rank, or was and may still touch its rows."""
        with self._changed:
            return self._joined.get(rank, self._lost.get(rank))

    @property
    def lost(self) -> set[int]:
        """Ranks that are lost and not known to be gone."""
        with self._changed:
            return set(self._lost)

    @property
    def missing(self) -> list[int]:
        """Ranks that are not joined now."""
        with self._changed:
            return self._missing()

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._joined]

    def join(self, rank: int, pid: int) -> None:
        """Record that this process is now this rank."""
        with self._changed:
            self._joined[rank] = pid
            self.all_joined = not self._missing()
            self._post(RankJoined(rank, pid))

    def refuse(self, rank: int | None, reason: str) -> None:
        """Record that a rank of this engine was refused, so that waiting for it is in vain."""
        with self._changed:
            if not self.all_joined:
                self._setback = self._setback or f"{'a rank' if rank is None else f'rank {rank}'} was refused: {reason}"
            self._changed.notify_all()

    def lose(self, rank: int) -> None:
        """Record that this rank's connection has ended."""
        with self._changed:
            if not self.all_joined:
                pid = self._joined[rank]
                self._setback = self._setback or f"rank {rank} (process {pid}) ended before all ranks had joined"
            self._lost[rank] = self._joined.pop(rank)
            self.all_joined = False
            self._pinned.pop(rank, None)
            self._count_pinned()
            self._post(RankLost(rank))

    def forget(self, rank: int) -> None:
        """Record that nothing of this lost rank is left."""
        with self._changed:
            del self._lost[rank]
            self._post(RankGone(rank))

    def end_prefault(self, rows: int, error: str) -> None:
        """Record that pre-faulting has ended."""
        with self._changed:
            if error:
                self._broken = self._broken or f"its memory cannot be populated: {error}"
            self._populating = False
            self._post(PrefaultEnded(rows, error))

    def break_off(self, text: str) -> None:
        """Make the start fail: ``wait_all`` raises StartError with this text."""
        with self._changed:
            self._broken = self._broken or text
            self._changed.notify_all()

    def _post(self, event: RegionEvent) -> None:
        self._events.put(event)
        self._changed.notify_all()

    def take_events(self, timeout: float) -> list[RegionEvent]:
        """Return what happened since the last call, in order; wait up to ``timeout`` seconds for the first."""
        events: list[RegionEvent] = []
        try:
            events.append(self._events.get(timeout=waitable(timeout)) if timeout > 0 else self._events.get_nowait())
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            return events

    def wait_all(self, timeout: float, settling: float = 0.0) -> None:
        """Wait until all ranks are ready; StartError that names the ranks that did not join, or why they never will.

        ``settling``: the seconds more that ranks get to pin their rows once all have joined, where that is waited for.
        """
        deadline = time.monotonic() + waitable(timeout)
        with self._changed:
            while not self._broken and not self.all_ready:
                if self._setback and not self.all_joined:
                    raise StartError(f"{self._region}: {self._setback}")
                more = settling if self.all_joined else 0.0
                left = deadline + more - time.monotonic()
                if left <= 0:
                    raise StartError(f"{self._region}: {self._describe_unready(timeout + more)}")
                self._changed.wait(left)
            if self._broken:
                raise StartError(f"{self._region}: {self._broken}")

    def wait_pinned(self, rows: int, timeout: float) -> bool:
        """Wait until each rank has pinned so many rows, or will pin no more; return whether that came in time."""

        def are_pinned() -> bool:
            return all(self._pinned.get(rank, 0) >= rows for rank in range(self.world_size))

        with self._changed:
            return self._changed.wait_for(are_pinned, timeout)

    def _describe_unready(self, seconds: float) -> str:
        if not self.all_joined:
            return self.describe_missing(self._missing(), seconds)
        what = "populated" if self._populating else "pinned by all ranks"
        return f"its memory is not {what} after {seconds:.3g} s; raise the time, or write 'prefault: ahead'"

    def describe_missing(self, missing: Iterable[int], seconds: float) -> str:
        """Explain in one line that these ranks did not come, and what to look at."""
        ranks = ", ".join(map(str, missing))
        return (
            f"of {self.world_size} ranks these did not join within {seconds:.3g} s: {ranks}; are their workers "
            "started with this engine id, on this machine, as this user, in the same container (network namespace)?"
        )
