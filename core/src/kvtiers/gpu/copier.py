"""The interface of copiers: synchronous for tensors in host memory, asynchronous for CUDA's."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from kvtiers.api import KvtiersError
from kvtiers.region.client import RegionJoin
from kvtiers.types import BlockSpec

__all__ = ["Copier", "Copy", "CudaError", "Lane", "LostDeviceError"]

Lane: TypeAlias = Literal["store", "load", "expedited"]
"""Copies of a lane run one after the other, in the order of their jobs; lanes do not wait for each other."""


class CudaError(KvtiersError):
    """A call of the CUDA driver failed; the context still works."""


class LostDeviceError(Exception):
    """The CUDA context is lost: this process can make no more copies."""


class Copy(Protocol):
    """One job's copy. ``nbytes``: bytes started so far; ``seconds``: its duration, once it has ended."""

    nbytes: int
    seconds: float

    def advance(self) -> bool:
        """Start the next piece; False: all have been started. May wait until an earlier piece has ended. Raises."""

    def ended(self) -> bool:
        """Return whether every piece that was begun has ended, without waiting; then raises if one has failed."""

    def wait(self) -> None:
        """Wait until every piece that was begun has ended, or failed."""


class Copier(Protocol):
    """Makes copies for one rank. ``mark`` belongs to the engine's thread, all else to the copy thread."""

    def mark(self) -> Any:
        """Mark the work that the engine's device has queued now; a copy with this mark runs after it. Raises."""

    def attach(self, region: RegionJoin, is_busy: Callable[[], bool]) -> None:
        """Use this region, which is ready. ``is_busy``: whether the engine works now; from any thread."""

    def detach(self) -> None:
        """Wait for the copies in flight, and release the region. May be called again."""

    def copy(self, lane: Lane, blocks: BlockSpec, chunk_ids: npt.NDArray[Any], mark: Any) -> Copy:
        """Prepare a copy; GeometryError if its geometry does not add up."""

    def close(self) -> None:
        """Free what it holds."""
