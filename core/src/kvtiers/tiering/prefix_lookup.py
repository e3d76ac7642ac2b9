"""Prefix lookups: how much of a request's prefix is in the primary or in a tier.

The primary is asked first; from the first chunk that it lacks the tiers are asked in their order, each about the whole
rest of the prefix. Chunks that a tier has and the primary lacks get reserved rows at once, for their promotion. How
long the request waits for them is decided in ``load_or_recompute.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtiers.api import LookupResult, OffloadKey, group_of
from kvtiers.api.keys import first_misfit
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.load_or_recompute import TRIAL, Waits
from kvtiers.tiering.promotion import Found, Promotions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import LastAnswer, RequestState, RoomWait
from kvtiers.tiering.tier_slot import PinBudget, TierSlot
from kvtiers.types import PrefixHits, RequestContext

__all__ = ["Lookups"]

_MISS, _PENDING = LookupResult.MISS, LookupResult.HIT_PENDING
_SMALLEST_QUESTION = 64  # chunks, once a tier was asked about the whole rest
# Chunks a call: a long prefix is reserved over several steps, so that none of them is long. Fewer the longer the prefix
# is by then: about 20 chunks of it are walked in the time that one takes to reserve.
_MOST_RESERVED, _FEWEST_RESERVED, _WALKED_FOR_ONE = 448, 128, 20
# With other prompts to compute the next step may be a long one, and what is reserved only then comes a step later.
_MOST_RESERVED_BESIDE_PROMPTS = 1536
_QUESTION_BESIDE_PROMPTS = 64  # chunks: each further question to a tier takes about as long as reserving so many
_WORTH_A_WALK = 64  # chunks: for fewer rows a request that waits for room is not looked up again


class _NoRoom(NamedTuple):
    """A tier has so many chunks more, for which it may pin no rows before other loads have ended."""

    slot: TierSlot
    chunks: int


class _Run(NamedTuple):
    """A leading run: its length, the tiers that answered RETRY about what follows, whether a call's bound ended it."""

    length: int
    silent: Sequence[TierSlot] = ()
    capped: bool = False
    no_room: _NoRoom | None = None


@dataclass(slots=True)
class _Asked:
    """A tier during one lookup: how many rows it may still get, and about how many chunks it is asked next."""

    slot: TierSlot
    room: int
    question: int


@dataclass(slots=True)
class _Search:
    """One lookup among the tiers: rows that all of them may still get, and chunks that this call may still reserve.

    ``most``: those of one answer. ``per_question``: what a further question counts in ``left``. ``waited``: chunks that
    the request has waited for before. ``may_wait``: loads in flight will give rows back. ``is_whole``: a part of the
    prefix is worth nothing, since windows or states are to be loaded beside it. ``prefix``: of a window, the tokens of
    the prefix that the other groups have.
    """

    tiers: list[_Asked]
    room: int
    left: int
    most: int
    per_question: int
    waited: int
    may_wait: bool
    is_whole: bool
    prefix: int
    no_room: _NoRoom | None = None


