"""Lookups: how far a request's prefix is at hand, and how long it is worth waiting for the rest.

The primary is asked first, in one sweep; for what it lacks the tiers are asked in their order. A tier's hits are
reserved for promotion on the spot. Waiting is bounded twice, once a request each: for an answer (``lookup_wait``), and
for a promotion (``load_wait``; ``auto``: no longer than computing the chunks would take).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtiers.api import LookupResult, OffloadKey, group_of
from kvtiers.base import PrefixHits
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.chunks import CPUPrimaryTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.promotion import Promotions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tiers import TierSlot

__all__ = ["Lookups"]

_HIT = LookupResult.HIT
_RETRY = LookupResult.RETRY
_MEASURE_SECONDS = 5.0  # how often a tier that seems too slow is measured anew
_PREFILL_WEIGHT = 0.2  # of the newest step in the running prefill seconds per token


class _Run(NamedTuple):
    """The leading run of one call: its length, and whether it ended at a chunk whose presence is unknown."""

    length: int
    unresolved: bool = False


class Lookups:
    """Answers ``lookup`` and ``lookup_prefix``; runs on the engine's thread and never waits."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        promotions: Promotions,
        tokens_per_chunk: Sequence[int],
        options: TieringOptions,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._promotions = promotions
        self._tokens_per_chunk = tokens_per_chunk
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._prefill_seconds_per_token: float | None = None
        self._measured_at: dict[int, float] = {}

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Take what the engine has seen of its own speed."""
        if tokens > 0 and seconds > 0:
            now = seconds / tokens
            before = self._prefill_seconds_per_token
            self._prefill_seconds_per_token = now if before is None else before + _PREFILL_WEIGHT * (now - before)

    def prefix(self, keys: Sequence[OffloadKey], state: RequestState) -> PrefixHits:
        """Return the leading run of ``keys`` (one group's, head first) that is present."""
        tokens = self._tokens_per_chunk[group_of(keys[0])]
        self._count(len(keys), state)
        if state.given_up:
            keys = _until(keys, state.given_up)
        length, pending = self._primary.resident_run(keys)
        run = _Run(length)
        if length < len(keys) and state.slots:
            run = self._follow(keys, length, state, tokens)
            pending = self._primary.resident_run(keys[: run.length])[1] if run.length > length else pending
        if pending:
            run, pending = self._bound_load(keys, run, pending, state, tokens)
        if run.unresolved and self._lookup_expired(state):
            state.given_up.add(keys[run.length])
            run = _Run(run.length)
        reach = run.length * tokens
        state.shortest_tokens = reach if state.shortest_tokens is None else min(state.shortest_tokens, reach)
        return PrefixHits(run.length - pending, pending, run.unresolved)

    def single(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Return where one chunk stands for this request."""
        shortest = state.shortest_tokens
        hits = self.prefix([key], state)
        state.shortest_tokens = shortest  # a window's chunk is no run from the start
        if hits.ready:
            return _HIT
        if hits.pending:
            return LookupResult.HIT_PENDING
        return _RETRY if hits.unresolved else LookupResult.MISS

    def _count(self, asked: int, state: RequestState) -> None:
        if asked > state.counted:
            self._metrics.lookups += asked - state.counted
            state.counted = asked

    def _follow(self, keys: Sequence[OffloadKey], at: int, state: RequestState, tokens: int) -> _Run:
        """Follow the prefix beyond its first absent chunk, through tiers and primary, to one that is not to be had."""
        slots = [slot for slot in state.slots if slot.available()]
        if not slots:
            return _Run(at)
        absent = [found is LookupResult.MISS for found in self._primary.find(keys[at:])]
        first, window = at, len(keys)
        while at < len(keys):
            here = at - first
            if not absent[here]:
                at = first + _index(absent, True, here)
                continue
            end = first + _index(absent, False, here)
            hits, unresolved = self._ask(slots, keys, at, min(end, at + window), state, tokens)
            if not hits:
                return _Run(at, unresolved)
            at += hits
            window = 64  # only the first question is about the whole rest
        return _Run(at)

    def _ask(
        self, slots: Sequence[TierSlot], keys: Sequence[OffloadKey], at: int, end: int, state: RequestState, tokens: int
    ) -> tuple[int, bool]:
        """Ask the tiers in order; return how many chunks from ``at`` are on their way now, and whether to ask again."""
        unresolved = False
        for slot in slots:
            answers = slot.lookup_many(keys[at:end], state.context)
            hits = _leading_hits(answers)
            slot.metrics.lookups += len(answers)
            if hits:
                if self._cheaper_to_compute(slot, hits, tokens):
                    self._metrics.recomputed_cheaper += hits
                    state.given_up.add(keys[at])
                    return 0, False
                return self._promotions.reserve(slot, keys[: at + hits], hits, state, tokens), False
            unresolved = unresolved or answers[0] is _RETRY
        return 0, unresolved

    def _cheaper_to_compute(self, slot: TierSlot, chunks: int, tokens: int) -> bool:
        per_token, per_chunk = self._prefill_seconds_per_token, slot.seconds_per_chunk
        if self._options.load_wait is not None or per_token is None or per_chunk is None:
            return False
        if (chunks + slot.loading_chunks) * per_chunk <= chunks * tokens * per_token:
            return False
        now = self._clock()
        if now - self._measured_at.get(slot.index, now - _MEASURE_SECONDS) >= _MEASURE_SECONDS:
            self._measured_at[slot.index] = now  # one load in a while goes ahead: it is the new measurement
            return False
        return True

    def _lookup_expired(self, state: RequestState) -> bool:
        now = self._clock()
        if state.lookup_until is None:
            state.lookup_until = now + self._options.lookup_wait
        if now < state.lookup_until:
            return False
        self._metrics.wait_expired += 1
        return True

    def _bound_load(
        self, keys: Sequence[OffloadKey], run: _Run, pending: int, state: RequestState, tokens: int
    ) -> tuple[_Run, int]:
        """Note who shares a promotion; end the run before its first pending chunk if the request has waited enough."""
        now = self._clock()
        if state.load_until is None:
            state.load_until = now + self._load_wait(pending * tokens, state)
        waiting = self._pending_in(keys[: run.length])
        if now < state.load_until:
            self._promotions.met(waiting, state)
            return run, pending
        self._metrics.wait_expired += pending
        state.given_up.update(waiting)
        return _Run(len(_until(keys[: run.length], state.given_up))), 0

    def _pending_in(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        found = self._primary.find(keys)
        return [key for key, where in zip(keys, found, strict=True) if where is LookupResult.HIT_PENDING]

    def _load_wait(self, tokens: int, state: RequestState) -> float:
        if self._options.load_wait is not None:
            return self._options.load_wait
        measured = all(slot.seconds_per_chunk is not None for slot in state.slots if slot.loading_chunks)
        if self._prefill_seconds_per_token is None or not measured:
            return self._options.lookup_wait
        return tokens * self._prefill_seconds_per_token


def _leading_hits(answers: Sequence[LookupResult]) -> int:
    hits = 0
    for answer in answers:
        if answer is not _HIT:
            break
        hits += 1
    return hits


def _index(flags: list[bool], wanted: bool, start: int) -> int:
    """Return where ``wanted`` comes next, or the length if it does not."""
    try:
        return flags.index(wanted, start)
    except ValueError:
        return len(flags)


def _until(keys: Sequence[OffloadKey], stop: set[OffloadKey]) -> Sequence[OffloadKey]:
    """Return the keys before the first that is in ``stop``."""
    if stop.isdisjoint(keys):
        return keys
    return keys[: next(i for i, key in enumerate(keys) if key in stop)]
