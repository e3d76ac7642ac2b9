"""Load or recompute under vLLM's own tiering, with the model of ``load_or_recompute.py`` in core.

vLLM looks up chunk by chunk, so the length of a tier's hit is not known when the first chunk is decided. The prompt's
length is used instead, known from the request's arrival, and the decision holds for all its chunks in that step,
and for as long as it has loads. Loads that were decided in a step are submitted at its end: until then they are
promised. A prompt of unknown length is loaded. The queue before a prompt is those that vLLM has begun, for as long as
computing them takes by the clock; behind it are those that have arrived and were neither begun nor loaded.

A request's wait for its loads is bounded by the tokens that they load, which are known then. A single late load does
not stop loads for others. A tier whose loads in flight all fail to land does: its assumed load time is at least
the time of that silence, also where ``load_wait`` was given.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.load_or_recompute import LATE, GpuQueue
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["PrefillRate", "Prompt", "Prompts"]

_MOST_EXPECTED = 4096  # requests that arrive and are never announced: the oldest are forgotten
_MOST_OPEN = 256
_INTERVALS = 2


@dataclass(slots=True, eq=False)
class Prompt:
    """One request's, in tokens. ``queue``: those of others before it and behind it when its loads began.

    ``loaded``: since it was last begun; ``before``: those that were loaded when it was.
    ``decided_in``: which step. ``promised``: chunks that it is to load, and of which no load has begun.
    ``trial``: how many chunks are loaded only to measure the tier; ``tried``: those of them that were asked for.
    """

    tokens: int = 0
    has_come: bool = False
    is_taken_up: bool = False
    is_loaded: bool = False
    decided_in: int = -1
    promised: int = 0
    queue: tuple[float, int] | None = None
    loading: float = 0
    loaded: int = 0
    before: int = 0
    trial: int = 0
    tried: set[OffloadKey] = field(default_factory=set)


class Prompts:
    """Decides which prompts to load from the tier in ``slot``. On the engine's thread, except for ``expect``."""

    def __init__(
        self,
        slot: TierSlot,
        cost: PrefillCost,
        tokens_per_chunk: Sequence[int],
        lookup_wait: float,
        load_wait: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.cost = cost
        self._slot = slot
        self._chunk_tokens = max(tokens_per_chunk, default=0)
        self._lookup_wait = lookup_wait
        self._load_wait = load_wait
        self._clock = clock
        self._gpu = GpuQueue(cost, clock)
        self._expected: OrderedDict[str, int] = OrderedDict()
        self._step = 0
        self._promised = 0

    # -- a prompt's way

    def expect(self, request_id: str, tokens: int) -> None:
        """Record the prompt length of a request that arrives. Any thread."""
        self._expected[request_id] = tokens
        if len(self._expected) > _MOST_EXPECTED:
            self._expected.popitem(last=False)

    def new(self, request_id: str) -> Prompt:
        """Return the prompt of a request, which may have been expected."""
        return Prompt(self._expected.pop(request_id, 0))

    def forget(self, request_id: str) -> None:
        """Forget a request that is over: vLLM prepares each further input of a session, and announces none."""
        self._expected.pop(request_id, None)

    def came(self, prompt: Prompt) -> None:
        """Record that a request has arrived, and waits for its turn."""
        prompt.has_come = True
        self._gpu.waiting += prompt.tokens

    def taken_up(self, prompt: Prompt) -> None:
        """Record that a prompt no longer waits for the GPU: it is begun, loaded, or over."""
        self._promise(prompt, 0)
        if prompt.has_come and not prompt.is_taken_up:
            prompt.is_taken_up = True
            self._gpu.waiting -= prompt.tokens

    def computes(self, prompt: Prompt) -> None:
        """Record that the engine begins a prompt: its chunks not loaded are computed. Then it is decided again."""
        self.taken_up(prompt)
        self._gpu.computes(max(0, prompt.tokens - prompt.loaded))
        prompt.is_loaded, prompt.decided_in, prompt.queue = False, -1, None
        prompt.before = prompt.loaded
        prompt.loading = prompt.loaded = prompt.trial = 0
        prompt.tried.clear()

    def end_step(self) -> None:
        """End the step: later decisions use the state of the next one."""
        self._step += 1

    # -- decisions

    def loads_chunk(self, prompt: Prompt, key: OffloadKey) -> bool:
        """Return whether to load a chunk that the tier has."""
        if prompt.decided_in < self._step and not prompt.loading:
            self._decide(prompt)
        if prompt.is_loaded or not prompt.trial:
            return prompt.is_loaded
        if len(prompt.tried) < prompt.trial:
            prompt.tried.add(key)
        return key in prompt.tried

    def loads(self, prompt: Prompt, tokens: int) -> float:
        """Record a load of this many tokens; return its request's wait budget for all its loads."""
        if prompt.queue is None:
            prompt.queue = self._gpu.ahead, self._behind(prompt)
        self.taken_up(prompt)
        prompt.loading = min(prompt.loading + tokens, prompt.tokens or math.inf)  # windows save no tokens of their own
        if self._load_wait is not None:
            return self._load_wait
        return self._at_least(LATE * self._seconds(prompt.loading, *prompt.queue))

    def _decide(self, prompt: Prompt) -> None:
        prompt.decided_in = self._step
        self._promise(prompt, 0)
        prompt.is_loaded = self._is_sooner(prompt)
        if prompt.is_loaded:
            self._promise(prompt, prompt.tokens // max(1, self._chunk_tokens))
        elif self._load_wait is None and not prompt.trial:
            prompt.trial = self._slot.trial(self._clock())

    def _promise(self, prompt: Prompt, chunks: int) -> None:
        if prompt.has_come and not prompt.is_taken_up:  # a prompt that is loaded does not wait for the GPU
            self._gpu.waiting += prompt.tokens * (bool(prompt.promised) - bool(chunks))
        self._promised += chunks - prompt.promised
        prompt.promised = chunks

    def _is_sooner(self, prompt: Prompt) -> bool:
        rate, now = self._slot.rate, self._clock()
        if self._load_wait is not None:
            return rate.stalled(now) < self._load_wait
        if not (prompt.tokens and self._chunk_tokens):
            return rate.stalled(now) <= self._at_least(0.0)
        chunks = prompt.tokens // self._chunk_tokens
        soon = rate.expected(chunks, self._slot.metrics.loading_chunks + self._promised, now)
        return soon <= self._at_least(self._seconds(prompt.tokens, self._gpu.ahead, self._behind(prompt)))

    def _behind(self, prompt: Prompt) -> int:
        own = prompt.tokens if prompt.has_come and not (prompt.is_taken_up or prompt.promised) else 0
        return self._gpu.waiting - own

    def _seconds(self, own: float, ahead: float, behind: int) -> float:
        return (ahead + own + min(behind, own)) * self.cost.seconds_per_token

    def _at_least(self, seconds: float) -> float:
        return seconds if self.cost.is_measured else max(self._lookup_wait, seconds)


@dataclass(slots=True, eq=False)
class _Step:
    """A step with new requests. ``waiting``: those whose first chunks have not come yet."""

    waiting: set[str]
    tokens: int = 0
    position: float = 0.0
    """How many tokens are before each of them in its prompt, on average."""
    intervals: list[float] = field(default_factory=list)


class PrefillRate:
    """The estimator of prefill speed, seconds a token; reports to ``cost``. Runs on the engine's thread.

    At the end of each step vLLM reports to a tier which requests are scheduled for the first time, and in a later step
    which of their chunks were computed. A request's first chunks are those that its first step has computed. A step
    lasts from the end of the one before to its own::

        seconds a token = seconds of a step / tokens in the first chunks of the requests that were new in it

    vLLM may schedule a step ahead; the prompts are then computed in the interval after it. Of the two intervals the
    longer one counts, since a step with prompts takes longer than one that only decodes. Requests that decode in the
    same step, and the last tokens of a prompt that fill no chunk, add to the seconds and not to the tokens: the result
    is the speed of prefill under the engine's current load. ``kvtiers/tiering/estimates.py`` makes one estimate of all
    steps; a step that was followed by idleness does not count.
    """

    def __init__(self, cost: PrefillCost) -> None:
        self._cost = cost
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

    def computed(self, request: str, tokens: int, position: float = 0.0) -> None:
        """Record computed chunks of a request. Only the first report counts: it is of the request's first step.

        ``position``: how many tokens are before each of those in its prompt, on average.
        """
        step = self._step_of.pop(request, None)
        if step is not None:
            step.tokens += tokens
            if tokens:
                step.position += (position - step.position) * tokens / step.tokens
            step.waiting.discard(request)

    def finished(self, request: str) -> None:
        """Drop a request: its remaining chunks will not be computed."""
        self.computed(request, 0)

    @staticmethod
    def _is_over(step: _Step) -> bool:
        return not step.waiting and len(step.intervals) == _INTERVALS

    def _take(self, step: _Step) -> None:
        if step.tokens:
            self._cost.observe(step.tokens, max(step.intervals), step.position)
