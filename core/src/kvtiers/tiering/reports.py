"""The manager's reports: snapshots of all figures.

A snapshot is assembled on the thread that asks for it, the tiers' own figures included, so it costs a step nothing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtiers._log_queue import dropped_lines
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.engine_side import Watchers
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["Snapshots"]

_CALL_SECONDS = 0.0002  # about what a call takes: how long to wait for its end
_MOST_LOOKS = 100


class Snapshots:
    """All figures at one moment between two of the manager's calls. ``data``: any thread.

    ``turns`` counts on when a call begins and when it ends, so that it is odd during one.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        primary: CPUPrimaryTier,
        slots: Sequence[TierSlot],
        own_stats: Callable[[str], dict[str, float]],
        watchers: Watchers,
    ) -> None:
        self._metrics = metrics
        self._primary = primary
        self._slots = slots
        self._own_stats = own_stats
        self._watchers = watchers
        self.turns = 0

    def data(self) -> dict[str, Any]:
        """Return the current figures: ``engine``, ``primary``, ``tiers`` by name, ``what_if``, ``events``."""
        slots = tuple(self._slots)  # which the engine's thread may change meanwhile
        engine, primary, tiers = self._moment(slots)
        named = zip(slots, tiers, strict=True)
        shadows, publisher = self._watchers.what_if, self._watchers.publisher
        what_if = {} if shadows is None else {"what_if": shadows.report()}
        events = {} if publisher is None else {"events": dict(publisher.report())}
        return (
            what_if
            | events
            | {
                "engine": engine,
                "primary": primary,
                "tiers": {slot.name: figures | {"own": slot.own_stats(self._own_stats)} for slot, figures in named},
            }
        )

    def _moment(self, slots: Sequence[TierSlot]) -> tuple[dict[str, Any], dict[str, int], list[dict[str, Any]]]:
        """Read all figures between two calls of the engine's thread, waiting a bounded time for such a moment."""
        for _ in range(_MOST_LOOKS):
            turn = self.turns
            self._metrics.dropped_log_lines = dropped_lines()
            if self._watchers.tracing is not None:
                self._metrics.dropped_spans = self._watchers.tracing.lost
            self._count_events()
            moment = self._metrics.as_data(), self._primary.figures(), [slot.metrics.as_data() for slot in slots]
            if turn % 2 == 0 and turn == self.turns:
                break
            time.sleep(_CALL_SECONDS)
        return moment

    def _count_events(self) -> None:
        if self._watchers.publisher is not None:
            report, metrics = self._watchers.publisher.report(), self._metrics
            metrics.event_batches = report["batches"]
            metrics.event_chunks = report["chunks"]
            metrics.dropped_event_chunks = report["dropped_chunks"]
            metrics.replayed_event_batches = report["replayed_batches"]
