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

_PRIMARY = {
    "rows": "num_rows",
    "free_rows": "free_rows",
    "evictable_rows": "evictable",
    "pending_rows": "pending_rows",
    "pinned_rows": "pinned_rows",
    "protected_rows": "protected_rows",
    "quarantined_rows": "quarantined_rows",
    "clean_rows": "clean_rows",
    "misuse": "misuse",
}


class _Figures:
    """Reads the counters and histograms of one class of metrics."""

    def __init__(self, kind: type[TierMetrics | EngineMetrics]) -> None:
        histograms = [f.name for f in fields(kind) if f.type is Histogram]
        self._numbers = [f.name for f in fields(kind) if f.name not in histograms]
        self._histograms = histograms
        self._read_numbers: Callable[[Any], tuple[Any, ...]] = attrgetter(*self._numbers)

    def read(self, metrics: TierMetrics | EngineMetrics) -> tuple[tuple[Any, ...], list[HistogramValue]]:
        return self._read_numbers(metrics), [getattr(metrics, name).value() for name in self._histograms]

    def as_data(self, values: tuple[Any, ...], histograms: Sequence[HistogramValue]) -> dict[str, Any]:
        data: dict[str, Any] = dict(zip(self._numbers, values, strict=True))
        data.update((name, value.as_data()) for name, value in zip(self._histograms, histograms, strict=True))
        return data


_ENGINE, _TIER = _Figures(EngineMetrics), _Figures(TierMetrics)
_read_primary = attrgetter(*_PRIMARY.values())


class _Moment(NamedTuple):
    """All figures at one moment; never changed."""

    engine: tuple[tuple[Any, ...], list[HistogramValue]]
    primary: tuple[Any, ...]
    tiers: list[tuple[tuple[Any, ...], list[HistogramValue]]]


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
        self._own_stats = own_stats
        self.take()

    def take(self) -> None:
        """Note all figures as they are now."""
        self._moment = _Moment(
            _ENGINE.read(self._metrics),
            _read_primary(self._primary),
            [_TIER.read(slot.metrics) for slot in self._slots],
        )

    def data(self) -> dict[str, Any]:
        """Return the figures of that moment as plain data: ``engine``, ``primary``, ``tiers`` by name."""
        moment = self._moment
        return {
            "engine": _ENGINE.as_data(*moment.engine),
            "primary": dict(zip(_PRIMARY, moment.primary, strict=True)),
            "tiers": {
                slot.name: _TIER.as_data(*figures) | {"own": slot.own_stats(self._own_stats)}
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
        self._keys += sum([len(event.keys) for event in events])
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
