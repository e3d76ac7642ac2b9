"""The two estimates of the load-or-recompute decision: the engine's prefill cost, and each tier's load rate.

Both are weighted quantiles of a few recent measurements, which a few outliers do not move.

**Prefill cost** (``PrefillCost``): seconds to compute a prompt's token, from the engine's own steps::

    seconds a token = the lower third of (seconds - fixed cost) / tokens over the last 9 steps

Whatever disturbs a step makes it longer: compilation and pinning at the start, decoding requests, an idle engine that
is counted in. So not the median but the lower third is used, by the steps' tokens, which holds after a single good step
among two bad ones, and follows an engine that has become slower within seven.

A step's fixed cost (launches, sampling) makes a token of a short one dear: the 16 tokens that are computed after a hit
take as long as some hundreds. So a step of fewer than 512 tokens says nothing, neither does one with less than a
quarter of the tokens of the largest remembered: with hits alone there are only such steps, and the prior stands, or
the longer steps before them. The fixed cost is what is left of the shortest of the last 16 steps without its tokens, by
what steps of at least twice as many tokens take longer than it does; 0 until such a step was seen.

An engine that launches the next step before it has read the report of the last one reads both together at the end of a
burst: what is left for the second one is next to nothing. So a step that took less than half of the engine's estimate
says nothing, unless most did: then the estimate is wrong.

What a load has saved depends on where its tokens are in the prompt, since attention reads all tokens before the one
that is computed. So the same steps are also fitted by position (``seconds``)::

    seconds a token = seconds at the beginning + slope x position

A step's seconds are linear in the mean position of its tokens, however many prompts it has. The slope is the median of
those between any two of the last 16 steps that are far enough apart (Theil-Sen), the beginning the lower third of what
is left. No token is priced as further into its prompt than those that were computed: the saving is never guessed too
high. The decision whether to load takes all tokens to cost the same.

Before the first such step a prior stands: an engine that makes so much KV a second. GPUs make 1 GB/s (a small one) to
7 GB/s (an H100 with a model of 1 billion parameters; 4 GB/s with one of 8 billion: 128 KiB a token in 30 us). The prior
is the low end: it takes computing to be dear, so that the first request that hits in a tier is loaded. An engine may
give an ``estimate`` of its own, as vLLM's integration makes one of the model's operations and the GPU's peak. Where it
is dearer than the prior, as on a CPU, it is the prior; otherwise the prior is no more than three times that.

**Load rate** (``LoadRate``): seconds to a tier's first chunk, and seconds a chunk from then on.

Before its first load a tier is taken to bring 2 GB/s (a network's or one drive's rate) of what stands before a request,
and the request's own at once: a load is how a tier is measured, so the first one is made, and not all behind it.

Measured from the loads that there are, in stretches that each begin and end with a look at the tier's results::

    seconds of a stretch = latency, if the tier was idle before it, + chunks x seconds a chunk

A job that had the tier to itself counts with its own seconds, which the tier has measured: the engine may see its end a
step later, which is 0.25 s later while it computes prompts. Of several jobs the shorter of the sum of their seconds and
of the engine's clock counts: a tier host reports only the time in which any load ran, and each moment of it once, but
the seconds of other tiers' jobs may overlap. A stretch that is an outlier changes a weighted median little; one that is
some seconds old weighs little, so a tier that becomes slower or faster is recognised within seconds. Latency and rate
come apart where stretches were seen that went on from one before, or that have several lengths (Theil-Sen: the median
slope between two of them); before, all is taken as the rate.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtiers.layout.cache_layout import CacheLayout

__all__ = ["LEAST_STEP", "PRIOR_BYTES_PER_SECOND", "LoadRate", "PrefillCost", "prior_seconds_per_token"]

LEAST_STEP = 512
"""Tokens of prompts in a step that says something of what a token costs: fewer cost hardly more than none."""

_PRIOR_KV_BYTES_PER_SECOND = 1e9

_STEPS = 9
_SHARE = 1 / 3
_SMALLEST = 1 / 4  # of the largest step's tokens
_POSITIONED_STEPS = 16
_LONGER = 2  # times the tokens of the shortest step: what a step takes longer than that is the cost of more tokens
_LEAST_COST = 1 / 8  # of a step's seconds for its tokens
_LAUNCHED = 2048  # tokens: fewer may take no longer than launching a step does
_MOST_PRIOR = 3  # times the engine's estimate
_LEAST_OF_ESTIMATE = 1 / 2  # at 0.4 of a card's peak; engines reach 0.5 to 0.6 of it, those in 8 bits up to twice that
_APART = 1 / 4  # of the furthest position: steps that are nearer to each other say nothing of the slope
_FEWEST_PAIRS = 3

PRIOR_BYTES_PER_SECOND = 2e9
"""Of a tier that has brought nothing yet."""

_STRETCHES = 12
_HALF_LIFE = 2.0  # seconds after which a stretch weighs half: a trial 5 s later outweighs what was before it
_MOST_WEIGHT = 64  # chunks: what a trial brings is not drowned in one long load
_LEAST_SECONDS = 0.005  # shorter looks are put together: a result may be seen some of that late
_LEAST_RATIO = 1.5  # of two lengths that say something of the slope between them


class _Step(NamedTuple):
    tokens: int
    seconds: float
    position: float


class PrefillCost:
    """Observed on the engine's thread; ``seconds_per_token`` may be read on any. ``prior``: until a step was seen.

    ``estimate``: the engine's own, in seconds a token; 0 without one.
    """

    def __init__(self, prior: float = 0.0, estimate: float = 0.0) -> None:
        self.seconds_per_token = min(max(prior, estimate), _MOST_PRIOR * estimate) if estimate else prior
        self.estimate = estimate or prior
        self.is_estimated = estimate > 0
        """The engine has an estimate of its own."""
        self._least = _LEAST_OF_ESTIMATE * estimate
        self._most = estimate or math.inf
        self.is_measured = False
        """A step of at least ``LEAST_STEP`` tokens was seen."""
        self._short: deque[_Step] = deque(maxlen=_POSITIONED_STEPS)
        self._steps: deque[_Step] = deque(maxlen=_POSITIONED_STEPS)
        self._fixed: float | None = None
        """Seconds of a step that are not its tokens'; None: nothing shows them yet."""
        self._fit: tuple[float, float] | None = None

    def observe(self, tokens: int, seconds: float, position: float = 0.0) -> None:
        """Take a step into account that has computed so many tokens of prompts in so many seconds, above 0.

        ``position``: the mean number of tokens before each of them in its prompt; 0 for each step: not known.
        """
        if tokens < LEAST_STEP:
            return
        step = _Step(tokens, seconds, position)
        self._short.append(step)
        last = list(self._steps)[-_STEPS:]
        if last and tokens < _SMALLEST * max(last).tokens:
            self._price(last)
            return
        self._steps.append(step)
        self._price([*last, step][-_STEPS:])
        self.is_measured = True

    def _price(self, recent: Sequence[_Step]) -> None:
        self._fit = None
        self._fixed = self._fixed_cost()
        prices = [(self._per_token(step), step.tokens) for step in self._possible(recent)]
        self.seconds_per_token = _weighted_quantile(prices, _SHARE)

    def _possible(self, steps: Iterable[_Step]) -> list[_Step]:
        """Return the steps that took as long as the estimate allows; all of them where most did not."""
        steps = list(steps)
        possible = [step for step in steps if step.seconds >= self._least * step.tokens]
        return possible if 2 * len(possible) >= len(steps) else steps

    def _fixed_cost(self) -> float | None:
        """Return the seconds of a step that are not its tokens', as a longer step beside a short one shows them."""
        least, tokens = min((step.seconds, step.tokens) for step in self._possible(self._short))
        slopes = [
            ((step.seconds - least) / (step.tokens - tokens), step.tokens)
            for step in self._possible(self._steps)
            if step.tokens >= _LONGER * tokens
        ]
        return max(0.0, least - _weighted_quantile(slopes, _SHARE) * tokens) if slopes else None

    def _per_token(self, step: _Step) -> float:
        """Return what a token of a step costs without what is fixed.

        An engine that launches a step for as long as the GPU computes takes the same time for few tokens as for many,
        all of which looks fixed.
        """
        if self._fixed is None:
            per_token = step.seconds / step.tokens
            return min(per_token, self._most) if step.tokens < _LAUNCHED else per_token
        least = min(step.seconds, max(_LEAST_COST * step.seconds, self._least * step.tokens))
        return max(step.seconds - self._fixed, least) / step.tokens

    def seconds(self, tokens: int, position: float) -> float | None:
        """Return what computing so many tokens of this mean position takes; None: nothing was computed yet."""
        if not self._steps:
            return None
        if self._fit is None:
            self._fit = self._fitted()
        begin, slope = self._fit
        return tokens * (begin + slope * min(position, max(step.position for step in self._steps)))

    def _fitted(self) -> tuple[float, float]:
        """Return the seconds of a prompt's first token, and how many more each position adds."""
        apart = _APART * max(step.position for step in self._steps)
        prices = [(self._per_token(step), step) for step in self._possible(self._steps)]
        slopes = [
            (second - first) / (b.position - a.position)
            for (first, a), (second, b) in itertools.combinations(prices, 2)
            if abs(b.position - a.position) > apart
        ]
        slope = max(0.0, statistics.median(slopes)) if len(slopes) >= _FEWEST_PAIRS else 0.0
        begins = [(per_token - slope * step.position, step.tokens) for per_token, step in prices]
        return max(0.0, _weighted_quantile(begins, _SHARE)), slope


