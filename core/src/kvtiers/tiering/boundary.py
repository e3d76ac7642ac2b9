"""The search for a boundary: the last place up to which the primary and the tiers have all that a prompt needs.

Of full attention all chunks before a boundary are needed, of windows and states those that are read there. Each tier is
asked one question about all groups: first the prefixes are followed, then the boundaries are tried from the right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.api.keys import first_misfit
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.load_or_recompute import TRIAL, Waits
from kvtiers.tiering.load_plan import Group, Share, Span
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, TierSlot

__all__ = ["BoundarySearch", "Look"]

_SMALLEST_QUESTION = 64  # chunks, once a tier was asked about the whole rest
_MOST_BOUNDARIES = 256  # that one search follows; each takes some 50 us
_FURTHER_QUESTIONS = 16


class _Run(NamedTuple):
    """A leading run: its length, which tier has which places of it, the tiers that gave no answer about its end."""

    length: int
    found: Sequence[tuple[TierSlot, Sequence[int]]] = ()
    silent: Sequence[TierSlot] = ()


@dataclass(slots=True)
class _Asked:
    """A tier during one search: how many rows it may still get, and about how many chunks it is asked next."""

    slot: TierSlot
    room: float
    question: int


@dataclass(slots=True)
class Look:
    """One look at a request's prompt, between the tokens ``computed`` and ``end``, and what it has found."""

    full: Sequence[Group]
    windows: Sequence[Group]
    state: RequestState
    computed: int
    end: int
    step: int
    room: float = math.inf
    tiers: list[_Asked] = field(default_factory=list)
    boundary: int = 0
    prefix: int = 0
    """The last boundary by full attention alone; windows and states may lack there."""
    unknown: OffloadKey = b""
    silent: Sequence[TierSlot] = ()
    """The tiers that gave no answer about the chunk ``unknown``, with which more may be found."""
    missing: list[OffloadKey] = field(default_factory=list)
    """The chunks that nobody has, for the lack of which later boundaries cannot be used."""
    shares: dict[TierSlot, Share] = field(default_factory=dict)
    too_slow: dict[TierSlot, Sequence[OffloadKey]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether a part of a plan is worth nothing, as with windows and states."""
        return bool(self.windows)

    def spans(self, boundary: int | None = None) -> list[Span]:
        """Return the chunks that this boundary needs, or the one that was found, by group."""
        boundary = self.boundary if boundary is None else boundary
        return [group.span(self.computed, boundary) for group in (*self.full, *self.windows)]


class BoundarySearch:
    """Searches for boundaries; runs on the engine's thread and never waits."""

    def __init__(self, primary: CPUPrimaryTier, budget: PinBudget, waits: Waits, metrics: EngineMetrics) -> None:
        self._primary = primary
        self._budget = budget
        self._waits = waits
        self._metrics = metrics

    def find(self, look: Look) -> None:
        """Find the boundary, with what the tiers have of it; ``silent`` if more may be found than is known."""
        look.boundary, look.silent, look.shares, look.missing = look.end, (), {}, []
        self._open_tiers(look)
        runs = self._follow_full(look)
        look.prefix = look.boundary if look.full else look.computed
        if look.windows and not look.silent:
            self._follow_windows(look)
        for group, run in zip(look.full, runs, strict=True):
            self._add_shares([group.span(look.computed, look.boundary)], run, look)

    def none_has(self, keys: Sequence[OffloadKey], state: RequestState) -> bool:
        """Return whether it is known of all these chunks that neither the primary nor a tier has them."""
        return not keys or (
            self._primary.lacks_all(keys)
            and all(slot.lacks_all(keys) for slot in state.slots if not state.load_over and slot.available())
        )

    def may_wait(self, state: RequestState, *, is_whole: bool) -> bool:
        """Return whether a plan without rows waits until loads in flight give some back; else it is cut."""
        return (self._waits.decides or is_whole) and any(slot.metrics.loading_chunks for slot in state.slots)

    # -- the groups

    def _follow_full(self, look: Look) -> list[_Run]:
        """Follow the prefix of each group of full attention; the shortest run limits the boundary."""
        runs = []
        # The chunks of the other groups, with the question about the first one: then there is no second question.
        behind = [key for span in look.spans()[1:] for key in span.keys]
        for group in look.full:
            span = group.span(look.computed, look.boundary)
            run = self._follow(span.keys, look, behind)
            runs.append(run)
            behind = []
            if run.length < len(span.keys):
                limit = (span.first + run.length - group.ahead) * group.tokens // look.step * look.step
                limit = max(look.computed, limit)
                if limit < look.boundary or not run.silent:
                    look.boundary, look.silent = min(limit, look.boundary), run.silent
                    look.unknown = span.keys[run.length]
        return runs

    def _follow_windows(self, look: Look) -> None:
        """Try the boundaries from the right until the tiers have all chunks of one, or have not answered."""
        for _ in range(_MOST_BOUNDARIES):
            self._pass_over(look)
            if look.boundary <= look.computed:
                return
            spans = [group.span(look.computed, look.boundary) for group in look.windows]
            keys = [key for span in spans for key in span.keys]
            run = self._follow(keys, look)
            if run.length == len(keys):
                self._add_shares(spans, run, look)
                return
            if run.silent:
                look.silent, look.unknown = run.silent, keys[run.length]
                self._ask_further(look)
                return
            place = run.length
            for span in spans:
                if place < len(span.keys):
                    look.boundary = self._before(span.first + place, span, look)
                    break
                place -= len(span.keys)
        look.boundary = look.computed

    def _pass_over(self, look: Look) -> None:
        """Pass over boundaries of which it is known that nobody has their first chunk: that takes some us each."""
        group, given_up = look.windows[0], look.state.given_up
        while look.boundary > look.computed:
            first = group.first(look.computed, look.boundary)
            key = group.keys[first]
            if key not in given_up:
                if not self._primary.lacks_all([key]) or not all(tier.slot.lacks_all([key]) for tier in look.tiers):
                    return
                look.missing.append(key)
            look.boundary = self._before(first, group, look)

    @staticmethod
    def _before(chunk: int, group: Group | Span, look: Look) -> int:
        """Return the last boundary that does not need this chunk of a group."""
        before = (chunk - group.ahead) * group.tokens
        return max(look.computed, min(before, look.boundary - 1) // look.step * look.step)

    def _ask_further(self, look: Look) -> None:
        """Ask the silent tiers also about the boundaries that are next if they have nothing at this one.

        Each question takes a step or more, and a prompt that another one shares may have its windows far to the left.
        """
        boundary, group = look.boundary, look.windows[0]
        for _ in range(_FURTHER_QUESTIONS):
            before = (group.first(look.computed, boundary) - group.ahead) * group.tokens
            boundary = min(before, boundary - 1) // look.step * look.step
            if boundary <= look.computed:
                break
            keys = [key for group in look.windows for key in group.span(look.computed, boundary).keys]
            for slot in look.silent:
                slot.ask(keys, look.state.context)

    @staticmethod
    def _add_shares(spans: Sequence[Span], run: _Run, look: Look) -> None:
        """Add what tiers have of the chunks of these groups, which were followed one after the other, to the plan."""
        at = 0
        for span in spans if run.found else ():
            end, first, tokens = at + len(span.keys), span.first - at, span.tokens
            for slot, found in run.found:
                places: Sequence[int]
                if isinstance(found, range):
                    places = range(max(found.start, at), min(found.stop, end))
                    keys = span.keys[places.start - at : places.stop - at] if places else ()
                else:
                    places = [place for place in found if at <= place < end]
                    keys = [span.keys[place - at] for place in places]
                if places:
                    share = look.shares.setdefault(slot, Share([], []))
                    share.keys.extend(keys)
                    share.positions.extend([(first + place) * tokens for place in places])
            at = end

    # -- the tiers

    def _open_tiers(self, look: Look) -> None:
        state = look.state
        look.tiers, look.room = [], math.inf
        if state.load_over:
            return
        takes_all = self._waits.decides or look.is_whole  # what has no rows yet waits for them, or is cut
        may_wait = self.may_wait(state, is_whole=look.is_whole)
        if not takes_all:
            look.room = self._budget.room_in_all
        for slot in state.slots:
            if slot in look.too_slow or not slot.available():
                continue
            room = self._budget.room(slot)
            if not room and not may_wait:
                slot.metrics.budget_misses += 1
                continue
            look.tiers.append(_Asked(slot, math.inf if takes_all else room, 1 << 30))

    def _follow(self, keys: Sequence[OffloadKey], look: Look, behind: Sequence[OffloadKey] = ()) -> _Run:
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
        if at < len(keys) and not silent:
            look.missing.append(keys[at])
        return _Run(at, found, silent)

    def _ask(
        self, keys: Sequence[OffloadKey], at: int, look: Look, behind: Sequence[OffloadKey]
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
            places = self._primary.absent(some[:has], at)
            take = int(min(len(places), tier.room, look.room))
            if take < len(places):
                self._drop(tier, [keys[place] for place in places[take:]], look)
            tier.room -= take
            look.room -= take
            if take:
                return tier.slot, places[:take], at + has if take == len(places) else places[take], ()
        return None, (), at, silent

    def _before_trial(self, slot: TierSlot, keys: Sequence[OffloadKey], at: int, look: Look) -> int:
        """Return how many chunks from ``at`` on may be loaded: not the last ones, if those are computed as a trial."""
        if look.full and self._waits.trial_of_cost(slot, len(keys) * look.full[0].tokens, look.state):
            end = len(keys) - len(keys) // TRIAL
            if end > at:
                look.state.given_up.add(keys[end])
                return end - at
        return len(keys) - at

    @staticmethod
    def _drop(tier: _Asked, keys: Sequence[OffloadKey], look: Look) -> None:
        """Count chunks that get no row, for the budget that is used up."""
        dropped = look.state.drop(tier.slot, keys)
        if tier.room <= look.room:
            tier.slot.metrics.over_one_tier += dropped
        else:
            tier.slot.metrics.over_all_tiers += dropped

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


def _until(keys: Sequence[OffloadKey], stop: set[OffloadKey]) -> Sequence[OffloadKey]:
    """Return the keys before the first that is in ``stop``."""
    if stop.isdisjoint(keys):
        return keys
    return keys[: next(i for i, key in enumerate(keys) if key in stop)]
