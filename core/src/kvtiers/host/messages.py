"""The messages between the engine's side of a store tier and the side that does its I/O.

The same messages pass through a queue (``io: thread``) or a socket pair (``io: process``). Requests name chunks by raw
key and row; no bytes of values travel.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias, TypeVar

from kvtiers.api import OffloadKey

__all__ = [
    "SAY_ONCE",
    "Event",
    "JobDone",
    "JobFailed",
    "JobReleased",
    "JobStarted",
    "Limits",
    "Opened",
    "Probed",
    "Status",
    "StoreJob",
    "drop_oldest",
]

SAY_ONCE = 128
"""Added to a log line's level: a line with the same text is not written again. Each of a tier's hosts may find the
same, and every time that it opens its store; the engine's log is to have it once."""

_DROPPED_AT_ONCE = 1_024  # dropping one at a time would walk over the gaps of all dropped before

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Status(IntEnum):
    """The outcome of one value of a job; one byte each in ``JobDone.statuses``."""

    MISSING = 0
    """Not there (or of another length, format or layout)."""
    DONE = 1
    CORRUPT = 2
    """There, but not the bytes that were stored under this name."""
    FAILED = 3
    """The store raised, or there was no time left."""
    DROPPED = 4
    """The store was full."""
    PRESENT = 5
    """Nothing to write: the store has it already."""
    REFUSED = 6
    """The store could not take this value now, and takes others; the job's error says why."""
    NO_ROOM = 7
    """Not written: its tenant has no room under its quota."""


class StoreJob(NamedTuple):
    """Move these chunks between their rows and the store, or remove them from it.

    ``overwrites``: of a store, one byte a key; 1: written whatever is there, since what seemed to be there was not
    given. Empty for none. ``is_delete``: there are no rows, and DONE means that the value is not there any more.
    """

    job_id: int
    is_load: bool
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    overwrites: bytes = b""
    is_delete: bool = False


class Limits(NamedTuple):
    """The limits of one tier in one host that may change while it works; None: no limit, or ``threads`` less one."""

    threads: int
    store_threads: int | None = None
    bytes_per_second: int | None = None
    requests_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The store is open (``error`` empty), or cannot be opened: that is tried again, and reported again.

    ``epoch``: that of the namespace in the store, "" if it was never bumped.
    """

    error: str = ""
    epoch: str = ""


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The first value of a job is being moved."""

    job_id: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job has failed, but something may still touch its rows; its JobDone follows when nothing does."""

    job_id: int
    error: str


class JobDone(NamedTuple):
    """A job has ended, and nothing touches its rows any more. ``statuses[i]`` is the Status of ``keys[i]``.

    ``seconds``: in which the host was busy with it, without those that it has reported for jobs before it.

    A tuple, as is ``Probed``: these come all the time, and are built in half the time.
    """

    job_id: int
    statuses: bytes
    nbytes: int
    seconds: float
    retries: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class JobReleased:
    """Nothing touches the rows of a load any more, as was requested; its JobDone still follows."""

    job_id: int


class Probed(NamedTuple):
    """Answers to a probe, for its first keys in order; one byte each, 1: present. ``error``: it could not be asked."""

    probe_id: int
    answers: bytes
    error: str = ""


Event: TypeAlias = Opened | JobStarted | JobFailed | JobDone | JobReleased | Probed


def drop_oldest(remembered: dict[_Key, _Value], most: int) -> None:
    """Drop the oldest entries of a dict that has grown over ``most``."""
    if len(remembered) > most:
        for oldest in list(itertools.islice(remembered, len(remembered) - most + _DROPPED_AT_ONCE)):
            del remembered[oldest]
