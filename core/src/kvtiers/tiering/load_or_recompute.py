"""The load-or-recompute decision: which requests wait for a tier, and for how long. Never longer than is worth it.

**The model.** One GPU computes prompts one after another, each tier brings chunks one after another, all at the same
time. For a request of which a tier has chunks (seconds, tokens, chunks)::

    by the GPU    (tokens to compute before it + its own + as many of those behind it) x seconds a token
    by the tier   latency + (chunks in flight + its own) x seconds a chunk

``seconds a token`` is the engine's own, ``latency`` and ``seconds a chunk`` are the tier's (``estimates.py``). Before
it are the prompts of requests that a lookup has left to be computed; they are worked off by the tokens that the engine
reports, or by the clock. Behind it are requests that have come and whose lookup has no answer yet. Where there are some
the GPU has work while this request is loaded, so the load may take longer: their tokens count, up to as many as the
request's own.

A tier that brings chunks 2.5 times as fast as the GPU computes them is fast, and so is any while nothing was brought
nor computed. What it brings for the requests before this one would keep the GPU busy for much longer than the tier. So
those loads count on both sides, and a burst that such a tier has is loaded, whole. What the GPU could compute meanwhile
is not worth it: each of its steps takes as long as several loads, and for so long no answer leaves the engine and no
load begins.

**The decision.** At the lookup the request is loaded if the tier has it sooner, else it is computed. While it waits the
two are compared again, with the rest of the load: the request is computed after all if that is sooner by a quarter at
least. It waits at most 1.1 times as long as computing would have taken when it began to wait. Where other loads have
used up the tier's budget of rows, it waits for its turn by the same rule. For the tier's answer it waits 0.15 times as
long as computing takes, or ``lookup_wait``, and 1.1 times while the tier loads: its hosts answer late then, and what it
is asked for would come after those loads anyway. The request waits for its own among them in any case. That wait begins
when the question has been sent.

A prompt with windows or states can be used up to a place where its tier has them, or not at all. So it is decided as a
whole, with the chunks of all KV groups, and once; while it waits it is computed after all if that, of all its tokens,
is sooner.

What holds of the sum of waiting and computing, for one request that has the engine to itself, beside the wait for an
answer: at most 1.05 times computing, once the tier has brought something and as long as it keeps its speed. One that
was not measured, or falls silent, is waited for 1.1 times as long as computing is taken to take, so that its first
requests take 2.1 times as long: what is not known yet can be found out by waiting alone.

**Not yet measured.** A tier that has loaded nothing yet is measured by its first load: the first request is loaded, and
the bound above limits what that can cost it; the requests behind it are decided by a prior. While a first load is in
flight, the tier counts as at least as slow as that load's time so far, so that later requests are computed. A tier that
was too slow is tried again every 5 s, with 16 or 64 chunks in turn, for which no request waits. Before the engine has
computed anything, its speed is a prior too; for the load of a request that has the engine to itself it is the engine's
own estimate, if there is one. A request waits at least ``lookup_wait`` then, and a load is not given up in its first
moment, when several jobs run beside the first that lands. Where a tier has all prompts nothing would ever be computed,
and the prior would stay. Where the engine has no estimate, one request then has the last sixteenth of its tokens
computed, unless the tier is as fast as the fastest GPU may be, or the prompt has windows or states. With an estimate no
prompt is cut: steps with at least 512 prompt tokens that misses bring say what computing costs.

``load_wait`` in seconds replaces all of this: what a tier has is loaded, and waited for so long.
"""

import math
from collections.abc import Callable, Sequence

from kvtiers.tiering.estimates import LEAST_STEP, PRIOR_BYTES_PER_SECOND, PrefillCost
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["FAST", "LATE", "LOOKUP", "STAY", "TRIAL", "GpuQueue", "Waits"]

LATE = 1.1
"""A request waits so many times as long as computing takes, at most."""
FAST = 2.5
"""A tier is fast that brings chunks so many times as fast as the GPU computes them."""
LOOKUP = 0.15
"""A request waits for a tier's answer for this share of the time that computing its prompt takes."""
TRIAL = 16
"""A request that is to show what computing takes has the last one of so many parts of it computed."""
_TRIAL_SECONDS = 5.0
_FASTEST_GPU = 7e9  # bytes of KV a second: an H100 with a model of 1 billion parameters
_FIRST_LOOK = 0.25
"""Until something was computed, a load is not given up within this share of the time that computing may take."""
STAY = 1.25
"""A request stops to wait for a load whose rest takes more than so many times as long as computing."""


