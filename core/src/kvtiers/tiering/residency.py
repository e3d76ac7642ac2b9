"""Residency: how far a request's prompt can be loaded, from the primary and the tiers, and the plan of its loads.

A prompt can be used up to a *boundary*: of full attention all chunks before it are needed, of windows and states those
that are read there. One question a tier is about all groups. When every answer has come, the boundary is found, from
the right, and its missing chunks, by tier, are one plan: it is decided as a whole (``load_or_recompute.py``), waits in
line for the rows that it needs, and then gets them; a long one in parts, so that no step is long.

::

    asked --answers, or the wait is over--> decided --rows for all of it--> loading --> ready
      what is too slow, too late or lost is struck out for the request, and the boundary is looked for again
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtiers.api import LookupResult, OffloadKey, group_of
from kvtiers.api.keys import first_misfit
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.load_or_recompute import TRIAL, Waits
from kvtiers.tiering.promotion import Promotions, Share
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import Answer, RequestState
from kvtiers.tiering.tier_slot import PinBudget, TierSlot
from kvtiers.types import PromptGroup, Reach, RequestContext

__all__ = ["Residency"]

_MISS, _PENDING, _HIT = LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT
_SMALLEST_QUESTION = 64  # chunks, once a tier was asked about the whole rest
_MOST_AT_ONCE = 448  # chunks that one call reserves, so that no step is long: some milliseconds
# With other prompts to compute the next step may be a long one, and what is reserved only then comes a step later.
_MOST_BESIDE_PROMPTS = 1536
_MOST_BOUNDARIES = 256  # that one look tries: each takes some 50 us
_FURTHER_QUESTIONS = 16
_NOTHING = Reach(0, 0, unresolved=False)


class _Run(NamedTuple):
    """A leading run: its length, which tier has which places of it, the tiers that gave no answer about its end."""

    length: int
    found: Sequence[tuple[TierSlot, Sequence[int]]] = ()
    silent: Sequence[TierSlot] = ()


class _Span(NamedTuple):
    """The chunks of a group that a boundary needs, from number ``first`` on, of ``tokens`` tokens each."""

    keys: Sequence[OffloadKey]
    first: int
    tokens: int


@dataclass(slots=True)
class _Asked:
    """A tier during one look: how many rows it may still get, and about how many chunks it is asked next."""

    slot: TierSlot
    room: float
    question: int


@dataclass(slots=True)
class _Look:
    """One look for the boundary of a request, between the tokens ``computed`` and ``end``."""

    groups: Sequence[PromptGroup]
    state: RequestState
    computed: int
    end: int
    step: int
    most: int
    """Chunks that are reserved in this call."""
    is_whole: bool
    """Of windows and states: a part of a plan is worth nothing."""
    may_wait: bool = False
    """Loads in flight will give rows back."""
    room: float = math.inf
    tiers: list[_Asked] = field(default_factory=list)
    boundary: int = 0
    unknown: OffloadKey = b""
    silent: Sequence[TierSlot] = ()
    """The tiers that gave no answer about the chunk ``unknown``, with which more may be found."""
    shares: dict[TierSlot, Share] = field(default_factory=dict)
    too_slow: dict[TierSlot, Sequence[OffloadKey]] = field(default_factory=dict)

    @property
    def plan(self) -> list[OffloadKey]:
        """Return the chunks that are to be loaded."""
        return [key for share in self.shares.values() for key in share.keys]


class Residency:
    """Answers ``reach``; runs on the engine's thread and never waits."""

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

    def reach(
        self, groups: Sequence[PromptGroup], state: RequestState, computed: int, end: int | None, step: int | None
    ) -> Reach:
        """Return how much of a prompt behind its first ``computed`` tokens can be loaded, no further than ``end``."""
        if not self._are_known(groups):
            return _NOTHING
        known = self._known_tokens(groups)
        end = known if end is None else min(end, known)
        if end <= computed:
            self._waits.taken_up(state)
            return _NOTHING
        tokens = [self._tokens_of(group) for group in groups]
        question = computed, end, groups[0].keys[-(-end // tokens[0]) - 1], len(groups)
        if (answer := state.answer) is not None and answer.question == question and self._stands(answer, state):
            return answer.reach
        state.answer = None
        is_whole = any(group.window for group in groups)
        most = _MOST_BESIDE_PROMPTS if self._waits.has_prompts_beside(state) else _MOST_AT_ONCE
        look = _Look(groups, state, computed, end, step or math.lcm(*tokens), most, is_whole)
        self._count(look)
        while (reach := self._settled(self._searched(look), question)) is None:
            pass
        if not (state.answer is not None and state.answer.slot is not None):
            if not state.is_taken_up and (reach.pending or not reach.unresolved):
                self._waits.taken_up(state)
            if reach.ready < end - computed and not (state.is_computed or reach.waits):
                self._waits.computes(state, end - computed - reach.ready)
        return reach

    def question(self, groups: Sequence[PromptGroup]) -> Sequence[OffloadKey]:
        """Return the chunks that the primary lacks of those that a whole prompt needs: what a tier is asked first."""
        if not self._are_known(groups):
            return ()
        keys, end = list[OffloadKey](), self._known_tokens(groups)
        for group in sorted(groups, key=lambda group: group.window):
            some = self._span(group, 0, end).keys
            keys += some[self._primary.resident_run(some)[0] :]
        return keys

    # -- inside

    def _are_known(self, groups: Sequence[PromptGroup]) -> bool:
        if not groups or not all(group.keys for group in groups):
            return False
        if all(group_of(group.keys[0]) < len(self._tokens_per_chunk) for group in groups):
            return True
        self._metrics.misuse += 1
        return False

    def _known_tokens(self, groups: Sequence[PromptGroup]) -> int:
        """Return up to which token a load is possible by the keys that there are in all groups."""
        return min((len(group.keys) - group.ahead) * self._tokens_of(group) for group in groups)

    def _tokens_of(self, group: PromptGroup) -> int:
        return self._tokens_per_chunk[group_of(group.keys[0])]

    def _span(self, group: PromptGroup, computed: int, boundary: int) -> _Span:
        """Return the chunks of a group that a load of the tokens from ``computed`` to the boundary needs."""
        tokens = self._tokens_of(group)
        if boundary <= computed:
            return _Span((), 0, tokens)
        first = (max(computed, boundary - group.window) if group.window else computed) // tokens
        return _Span(group.keys[first : -(-boundary // tokens) + group.ahead], first, tokens)

    def _spans(self, look: _Look) -> Iterator[_Span]:
        """Yield the chunks that the boundary needs, by group."""
        return (self._span(group, look.computed, look.boundary) for group in look.groups)

    def _count(self, look: _Look) -> None:
        look.boundary = look.end
        chunks = sum(len(span.keys) for span in self._spans(look))
        self._metrics.lookups += max(0, chunks - look.state.counted)
        look.state.counted = max(chunks, look.state.counted)

    def _stands(self, answer: Answer, state: RequestState) -> bool:
        """Return whether the last answer to a request that waits still holds; it takes one comparison, or a few.

        So a step without a change costs next to nothing, however many requests wait and however long their prompts.
        """
        slot = answer.slot
        if slot is None:
            waits = answer.reach.pending > 0
            return answer.changes == self._primary.changes and not (waits and self._waits.load_over(state, 0))
        return (
            slot.available()
            and slot.metrics.loading_chunks > 0
            and self._budget.room(slot) < answer.chunks
            and not (self._waits.load_over(state, 0) if answer.reach.pending else self._waits.line_over(state, 0))
            and self._waits.is_sooner(slot, answer.chunks, answer.tokens, answer.total, state)
        )

    # -- the boundary

    def _searched(self, look: _Look) -> _Look:
        """Find the boundary, with what the tiers have of it; ``silent`` if more may be found than is known."""
        look.boundary, look.silent, look.shares = look.end, (), {}
        self._open_tiers(look)
        full = [group for group in look.groups if not group.window]
        windows = [group for group in look.groups if group.window]
        runs = self._follow_full(full, windows, look)
        for _ in range(_MOST_BOUNDARIES):
            if not windows or look.boundary <= look.computed or look.silent:
                break
            spans = [self._span(group, look.computed, look.boundary) for group in windows]
            keys = [key for span in spans for key in span.keys]
            run = self._follow(keys, look)
            if run.length == len(keys):
                self._add_shares(spans, run, look)
                break
            if run.silent:
                look.silent, look.unknown = run.silent, keys[run.length]
                self._ask_further(windows, look)
                break
            look.boundary = self._before(run.length, spans, windows, look)
        else:
            look.boundary = look.computed
        for group, run in zip(full, runs, strict=True):
            span = self._span(group, look.computed, look.boundary)
            self._add_shares([span], run, look)
        return look

    def _ask_further(self, windows: Sequence[PromptGroup], look: _Look) -> None:
        """Ask the silent tiers also about the boundaries that are next if they have nothing at this one.

        Each question takes a step or more, and a prompt that another one shares may have its windows far to the left.
        """
        boundary = look.boundary
        for _ in range(_FURTHER_QUESTIONS):
            span = self._span(windows[0], look.computed, boundary)
            boundary = min((span.first - windows[0].ahead) * span.tokens, boundary - 1) // look.step * look.step
            if boundary <= look.computed:
                break
            keys = [key for group in windows for key in self._span(group, look.computed, boundary).keys]
            for slot in look.silent:
                slot.ask(keys, look.state.context)

    def _follow_full(self, full: Sequence[PromptGroup], windows: Sequence[PromptGroup], look: _Look) -> list[_Run]:
        """Follow the prefix of each group of full attention; the shortest run limits the boundary."""
        runs = []
        # The chunks of the other groups, with the question about the first one: then there is no second question.
        behind = [key for group in (*full[1:], *windows) for key in self._span(group, look.computed, look.end).keys]
        for group in full:
            keys, first, tokens = self._span(group, look.computed, look.boundary)
            run = self._follow(keys, look, behind)
            runs.append(run)
            behind = []
            if run.length < len(keys):
                limit = max(look.computed, (first + run.length - group.ahead) * tokens // look.step * look.step)
                if limit < look.boundary or not run.silent:
                    look.boundary, look.silent = min(limit, look.boundary), run.silent
                    look.unknown = keys[run.length]
        return runs

    def _before(self, place: int, spans: Sequence[_Span], windows: Sequence[PromptGroup], look: _Look) -> int:
        """Return the last boundary that does not need the chunk at this place of the windows' chunks."""
        for span, group in zip(spans, windows, strict=True):
            if place < len(span.keys):
                before = (span.first + place - group.ahead) * span.tokens
                return max(look.computed, min(before, look.boundary - 1) // look.step * look.step)
            place -= len(span.keys)
        return look.computed

    def _add_shares(self, spans: Sequence[_Span], run: _Run, look: _Look) -> None:
        """Add what tiers have of the chunks of these groups, which were followed one after the other, to the plan."""
        if not run.found:
            return
        at = 0
        for span in spans:
            end = at + len(span.keys)
            for slot, found in run.found:
                if places := [place - at for place in found if at <= place < end]:
                    share = look.shares.setdefault(slot, Share([], []))
                    share.keys.extend([span.keys[place] for place in places])
                    share.positions.extend([(span.first + place) * span.tokens for place in places])
            at = end

    # -- the tiers

    def _open_tiers(self, look: _Look) -> None:
        state = look.state
        look.tiers, look.room = [], math.inf
        if state.load_over:
            return
        takes_all = self._waits.decides or look.is_whole  # what has no rows yet waits for them, or is cut
        look.may_wait = takes_all and any(slot.metrics.loading_chunks for slot in state.slots)
        if not takes_all:
            look.room = self._budget.room_in_all
        for slot in state.slots:
            if slot in look.too_slow or not slot.available():
                continue
            room = self._budget.room(slot)
            if not room and not look.may_wait:
                slot.metrics.budget_misses += 1
                continue
            look.tiers.append(_Asked(slot, math.inf if takes_all else room, 1 << 30))

    def _follow(self, keys: Sequence[OffloadKey], look: _Look, behind: Sequence[OffloadKey] = ()) -> _Run:
        """Follow a run through the primary and the tiers, up to the first chunk that none has.

        ``behind``: chunks of other groups that a tier is asked about, too, since they will be needed.
        """
        if look.state.given_up:
            keys = _until(keys, look.state.given_up)
        at = self._resident_until(keys, 0)
        if at < len(keys) and look.tiers and (misfit := first_misfit(keys[at:])) is not None:
            self._metrics.misuse += 1
            keys = keys[: at + misfit]
        found: list[tuple[TierSlot, Sequence[int]]] = []
        silent: Sequence[TierSlot] = ()
        struck_out = len(look.state.given_up)
        while at < len(keys) and look.tiers and look.room:
            slot, places, end, silent = self._ask(keys, at, look, behind)
            if slot is None:
                break
            found.append((slot, places))
            if len(look.state.given_up) > struck_out:
                struck_out = len(look.state.given_up)
                keys = _until(keys, look.state.given_up)
            at = self._resident_until(keys, end)
        return _Run(at, found, silent)

    def _ask(
        self, keys: Sequence[OffloadKey], at: int, look: _Look, behind: Sequence[OffloadKey]
    ) -> tuple[TierSlot | None, Sequence[int], int, Sequence[TierSlot]]:
        """Ask the tiers in order about what follows ``at``.

        Return the first one that has some of it, which chunks it is to bring, and up to where; if none has, those that
        gave no answer.
        """
        silent: list[TierSlot] = []
        state = look.state
        for tier in look.tiers:
            if not tier.room:
                continue
            some = keys[at : at + tier.question]
            tier.question = max(_SMALLEST_QUESTION, min(tier.question, len(keys)) // 2)
            asked = [*some, *behind] if behind and at + len(some) == len(keys) else some
            there, retry = tier.slot.ask(asked, state.context)
            there = min(there, len(some))
            has = state.not_lost(tier.slot, some[:there]) if state.lost else there
            if not has:
                if retry and not there:
                    silent.append(tier.slot)
                continue
            has = min(has, self._before_trial(tier.slot, keys, at, look))
            places = self._absent(some[:has], at)
            take = int(min(len(places), tier.room, look.room))
            if take < len(places):
                self._drop(tier, [keys[place] for place in places[take:]], look)
            tier.room -= take
            look.room -= take
            if take:
                return tier.slot, places[:take], at + has if take == len(places) else places[take], ()
        return None, (), at, silent

    def _before_trial(self, slot: TierSlot, keys: Sequence[OffloadKey], at: int, look: _Look) -> int:
        """Return how many chunks from ``at`` on may be loaded: not the last ones, if those are computed as a trial."""
        if not look.is_whole and self._waits.trial_of_cost(slot, len(keys) * self._tokens_per_chunk[group_of(keys[0])]):
            end = len(keys) - len(keys) // TRIAL
            if end > at:
                look.state.given_up.add(keys[end])
                return end - at
        return len(keys) - at

    def _drop(self, tier: _Asked, keys: Sequence[OffloadKey], look: _Look) -> None:
        """Count chunks that get no row, for the budget that is used up."""
        dropped = look.state.drop(tier.slot, keys)
        if tier.room <= look.room:
            tier.slot.metrics.over_one_tier += dropped
        else:
            tier.slot.metrics.over_all_tiers += dropped

    def _absent(self, keys: Sequence[OffloadKey], first: int) -> list[int]:
        found = self._primary.find(keys)
        return [place for place, where in enumerate(found, first) if where is _MISS]

    def _resident_until(self, keys: Sequence[OffloadKey], at: int) -> int:
        """Return the place of the first chunk, from ``at`` on, that the primary lacks."""
        step = 16 if at else len(keys)
        while at < len(keys):
            here = self._primary.resident_run(keys[at : at + step])[0]
            at += here
            if here < step:
                break
            step *= 4
        return at

    # -- the decision

    def _settled(self, look: _Look, question: tuple[object, ...]) -> Reach | None:
        """Return what follows for the request; None: something was struck out for it, look again."""
        if look.silent and self._waits.lookup_over(look.state, look.silent):
            self._metrics.wait_expired += 1
            for silent in look.silent:
                silent.metrics.wait_expired += 1
            look.state.given_up.add(look.unknown)
            return None
        if look.silent and look.is_whole:
            return Reach(*self._standing(look), unresolved=True)
        more, tokens = bool(look.silent), 0
        if look.shares:
            tokens, total = self._waited_for(look)
            if self._has_too_slow(look, tokens, total):
                return None
            if look.may_wait and (slot := self._lacks_rows(look)) is not None:
                return self._in_line(slot, look, tokens, total, question)
            is_cut = self._cut_to_rows(look)
            if not self._reserve(look, is_cut=is_cut):
                return None
            more |= is_cut
        if look.too_slow and not look.silent:
            self._recompute(look)
        return self._waited(look, tokens, question, more=more)

    def _waited(self, look: _Look, tokens: int, question: tuple[object, ...], *, more: bool) -> Reach | None:
        """Return how far a request is whose plan is decided; None: it has waited for its loads as long as it may."""
        ready, pending = self._standing(look)
        if pending:
            if self._waits.load_over(look.state, tokens or self._waited_for(look)[0]):
                self._give_up(look)
                return None
            for span in self._spans(look):
                self._promotions.share(span.keys, look.state)
        reach = Reach(ready, pending, unresolved=more)
        if reach.tokens and not more:
            look.state.answer = Answer(question, reach, self._primary.changes)
        return reach

    def _standing(self, look: _Look) -> tuple[int, int]:
        """Return how many tokens up to the boundary are ready in the primary, and how many are pending there."""
        reach, pending = look.boundary, 0
        for group, span in zip(look.groups, self._spans(look), strict=True):
            length, waits = self._primary.resident_run(span.keys)
            if length < len(span.keys):
                reach = min(reach, (span.first + length - group.ahead) * span.tokens // look.step * look.step)
            pending = max(pending, waits * span.tokens)
        total = max(0, reach - look.computed)
        pending = min(pending, total)
        return total - pending, pending

    def _waited_for(self, look: _Look) -> tuple[int, int]:
        """Return the tokens that are computed if nothing is waited for, and the chunks that are not readable yet."""
        missing = [(self._not_ready(span.keys), span.tokens) for span in self._spans(look)]
        tokens = look.boundary - look.computed if look.is_whole else max(chunks * size for chunks, size in missing)
        return tokens, sum(chunks for chunks, _ in missing)

    def _not_ready(self, keys: Sequence[OffloadKey]) -> int:
        return len(keys) - self._primary.find(keys).count(_HIT)

    def _has_too_slow(self, look: _Look, tokens: int, total: int) -> bool:
        """Return whether a tier is too slow for its share of the plan; it is left out then."""
        if not self._waits.decides or (look.is_whole and look.state.loading):
            return False
        for slot, share in look.shares.items():
            if not self._waits.is_sooner(slot, len(share.keys), tokens, total, look.state):
                look.too_slow[slot] = share.keys
        return any(slot in look.shares for slot in look.too_slow)

    def _recompute(self, look: _Look) -> None:
        """Strike out chunks that are computed sooner than loaded, and count them."""
        left = [[key for key, absent in self._each_absent(keys) if absent] for keys in look.too_slow.values()]
        for slot, keys in zip(look.too_slow, left, strict=True):
            slot.metrics.recomputed_cheaper += len(keys)
        self._metrics.recomputed_cheaper += len({key for keys in left for key in keys})
        look.state.given_up.update(keys[0] for keys in left if keys)
        first, chunks = next(iter(look.too_slow.items()))
        if trial := self._waits.trial(first):
            self._try_out(first, chunks[: min(trial, self._budget.room(first))], look)
        look.too_slow = {}

    def _each_absent(self, keys: Sequence[OffloadKey]) -> Iterator[tuple[OffloadKey, bool]]:
        return zip(keys, [where is _MISS for where in self._primary.find(keys)], strict=True)

    def _try_out(self, slot: TierSlot, keys: Sequence[OffloadKey], look: _Look) -> None:
        """Load a few chunks from a tier that seems too slow, to measure it; no request waits for them."""
        if some := [key for key, absent in self._each_absent(keys) if absent]:
            here = [key for key, absent in self._each_absent(self._in_prefix_order(look)) if not absent]
            state = RequestState(RequestContext(""), (slot,), is_prefetch=True, load_over=True)
            self._promotions.reserve([*here, *some], {slot: Share(some, [0] * len(some))}, state, is_whole=False)

    def _give_up(self, look: _Look) -> None:
        """Strike out what is on its way, since the request waits no longer."""
        state = look.state
        keys = [key for span in self._spans(look) for key in span.keys]
        waiting = [key for key, where in zip(keys, self._primary.find(keys), strict=True) if where is _PENDING]
        if state.is_overtaken:
            self._metrics.recomputed_cheaper += len(waiting)
        else:
            self._metrics.wait_expired += len(waiting)
        self._provenance.expired(waiting, overtaken=state.is_overtaken)
        state.given_up.update(waiting)

    # -- rows

    def _wanted(self, share: Share) -> int:
        """Return how many rows a share is to get at once: all, unless it has more than a tier may ever have."""
        return min(len(share.keys), self._budget.tier_rows, self._budget.all_rows)

    def _lacks_rows(self, look: _Look) -> TierSlot | None:
        """Return the first tier that may not have the rows of its share before others have given some back."""
        wanted = 0
        for slot, share in look.shares.items():
            wanted += self._wanted(share)
            if self._wanted(share) > self._budget.room(slot) or wanted > self._budget.room_in_all:
                return slot
        return None

    def _in_line(
        self, slot: TierSlot, look: _Look, tokens: int, total: int, question: tuple[object, ...]
    ) -> Reach | None:
        """Let the plan wait for its rows; None: it has waited long enough, and is computed."""
        state = look.state
        ready, pending = self._standing(look)
        if self._waits.load_over(state, tokens) if pending else self._waits.line_over(state, tokens):
            slot.metrics.budget_misses += 1
            state.given_up.update(share.keys[0] for share in look.shares.values())
            if pending:
                self._give_up(look)
            return None
        reach = Reach(ready, pending, unresolved=True)
        wanted = self._wanted(look.shares[slot])
        state.answer = Answer(question, reach, self._primary.changes, slot, wanted, tokens, total)
        return reach

    def _cut_to_rows(self, look: _Look) -> bool:
        """Shorten a plan that has more chunks than one call reserves, or than a tier may ever have rows for.

        Return whether it is shorter now: its first chunks go first, the others follow.
        """
        before, room = len(look.plan), min(self._budget.room_in_all, look.most)
        for slot, share in look.shares.items():
            take = min(len(share.keys), room, self._budget.room(slot))
            room -= take
            look.shares[slot] = Share(share.keys[:take], share.positions[:take])
        return len(look.plan) < before

    def _reserve(self, look: _Look, *, is_cut: bool) -> bool:
        """Reserve the plan's rows; False: there are none, and what the request could have is looked for again."""
        run, mine = self._in_prefix_order(look), set(look.plan)
        used = self._used(run, mine, look.state)
        rest = run[used:]
        if is_cut:  # without the chunks that are left for later
            rest = [key for key, absent in self._each_absent(rest) if key in mine or not absent]
        state, is_whole = look.state, look.is_whole
        has_rows = self._promotions.reserve([*run[:used], *rest], look.shares, state, is_whole=is_whole, used=used)
        length = self._primary.resident_run(run)[0]
        state.used = length, run[length - 1]
        if has_rows or not (is_whole or is_cut):
            return True
        look.state.given_up.update(share.keys[0] for share in look.shares.values() if share.keys)
        return False

    @staticmethod
    def _used(run: Sequence[OffloadKey], mine: set[OffloadKey], state: RequestState) -> int:
        """Return how many of the run's first chunks are in the primary, and were in the run of the last plan."""
        length, last = state.used
        return length if 0 < length <= len(run) and run[length - 1] == last and mine.isdisjoint(run[:length]) else 0

    def _in_prefix_order(self, look: _Look) -> list[OffloadKey]:
        """Return the chunks up to the boundary by where they end: eviction takes the last ones first, in all groups."""
        spans = list(self._spans(look))
        if len(spans) == 1:
            return list(spans[0].keys)
        placed = [
            ((span.first + place + 1) * span.tokens, key) for span in spans for place, key in enumerate(span.keys)
        ]
        placed.sort()
        return [key for _, key in placed]


def _until(keys: Sequence[OffloadKey], stop: set[OffloadKey]) -> Sequence[OffloadKey]:
    """Return the keys before the first that is in ``stop``."""
    if stop.isdisjoint(keys):
        return keys
    return keys[: next(i for i, key in enumerate(keys) if key in stop)]
