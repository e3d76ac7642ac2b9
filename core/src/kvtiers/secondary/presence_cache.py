"""The presence cache of a tier: which chunks its store has, asked once and remembered for a while.

A verdict is HIT or MISS and expires; a chunk without a verdict is unknown, or being asked for. A completed store turns
the verdict to HIT, a failed load turns it to MISS, and both discard answers for that chunk that are still in flight. A
key whose lookup hit and whose load missed is also a suspect key. Runs on the engine's thread; the tier's backend sends
the questions.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.host.messages import Status, drop_oldest

__all__ = ["PresenceCache", "SuspectKeys"]

_MOST_VERDICTS = 250_000
_MOST_SUSPECT = 8_192
_MISS_SECONDS = 1.0  # another engine may store it at any time; a MISS is reused no longer than this
_LEAST_SECONDS = 0.2  # an answer that expired before the next lookup would be asked for again and again
_MOST_PROBES = 128  # in flight at once; a tier that has not answered these is asked no more for now
_LONGEST_RUN = 8_192  # keys in one question
_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_NOT_GIVEN = frozenset({Status.MISSING, Status.CORRUPT})
_QUEUED = 0  # in place of a probe's id: to be asked at the end of the step


class _Probe(NamedTuple):
    """A question in flight."""

    keys: Sequence[OffloadKey]
    sent_at: float


class PresenceCache:
    """The verdicts of one tier. ``send(probe_id, keys, is_prefix)`` asks; False: it cannot be asked now.

    ``exists_ttl``: seconds for which an answer is reused. ``deadline``: seconds in which a question is answered.
    ``most``: verdicts that are remembered.
    """

    def __init__(
        self,
        exists_ttl: float,
        deadline: float,
        clock: Callable[[], float],
        send: Callable[[int, Sequence[OffloadKey], bool], bool],
        *,
        most: int = _MOST_VERDICTS,
    ) -> None:
        self.set_ttl(exists_ttl)
        self._deadline = deadline
        self._clock = clock
        self._send = send
        self._most = most
        self._verdicts: dict[OffloadKey, float] = {}  # until when: positive a HIT, negative a MISS
        self._asked: dict[OffloadKey, int] = {}
        self._probes: dict[int, _Probe] = {}  # the oldest first
        self._ids = itertools.count(1)
        self._runs: list[Sequence[OffloadKey]] = []
        self._singles: dict[OffloadKey, None] = {}
        self.at_work = False
        """There is a question to send, or one in flight."""
        self.questions = 0
        """Questions that have ended: answered, failed, or given up."""
        self.seconds = 0.0
        """Seconds that these were in flight; of those of one time all count."""

    @property
    def open_probes(self) -> int:
        """Questions in flight."""
        return len(self._probes)

    def set_ttl(self, exists_ttl: float) -> None:
        """Reuse the answers that come from now on for so many seconds."""
        self._hit_seconds = max(_LEAST_SECONDS, exists_ttl)
        self._miss_seconds = max(_LEAST_SECONDS, min(exists_ttl, _MISS_SECONDS))

    def ask(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Answer for the leading run of a prefix, up to the first MISS or unknown chunk; what is unknown gets asked."""
        now = self._clock()
        verdicts = map(self._verdicts.get, keys, itertools.repeat(-1.0))
        hits = next((place for place, until in enumerate(verdicts) if until < now), len(keys))
        answers = [_HIT] * hits
        if hits < len(keys):
            until = self._verdicts.get(keys[hits])
            is_miss = until is not None and until <= -now
            answers.append(_MISS if is_miss else self._want(keys[hits:], now))
        return answers

    def has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether the store has all of these chunks, by verdicts that are still good."""
        return min(map(self._verdicts.get, keys, itertools.repeat(-1.0)), default=-1.0) >= self._clock()

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether the store lacks all of these chunks, by verdicts that are still good."""
        return max(map(self._verdicts.get, keys, itertools.repeat(0.0)), default=-math.inf) <= -self._clock()

    def flush(self) -> None:
        """Send the step's questions."""
        if self._singles:
            self._post(list(self._singles), is_prefix=False)
            self._singles.clear()
        for run in self._runs:
            self._post(run, is_prefix=True)
        self._runs.clear()

    def answered(self, probe_id: int, answers: bytes) -> None:
        """Record the answers to a probe, for its first keys; the others stay unknown."""
        probe = self._probes.get(probe_id)
        if probe is None:
            return
        now = self._clock()
        self.questions += 1
        self.seconds += now - probe.sent_at
        self._take_in(probe_id, answers, now)

    def _take_in(self, probe_id: int, answers: bytes, now: float) -> None:
        probe = self._probes.pop(probe_id)
        asked = self._asked
        until = (-(now + self._miss_seconds), now + self._hit_seconds)
        # The others have got a verdict otherwise, or are asked for again.
        mine = [asked.get(key) == probe_id for key in probe.keys]
        for key in itertools.compress(probe.keys, mine):
            asked.pop(key, None)
        known = [(key, until[there > 0]) for key, there in zip(probe.keys, answers, strict=False)]
        self._verdicts.update(itertools.compress(known, mine))
        drop_oldest(self._verdicts, self._most)

    def failed(self, probe_id: int) -> None:
        """Record that a probe failed: its chunks are misses for now."""
        if probe_id in self._probes:
            self.answered(probe_id, bytes(len(self._probes[probe_id].keys)))

    def give_up_overdue(self) -> int:
        """Turn questions that were asked too long ago into misses; return how many these were."""
        now = self._clock()
        overdue = 0
        while self._probes:
            oldest = next(iter(self._probes))
            if self._probes[oldest].sent_at + self._deadline > now:
                break
            self.failed(oldest)
            overdue += 1
        self.at_work = bool(self._probes or self._singles or self._runs)
        return overdue

    def stored(self, keys: Iterable[OffloadKey]) -> None:
        """Record that these chunks are in the tier now."""
        self._learn(keys, self._clock() + self._hit_seconds)

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """Record that these chunks could not be loaded: turn their verdicts to MISS."""
        self._learn(keys, -(self._clock() + self._miss_seconds))

    def clear(self) -> None:
        """Forget everything: names have changed, or the tier may have."""
        self._verdicts.clear()
        self._asked.clear()
        self._probes.clear()
        self._runs.clear()
        self._singles.clear()

    def _learn(self, keys: Iterable[OffloadKey], until: float) -> None:
        learnt = dict.fromkeys(keys, until)
        self._verdicts.update(learnt)
        if self._asked:
            for key in learnt:
                self._asked.pop(key, None)
        drop_oldest(self._verdicts, self._most)

    def _want(self, keys: Sequence[OffloadKey], now: float) -> LookupResult:
        """Queue a question about an unknown run, except for chunks being asked for or behind a known MISS."""
        if keys[0] in self._asked or keys[0] in self._singles:
            return _RETRY
        if len(self._probes) + len(self._runs) >= _MOST_PROBES:
            return _RETRY  # its request asks again in the next step, for as long as it waits for answers
        self.at_work = True
        if len(keys) == 1:
            self._singles[keys[0]] = None
            return _RETRY
        keys = keys[:_LONGEST_RUN]
        asked, singles, verdicts = self._asked, self._singles, self._verdicts
        is_new = asked.keys().isdisjoint(keys) and singles.keys().isdisjoint(keys)
        if not is_new or min(map(verdicts.get, keys, itertools.repeat(0.0))) < -now:
            ends = (key in asked or key in singles or verdicts.get(key, 0.0) < -now for key in keys)
            keys = keys[: list(ends).index(True)]
        self._runs.append(keys)
        asked.update(dict.fromkeys(keys, _QUEUED))
        return _RETRY

    def _post(self, keys: Sequence[OffloadKey], *, is_prefix: bool) -> None:
        probe_id = next(self._ids)
        now = self._clock()
        self._probes[probe_id] = _Probe(keys, now)
        self._asked.update(dict.fromkeys(keys, probe_id))
        if not self._send(probe_id, keys, is_prefix):
            # Behind others that are in flight it is asked again in the next step. Else there is no host.
            self._take_in(probe_id, b"" if len(self._probes) > 1 else bytes(len(keys)), now)