def prior_seconds_per_token(layout: CacheLayout) -> float:
    """Return the assumed seconds a token before the first step, from the KV bytes of a token in all ranks.

    A hybrid model counts all its groups, though window groups keep little of a long prompt: the estimate is high then.
    """
    groups = range(len(layout.groups))
    nbytes = sum(layout.payload_bytes(group) / layout.tokens_per_chunk(group) for group in groups)
    return nbytes / _PRIOR_KV_BYTES_PER_SECOND


class _Stretch(NamedTuple):
    """So many chunks came in so many seconds. ``is_fresh``: the tier was idle before, so the latency is in it."""

    chunks: int
    seconds: float
    at: float
    is_fresh: bool


class LoadRate:
    """The measured speed of one tier's loads; runs on the engine's thread."""

    def __init__(self, prior: float = 0.0) -> None:
        self.prior = prior
        """Seconds a chunk until something has come."""
        self.measured_at = -math.inf
        self._tickets = itertools.count(1)
        self._running: dict[int, float] = {}  # by ticket, when it was submitted
        self._newest_ended = 0
        self._behind = 0  # running jobs that are newer than the newest that has ended
        self._behind_since = 0.0
        self._since = 0.0  # of the stretch that is open
        self._is_fresh = True
        self._begun = 0  # jobs since the tier was idle
        self._chunks = 0
        self._seconds = 0.0
        self._stretches: deque[_Stretch] = deque(maxlen=_STRETCHES)
        self._fit: tuple[float, float] | None = None

    # -- what happens

    def begins(self, now: float) -> int:
        """Record the start of a load; return its ticket for ``ends``."""
        ticket = next(self._tickets)
        if not self._running:
            self._since, self._is_fresh, self._begun, self._chunks, self._seconds = now, True, 0, 0, 0.0
        if not self._behind:
            self._behind_since = now
        self._running[ticket] = now
        self._behind += 1
        self._begun += 1
        return ticket

    def ends(self, ticket: int, chunks: int, seconds: float, now: float) -> None:
        """Record a load's end: so many chunks came, by the tier's clock in so many seconds (0: it has none)."""
        submitted = self._running.pop(ticket, now)
        if ticket > self._newest_ended:
            self._newest_ended = ticket
            self._behind = sum(other > ticket for other in self._running)
            self._behind_since = now
        self._chunks += chunks
        self._seconds += seconds or now - submitted

    def drop(self, ticket: int) -> None:
        """Forget a load that was given up: its result says nothing about the next one."""
        if self._running.pop(ticket, None) is not None and ticket > self._newest_ended:
            self._behind -= 1

    def look_ends(self, now: float) -> None:
        """Close the stretch if a load has landed in it and it is long enough; after all results of one poll."""
        took = now - self._since
        if not self._chunks or (took < _LEAST_SECONDS and self._running):
            return
        seconds = self._seconds if self._begun == 1 or took <= 0 else min(self._seconds, took)
        self.add(self._chunks, seconds, now, is_fresh=self._is_fresh)
        self._since, self._is_fresh, self._chunks, self._seconds = now, False, 0, 0.0

    def add(self, chunks: int, seconds: float, now: float, *, is_fresh: bool = True) -> None:
        """Add a stretch to the measurements."""
        self._stretches.append(_Stretch(chunks, seconds, now, is_fresh))
        self.measured_at = now
        self._fit = None

    # -- what follows

    @property
    def seconds_per_chunk(self) -> float | None:
        """Seconds a chunk, without the latency; None until something has come."""
        return self._fitted()[1] if self._stretches else None

    @property
    def latency(self) -> float:
        """Seconds to the first chunk of an idle tier, as far as they are known."""
        return self._fitted()[0] if self._stretches else 0.0

    def expected(self, chunks: int, others: int, now: float) -> float:
        """Return the seconds until so many chunks have landed, behind ``others`` that are in flight.

        At least as long as the tier has been silent (``stalled``): it may be silent for as long again.
        """
        if self._stretches:
            latency, per_chunk = self._fitted()
            return max(latency + (chunks + others) * per_chunk, self.stalled(now))
        return max(others * self.prior, self.stalled(now))

    def stalled(self, now: float) -> float:
        """Return for how long nothing has landed, though a load is in flight that is newer than the last one landed.

        A single job that hangs while newer ones come does not count.
        """
        return now - self._behind_since if self._behind else 0.0

    def _fitted(self) -> tuple[float, float]:
        if self._fit is None:
            self._fit = self._refit()
        return self._fit

    def _refit(self) -> tuple[float, float]:
        stretches, newest = self._stretches, self._stretches[-1].at
        weights = [min(it.chunks, _MOST_WEIGHT) * 0.5 ** ((newest - it.at) / _HALF_LIFE) for it in stretches]
        whole = [(it.seconds / it.chunks, weight) for it, weight in zip(stretches, weights, strict=True)]
        per_chunk = _weighted_quantile(whole)
        fresh = [(it, weight) for it, weight in zip(stretches, weights, strict=True) if it.is_fresh]
        slopes = [
            ((b.seconds - a.seconds) / (b.chunks - a.chunks), min(first, second))
            for (a, first), (b, second) in itertools.combinations(fresh, 2)
            if max(a.chunks, b.chunks) >= _LEAST_RATIO * min(a.chunks, b.chunks)
        ]
        slopes += [pair for it, pair in zip(stretches, whole, strict=True) if not it.is_fresh]
        if not slopes or not fresh:
            return 0.0, per_chunk
        # At most half of the best stretch counts as latency, until longer stretches separate the two.
        slope = max(_weighted_quantile(slopes), min(rate for rate, _ in whole) / 2)
        latency = _weighted_quantile([(it.seconds - it.chunks * slope, weight) for it, weight in fresh])
        return (latency, slope) if latency > 0 else (0.0, per_chunk)


def _weighted_quantile(pairs: Iterable[tuple[float, float]], share: float = 0.5) -> float:
    """Return the smallest value at which ``share`` of all weight is reached; ``pairs``: (value, weight), at least one.

    0.5 is the median. Weights are above 0.
    """
    ordered = sorted(pairs)
    wanted, reached = share * sum([weight for _, weight in ordered]), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return ordered[-1][0]
