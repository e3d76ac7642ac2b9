"""Large values in parts: written as one upload, read as ranges, several parts at a time, by threads of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtiers_objectstore.failures import Failures
from kvtiers_objectstore.values import Body, ValueClient, read_into

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

    def read(self, key: str, dst: memoryview) -> int:
        """Fill the start of ``dst`` from an object; return its length, 0: there is none, or it is longer.

        All ranges are asked for as if the object were as long as ``dst``; the first answer says how long it is, and
        what is behind its end is not asked for any more.
        """
        longest = len(dst)
        end = longest

        def read_part(start: int) -> Body | None:
            nonlocal end
            if start >= end:
                return None
            with dst[start : start + self._size] as part:
                body = read_into(self._client, key, part, start, longest)
            end = min(end, start if body is None else body.total)
            return body

        bodies = self.each(read_part, range(0, longest, self._size))
        if bodies[0] is None:
            return 0
        total = bodies[0].total
        etags = {None if body is None else body.etag for body in bodies[: -(-total // self._size)]}
        if None in etags:  # deleted meanwhile
            return 0
        if len(etags) > 1:
            raise self._failures.failure(f"GET {key}", 0, "Replaced")
        return total

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
