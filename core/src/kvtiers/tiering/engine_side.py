"""The ``EngineSide`` interface: what the manager needs of the composition root (``runtime.py``)."""

from collections.abc import Collection
from typing import Protocol

__all__ = ["EngineSide"]


class EngineSide(Protocol):
    """The region, the ranks, and the tiers' life. Nothing blocks but ``wait_ready`` and the two ``close`` methods."""

    def ready(self) -> bool:
        """Return whether all ranks have joined. Handles the region's events."""

    def take_lost_ranks(self) -> Collection[int]:
        """Return the ranks that were lost since the last call, or before and are not back; as of the last ``ready``."""

    def dma_may_run(self) -> bool:
        """Return whether a rank that was lost may still write into rows."""

    def wait_ready(self, timeout: float) -> None:
        """Block until all ranks have joined and all required tiers are open; StartError names who is missing."""

    def new_weights(self, version: str) -> None:
        """Make all later keys and values those of other weights."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights, as it stands in the names of values."""

    def tier_stats(self, name: str) -> dict[str, float]:
        """Return a tier's own figures. From any thread."""

    def close_tiers(self, timeout: float) -> None:
        """Drain and close the tiers within ``timeout`` seconds."""

    def close_region(self) -> None:
        """Release the region, after all its users."""
