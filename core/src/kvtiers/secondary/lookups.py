"""Answers to "is it there?": asked once, remembered for a while, and never older than what is known since.

A verdict is HIT or MISS until a time; a chunk without one is unknown, or being asked for. A store that completes turns
the verdict to HIT, a failed load turns it to MISS, and either makes answers that are still under way void for that
chunk. Runs on the engine's thread; the asking itself is done elsewhere.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from kvtiers.api import LookupResult, OffloadKey

__all__ = ["TierLookups"]

_MAX_VERDICTS = 1_000_000
_MISS_SECONDS = 1.0  # another engine may store it at any time; a MISS is believed no longer than this
_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class TierLookups:
    """The verdicts of one tier. ``send(probe_id, keys, is_prefix)`` asks; False: it cannot be asked now."""

    def __init__(
        self, exists_ttl: float, clock: Callable[[], float], send: Callable[[int, Sequence[OffloadKey], bool], bool]
    ) -> None:
        self._hit_seconds = exists_ttl
        self._miss_seconds = min(exists_ttl, _MISS_SECONDS)
        self._clock = clock
        self._send = send
        self._verdicts: dict[OffloadKey, float] = {}  # until when: positive a HIT, negative a MISS
        self._asked: dict[OffloadKey, int] = {}
        self._probes: dict[int, Sequence[OffloadKey]] = {}
        self._ids = itertools.count(1)
        self._runs: list[Sequence[OffloadKey]] = []
        self._singles: dict[OffloadKey, None] = {}

    @property
    def open_probes(self) -> int:
        """Questions under way."""
        return len(self._probes)

    def ask(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Answer for the leading run of a prefix, up to the first MISS or unknown chunk; what is unknown gets asked."""
        now = self._clock()
        answers: list[LookupResult] = []
        for until in map(self._verdicts.get, keys):
            if until is None or -now < until < now:
                break
            if until < 0:
                answers.append(_MISS)
                return answers
            answers.append(_HIT)
        if len(answers) < len(keys):
            self._want(keys[len(answers) :], now)
            answers.append(_RETRY)
        return answers

    def flush(self) -> None:
        """Send the step's questions."""
        if self._singles:
            self._post(list(self._singles), is_prefix=False)
            self._singles.clear()
        for run in self._runs:
            self._post(run, is_prefix=True)
        self._runs.clear()

    def answered(self, probe_id: int, answers: bytes) -> None:
        """Take in the answers to a probe, for its first keys; the others stay unknown."""
        keys = self._probes.pop(probe_id, ())
        asked = self._asked
        now = self._clock()
        hit, miss = now + self._hit_seconds, -(now + self._miss_seconds)
        for key, there in itertools.zip_longest(keys, answers):
            if asked.get(key) == probe_id:  # else it has become known otherwise, or is asked for anew
                del asked[key]
                if there is not None:
                    self._verdicts[key] = hit if there else miss
        self._bound()

    def failed(self, probe_id: int) -> None:
        """A probe could not be asked: its chunks are misses for now."""
        self.answered(probe_id, bytes(len(self._probes.get(probe_id, ()))))

    def stored(self, keys: Iterable[OffloadKey]) -> None:
        """These chunks are in the tier now."""
        self._learn(keys, self._clock() + self._hit_seconds)

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """These chunks could not be loaded: whatever was believed of them is wrong."""
        self._learn(keys, -(self._clock() + self._miss_seconds))

    def clear(self) -> None:
        """Forget everything: names have changed, or the tier may have."""
        self._verdicts.clear()
        self._asked.clear()
        self._probes.clear()
        self._runs.clear()
        self._singles.clear()

    def _learn(self, keys: Iterable[OffloadKey], until: float) -> None:
        keys = list(keys)
        self._verdicts.update(dict.fromkeys(keys, until))
        for key in keys:
            self._asked.pop(key, None)
        self._bound()

    def _want(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Note an unknown run, as far as it is not being asked for already and does not end in a known MISS."""
        if keys[0] in self._asked or keys[0] in self._singles:
            return
        if len(keys) == 1:
            self._singles[keys[0]] = None
            return
        asked, verdicts = self._asked, self._verdicts
        end = next((i for i, key in enumerate(keys) if key in asked or verdicts.get(key, 0.0) < -now), len(keys))
        self._runs.append(keys[:end])
        asked.update(dict.fromkeys(keys[:end], 0))

    def _post(self, keys: Sequence[OffloadKey], *, is_prefix: bool) -> None:
        probe_id = next(self._ids)
        self._probes[probe_id] = keys
        self._asked.update(dict.fromkeys(keys, probe_id))
        if not self._send(probe_id, keys, is_prefix):
            self.failed(probe_id)

    def _bound(self) -> None:
        excess = len(self._verdicts) - _MAX_VERDICTS
        if excess > 0:
            for key in list(itertools.islice(self._verdicts, excess + _MAX_VERDICTS // 10)):
                del self._verdicts[key]
