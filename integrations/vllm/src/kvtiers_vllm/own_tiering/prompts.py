"""Load or recompute under vLLM's own tiering: core's decision (``load_or_recompute.py``), where vLLM asks key by key.

The length of a tier's hit is not known when the first chunk is decided. The prompt's length is used instead, known from
the request's arrival, and the decision holds for all its chunks in that step, and for as long as it has loads. Loads
that were decided in a step are submitted at its end: until then they are promised. A prompt of unknown length is
loaded, and so is any where ``load_wait`` was given, unless none of the tier's loads in flight has landed for as long as
a request would wait.

The queue before a prompt is those that vLLM has begun, for as long as computing them takes by the clock; behind it are
those that have arrived and were neither begun nor loaded. A request's wait for its loads is bounded by the tokens that
they load, which are known then. Between its loads it does not wait. A request that vLLM has preempted is decided anew,
with a wait of its own. That is also when vLLM looks up the further inputs of a session, and not before.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from kvtiers.api import OffloadKey
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import Waits
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext

__all__ = ["PrefillRate", "Prompt", "Prompts"]

_MOST_OPEN = 256
_INTERVALS = 2


@dataclass(slots=True, eq=False)
class Prompt:
    """One request's, in tokens, until it is preempted. ``state``: by which core decides. ``shown``: vLLM's request.

    ``loading``: all that it has waited for; ``loaded``: since it was last begun. It had ``begun`` tokens then, of which
    those behind ``before`` were computed.
    ``decided_in``: which step. ``loads``: in flight; ``idle_since``: when the last one has ended, if there is none.
    ``asking_in``: in which step it last waited for an answer.
    ``trial``: how many chunks are loaded only to measure the tier; ``tried``: those of them that were asked for.
    """

    state: RequestState
    shown: Any
    is_loaded: bool = False
    decided_in: int = -1
    asking_in: int = -2
    loads: int = 0
    idle_since: float = 0.0
    loading: int = 0
    loaded: int = 0
    before: int = 0
    begun: int = 0
    trial: int = 0
    tried: set[OffloadKey] = field(default_factory=set)


class Prompts:
    """Decides which prompts to load from the tier in ``slot``. On the engine's thread, except for ``expect``."""

    def __init__(
        self,
        slot: TierSlot,
        options: TieringOptions,
        tokens_per_chunk: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self.waits = Waits(options, clock, options.prefill_cost())
        self._slot = slot
        self._chunk_tokens = max(tokens_per_chunk, default=0)
        self._has_groups = len(tokens_per_chunk) > 1
        self._longest_silence = options.lookup_wait if options.load_wait is None else options.load_wait
        self._clock = clock
        self._expected: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """By id, vLLM's requests that ``new`` may still name; others expire with their object."""
        self._step = 0

    # -- a prompt's way

    def expect(self, shown: Any) -> None:
        """Record a request of vLLM's that arrives, or an input that vLLM adds to one of the same id. Any thread."""
        self._expected.setdefault(shown.request_id, shown)

    def new(self, context: RequestContext) -> Prompt:
        """Return the prompt of a request, which may have been expected."""
        return self._prompt(context, self._expected.pop(context.request_id, None))

    def preempted(self, prompt: Prompt) -> Prompt:
        """Return the prompt of a request that is served from its beginning again."""
        anew = self._prompt(prompt.state.context, prompt.shown)
        anew.begun = prompt.begun
        return anew

    def _prompt(self, context: RequestContext, shown: Any) -> Prompt:
        state = RequestState(context, (self._slot,), prompt_tokens=_length(shown), is_whole=self._has_groups)
        return Prompt(state, shown)

    def computes(self, prompt: Prompt) -> None:
        """Record that the engine begins a prompt, or a session's next input: its chunks not loaded are computed."""
        state = prompt.state
        self.waits.taken_up(state)
        state.prompt_tokens = _length(prompt.shown)
        prompt.before = max(prompt.begun, prompt.loaded)
        prompt.begun, prompt.loaded = state.prompt_tokens, 0
        self.waits.gpu.computes(max(0, prompt.begun - prompt.before))

    def end_step(self) -> None:
        """End the step: its loads are submitted, and later decisions use the state of the next one."""
        self._slot.promised_chunks = 0
        self.waits.questions_sent()
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

    def answer_over(self, prompt: Prompt) -> bool:
        """Return whether a request that got no answer has waited long enough for one."""
        if self.waits.lookup_over(prompt.state, prompt.state.slots):
            return True
        prompt.asking_in = self._step
        return False

    def load_begins(self, prompt: Prompt, chunks: int, tokens: int) -> None:
        """Record a load of so many chunks, which saves computing so many tokens; its request waits for it."""
        state = prompt.state
        is_first = not state.loading
        self._leave_out_pause(prompt)
        self.waits.taken_up(state)
        state.load_from(self._slot, chunks)
        prompt.loads += 1
        prompt.loading += tokens
        if state.prompt_tokens:  # windows save no tokens of their own
            prompt.loading = min(prompt.loading, state.prompt_tokens)
        if is_first:
            self.waits.load_begins(state)
        self.wait_is_over(prompt)

    def load_ends(self, prompt: Prompt, chunks: int) -> None:
        """Record the end of a load of so many chunks."""
        self._slot.metrics.loading_chunks -= chunks
        prompt.loads -= 1
        prompt.idle_since = self._clock()

    def wait_is_over(self, prompt: Prompt) -> bool:
        """Return whether a request has waited long enough for its loads, or computing it is sooner.

        The two are not compared while it waits for answers, too: it is not known then what it loads in all. Nor are
        they for a trial, which is to show what the tier takes now.
        """
        compares = prompt.asking_in < self._step - 1 and (prompt.is_loaded or not prompt.trial)
        return self.waits.load_over(prompt.state, prompt.loading, compares=compares)

    def _decide(self, prompt: Prompt) -> None:
        prompt.decided_in = self._step
        self._leave_out_pause(prompt)
        tokens = prompt.state.prompt_tokens
        chunks = tokens // max(1, self._chunk_tokens)
        if self.waits.decides and chunks:
            prompt.is_loaded = self.waits.is_sooner(self._slot, chunks, tokens, chunks, prompt.state)
        else:
            prompt.is_loaded = self._slot.rate.stalled(self._clock()) < self._longest_silence
        if prompt.is_loaded:
            self.waits.taken_up(prompt.state)
            self._slot.promised_chunks += chunks
        elif self.waits.decides and not prompt.trial:
            prompt.trial = self.waits.trial(self._slot)

    def _leave_out_pause(self, prompt: Prompt) -> None:
        """Let the time since a request's last load not count as a wait for loads."""
        if prompt.state.load_since is not None and not prompt.loads:
            now = self._clock()
            prompt.state.load_since += now - prompt.idle_since
            prompt.idle_since = now


def _length(shown: Any) -> int:
    """Return the length of a prompt, with all inputs that a session has begun; 0 where vLLM does not say it."""
    return int(getattr(shown, "num_prompt_tokens", None) or 0)


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
