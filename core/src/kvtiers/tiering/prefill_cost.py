"""The prefill cost of an engine: seconds to compute a prompt's token, estimated from its own steps.

::

    seconds a token = the lower third of (seconds / tokens) over the last 9 steps, by their tokens

Whatever disturbs a step makes it longer: compilation and pinning at the start, decoding requests, an idle engine that
is counted in. So not the median but the lower third is used, which holds after a single good step among two bad
ones, and follows an engine that has become slower within seven. A step's fixed cost (launches, sampling) makes a token
of a short one dear: one with less than a quarter of the tokens of the largest remembered says nothing. After a hit few
tokens are computed, and with hits alone there are only such steps; the longer ones before them stay remembered.

Before the first step a prior stands: an engine that makes so much KV a second. GPUs make 1 GB/s (a small one) to
7 GB/s (an H100 with a model of 1 billion parameters; 4 GB/s with one of 8 billion: 128 KiB a token in 30 us). The prior
is the low end: it takes computing to be dear, so that the first request that hits in a tier is loaded.
"""

from collections import deque

from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.tiering.robust import weighted_quantile

__all__ = ["PrefillCost", "prior_seconds_per_token"]

_PRIOR_KV_BYTES_PER_SECOND = 1e9

_STEPS = 9
_SHARE = 1 / 3
_SMALLEST = 1 / 4  # of the largest step's tokens


class PrefillCost:
    """Observed on the engine's thread; ``seconds_per_token`` may be read on any. ``prior``: until a step was seen."""

    def __init__(self, prior: float = 0.0) -> None:
        self.seconds_per_token = prior
        self.is_measured = False
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    def observe(self, tokens: int, seconds: float) -> None:
        """Take a step into account that has computed so many tokens of prompts, more than none, in so many seconds."""
        steps = self._steps
        if steps and tokens < _SMALLEST * max(steps)[0]:
            return
        steps.append((tokens, seconds))
        self.seconds_per_token = weighted_quantile([(took / some, some) for some, took in steps], _SHARE)
        self.is_measured = True


def prior_seconds_per_token(layout: CacheLayout) -> float:
    """Return the assumed seconds a token before the first step, from the KV bytes of a token in all ranks.

    A hybrid model counts all its groups, though window groups keep little of a long prompt: the estimate is high then.
    """
    groups = range(len(layout.groups))
    nbytes = sum(layout.payload_bytes(group) / layout.tokens_per_chunk(group) for group in groups)
    return nbytes / _PRIOR_KV_BYTES_PER_SECOND
