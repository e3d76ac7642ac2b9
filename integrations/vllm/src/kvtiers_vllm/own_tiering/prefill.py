"""The estimator of prefill speed under vLLM's own tiering: seconds a token.

At each step's end vLLM reports to a tier which requests are scheduled for the first time, and later which of their
chunks were computed: the first chunks of a request are those of its first step. How long that step took is the time
from one step's end to the next::

    seconds a token = seconds of a step / tokens in the first chunks of the requests that were new in it

vLLM may schedule a step ahead: then a step's time is the next one's. The longer of the two is taken, since a prompt's
takes longer than a decoding step. Decoding requests in the same step, and what of a prompt is no whole chunk, are in
the seconds and not in the tokens: it is the engine's speed under the load that it has. The estimate from the steps is
computed as everywhere (``kvtiers/tiering/estimates.py``), so that a step that ended in idleness does not count.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.prefill_price import PrefillPrice

__all__ = ["PrefillRate"]

_MOST_OPEN = 256
_INTERVALS = 2


@dataclass(slots=True, eq=False)
class _Step:
    """A step with new requests. ``waiting``: those whose first chunks have not come yet."""

    waiting: set[str]
    tokens: int = 0
    position: float = 0.0
    """How many tokens are before each of them in its prompt, on average."""
    intervals: list[float] = field(default_factory=list)


class PrefillRate:
    """Reports steps to ``cost`` and ``price``. Runs on the engine's thread."""

    def __init__(self, cost: PrefillCost, price: PrefillPrice) -> None:
        self._cost = cost
        self._price = price
        self._open: deque[_Step] = deque(maxlen=_MOST_OPEN)
        self._step_of: dict[str, _Step] = {}
        self._last_end: float | None = None

    def step_ended(self, new_requests: Iterable[str], now: float) -> None:
        """Record a step's end, and of the requests that are computed for the first time in it."""
        for step in self._open:
            if len(step.intervals) < _INTERVALS and self._last_end is not None:
                step.intervals.append(now - self._last_end)
        self._last_end = now
        if new := set(new_requests):
            step = _Step(new)
            self._open.append(step)
            self._step_of.update(dict.fromkeys(new, step))
        for step in [step for step in self._open if self._is_over(step)]:
            self._open.remove(step)
            self._take(step)

    def computed(self, request: str, tokens: int, before: int = 0) -> None:
        """Record computed chunks of a request. Only the first report counts: it is of the request's first step.

        ``before``: the tokens of its prompt that were loaded, and not computed.
        """
        step = self._step_of.pop(request, None)
        if step is not None:
            step.tokens += tokens
            if tokens:
                step.position += (before + tokens / 2 - step.position) * tokens / step.tokens
            step.waiting.discard(request)

    def finished(self, request: str) -> None:
        """Drop a request: its remaining chunks will not be computed."""
        self.computed(request, 0)

    @staticmethod
    def _is_over(step: _Step) -> bool:
        return not step.waiting and len(step.intervals) == _INTERVALS

    def _take(self, step: _Step) -> None:
        if step.tokens:
            self._cost.observe(step.tokens, max(step.intervals))
            self._price.observe(step.tokens, max(step.intervals), step.position)
