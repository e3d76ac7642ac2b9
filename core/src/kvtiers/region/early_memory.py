"""The region's memory, made before the region: it is populated while an engine loads its model.

A primary's size stands in the config, while the layout of a chunk follows from the loaded model. The first 32 GiB are
populated in two to five seconds, which pass while the model loads, instead of being waited for after it.
"""

import contextlib
import os
from typing import Protocol

from kvtiers.api import StartError
from kvtiers.region.limits import memory_problem
from kvtiers.region.memfd import HUGE_PAGE_BYTES, HugePages, PrefaultMode, create_memfd, detach_in_children
from kvtiers.region.prefault import Prefault

__all__ = ["EarlyMemory", "LentMemory"]


class LentMemory(Protocol):
    """Populated memory that outlives the region: whoever lends it is told which processes have it.

    ``nbytes``: of the memfd.
    """

    nbytes: int

    def take_rows(self) -> int:
        """Return the memfd, by a descriptor of the caller's own."""

    def watch(self, rank: int, pidfd: int) -> None:
        """Take note of a process before it is given the memory: a rank, or (below -1) a tier host.

        OSError: it is not to be given it.
        """

    def unwatch(self, rank: int) -> None:
        """Take note that nothing of this process can touch a row any more."""


class EarlyMemory:
    """A memfd of ``capacity`` bytes or a page more, and the pre-fault program that populates it.

    ``SharedOffloadRegion.create`` takes it over; before that ``close`` gives it back. StartError, in one line, if the
    memory is not there; ``option``: where its size stands. The thread that creates it is to live as long as the
    process: the program ends with it.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        huge_pages: HugePages = "off",
        prefault: PrefaultMode = "ahead",
        window: int,
        option: str = "primary.capacity",
    ) -> None:
        page = HUGE_PAGE_BYTES[huge_pages]
        self.nbytes = -(-capacity // page) * page
        """Of the memfd."""
        if huge_pages == "off" and (problem := memory_problem(self.nbytes, option=option)):
            raise StartError(problem)
        self.wanted = min(window, self.nbytes) if prefault == "ahead" else self.nbytes
        self.fd = create_memfd(name, self.nbytes, huge_pages)
        self.prefault: Prefault | None = None
        self._is_ours = True
        detach_in_children(self)
        with contextlib.suppress(OSError):  # the region reports it, when it tries again
            self.prefault = None if prefault == "off" else Prefault(self.fd, self.nbytes, page, self.wanted)

    def take(self) -> tuple[int, Prefault | None]:
        """Hand the memfd and the program over to a region, once; StartError if they are gone."""
        if not self._is_ours:
            raise StartError("the memory that was prepared has been released or used")
        self._is_ours = False
        return self.fd, self.prefault

    def close(self) -> None:
        """End the program and release the memory, unless a region has taken it over. May be called again."""
        if self._is_ours:
            self._is_ours = False
            if self.prefault is not None:
                self.prefault.stop()
            os.close(self.fd)

    def detach(self) -> None:
        """Close the descriptors in a forked child."""
        if self._is_ours:
            self._is_ours = False
            if self.prefault is not None:
                self.prefault.detach()
            os.close(self.fd)