class GpuQueue:
    """The queue of one GPU, in tokens: the prompts ahead of a request that comes now, and those behind it."""

    def __init__(self, cost: PrefillCost, clock: Callable[[], float]) -> None:
        self.cost = cost
        self.waiting = 0
        """Tokens of prompts that have come, and of which it is not decided yet whether they are computed."""
        self._clock = clock
        self.is_empty = True
        """Nothing was put into it, or all of that has been computed."""
        self._ahead = 0.0
        self._drained_at = 0.0

    def computes(self, tokens: float) -> None:
        """Put so many tokens into the queue, behind all others."""
        now = self._clock()
        self._ahead = self._left(now) + tokens
        self._drained_at = now
        self.is_empty = self._ahead <= 0

    def step_ends(self, tokens: int) -> None:
        """Record what was computed since the last step: as the engine reports, or at least by the clock."""
        now = self._clock()
        self._ahead = min(self._left(now), max(0.0, self._ahead - tokens))
        self._drained_at = now
        self.is_empty = self._ahead <= 0

    @property
    def ahead(self) -> float:
        """Tokens to be computed before a request that comes now."""
        return 0.0 if self.is_empty else self._left(self._clock())

    def _left(self, now: float) -> float:
        """Return the tokens in the queue that are not computed yet, by the clock."""
        if self.is_empty:
            return 0.0
        per_token = self.cost.seconds_per_token
        return max(0.0, self._ahead - (now - self._drained_at) / per_token) if per_token > 0 else 0.0


