"""Runs of values: what one transfer thread moves between rows and a store at a time, and what has come of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.host.messages import Parts, Status
from kvtiers.host.row_fence import RowFence
from kvtiers.layout.borrowed_views import LentValues, Loan
from kvtiers.layout.storage_name import StorageNames

__all__ = ["Moved", "ValueRun"]


@dataclass(frozen=True, slots=True)
class ValueRun:
    """Values to move: ``keys[i]`` lies in ``rows[i]``. No call begins after ``give_up_at`` or a False of ``wanted``.

    ``parts[i]``: where it lies in a client's region instead, if not empty (``StoreJob.parts``).
    """

    names: StorageNames
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    give_up_at: float
    wanted: Callable[[], bool] = lambda: True
    fence: RowFence = field(default_factory=RowFence)
    overwrites: bytes = b""
    """Of a store, a byte a key, or none; 1: written though the tier seems to have it."""
    parts: Sequence[Parts] = ()
    keep_damaged: bool = False
    """Of a load: a value that fails its check stays in the store."""

    def is_over(self) -> bool:
        """Return whether nothing more of it is to be begun."""
        return time.monotonic() >= self.give_up_at or not self.wanted()


@dataclass(slots=True)
class Moved:
    """The outcome of a run of values: a Status each, bytes moved, and the loans of which the store kept a buffer."""

    statuses: bytearray
    nbytes: int = 0
    retries: int = 0
    error: str = ""
    kept: list[Loan | LentValues] = field(default_factory=list)

    @classmethod
    def nothing(cls, count: int, error: str = "") -> "Moved":
        """Return the outcome of ``count`` values of which none was moved."""
        return cls(bytearray([Status.FAILED]) * count, error=error)
