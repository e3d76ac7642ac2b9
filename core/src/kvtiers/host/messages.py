"""The messages between the engine's side of a store tier and the side that does its I/O.

The same messages pass through a queue (``io: thread``) or a socket pair (``io: process``). Requests name chunks by raw
key and row; no bytes of values travel.
"""

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvtiers.api import OffloadKey

__all__ = [
    "SAY_ONCE",
    "Abandon",
    "Close",
    "Event",
    "Hello",
    "JobDone",
    "JobFailed",
    "JobReleased",
    "JobStarted",
    "Limits",
    "LogLine",
    "Message",
    "Names",
    "Opened",
    "Parts",
    "Probe",
    "Probed",
    "Release",
    "Report",
    "Request",
    "Stats",
    "Status",
    "StoreJob",
    "drop_oldest",
]

SAY_ONCE = 128
"""Added to a log line's level: a line with the same text is not written again. Each of a tier's hosts may find the
same, and every time that it opens its store; the engine's log is to have it once."""

Id: TypeAlias = Annotated[int, Meta(ge=0)]
Row: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Parts: TypeAlias = Sequence[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(gt=0)]]]
"""Where a value lies in the region of a client: offset and length in bytes of each part, one behind the other."""

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


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message between the two sides. Its ``tag`` and its fields, in their order, are the wire format."""


class Hello(Message, tag=1, frozen=True):
    """The first message to a host. ``document``: JSON, which a host of any release can read: see ``placement.py``."""

    document: str


class Names(Message, tag=2, frozen=True):
    """Use these names for all that follows (``StorageNames``)."""

    prefix: str
    layout_id: Annotated[bytes, Meta(min_length=8, max_length=8)]


class StoreJob(Message, tag=3, frozen=True):
    """Move these chunks between their rows and the store, or remove them from it.

    ``overwrites``: of a store, one byte a key; 1: written whatever is there, since what seemed to be there was not
    given. Empty for none. ``is_delete``: there are no rows, and DONE means that the value is not there any more.
    ``parts``: of a client's job, where each value lies in the client's region; one without parts lies in its row.
    Empty where all values do. ``keep_damaged``: of a load, a value that fails its check stays in the store.
    """

    job_id: Id
    is_load: bool
    keys: Sequence[OffloadKey]
    rows: Sequence[Row]
    overwrites: bytes = b""
    is_delete: bool = False
    parts: Sequence[Parts] = msgspec.field(default_factory=list)
    keep_damaged: bool = False

    def __post_init__(self) -> None:
        """Refuse a job whose fields contradict each other."""
        keys = len(self.keys)
        if len(self.rows) != (0 if self.is_delete else keys) or (self.is_load and self.is_delete):
            raise ValueError(f"job {self.job_id} has {keys} keys and {len(self.rows)} rows")
        if self.overwrites and (len(self.overwrites) != keys or self.is_load or self.is_delete):
            raise ValueError(f"job {self.job_id} has {keys} keys and {len(self.overwrites)} marks to overwrite")
        if self.parts and (len(self.parts) != keys or self.is_delete):
            raise ValueError(f"job {self.job_id} has {keys} keys and the parts of {len(self.parts)} values")


class Probe(Message, tag=4, frozen=True):
    """Say which of these keys the store has; of a prefix the answers may end after the first absence."""

    probe_id: Id
    keys: Sequence[OffloadKey]
    is_prefix: bool


class Abandon(Message, tag=5, frozen=True):
    """Begin nothing more for this job."""

    job_id: Id


class Close(Message, tag=6, frozen=True):
    """End the host within so many seconds."""

    seconds: float


class Release(Message, tag=7, frozen=True):
    """Detach this job from its memory: a load that uses bounce buffers, or any job of values in a client's region."""

    job_id: Id


class Limits(Message, tag=8, frozen=True):
    """The limits of one tier in one host that may change while it works; None: no limit, or ``threads`` less one."""

    threads: Annotated[int, Meta(ge=1)]
    store_threads: int | None = None
    bytes_per_second: int | None = None
    requests_per_second: float | None = None


class Opened(Message, tag=64, frozen=True):
    """The store is open (``error`` empty), or cannot be opened: that is tried again, and reported again.

    ``epoch``: that of the namespace in the store, "" if it was never bumped.
    """

    error: str = ""
    epoch: str = ""


class JobStarted(Message, tag=65, frozen=True):
    """The first value of a job is being moved."""

    job_id: Id


class JobFailed(Message, tag=66, frozen=True):
    """A job has failed, but something may still touch its rows; its JobDone follows when nothing does."""

    job_id: Id
    error: str


class JobDone(Message, tag=67, frozen=True):
    """A job has ended, and nothing touches its rows any more. ``statuses[i]`` is the Status of ``keys[i]``.

    ``seconds``: in which the host was busy with it, without those that it has reported for jobs before it.
    """

    job_id: Id
    statuses: bytes
    nbytes: Annotated[int, Meta(ge=0)]
    seconds: float
    retries: Annotated[int, Meta(ge=0)] = 0
    error: str = ""


class Probed(Message, tag=68, frozen=True):
    """Answers to a probe, for its first keys in order; one byte each, 1: present. ``error``: it could not be asked."""

    probe_id: Id
    answers: bytes
    error: str = ""


class Stats(Message, tag=69, frozen=True):
    """The store's figures."""

    figures: dict[str, float]


class LogLine(Message, tag=70, frozen=True):
    """A line for the engine's log. ``level``: as in ``logging``, below 128; SAY_ONCE may be added."""

    level: Annotated[int, Meta(ge=0, le=255)]
    text: str


class JobReleased(Message, tag=71, frozen=True):
    """Nothing writes into the memory of a job any more, as was requested; its JobDone still follows.

    What a store reads there from now on it does not keep. ``statuses``: of a load, DONE for each value that has landed.
    """

    job_id: Id
    statuses: bytes


Request: TypeAlias = Hello | Names | StoreJob | Probe | Abandon | Close | Release | Limits
"""What the engine sends."""

Event: TypeAlias = Opened | JobStarted | JobFailed | JobDone | JobReleased | Probed
"""What becomes of the store, of a job or of a question."""

Report: TypeAlias = Event | Stats | LogLine
"""What a host sends."""


def drop_oldest(remembered: dict[_Key, _Value], most: int) -> None:
    """Drop the oldest entries of a dict that has grown over ``most``, and an eighth of it more, 1,024 at most."""
    if len(remembered) > most:
        at_once = min(_DROPPED_AT_ONCE, most // 8)
        for oldest in list(itertools.islice(remembered, len(remembered) - most + at_once)):
            del remembered[oldest]
