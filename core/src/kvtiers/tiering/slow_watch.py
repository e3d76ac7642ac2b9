"""The watch over slow tiers: one log line when a tier becomes too slow, with what to do, and one when it recovers.

Late answers and loads are no failure: the requests are computed, and all looks well. A tier counts as too slow when, in
several checks in a row, nearly all of its answers and loads come too late.
"""

from collections.abc import Callable, Mapping

from kvtiers.metrics import TierMetrics

__all__ = ["SlowWatch"]

_LOOK_SECONDS = 1.0
_LOOKS = 3  # in a row: the first request after a start, or after a pause, says nothing
_LEAST_LATE = 8  # an answer that does not come counts once for its request, a load once a chunk
_LATE_FOR_EACH = 10  # chunks that came too late, to each that came in time


class SlowWatch:
    """The watch of one tier. ``own``: its own figures, for the line. Engine's thread."""

    def __init__(self, name: str, metrics: TierMetrics, own: Callable[[], Mapping[str, float]]) -> None:
        self._name = name
        self._metrics = metrics
        self._own = own
        self._look_at = 0.0
        self._seen = (0, 0)
        self._run = 0
        """Looks in a row that say the opposite of what holds."""
        self._late = 0
        """What came too late in this run, and in the time in which it is too slow."""

    def look(self, now: float) -> str:
        """Check the figures, once a second at most; return a line for the log, or "" for none."""
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_SECONDS
        metrics = self._metrics
        before, self._seen = self._seen, (metrics.wait_expired + metrics.recomputed_cheaper, metrics.loaded_chunks)
        late, brought = (count - earlier for count, earlier in zip(self._seen, before, strict=True))
        if not (late or brought):
            return ""
        if metrics.too_slow:
            return self._ends(late, brought)
        return self._begins(late, brought)

    def _begins(self, late: int, brought: int) -> str:
        is_late = late > _LATE_FOR_EACH * brought
        self._run, self._late = (self._run + 1, self._late + late) if is_late else (0, 0)
        if self._run < _LOOKS or self._late < _LEAST_LATE:
            return ""
        self._run, self._metrics.too_slow = 0, 1
        return (
            f"{self._name}: too slow: {self._late} of its answers and loads came too late{self._answers()}, and what "
            "it may have was computed; look at the way to its store, or give it longer by 'lookup_wait' and 'load_wait'"
        )

    def _ends(self, late: int, brought: int) -> str:
        self._late += late
        self._run = self._run + 1 if brought >= late else 0
        if self._run < _LOOKS:
            return ""
        late, self._late, self._run, self._metrics.too_slow = self._late, 0, 0, 0
        return f"{self._name}: fast enough again; {late} of its answers and loads came too late meanwhile"

    def _answers(self) -> str:
        own = self._own()
        if not (questions := own.get("lookup_questions", 0)):
            return ""
        return f" (an answer takes it {own.get('lookup_seconds', 0.0) / questions * 1e3:.0f} ms)"
