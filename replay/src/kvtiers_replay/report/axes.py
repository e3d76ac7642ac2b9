"""Axes: which numbers stand along a side of a plot, and where between its two ends a value lies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Axis", "counts", "linear", "log_seconds", "percent", "seconds_text", "share_axis", "since_start"]

_SECONDS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))


@dataclass(frozen=True, slots=True)
class Axis:
    """``title`` has the unit. ``ticks``: values and their texts."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return where a value lies: 0 is the low end, 1 the high one; what is outside is at an end."""
        if self.high <= self.low:
            return 0.5
        inside = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)


def linear(title: str, highest: float, text: Callable[[float], str], base: float = 1.0, head: float = 0.12) -> Axis:
    """Return an axis from 0 to a little above ``highest``; its ticks are 1, 2 or 5 times a power of ten of ``base``."""
    return _stepped(title, highest or base, text, _nice_step((highest or base) / 5, base), head)


def counts(title: str, highest: float) -> Axis:
    """Return an axis of whole numbers."""
    return _stepped(
        title, highest or 1.0, lambda count: f"{count:,.0f}", max(1.0, _nice_step((highest or 1) / 5, 1)), 0.12
    )


def _stepped(title: str, highest: float, text: Callable[[float], str], step: float, head: float) -> Axis:
    high = highest * (1 + head)
    return Axis(title, 0.0, high, [(i * step, text(i * step)) for i in range(math.floor(high / step + 1e-9) + 1)])


def share_axis(title: str, highest: float) -> Axis:
    """Return an axis of shares in percent, that does not make much of little."""
    high = min(1.0, max(highest, 0.1))
    return linear(title, high, lambda share: f"{100 * share:.3g} %", head=0.12 if high < 0.9 else 0.0)


def since_start(longest: float) -> Axis:
    """Return an axis of time since the first request."""
    unit, factor = next(((u, f) for u, f in (("h", 3600.0), ("min", 60.0)) if longest >= 3 * f), ("s", 1.0))
    return linear(f"time since the first request ({unit})", longest, lambda s: f"{s / factor:.3g}", factor, head=0.0)


def log_seconds(title: str, shortest: float, longest: float) -> Axis:
    """Return a logarithmic axis of durations, with a tick at each power of ten, or closer where there are few."""
    low, high = shortest, max(longest, shortest * 10)
    factors = (1, 2, 5) if high / low <= 100 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in factors]
    ticks = [(value, seconds_text(value)) for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return Axis(title, low, high, ticks, logarithmic=True)


def seconds_text(seconds: float) -> str:
    """Return a duration with three digits, from microseconds to seconds."""
    unit, factor = next(((u, f) for u, f in _SECONDS if seconds < 999.5 * f), _SECONDS[-1])
    return f"{seconds / factor:.3g} {unit}" if seconds < 9995 else f"{seconds:,.0f} s"


def percent(share: float) -> str:
    """Return a share in percent, with one digit behind the point."""
    return f"{100 * share:.1f} %"


def _nice_step(rough: float, base: float) -> float:
    """Return 1, 2 or 5 times a power of ten of ``base``, at least ``rough``."""
    power: float = base * 10.0 ** math.floor(math.log10(rough / base))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