class Waits:
    """Weighs tiers against computing; runs on the engine's thread."""

    def __init__(self, options: TieringOptions, clock: Callable[[], float], cost: PrefillCost) -> None:
        self._clock = clock
        self.cost = cost
        self.gpu = GpuQueue(self.cost, clock)
        self._trial_until = -math.inf
        self.unasked: set[RequestState] = set()
        """Requests that got no answer in this step, and never before: their questions leave with its end."""
        self.set_options(options)

    def set_options(self, options: TieringOptions) -> None:
        """Use other waits from now on."""
        self._options = options
        self.decides = options.load_wait is None
        """By the model; False: ``load_wait`` is given."""

    def behind(self, state: RequestState) -> int:
        """Return how many tokens wait for the GPU besides this request's."""
        own = state.prompt_tokens if state.has_come and not state.is_taken_up else 0
        return self.gpu.waiting - own

    def has_prompts_beside(self, state: RequestState) -> bool:
        """Return whether the GPU has other prompts to compute, now or soon."""
        return not self.gpu.is_empty or self.behind(state) > 0

    # -- what the GPU has to do

    def step_ends(self, tokens: int, seconds: float, position: float = 0.0) -> None:
        """Record how many tokens the engine has computed since the last step, in how many seconds, and where."""
        if tokens > 0 and 0 < seconds < math.inf:
            self.cost.observe(tokens, seconds, position if 0 < position < math.inf else 0.0)
        if not self.gpu.is_empty:
            self.gpu.step_ends(max(0, tokens))

    def came(self, state: RequestState) -> None:
        """Count a new request, which waits for its turn; once a request."""
        if not state.has_come:
            state.has_come = True
            self.gpu.waiting += state.prompt_tokens

    def taken_up(self, state: RequestState) -> None:
        """Count a request as no longer waiting: it was looked up, or is over."""
        if state.has_come and not state.is_taken_up:
            state.is_taken_up = True
            self.gpu.waiting -= state.prompt_tokens

    def computes(self, state: RequestState, tokens: int) -> None:
        """Count the tokens of a request that its lookup left to be computed; once a request."""
        if not state.is_computed:
            state.is_computed = True
            self.gpu.computes(max(tokens, 0))

    # -- at the lookup

    def is_sooner(self, slot: TierSlot, chunks: int, tokens: int, total: int, state: RequestState) -> bool:
        """Return whether a tier loads its share of a request's plan sooner than the request's tokens are computed.

        The share is ``chunks`` of ``total`` chunks of all tiers and KV groups, which save computing ``tokens`` tokens.
        It pays only if all of it lands, behind the tier's queue, within the request's remaining wait; the part of the
        queue that is the request's own would be computed too.
        """
        now = self._clock()
        tokens_per_chunk = tokens / max(1, total)
        left = self._seconds_by_gpu(max(state.load_tokens, tokens), state)
        left -= 0.0 if state.load_since is None else now - state.load_since
        in_flight = slot.metrics.loading_chunks + slot.promised_chunks
        own = 0 if slot.rate.seconds_per_chunk is not None else min(in_flight, state.loading.get(slot, (0, 0))[1])
        soon = slot.rate.expected(chunks, in_flight - own, now)
        left += self._spared(slot, in_flight, tokens_per_chunk)
        return soon <= left and self._is_cheaper(slot, tokens_per_chunk, state)

    def trial(self, slot: TierSlot) -> int:
        """Return how many chunks may be loaded from a tier that seems too slow, only to measure it; mostly none."""
        return 0 if slot.metrics.loading_chunks else slot.trial(self._clock())

    def _spared(self, slot: TierSlot, chunks: int, tokens_per_chunk: float) -> float:
        """Return the seconds to compute these chunks, which a tier brings for others; 0 if it is not fast.

        While nothing was computed, a tier that has brought nothing yet counts as fast: both are priors.
        """
        per_chunk = slot.rate.seconds_per_chunk
        computing = tokens_per_chunk * self.cost.seconds_per_token
        is_fast = not self.cost.is_measured if per_chunk is None else FAST * per_chunk <= computing
        return chunks * computing if is_fast else 0.0

    def _is_cheaper(self, slot: TierSlot, tokens_per_chunk: float, state: RequestState) -> bool:
        """Return whether loading a chunk takes less than computing it, or than computing two if others want the GPU.

        Chunks that the request gets faster from another tier do not count.
        """
        per_chunk = slot.rate.seconds_per_chunk
        if per_chunk is None or not self.cost.is_measured:
            return True
        tokens = tokens_per_chunk + min(self.behind(state) + self.gpu.ahead, tokens_per_chunk)
        return per_chunk <= tokens * self.cost.seconds_per_token

    def _seconds_by_gpu(self, tokens: float, state: RequestState) -> float:
        """Return the seconds to compute this many tokens of a request, and those of other requests that count."""
        ahead, behind = self.gpu.ahead, self.behind(state)
        return self._at_least((ahead + tokens + min(behind, tokens)) * self._seconds_per_token(state))

    def _seconds_per_token(self, state: RequestState) -> float:
        """Return what a token of this request costs: until that is measured, by the estimate if nothing is beside it.

        Beside others the prior stands, which takes computing to be dear: in a burst the first loads look slow, since
        several run at once, and what is computed for that holds up all loads behind it.
        """
        return self.cost.seconds_per_token if self.cost.is_measured or self._is_beside(state) else self.cost.estimate

    def _is_beside(self, state: RequestState) -> bool:
        """Return whether the request has others beside it, or had when it began to wait."""
        return (
            state.was_beside
            or self.has_prompts_beside(state)
            or any(_loads_for_others(slot, state) for slot in state.slots)
        )

    def _at_least(self, seconds: float) -> float:
        return seconds if self.cost.is_measured else max(self._options.lookup_wait, seconds)

    def trial_of_cost(self, slot: TierSlot, tokens: int, state: RequestState) -> bool:
        """Return whether a request of so many tokens is to be computed in part, since nothing tells what that costs.

        Only of a tier whose rate is known, and that a GPU may outdo; never one with windows or states, which are stored
        at the prompt's end alone: without its last tokens none of it could be used. One request is enough; another one
        follows if nothing has come of it after 5 s.
        """
        is_known = self.cost.is_measured or self.cost.is_estimated
        if is_known or not self.decides or state.is_whole or tokens < LEAST_STEP * TRIAL:
            return False
        per_chunk, now = slot.rate.seconds_per_chunk, self._clock()
        fastest = slot.rate.prior * PRIOR_BYTES_PER_SECOND / _FASTEST_GPU
        if per_chunk is None or per_chunk <= fastest or now < self._trial_until:
            return False
        self._trial_until = now + _TRIAL_SECONDS
        return True

    # -- while a request waits

    def lookup_over(self, state: RequestState, silent: Sequence[TierSlot]) -> bool:
        """Return whether a request that got no answer from these tiers has waited long enough for one.

        Its wait begins with the end of the step: the questions of a step leave then, however long its lookups took.
        """
        if state.lookup_since is None:
            self.unasked.add(state)
            return False
        waited = self._clock() - state.lookup_since
        if waited < self._options.lookup_wait or not self.decides:
            return waited >= self._options.lookup_wait
        # What a tier brings now is before what it is asked for, whenever the answer comes.
        share = LATE if any(slot.metrics.loading_chunks for slot in silent) else LOOKUP
        return waited >= share * state.prompt_tokens * self._seconds_per_token(state)

    def questions_sent(self) -> None:
        """Begin the waits for answers of the requests that were the first to ask in this step, which ends now."""
        now = self._clock()
        for state in self.unasked:
            state.lookup_since = now
        self.unasked.clear()

    def load_begins(self, state: RequestState) -> None:
        """Record what is beside a request, and before it, that begins to wait for loads."""
        state.queue = self.gpu.ahead, self.behind(state)
        state.was_beside = self._is_beside(state)
        state.ended_before = {slot: slot.ended_chunks for slot in state.slots}

    def load_over(self, state: RequestState, tokens: int, *, compares: bool = True) -> bool:
        """Return whether a request has waited long enough for this many tokens' chunks, or computing is sooner.

        ``compares``: whether it may be sooner.
        """
        now = self._clock()
        if state.load_since is None:
            state.load_since = now
            self.load_begins(state)
        state.load_tokens = max(state.load_tokens, tokens)
        if not state.load_over:
            waited = now - state.load_since
            state.is_overtaken = compares and self.decides and waited > 0 and self._is_overtaken(state, waited)
            state.load_over = state.is_overtaken or waited >= self._longest(state)
        return state.load_over

    def line_over(self, state: RequestState, tokens: int) -> bool:
        """Return whether a request has stood in line for a tier's rows, with nothing on its way, as long as it may.

        The limit is the time to compute all tokens queued now, its own included: the GPU's queue would take as long.
        """
        now = self._clock()
        if state.line_until is None:
            tokens += int(self.gpu.ahead) + self.behind(state)
            state.line_until = now + self._at_least(LATE * tokens * self.cost.seconds_per_token)
        return now >= state.line_until

    def _longest(self, state: RequestState) -> float:
        if self._options.load_wait is not None:
            return self._options.load_wait
        ahead, behind = state.queue
        tokens = ahead + state.load_tokens + min(behind, state.load_tokens) + self._spared_before(state)
        return self._at_least(LATE * tokens * self._seconds_per_token(state))

    def _spared_before(self, state: RequestState) -> float:
        """Return the tokens of others that fast tiers bring, or have brought, before the request's own.

        Of a tier that has brought nothing yet no more than the request's own: it may never bring any.
        """
        per_chunk = state.load_tokens / max(1, sum(chunks for _, chunks in state.loading.values()))
        found = 0.0
        for slot, (last, chunks) in state.loading.items():
            before = max(0, last - chunks - state.ended_before.get(slot, 0)) * per_chunk
            if self._spared(slot, 1, per_chunk):
                most = math.inf if slot.rate.seconds_per_chunk is not None else state.load_tokens
                found = max(found, min(before, most))
        return found

    def _is_overtaken(self, state: RequestState, waited: float) -> bool:
        """Return whether what is left of the request's loads takes clearly longer than computing it would.

        By what the tiers have shown: one that falls silent has as long as the request waits. While nothing was computed
        not at once: a tier reads several jobs at a time, and looks slow when the first of them has landed.
        """
        if not self.cost.is_measured and waited < _FIRST_LOOK * state.load_tokens * self.cost.estimate:
            return False
        left, own_left, own, spared = 0.0, 0, 0, 0.0
        per_chunk = state.load_tokens / max(1, sum(chunks for _, chunks in state.loading.values()))
        for slot, (last, chunks) in state.loading.items():
            if slot.rate.seconds_per_chunk is None:
                continue  # it has as long as the request waits
            queue = max(0, last - slot.ended_chunks)
            if queue:
                left = max(left, slot.rate.latency - waited + queue * slot.rate.seconds_per_chunk)
                own_left += min(queue, chunks)
                spared = max(spared, self._spared(slot, max(0, queue - chunks), per_chunk))
            own += chunks
        if not own_left:
            return False
        tokens = state.load_tokens * (1.0 if state.is_whole else own_left / own)
        return left > STAY * (self._seconds_by_gpu(tokens, state) + spared)


def _loads_for_others(slot: TierSlot, state: RequestState) -> bool:
    last, own = state.loading.get(slot, (0, 0))
    return slot.metrics.loading_chunks > min(own, max(0, last - slot.ended_chunks))