class SuspectKeys:
    """Suspect keys of one tier: ``exists`` said yes, but the load did not bring the chunk, or it was deleted.

    The next store of such a key overwrites whatever is there, without asking first: a value of another format or length
    would stand in its way for ever. Kept on the engine's side, so that it holds for every host of the tier; the latest
    ``most`` are. For one thread.
    """

    def __init__(self, most: int = _MOST_SUSPECT) -> None:
        self._most = most
        self.keys: dict[OffloadKey, None] = {}

    def note(self, keys: Sequence[OffloadKey], statuses: bytes | bytearray, *, is_load: bool) -> None:
        """Update the suspects by a job's statuses: a load's miss adds its key, a value read or written removes it."""
        if is_load and not _NOT_GIVEN.isdisjoint(statuses):
            self.keys.update((key, None) for key, status in zip(keys, statuses, strict=False) if status in _NOT_GIVEN)
            drop_oldest(self.keys, self._most)
        if self.keys:
            for key, status in zip(keys, statuses, strict=False):
                if status == Status.DONE:
                    self.keys.pop(key, None)

    def deleted(self, keys: Iterable[OffloadKey]) -> None:
        """Add keys whose values were removed: another host of the tier may still take them for present."""
        self.keys.update(dict.fromkeys(keys))
        drop_oldest(self.keys, self._most)

    def among(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return a byte for each of these keys, 1 for a suspect one; nothing if none is."""
        if self.keys.keys().isdisjoint(keys):
            return b""
        return bytes(key in self.keys for key in keys)

    def clear(self) -> None:
        """Forget all suspect keys."""
        self.keys.clear()
