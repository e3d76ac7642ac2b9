"""The interfaces of what the composition root (``runtime.py``) gives the manager: an engine's side, and besides it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from kvtiers.api import TierConfig
from kvtiers.types import ChunkBlocks, OffloadEvent

__all__ = ["EngineSide", "EventSide", "InStep", "LiveSide", "ShadowSide"]

InStep: TypeAlias = Callable[[Callable[[], Mapping[str, Any] | None]], Mapping[str, Any]]
"""Has a step of the engine do some work, and returns what that returned; CommandRefused if there was no step in time.
Work that returns None is called again in the next step."""


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


class ShadowSide(Protocol):
    """The shadow caches beside an engine. Nothing blocks but ``close``."""

    def request(
        self,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object],
    ) -> None:
        """Take a request that has ended."""

    def report(self) -> dict[str, Any]:
        """Return the last figures as plain data; empty while there are none. From any thread."""

    def close(self, timeout: float) -> None:
        """End within ``timeout`` seconds."""


class EventSide(Protocol):
    """The publisher of an engine's KV events. Nothing waits but ``close``; the first three on the engine's thread."""

    def take(self, changes: Sequence[OffloadEvent]) -> None:
        """Take what has changed in a step, in its order."""

    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take descriptions of chunks whose events may follow."""

    def cleared(self) -> None:
        """Take that nothing is anywhere any more."""

    def add_tier(self, tier: TierConfig) -> None:
        """Use what the config says of a tier. From any thread."""

    def report(self) -> Mapping[str, Any]:
        """Return what was published, and what was dropped, as plain data. From any thread."""

    def close(self, timeout: float) -> None:
        """Send what waits, and end, within about ``timeout`` seconds."""


class LiveSide(Protocol):
    """The config of a running engine, as far as an operator may change it. Not the engine's thread; may wait.

    All raise CommandRefused, one line, where they change nothing.
    """

    def limit(self, name: str, changes: Mapping[str, Any], in_step: InStep) -> Mapping[str, Any]:
        """Give a tier other threads, or another rate limit."""

    def reload(self, path: str, in_step: InStep) -> Mapping[str, Any]:
        """Apply the live options of the config's file, "" for that of the start."""

    def attach(self, name: str, path: str, in_step: InStep) -> Mapping[str, Any]:
        """Open a tier of the config's file."""

    def detach(self, name: str, in_step: InStep) -> Mapping[str, Any]:
        """Close a tier."""
