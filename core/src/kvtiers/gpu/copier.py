"""What the worker knows of a copy, whoever makes it: host memory's at once, CUDA's asynchronously."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from kvtiers.gpu.host_copy import HostCopier
from kvtiers.region.client import RegionJoin
from kvtiers.types import BlockSpec

__all__ = ["Copier", "Copy", "HostCopies", "Lane", "LostDeviceError"]

Lane: TypeAlias = Literal["store", "load", "expedited"]
"""Copies of a lane run one after the other, in the order of their jobs; lanes do not wait for each other."""


class LostDeviceError(Exception):
    """The CUDA context is gone: nothing can be copied by this process any more."""


class Copy(Protocol):
    """One job's copy. ``nbytes``: how much has been begun; ``seconds``: how long it took, once it has ended."""

    nbytes: int
    seconds: float

    def advance(self) -> bool:
        """Begin the next piece; False: all have been begun. May wait until an earlier piece has ended. Raises."""

    def ended(self) -> bool:
        """Say whether every piece that was begun has ended, without waiting; then raises if one has failed."""

    def wait(self) -> None:
        """Wait until every piece that was begun has ended, or failed."""


class Copier(Protocol):
    """Makes copies for one rank. ``mark`` belongs to the engine's thread, all else to the copy thread."""

    def mark(self) -> Any:
        """Return a mark of what the engine's device does now; a copy with this mark comes after it. Raises."""

    def attach(self, region: RegionJoin, is_busy: Callable[[], bool]) -> None:
        """Use this region, which is ready. ``is_busy``: whether the engine works now; from any thread."""

    def detach(self) -> None:
        """Wait for the copies that run, and let go of the region. May be called again."""

    def copy(self, lane: Lane, blocks: BlockSpec, chunk_ids: npt.NDArray[Any], mark: Any) -> Copy:
        """Prepare a copy; GeometryError if its geometry does not add up."""

    def close(self) -> None:
        """Free what it holds."""


class HostCopies:
    """The copies of a ``HostCopier``: each piece has ended when ``advance`` returns."""

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def mark(self) -> None:
        """Nothing: what the engine wrote before is in memory."""

    def attach(self, region: RegionJoin, is_busy: Callable[[], bool]) -> None:
        """Use this region, which is ready, at once: there is nothing to pin."""
        del is_busy
        self._copier.attach(region.view)
        region.settle()

    def detach(self) -> None:
        """Let go of the region."""
        self._copier.detach()

    def copy(self, lane: Lane, blocks: BlockSpec, chunk_ids: npt.NDArray[Any], mark: None) -> "_HostCopy":
        """Prepare a copy."""
        del mark
        make = self._copier.store if lane == "store" else self._copier.load
        return _HostCopy(make(blocks, chunk_ids))

    def close(self) -> None:
        """Nothing to free."""


class _HostCopy:
    def __init__(self, pieces: Iterator[int]) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._pieces = pieces

    def advance(self) -> bool:
        begin = time.perf_counter()
        piece = next(self._pieces, None)
        self.seconds += time.perf_counter() - begin
        self.nbytes += piece or 0
        return piece is not None

    def ended(self) -> bool:
        return True

    def wait(self) -> None:
        """It has ended."""
