"""The ``AdmissionPolicy`` interface: which chunks are worth a write to a tier, shortly before they leave the primary.

To add one, subclass ``AdmissionPolicy`` and declare an entry point in the group ``kvtiers.admission``; its name is what
``admission`` of a tier in the configuration says.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from kvtiers.api import OffloadKey
from kvtiers.plugins import ADMISSION_GROUP, load_subclass
from kvtiers.primary.eviction import EvictionPolicy

__all__ = ["AdmissionPolicy", "admission_class"]


class AdmissionPolicy(ABC):
    """The decisions of one tier. Keys are the primary's residents, unless they are said to have left.

    The cascade calls it on the engine's thread: no method blocks, and each should cost O(1) a chunk.
    """

    looked_at: Collection[OffloadKey]
    """Residents that were sent or declined. It changes with time."""
    missed: int
    """Chunks that were declined, left the primary, and were asked for again."""

    @abstractmethod
    def __init__(self, may_lose: float, chunks: int | None, writes_per_hour: float | None, now: float) -> None:
        """Start empty. ``may_lose``: share of all hits; ``chunks``: that the tier holds; ``writes_per_hour``: chunks.

        None: not known, and no bound. ``now``: seconds, by the clock of all other calls.
        """

    @staticmethod
    @abstractmethod
    def around(policy: EvictionPolicy, capacity: int, residents: Iterable[OffloadKey]) -> EvictionPolicy:
        """Return a policy that evicts as the given one does, and answers ``expected_reuse``.

        ``residents``: chunks that ``policy`` has already. Called where the eviction policy has no forecast of its own.
        """

    @abstractmethod
    def unsent(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return those of these chunks that were not sent."""

    @abstractmethod
    def choose(self, keys: Sequence[OffloadKey], odds: Sequence[float], now: float) -> list[OffloadKey]:
        """Return those of these chunks that are worth a write. ``odds``: the probability of each to be used again."""

    @abstractmethod
    def room(self, now: float) -> int | None:
        """Return how many chunks may be written now; None: there is no bound."""

    @abstractmethod
    def sent(self, keys: Collection[OffloadKey], *, written: bool) -> None:
        """Record that these chunks are on their way to the tier (``written``), or that a tier has them."""

    @abstractmethod
    def failed(self, keys: Iterable[OffloadKey]) -> None:
        """Record that these chunks were not stored: they are looked at again."""

    @abstractmethod
    def read(self, keys: Sequence[OffloadKey]) -> None:
        """Count hits."""

    @abstractmethod
    def computed(self, keys: Iterable[OffloadKey]) -> None:
        """Record that these chunks had to be computed."""

    @abstractmethod
    def left(self, keys: Sequence[OffloadKey]) -> int:
        """Record that these chunks are no longer resident; return how many left before they were looked at."""

    @abstractmethod
    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Handle chunks that are resident no longer, through no eviction."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all chunks; what was counted stays."""


def admission_class(name: str) -> type[AdmissionPolicy]:
    """Return the admission policy of this name; ConfigError, one line, if it cannot be used."""
    return load_subclass(ADMISSION_GROUP, name, "admission policy", AdmissionPolicy)  # type: ignore[type-abstract]
