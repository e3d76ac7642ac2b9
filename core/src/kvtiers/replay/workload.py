"""What is replayed: requests, each with the chained hashes of its prompt's full blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ReplayRequest", "Workload"]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRequest:
    """One request: its prompt's length in tokens, one hash for each full block of it, and when it arrives (seconds)."""

    num_tokens: int
    block_hashes: Sequence[bytes]
    arrival: float = 0.0


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
