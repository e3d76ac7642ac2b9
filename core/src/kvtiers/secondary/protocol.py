"""What the engine's side of a store tier and the side that does its I/O tell each other.

The same messages pass through a queue (``io: thread``) or a socket pair (``io: process``). Requests name chunks by raw
key and row; no bytes of values travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

from kvtiers.api import OffloadKey
from kvtiers.rows.names import StorageNames

__all__ = [
    "Event",
    "JobDone",
    "JobFailed",
    "JobReleased",
    "JobStarted",
    "Opened",
    "Probed",
    "Status",
    "StoreBackend",
    "StoreJob",
    "error_text",
]

_LONGEST_ERROR = 1_000


class Status(IntEnum):
    """What became of one value of a job; one byte each in ``JobDone.statuses``."""

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


class StoreJob(NamedTuple):
    """Move these chunks between their rows and the store.

    ``overwrites``: of a store, one byte a key; 1: written whatever is there, since what seemed to be there was not
    given. Empty for none.
    """

    job_id: int
    is_load: bool
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    overwrites: bytes = b""


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
    """Nothing touches the rows of a load any more, as was wished; its JobDone is still owed."""

    job_id: int


class Probed(NamedTuple):
    """Answers to a probe, for its first keys in order; one byte each, 1: present. ``error``: it could not be asked."""

    probe_id: int
    answers: bytes
    error: str = ""


Event: TypeAlias = Opened | JobStarted | JobFailed | JobDone | JobReleased | Probed


class StoreBackend(Protocol):
    """Where a store's I/O runs, seen from the engine's thread. Nothing here blocks but ``drain`` and ``close``."""

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the store is open; return "" then, else why it is not."""

    def send_job(self, job: StoreJob) -> bool:
        """Start a job under the names current now; False: there is no room for it."""

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Ask which of the keys the store has; of a prefix only as far as it is present. False: no room."""

    def set_names(self, names: StorageNames) -> None:
        """Use other names (another fingerprint) for all that is sent from now on."""

    def abandon(self, job_id: int) -> None:
        """Take note that nobody waits for this job any more; its JobDone is still owed."""

    def release(self, job_id: int) -> None:
        """Have a load leave its rows alone, if it can: then its JobReleased comes, though calls are still under way."""

    def flush(self) -> None:
        """Send what was collected since the last call."""

    def poll(self) -> Sequence[Event]:
        """Take the news, a bounded number of messages."""

    def restart(self, reason: str) -> None:
        """Begin anew, if that is possible: the store does not answer any more."""

    def log(self, level: int, text: str) -> None:
        """Write a line to the log, on another thread than the engine's."""

    def stats(self) -> dict[str, float]:
        """Return the store's own figures, as of its last report."""

    def drain(self, timeout: float) -> bool:
        """Wait until all jobs have ended; False if some have not within ``timeout`` seconds."""

    def close(self, timeout: float) -> None:
        """End it all; what has not ended within ``timeout`` seconds is dropped."""


def error_text(error: BaseException) -> str:
    """Return an exception in one line of bounded length, whatever somebody else's code has put into it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- a broken __str__
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_LONGEST_ERROR]
