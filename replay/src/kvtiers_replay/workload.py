"""Workloads: requests with their arrival and the chained hashes of their prompts' full blocks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Arrivals", "ReplayRequest", "Workload", "infinite_hits"]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRequest:
    """One request: its prompt's length in tokens, one hash for each full block of it, and when it arrives (seconds).

    ``params``: its transfer parameters, hints among them; ``output_tokens``: of its answer, 0 if that is not known.
    """

    num_tokens: int
    block_hashes: Sequence[bytes]
    arrival: float = 0.0
    params: Mapping[str, object] = field(default_factory=dict)
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in the order of their arrival. Equal block hashes mean equal whole prefixes."""

    name: str
    tokens_per_block: int
    requests: Sequence[ReplayRequest]

    @property
    def longest(self) -> int:
        """Full blocks of the longest request."""
        return max(len(request.block_hashes) for request in self.requests)


def infinite_hits(workload: Workload) -> list[int]:
    """Return, by request, how many blocks a cache without bounds would have hit, in the order of arrival."""
    seen: set[bytes] = set()
    hits = []
    for request in workload.requests:
        hashes = request.block_hashes
        # The last token is always computed, so a block that ends with it is of no use.
        usable = max(0, request.num_tokens - 1) // workload.tokens_per_block
        hits.append(next((i for i in range(usable) if hashes[i] not in seen), usable))
        seen.update(hashes)
    return hits


class Arrivals:
    """Requests as they arrive: each at its time in the workload, ``speed`` times as fast; None: all are there at once.

    ``first``: the time in the workload that is the beginning. The clock starts with the first ``take``.
    """

    def __init__(
        self,
        requests: Sequence[tuple[ReplayRequest, int]],
        speed: float | None = None,
        first: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._speed = speed
        self._first = first
        self._clock = clock
        self._begin: float | None = None
        self._next = 0

    @property
    def exhausted(self) -> bool:
        """Return whether all have been taken."""
        return self._next == len(self._requests)

    def take(self) -> tuple[ReplayRequest, int] | None:
        """Return the next request that has arrived, with its ``infinite_hits``; None: there is none now."""
        if self._begin is None:
            self._begin = self._clock()
        if self.exhausted:
            return None
        arrived = self._requests[self._next]
        if self._speed is not None:
            due = (arrived[0].arrival - self._first) / self._speed
            if self._clock() - self._begin < due:
                return None
        self._next += 1
        return arrived
