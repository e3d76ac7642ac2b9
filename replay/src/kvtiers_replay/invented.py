"""Choices by a seed, and prompts of invented text that grow: the common parts of the made-up workloads.

For a KV cache only equality matters. So text is a name and a number of tokens; equal names with equal lengths are equal
text, and one that is added once has a name of its own.
"""

import bisect
import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvtiers_replay.workload import ReplayRequest

__all__ = ["Chance", "Prompt", "zipf"]

_T = TypeVar("_T")


class Chance:
    """Choices that depend on the seed alone.

    Of ``random.Random``, only what ``random()`` returns for a seed stays the same in all releases of Python.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # noqa: S311 -- a workload, not a secret

    def of(self, choices: Sequence[_T]) -> _T:
        """Return one of these, each as often as any other."""
        return choices[int(self._random() * len(choices))]

    def by_rank(self, choices: Sequence[_T], ends: Sequence[float]) -> _T:
        """Return one of these, by the running sums of their weights."""
        return choices[min(bisect.bisect(ends, self._random() * ends[-1]), len(choices) - 1)]

    def happens(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random() < probability

    def between(self, least: float, doublings: int) -> float:
        """Return a number from ``least`` up to ``least * 2**doublings``, in each doubling as often as in any other."""
        # No logarithms: their last bits differ between machines.
        return least * float(1 << int(self._random() * doublings)) * (1.0 + self._random())


class Prompt:
    """A growing prompt of named texts; a copy goes on by itself."""

    def __init__(self, tokens_per_block: int) -> None:
        self._per_block = tokens_per_block
        self._hashes: list[bytes] = []
        self._rest = b""  # hash over what stands behind the last full block
        self.tokens = 0

    def add(self, name: str, tokens: int) -> None:
        """Append this many tokens of the text of that name."""
        start = 0
        while start < tokens:
            taken = min(self._per_block - self.tokens % self._per_block, tokens - start)
            self._rest = hashlib.sha256(self._rest + f"{name} {start} {taken};".encode()).digest()
            self.tokens += taken
            start += taken
            if not self.tokens % self._per_block:
                before = self._hashes[-1] if self._hashes else b""
                self._hashes.append(hashlib.sha256(before + self._rest).digest())
                self._rest = b""

    def copy(self) -> "Prompt":
        """Return a prompt that begins with all of this one."""
        other = Prompt(self._per_block)
        other._hashes, other._rest, other.tokens = self._hashes.copy(), self._rest, self.tokens
        return other

    def request(self, arrival: float, output_tokens: int, params: Mapping[str, object]) -> ReplayRequest:
        """Return the prompt as it is now."""
        return ReplayRequest(self.tokens, tuple(self._hashes), arrival, params, output_tokens)


def zipf(count: int) -> list[float]:
    """Return the running sums of weights of which that of rank r is 1/r."""
    return list(itertools.accumulate(1 / rank for rank in range(1, count + 1)))