class Lookups:
    """Answers ``lookup`` and ``lookup_prefix``; runs on the engine's thread and never waits."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        budget: PinBudget,
        promotions: Promotions,
        provenance: Provenance,
        waits: Waits,
        tokens_per_chunk: Sequence[int],
        metrics: EngineMetrics,
    ) -> None:
        self._primary = primary
        self._budget = budget
        self._promotions = promotions
        self._provenance = provenance
        self._waits = waits
        self._tokens_per_chunk = tokens_per_chunk
        self._metrics = metrics
        self.asking: list[RequestState] = []
        """The requests of this step."""

    def prefix(self, keys: Sequence[OffloadKey], state: RequestState, first: int) -> PrefixHits:
        """Return the leading run of ``keys`` (one group's, head first, from its chunk ``first`` on) that is present."""
        group = group_of(keys[0])
        state.firsts[group] = first
        tokens = self._tokens_in_a_chunk(group)
        counted = state.counted.get(group, 0)
        if len(keys) > counted:
            self._metrics.lookups += len(keys) - counted
            state.counted[group] = len(keys)
        last = state.answers.get(group)
        hits = None if last is None else self._as_before(last, keys, state)
        if hits is None and state.room_waits and group in state.room_waits:
            hits = self._in_line(state.room_waits[group], keys, state, tokens)
        if hits is None:
            hits = self._run(keys, state, tokens)
            if hits.pending and not hits.unresolved:
                state.answers[group] = LastAnswer(hits, len(keys), keys[-1], self._primary.changes)
        if not state.room_waits or group not in state.room_waits:
            # One whose tiers have not answered yet still waits for its turn: others are loaded on its account, too.
            if not state.is_taken_up and (hits.pending or not hits.unresolved):
                self._waits.taken_up(state)
            if hits.ready < len(keys) and not (state.is_computed or hits.pending or hits.unresolved):
                self._waits.computes(state, (len(keys) - hits.ready) * tokens)
        if not state.reached:
            self.asking.append(state)
        state.reached[group] = (hits.ready + hits.pending) * tokens
        return hits

    def single(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Return where one chunk stands for this request."""
        if key not in state.counted_single:
            self._metrics.lookups += 1
            state.counted_single.add(key)
        hits = self._run([key], state, self._tokens_in_a_chunk(group_of(key)), window=True)
        if hits.ready:
            return LookupResult.HIT
        if hits.pending:
            return _PENDING
        return LookupResult.RETRY if hits.unresolved else _MISS

    def window(self, keys: Sequence[OffloadKey], state: RequestState) -> PrefixHits:
        """Return the leading run of a window's chunks that is present; it is loaded if that is all of them."""
        if new := set(keys).difference(state.counted_single):
            self._metrics.lookups += len(new)
            state.counted_single |= new
        group = group_of(keys[0])
        last = state.answers.get(group)
        hits = None if last is None else self._as_before(last, keys, state)
        if hits is None:
            hits = self._run(keys, state, self._tokens_in_a_chunk(group), window=True)
            if hits.pending and not hits.unresolved:
                state.answers[group] = LastAnswer(hits, len(keys), keys[-1], self._primary.changes)
        return hits

    def end_step(self) -> None:
        """Forget how far the step's requests reached."""
        for state in self.asking:
            state.reached.clear()
        self.asking.clear()

    def _tokens_in_a_chunk(self, group: int) -> int:
        if group < len(self._tokens_per_chunk):
            return self._tokens_per_chunk[group]
        self._metrics.misuse += 1  # no such group: nothing that is waited for
        return 0

    def _as_before(self, last: LastAnswer, keys: Sequence[OffloadKey], state: RequestState) -> PrefixHits | None:
        """Return the last answer of a waiting request, if nothing has changed since and its wait has not expired.

        So a step without a change costs next to nothing, however many requests wait and however long their prefixes.
        """
        if (
            last.changes != self._primary.changes
            or last.length != len(keys)
            or last.last != keys[-1]
            or self._waits.load_over(state, 0)
        ):
            return None
        return last.hits

    def _in_line(
        self, wait: RoomWait, keys: Sequence[OffloadKey], state: RequestState, tokens: int
    ) -> PrefixHits | None:
        """Return the last answer of a request that waits for rows, while there are none and waiting pays."""
        slot, waited = wait.slot, state.awaited.get(group_of(keys[0]), (0, 0))[1]
        if (
            wait.length != len(keys)
            or wait.last != keys[-1]
            or not slot.available()
            or self._budget.room(slot) >= min(wait.wanted, _WORTH_A_WALK)
            or not slot.metrics.loading_chunks
            or (self._waits.load_over(state, 0) if wait.hits.pending else self._waits.line_over(state, 0))
            or not self._waits.is_sooner(slot, wait.wanted, tokens, state, waited)
        ):
            return None
        return self._hits_now(wait, keys, state)

    def _hits_now(self, wait: RoomWait, keys: Sequence[OffloadKey], state: RequestState) -> PrefixHits | None:
        """Return the hits of a request in line as they are now; None if one of its chunks is gone."""
        changes, hits = self._primary.changes, wait.hits
        if wait.changes == changes:
            return hits
        length, pending = self._primary.resident_run(keys[: hits.chunks])
        if length < hits.chunks:
            return None
        hits = hits._replace(ready=length - pending, pending=pending)
        state.room_waits[group_of(keys[0])] = wait._replace(hits=hits, changes=changes)
        return hits

    def _run(self, keys: Sequence[OffloadKey], state: RequestState, tokens: int, *, window: bool = False) -> PrefixHits:
        if state.given_up:
            keys = _until(keys, state.given_up)
        length, pending = self._primary.resident_run(keys)
        asks = length < len(keys) and bool(state.slots) and not state.load_over
        if not (asks or pending or state.room_waits):  # nothing is waited for, nor was
            return PrefixHits(length, 0, unresolved=False)
        run = self._follow(self._fitting(keys, length), length, state, tokens, window=window) if asks else _Run(length)
        if run.length > length:
            pending += self._primary.resident_run(keys[length : run.length])[1]
            length = run.length
        more = run.no_room.chunks if run.no_room is not None else 0
        if pending:
            here = keys[:length]
            chunks = self._awaited(here, pending, state, window=window)
            whole = _prefix_of(state) if window else 0
            if self._waits.load_over(state, whole or (max(pending, chunks) + more) * tokens):
                return self._give_up(keys, length, pending, state)
            self._promotions.share(here, state)
        elif run.no_room is not None and self._waits.line_over(state, more * tokens):
            run.no_room.slot.metrics.budget_misses += 1
            return self._give_up(keys, length, 0, state)
        if keys and not window and (run.no_room is not None or state.room_waits):
            self._note_room(keys, PrefixHits(length - pending, pending, unresolved=True), run.no_room, state)
        if run.silent and self._waits.lookup_over(state, run.silent):
            self._metrics.wait_expired += 1
            for slot in run.silent:
                slot.metrics.wait_expired += 1
            state.given_up.add(keys[length])
            run = _Run(length)
        return PrefixHits(length - pending, pending, bool(run.silent) or run.capped or run.no_room is not None)

    def _give_up(self, keys: Sequence[OffloadKey], length: int, pending: int, state: RequestState) -> PrefixHits:
        """Return a run for a request that waits no longer: its ready chunks; pending ones are misses for it."""
        waiting = self._pending_in(keys[:length]) if pending else []
        if state.is_overtaken:
            self._metrics.recomputed_cheaper += len(waiting)
        else:
            self._metrics.wait_expired += len(waiting)
        self._provenance.expired(waiting, overtaken=state.is_overtaken)
        state.given_up.update(waiting)
        if length < len(keys):
            state.given_up.add(keys[length])
        state.room_waits.clear()
        return PrefixHits(keys.index(waiting[0]) if waiting else length, 0, unresolved=False)

    def _note_room(
        self, keys: Sequence[OffloadKey], hits: PrefixHits, no_room: _NoRoom | None, state: RequestState
    ) -> None:
        group = group_of(keys[0])
        if no_room is not None:
            state.room_waits[group] = RoomWait(
                no_room.slot, hits, len(keys), keys[-1], no_room.chunks, self._primary.changes
            )
        else:
            state.room_waits.pop(group, None)

    def _fitting(self, keys: Sequence[OffloadKey], first: int) -> Sequence[OffloadKey]:
        """Return the keys before the first, from ``first`` on, that is no chunk's: a tier's host would end over it."""
        misfit = first_misfit(keys[first:])
        if misfit is None:
            return keys
        self._metrics.misuse += 1
        return keys[: first + misfit]

    def _awaited(self, run: Sequence[OffloadKey], pending: int, state: RequestState, *, window: bool) -> int:
        """Return how many chunks the request has waited for so far: a long run comes in parts, several at a time.

        ``pending``: how many of the run are on their way now.
        """
        if window:
            state.window_waits.update(run)
            return len(state.window_waits)
        group = group_of(run[0])
        reach, chunks = state.awaited.get(group, (0, 0))
        if len(run) > reach:
            chunks += self._primary.resident_run(run[reach:])[1] if reach else pending
            state.awaited[group] = len(run), chunks
        return chunks

    def _pending_in(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        found = self._primary.find(keys)
        return [key for key, where in zip(keys, found, strict=True) if where is _PENDING]

    # -- the tiers

    def _follow(self, keys: Sequence[OffloadKey], at: int, state: RequestState, tokens: int, *, window: bool) -> _Run:
        """Follow the prefix beyond its first absent chunk, through tiers and primary, to the first miss in all."""
        if at == len(keys):
            return _Run(at)
        may_wait = self._waits.decides and any(slot.metrics.loading_chunks for slot in state.slots)
        tiers: list[_Asked] = []
        for slot in state.slots:
            if slot.available():
                room = self._budget.room(slot)
                if room or may_wait:
                    tiers.append(_Asked(slot, room, len(keys)))
                else:
                    slot.metrics.budget_misses += 1
        beside = self._waits.has_prompts_beside(state)
        most = _MOST_RESERVED_BESIDE_PROMPTS if beside else _MOST_RESERVED
        per_question = _QUESTION_BESIDE_PROMPTS if beside else 0
        left = max(_FEWEST_RESERVED, most - at // _WALKED_FOR_ONE)
        waited = len(state.window_waits) if window else state.awaited.get(group_of(keys[0]), (0, 0))[1]
        whole = self._waits.shape.has_windows and not window
        prefix = _prefix_of(state) if window else 0
        search = _Search(tiers, self._budget.room_in_all, left, most, per_question, waited, may_wait, whole, prefix)
        found: list[Found] = []
        silent: Sequence[TierSlot] = ()
        while at < len(keys) and tiers and (search.room or search.may_wait) and search.left:
            share, end, silent = self._ask(search, keys, at, state, tokens)
            if share is None:
                break
            found.append(share)
            search.left = max(0, search.left - search.per_question)
            at = self._resident_until(keys, end)
        is_known = search.left and not silent and search.no_room is None
        if found and not (window and at < len(keys) and is_known):  # of a window a part is worth nothing
            reached = self._promotions.reserve(keys[:at], found, state, tokens)
            if reached < at:
                return _Run(reached)
        if at < len(keys) and search.no_room is not None:
            return _Run(at, silent, no_room=search.no_room)
        return _Run(at, silent, capped=not search.left and at < len(keys))

    def _ask(
        self, search: _Search, keys: Sequence[OffloadKey], at: int, state: RequestState, tokens: int
    ) -> tuple[Found | None, int, Sequence[TierSlot]]:
        """Ask the tiers in order about what follows ``at``.

        Return what the first one with a hit is to bring and up to where, and, if none has one, those to ask again.
        """
        silent: list[TierSlot] = []
        too_slow: list[tuple[TierSlot, int]] = []  # with how many of the leading keys each has
        search.no_room = None
        for tier in search.tiers:
            if not tier.room and not search.may_wait:
                continue
            some = keys[at : at + tier.question]
            tier.question = max(_SMALLEST_QUESTION, tier.question // 2)
            there, retry = tier.slot.ask(some, state.context)
            has = state.not_lost(tier.slot, some[:there]) if state.lost else min(there, len(some))
            if not has:
                if retry and not there:
                    silent.append(tier.slot)
                continue
            hits = min(has, search.most, self._before_trial(tier.slot, keys, at, state, tokens))
            places = self._absent(some[:hits], at)
            wanted = len(places) if not search.is_whole or has == hits else len(self._absent(some[:has], at))
            if not self._waits.worth_loading(tier.slot, wanted, tokens, state, search.waited, search.prefix):
                too_slow.append((tier.slot, has))
            elif take := self._take(search, tier, [keys[place] for place in places], state):
                end = at + hits if take == len(places) else places[take]
                return Found(tier.slot, places[:take]), end, ()
        if too_slow and not silent and search.no_room is None:
            self._recompute(too_slow, keys, at, state)
            self._try_out(*too_slow[0], keys, at, tokens)
        return None, at, silent

    def _before_trial(
        self, slot: TierSlot, keys: Sequence[OffloadKey], at: int, state: RequestState, tokens: int
    ) -> int:
        """Return how many chunks from ``at`` on may be loaded: not the last ones, if those are computed as a trial."""
        if self._waits.trial_of_cost(slot, len(keys) * tokens):
            end = len(keys) - len(keys) // TRIAL
            if end > at:
                state.given_up.add(keys[end])
                return end - at
        return len(keys) - at

    def _take(self, search: _Search, tier: _Asked, wanted: Sequence[OffloadKey], state: RequestState) -> int:
        """Return how many of the chunks that this tier is to bring get a row now; note what waits for one."""
        allowed = min(len(wanted), tier.room, search.room)
        search.may_wait = search.may_wait or (allowed > 0 and self._waits.decides)
        if allowed < len(wanted) and not search.may_wait:
            dropped = state.drop(tier.slot, wanted[allowed:])
            if tier.room <= search.room:
                tier.slot.metrics.over_one_tier += dropped
            else:
                tier.slot.metrics.over_all_tiers += dropped
        elif not allowed and search.no_room is None:
            search.no_room = _NoRoom(tier.slot, len(wanted))
        take = min(allowed, search.left)
        tier.room -= take
        search.room -= take
        search.left -= take
        return take

    def _recompute(
        self, too_slow: Sequence[tuple[TierSlot, int]], keys: Sequence[OffloadKey], at: int, state: RequestState
    ) -> None:
        """Give up chunks that are computed sooner than loaded; ``too_slow``: tiers, and how many keys each has."""
        for slot, has in too_slow:
            slot.metrics.recomputed_cheaper += len(self._absent(keys[at : at + has], at))
        most = max([has for _, has in too_slow])
        self._metrics.recomputed_cheaper += len(self._absent(keys[at : at + most], at))
        state.given_up.add(keys[at])

    def _try_out(self, slot: TierSlot, has: int, keys: Sequence[OffloadKey], at: int, tokens: int) -> None:
        """Load a few chunks, of so many from ``at`` on, once in a while from a tier that seems too slow, to measure it.

        No request waits for them: the one that found them is computed meanwhile.
        """
        if trial := self._waits.trial(slot):
            places = self._absent(keys[at : at + min(has, trial)], at)[: self._budget.room(slot)]
            if places:
                state = RequestState(RequestContext(""), (slot,), is_prefetch=True, load_over=True)
                self._promotions.reserve(keys, [Found(slot, places)], state, tokens)

    def _absent(self, keys: Sequence[OffloadKey], first: int) -> list[int]:
        found = self._primary.find(keys)
        return [place for place, where in enumerate(found, first) if where is _MISS]

    def _resident_until(self, keys: Sequence[OffloadKey], at: int) -> int:
        """Return the place of the first chunk, from ``at`` on, that the primary lacks."""
        step = 16
        while at < len(keys):
            here = self._primary.resident_run(keys[at : at + step])[0]
            at += here
            if here < step:
                break
            step *= 4
        return at


def _prefix_of(state: RequestState) -> int:
    """Return how many tokens all groups have that were asked about as a prefix in this step; 0: none was."""
    return min(state.reached.values(), default=0)


def _until(keys: Sequence[OffloadKey], stop: set[OffloadKey]) -> Sequence[OffloadKey]:
    """Return the keys before the first that is in ``stop``."""
    if stop.isdisjoint(keys):
        return keys
    return keys[: next(i for i, key in enumerate(keys) if key in stop)]
