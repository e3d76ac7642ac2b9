"""The first two rungs of the contract: a blocking store of values, and its optional abilities.

A *value* is one chunk as a store sees it: a flat run of bytes whose length is a multiple of 4096, ending in a
64-byte seal that core writes and checks. A store gives back exactly the bytes it was given, or says that it has
none; it never looks inside.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from kvtiers.api.errors import NotKept

__all__ = [
    "ChunkStore",
    "Finding",
    "StoreEntry",
    "SupportsBatch",
    "SupportsDiagnosis",
    "SupportsListing",
    "SupportsPieces",
    "SupportsStats",
]


class ChunkStore(ABC):
    """The storage of one tier's values. Subclass it, write four methods, and core does the rest.

    Core's threads call these methods, several at once, and they may block; they never run on the engine's
    thread. Core brings the threads, retries, deadlines, the circuit breaker, integrity checks and metrics.

    Names have at most 250 characters, each of ``a-z 0-9 . _ - /``, with ``/`` between their parts; no part is empty,
    ``.`` or ``..``. (A namespace of 64 characters, a model of 64 and vLLM's hashes of 32 bytes give 227.)

    ``dst`` and ``src`` are flat 1-D views of bytes (``format "B"``), ``src`` over exactly one value. They are valid
    only during the call: a store copies what it keeps. A buffer kept after the call is detected and fails the job.

    An absent value is a return value, a failure is an exception, and what is not kept is ``NotKept``. A store of
    several servers of which one is lost raises if it can do nothing of what a call asks for; else it answers for the
    others, and for what lies on the lost one it answers "absent" (``write_many``: ``NotKept(reason, full=False)``), at
    once and not after a timeout each, and counts it in ``stats``.

    A store is used in the process that opened it, and must not fork without exec: a forked child has no access to the
    views, and is ended when it comes back from a call. Core opens one store in each tier host.

    Five failures in a row, or half of all calls in 30 s, take the whole tier out of use for a while (``breaker``).
    """

    transient_errors: ClassVar[tuple[type[Exception], ...]] = (ConnectionError, TimeoutError)
    """Exceptions after which the same call may succeed; core retries them inside the job's deadline."""

    asks_one_by_one: ClassVar[bool] = False
    """``exists`` is expensive for each name, as where it is a request each: so core asks for one name a call (up to
    256 otherwise), searches a prefix by bisection, takes everything below a hit as present, and does not ask before it
    writes an unknown value."""

    @abstractmethod
    def read_into(self, name: str, dst: memoryview) -> int:
        """Read the value of this name into the start of ``dst``; return the value's length in bytes.

        Return 0 if there is no such value, if it is empty, or if it is longer than ``dst``; what ``dst`` holds then,
        and behind a shorter value, does not matter. Raise on failure. May be called again for the same name, from
        several threads at once.
        """

    @abstractmethod
    def write(self, name: str, src: memoryview) -> None:
        """Keep the bytes of ``src`` (read-only) under this name, replacing any older value.

        Atomic: another reader, also one in another process, sees the old value, the new one or none, never a mix;
        and so it stays if this process is killed in the middle. Raise ``NotKept`` to drop the write: there is no room
        now, or ever for a value of this length (say the limit in its text). With ``full=False``: for another reason,
        as on a disk that is read-only. It is logged once and counted, and is no failure of the tier.
        """

    @abstractmethod
    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Return for each name, in order, whether ``read_into`` would find a value now."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove these values. A name that is absent is no error."""

    def close(self) -> None:
        """Release connections, threads, descriptors and child processes. Called once, after all other calls.

        Child processes that are left are killed with the tier host.
        """


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One value in a listing: its name, its length in bytes, and when it was written (Unix seconds), if known."""

    name: str
    nbytes: int
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that ``kvtiers check`` reports: how bad it is, what it is, and what to do about it."""

    level: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""


@runtime_checkable
class SupportsBatch(Protocol):
    """A store that moves several values a call, or a value that lies in several places in memory, by itself.

    Core moves all values by these two methods then; for any other store it makes them of ``read_into`` and ``write``, a
    value a call, and copies together first what lies in several places. A value is given as 1 to 64 flat views of
    bytes, one behind the other, each of any length but 0 and at any address: files and sockets take such lists as they
    are (``os.preadv``, ``socket.sendmsg``).
    """

    batch_values: int
    """At most so many values a call, an attribute of the class; core gives at most 32, and 16 MiB of values or one."""

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> Sequence[int]:
        """Do ``read_into`` for each name and the views of its ``dst``, in order; return the values' lengths, in order.

        The room of a ``dst`` is that of its views together. May be called from several threads at once, also for the
        same names. An exception fails all of them.
        """

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> Sequence[NotKept | None]:
        """Do ``write`` for each name and the views of its ``src``; return None for each value kept, in order.

        ``NotKept``, as an answer, drops that value; raised, it drops all of them. Each value is atomic, the call is
        not. An exception of another kind fails all of them.
        """


@runtime_checkable
class SupportsPieces(Protocol):
    """A store whose library gives it values in memory of its own, out of which ``read_into`` could only copy them.

    Core copies such a value into its row a piece at a time and hashes each piece while it is in the processor's cache;
    otherwise the check would read the whole value from memory a second time. Core's threads call both methods. A store
    with ``SupportsBatch`` is not asked.

    It pays for small values. Loads from an object store on the same machine (two processors) took 12 % less CPU time a
    byte than by ``read_into`` at 64 KiB, 10 % less at 256 KiB, some 5 % less at 512 KiB, and the same from 2 MiB on; at
    64 KiB they were 11 % faster. The same tier against itself differed by up to 6 %.
    """

    def reads_in_pieces(self, nbytes: int) -> bool:
        """Return whether values of this length are to be read by ``read_pieces``; the others are by ``read_into``."""

    def read_pieces(self, name: str, nbytes: int) -> Iterable[bytes | memoryview] | None:
        """Return the value of this name from its start to its end, in pieces of any length; None if there is none.

        None, before a piece, also if the value has another length than ``nbytes``. Core takes a piece before it asks
        for the next one, and keeps none. Raise on failure, also in the middle. May be called again for the same name.
        """


@runtime_checkable
class SupportsListing(Protocol):
    """A store that can say what it holds.

    Without it all works but ``quotas`` and ``kvtiers store`` (list, count, verify, prune, retire by a bump), and
    ``kvtiers check`` of a read-only tier reads no value. ``TierUnavailable`` or ``ConfigError``, one line, if it cannot
    list now, or as it is configured.
    """

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Yield every value whose name starts with ``prefix``, in any order, without loading values.

        May be left half way, as a generator that is closed; other calls may come between two values.
        """


@runtime_checkable
class SupportsDiagnosis(Protocol):
    """A store that can find out what is wrong with its backend or its settings."""

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the backend for values of this many bytes. May take seconds; called by ``kvtiers check``."""


@runtime_checkable
class SupportsStats(Protocol):
    """A store with figures of its own."""

    def stats(self) -> Mapping[str, float]:
        """Return current figures by name (lower case, underscores), exported as ``kvtiers_tier_<name>``.

        Called once a second while values move, by the thread that answers lookups, which wait meanwhile: it may take a
        lock and read counters, but asks no backend. At most 256 figures; what raises is left out that time.
        """
