"""How long a request waits for a tier: never longer than is worth it.

Two clocks a request, each started by the first answer that makes it wait and never wound again: one for answers that
are not there yet (``lookup_wait``), one for chunks that are on their way (``load_wait``; ``auto``: as long as computing
them would take, once both sides have been measured, and ``lookup_wait`` until then).
"""

import math
from collections.abc import Callable

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["PrefillPrice", "Waits"]

_NEWEST_STEP = 0.2  # its weight in the running seconds per token, if all steps have equally many tokens
_MEASURE_SECONDS = 5.0  # how often a tier that seems too slow is measured anew
_TRIAL_CHUNKS = 16  # how much is loaded for that


class PrefillPrice:
    """Seconds that computing a token takes, running; a step of few tokens says little of it, and weighs as little."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None
        """None until a step has been seen."""
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take a step into account that has computed so many tokens, more than none."""
        self._tokens += _NEWEST_STEP * (tokens - self._tokens)
        self._seconds += _NEWEST_STEP * (seconds - self._seconds)
        self.seconds_per_token = self._seconds / self._tokens


class Waits:
    """Weighs tiers against computing; runs on the engine's thread."""

    def __init__(self, options: TieringOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._prefill = PrefillPrice()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Take what the engine has seen of its own speed."""
        if tokens > 0 and 0 < seconds < math.inf:
            self._prefill.observe(tokens, seconds)

    def worth_loading(
        self, slot: TierSlot, chunks: int, tokens_per_chunk: int, state: RequestState, waited: int
    ) -> int:
        """Return how many of these chunks, which this tier has, are worth loading: all, a few for a trial, or none.

        All have to come before the request stops waiting, behind the tier's queue: of that, what the request itself has
        found would be computed too. ``waited``: how many chunks of this group the request has waited for so far.
        """
        per_token, per_chunk = self._prefill.seconds_per_token, slot.seconds_per_chunk
        if self._options.load_wait is not None or per_token is None or per_chunk is None:
            return chunks
        now = self._clock()
        tokens = max(state.load_tokens, (waited + chunks) * tokens_per_chunk)
        left = tokens * per_token - (0.0 if state.load_since is None else now - state.load_since)
        is_cheaper = per_chunk <= tokens_per_chunk * per_token
        if is_cheaper and (chunks + slot.metrics.loading_chunks) * per_chunk <= left:
            return chunks
        if now - max(slot.measured_at, slot.tried_at) < _MEASURE_SECONDS:
            return 0
        slot.tried_at = now
        return min(chunks, _TRIAL_CHUNKS)

    def lookup_over(self, state: RequestState) -> bool:
        """Say whether a request that got no answer has waited long enough for one."""
        now = self._clock()
        if state.lookup_since is None:
            state.lookup_since = now
        return now - state.lookup_since >= self._options.lookup_wait

    def load_over(self, state: RequestState, tokens: int, unmeasured: Callable[[], bool]) -> bool:
        """Say whether a request has waited long enough for chunks of this many tokens.

        ``unmeasured``: says whether one of the tiers that bring them has not brought anything yet.
        """
        now = self._clock()
        if state.load_since is None:
            state.load_since = now
        state.load_tokens = max(state.load_tokens, tokens)
        state.load_over = state.load_over or now - state.load_since >= self._load_wait(state.load_tokens, unmeasured)
        return state.load_over

    def _load_wait(self, tokens: int, unmeasured: Callable[[], bool]) -> float:
        if self._options.load_wait is not None:
            return self._options.load_wait
        per_token = self._prefill.seconds_per_token
        if per_token is None or unmeasured():
            return self._options.lookup_wait
        return tokens * per_token
