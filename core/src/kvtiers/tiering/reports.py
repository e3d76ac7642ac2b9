"""What the manager tells others: figures, and events.

Figures are taken at the end of each step, and put into words by whoever asks, who also asks the tiers for their own.
Events are kept in order for whoever takes them; they are bounded, and a reset forgets them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from kvtiers.base import OffloadEvent
from kvtiers.metrics import EngineMetrics, Histogram, HistogramValue, TierMetrics
from kvtiers.primary.chunks import CPUPrimaryTier
from kvtiers.tiering.tiers import TierSlot

__all__ = ["EventLog", "Snapshots"]

_MAX_KEYS = 1 << 17  # of events that nobody has taken


class _Figures:
    """Reads the counters and histograms of one class of metrics."""

    def __init__(self, kind: type[TierMetrics | EngineMetrics]) -> None:
        histograms = [f.name for f in fields(kind) if f.type is Histogram]
        self._numbers = [f.name for f in fields(kind) if f.name not in histograms]
        self._histograms = histograms
        parts = [f"{name}.{part}" for name in histograms for part in HistogramValue._fields]
        self.read: Callable[[TierMetrics | EngineMetrics], tuple[Any, ...]] = attrgetter(*self._numbers, *parts)

    def as_data(self, values: Sequence[Any]) -> dict[str, Any]:
        parts = iter(values)
        data: dict[str, Any] = {name: next(parts) for name in self._numbers}
        return data | {name: HistogramValue(next(parts), next(parts)).as_data() for name in self._histograms}


_ENGINE, _TIER = _Figures(EngineMetrics), _Figures(TierMetrics)


class _Moment(NamedTuple):
    """All figures at one moment; never changed."""

    engine: tuple[Any, ...]
    primary: dict[str, int]
    tiers: list[tuple[Any, ...]]


class Snapshots:
    """Keeps the figures of the last moment taken. ``take``: engine's thread; ``data``: any thread."""

    def __init__(
        self,
        metrics: EngineMetrics,
        primary: CPUPrimaryTier,
        slots: Sequence[TierSlot],
        own_stats: Callable[[str], dict[str, float]],
    ) -> None:
        self._metrics = metrics
        self._primary = primary
        self._slots = slots
        self._of_tiers = [slot.metrics for slot in slots]
        self._own_stats = own_stats
        self.take()

    def take(self) -> None:
        """Note all figures as they are now."""
        self._moment = _Moment(_ENGINE.read(self._metrics), self._primary.figures(), [*map(_TIER.read, self._of_tiers)])

    def data(self) -> dict[str, Any]:
        """Return the figures of that moment as plain data: ``engine``, ``primary``, ``tiers`` by name."""
        moment = self._moment
        return {
            "engine": _ENGINE.as_data(moment.engine),
            "primary": dict(moment.primary),
            "tiers": {
                slot.name: _TIER.as_data(figures) | {"own": slot.own_stats(self._own_stats)}
                for slot, figures in zip(self._slots, moment.tiers, strict=True)
            },
        }


class EventLog:
    """The events since the last ``take``. Of too many the oldest are dropped."""

    def __init__(self) -> None:
        self._events: deque[OffloadEvent] = deque()
        self._keys = 0

    def add(self, events: Sequence[OffloadEvent]) -> int:
        """Append these events; return how many old ones were dropped for them."""
        self._events.extend(events)
        for event in events:
            self._keys += len(event.keys)
        dropped = 0
        while self._keys > _MAX_KEYS:
            self._keys -= len(self._events.popleft().keys)
            dropped += 1
        return dropped

    def take(self) -> list[OffloadEvent]:
        """Return the events, oldest first, and keep none."""
        events = list(self._events)
        self.clear()
        return events

    def clear(self) -> None:
        """Keep none."""
        self._events.clear()
        self._keys = 0
