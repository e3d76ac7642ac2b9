"""A rule, from measurements alone, for whether a prefix is loaded or computed, and how long a load of it may take.

Computing costs more than in proportion to the length, so it is remembered by powers of two of tokens. A load costs some
overhead and time for its bytes: of small ones the seconds are remembered, of large ones the seconds a byte. A faster
measurement holds at once, a slower one by half: it may be a hiccup, and a price that is too low is measured again.
"""

import time
from typing import Any

import torch

__all__ = ["FirstToken", "LoadOrCompute"]

_SMALL_BYTES = 16 << 20  # below it, a load is mostly overhead
_LEAST_SIZE = (512).bit_length()  # tokens, by power of two
_TRY_EVERY = 16  # refused loads, of which one is made all the same


class LoadOrCompute:
    """Decides for one model and its tiers, on one thread. What was not measured yet speaks for the load."""

    def __init__(self) -> None:
        self._compute: dict[int, float] = {}  # seconds a token, by power of two of tokens
        self._small_load: float | None = None  # seconds
        self._large_load: float | None = None  # seconds a byte
        self._refused = 0

    @property
    def skipped(self) -> int:
        """How many loads were not made."""
        return self._refused - self._refused // _TRY_EVERY

    def computed(self, tokens: int, seconds: float) -> None:
        """Note what computing so many tokens, 1 or more, took."""
        size = tokens.bit_length()
        self._compute[size] = _updated(self._compute.get(size), seconds / tokens)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Note what a load of so many bytes, 1 or more, took; of one that its limit has ended, at least twice that."""
        if nbytes < _SMALL_BYTES:
            self._small_load = _updated(self._small_load, seconds)
        else:
            self._large_load = _updated(self._large_load, seconds / nbytes)

    def limit(self, tokens: int, nbytes: int) -> float | None:
        """Return how many seconds a load of this prefix may take; None if computing it is expected to be faster.

        Without bound, as long as nothing was computed.
        """
        computing = self._computing(tokens)
        if self._loading(nbytes) <= computing:
            return computing
        self._refused += 1
        return None if self._refused % _TRY_EVERY else computing

    def _computing(self, tokens: int) -> float:
        """Return the seconds expected, infinite if nothing was measured.

        Of the next larger length that was measured, before a smaller one: short computations are mostly overhead, so
        that what fewer than 512 tokens took, as of those behind a hit, says nothing of more.
        """
        size = tokens.bit_length()
        larger = [one for one in self._compute if one >= size]
        smaller = [one for one in self._compute if one < size and (one >= _LEAST_SIZE or size <= _LEAST_SIZE)]
        nearest = min(larger) if larger else max(smaller, default=None)
        return float("inf") if nearest is None else self._compute[nearest] * tokens

    def _loading(self, nbytes: int) -> float:
        """Return the seconds expected, 0 if no such load was measured."""
        if nbytes < _SMALL_BYTES:
            return self._small_load or 0.0
        return (self._large_load or 0.0) * nbytes


def _updated(known: float | None, measured: float) -> float:
    return measured if known is None else min(measured, (known + measured) / 2)


class FirstToken:
    """A stopping criterion that stops nothing: the time from its making to the first new token, as the device sees it.

    ``tokens``: how many are computed in between.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self._device = device
        self._begin = self._now()
        self._end: Any = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return that no prompt is done; ``input_ids``: [prompts, tokens]."""
        del scores
        if self._end is None:
            self._end = self._now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def seconds(self) -> float | None:
        """Return the time, after ``generate`` has returned; None if it made no token."""
        if self._end is None or self._device.type != "cuda":
            return None if self._end is None else self._end - self._begin
        self._end.synchronize()  # it lies before the last token, for which generate() has waited
        return float(self._begin.elapsed_time(self._end)) / 1000

    def _now(self) -> Any:
        """Return an event on the device's stream, or the time: nothing here waits for the device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
