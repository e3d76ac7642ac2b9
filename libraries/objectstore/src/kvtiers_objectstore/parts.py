"""Large values in parts: written as one upload, read as ranges, several parts at a time, by threads of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtiers_objectstore.failures import Failures
from kvtiers_objectstore.values import ValueClient, read_into

__all__ = ["Parts"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Parts(ABC):
    """Moves values that are larger than a part, by threads of its own, for which the caller's thread waits.

    ``part_size``: in bytes. ``connections``: how many parts are moved at a time. ``label``: in the threads' names.
    """

    def __init__(
        self, client: ValueClient, failures: Failures, *, part_size: int, connections: int, label: str
    ) -> None:
        self._client = client
        self._failures = failures
        self._size = part_size
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix=f"kvtiers-{label}-part")

    @abstractmethod
    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Write an object in one upload. False, and nothing is changed, if ``only_new`` and there is one already."""

    def read(self, key: str, dst: memoryview) -> bool:
        """Fill ``dst`` from an object of its length; False: there is none."""
        total = len(dst)

        def read_part(start: int) -> str | None:
            with dst[start : start + self._size] as part:
                return read_into(self._client, key, part, start, total)

        etags = self.each(read_part, range(0, total, self._size))
        if None in etags:
            return False
        if len(set(etags)) > 1:
            raise self._failures.failure(f"GET {key}", 0, "Replaced")
        return True

    def each(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Do the work for each item; when all have ended, return their results or raise the first error.

        The threads may use the caller's buffer, so none may be left running.
        """
        futures = [self._pool.submit(work, item) for item in items]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
