"""Residency: how far a request's prompt can be loaded, from the primary and the tiers, and the rows for its loads.

When every tier has answered, the boundary is found (``boundary.py``), and its missing chunks, by tier, are one plan;
with full attention alone, what is known so far is one, while a tier is silent. It is decided as a whole
(``load_or_recompute.py``), waits in line for the rows that it needs, and then gets them; a long one in parts, so that
no step is long, and each part if it is still sooner. The request keeps the plan until all of it has come, some of it
is lost, or a later boundary may be had.

::

    asked --answers, or the wait is over--> decided --rows for all of it--> loading --> ready
      what is too slow or too late is struck out for the request, what a tier has lost for this tier alone;
      then the boundary is looked for again
"""

import math
from collections.abc import Mapping, Sequence

from kvtiers.api import LookupResult, OffloadKey, group_of
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.boundary import BoundarySearch, Look
from kvtiers.tiering.load_or_recompute import Waits
from kvtiers.tiering.load_plan import NOTHING, Group, Plan, Question, Share
from kvtiers.tiering.promotion import Promotions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import PinBudget, TierSlot
from kvtiers.types import PromptGroup, Reach, RequestContext

__all__ = ["Residency"]

_PENDING = LookupResult.HIT_PENDING
_MOST_AT_ONCE = 448  # chunks that one call reserves, so that no step is long: some milliseconds
# With other prompts to compute the next step may be a long one, and what is reserved only then comes a step later.
_MOST_BESIDE_PROMPTS = 1536


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
        self._search = BoundarySearch(primary, budget, waits, metrics)

    def reach(
        self, prompt: Sequence[PromptGroup], state: RequestState, computed: int, end: int | None, step: int | None
    ) -> Reach:
        """Return how much of a prompt behind its first ``computed`` tokens can be loaded, no further than ``end``."""
        groups = self._groups(prompt)
        known = _known_tokens(groups) if groups else 0
        until, end = end, known if end is None else min(end, known)
        if not groups or end <= computed:
            self._waits.taken_up(state)
            if state.prompt_tokens:
                self._waits.computes(state, state.prompt_tokens - computed)
            return NOTHING
        question = Question(computed, until, end, groups[0].keys[-(-end // groups[0].tokens) - 1], len(groups))
        plan, state.plan = state.plan, None
        reach = None
        if plan is not None and plan.serves(question):
            if self._stands(plan, state):
                state.plan = plan
                return plan.reach
            reach = self._advance(plan, state) if self._goes_on(plan, state) else None
        if reach is None:
            full = [group for group in groups if not group.window]
            windows = [group for group in groups if group.window]
            step = step or math.lcm(*(group.tokens for group in groups))
            state.is_whole |= bool(windows)
            look = Look(full, windows, state, computed, end, step)
            self._count(look)
            while reach is None:
                self._search.find(look)
                reach = self._decided(look, question)
        if state.plan is None or state.plan.line is None:
            if not state.is_taken_up and (reach.pending or not reach.unresolved):
                self._waits.taken_up(state)
            if reach.ready < end - computed and not (state.is_computed or reach.waits):
                self._waits.computes(state, end - computed - reach.ready)
        return reach

    def waits_on(self, state: RequestState, computed: int, end: int) -> Reach | None:
        """Return the last answer if the request waits on, for loads or in line for rows; None: ask ``reach``.

        It takes no longer for a long prompt. The answer may be older in how much of what is pending has come.
        """
        plan = state.plan
        if plan is None or plan.question[:2] != (computed, end):
            return None
        if plan.line is not None:
            return plan.reach if self._stays_in_line(plan, plan.line, state) else None
        are_coming = set(self._primary.find(plan.awaited)) == {_PENDING}
        return plan.reach if are_coming and not self._waits.load_over(state, 0) else None

    def question(self, prompt: Sequence[PromptGroup]) -> Sequence[OffloadKey]:
        """Return the chunks that the primary lacks of those that a whole prompt needs: what a tier is asked first."""
        if not (groups := self._groups(prompt)):
            return ()
        keys, end = list[OffloadKey](), _known_tokens(groups)
        for group in sorted(groups, key=lambda group: group.window):
            some = group.span(0, end).keys
            keys += some[self._primary.resident_run(some)[0] :]
        return keys

    # -- inside

    def _groups(self, prompt: Sequence[PromptGroup]) -> list[Group]:
        """Return a prompt's groups with their tokens; none if one is empty, or there is no such group."""
        tokens = self._tokens_per_chunk
        try:
            return [Group(*group, tokens[group_of(group.keys[0])]) for group in prompt]
        except IndexError:
            self._metrics.misuse += all(group.keys for group in prompt)
            return []

    def _count(self, look: Look) -> None:
        chunks = sum(len(span.keys) for span in look.spans(look.end))
        self._metrics.lookups += max(0, chunks - look.state.counted)
        look.state.counted = max(chunks, look.state.counted)

    def _stands(self, plan: Plan, state: RequestState) -> bool:
        """Return whether the last answer to a request that waits still holds; it takes one comparison, or a few.

        So a step without a change costs next to nothing, however many requests wait and however long their prompts.
        """
        if (slot := plan.line) is not None:
            return self._stays_in_line(plan, slot, state)
        if plan.shares:
            return False
        if not plan.reach.tokens:
            return self._search.none_has(plan.missing, state)
        return plan.changes == self._primary.changes and not (plan.reach.pending and self._waits.load_over(state, 0))

    def _stays_in_line(self, plan: Plan, slot: TierSlot, state: RequestState) -> bool:
        """Return whether a plan waits on for this tier's rows: loading it is still sooner, and it has not all come."""
        keys, wanted = plan.shares[slot].keys, self._wanted(plan.shares[slot])
        return (
            slot.available()
            and self._primary.lacks_all(keys[-1:])
            and slot.metrics.loading_chunks > 0
            and self._budget.room(slot) < wanted
            and not (self._waits.load_over if plan.reach.pending else self._waits.line_over)(state, 0)
            and self._waits.is_sooner(slot, wanted, plan.tokens, plan.total, state)
        )

    # -- the decision

    def _decided(self, look: Look, question: Question) -> Reach | None:
        """Return what follows for the request; None: something was struck out for it, look again."""
        state, is_whole = look.state, look.is_whole
        if look.silent and self._waits.lookup_over(state, look.silent):
            self._metrics.wait_expired += 1
            for silent in look.silent:
                silent.metrics.wait_expired += 1
            state.given_up.add(look.unknown)
            return None
        spans, more = look.spans(), bool(look.silent)
        plan = Plan(question, look.boundary, look.step, spans, look.shares, is_whole, more, look.missing)
        if look.silent and is_whole:
            return Reach(*self._standing(plan), unresolved=True)
        if look.boundary <= look.computed:
            return self._found_nothing(look, plan)
        if plan.shares:
            plan.tokens, plan.total = self._waited_for(plan)
            if too_slow := self._too_slow(plan, state):
                look.too_slow |= too_slow
                return None
        return self._advance(plan, state, look)

    def _found_nothing(self, look: Look, plan: Plan) -> Reach:
        """Return that nothing can be loaded, or not yet; it holds until one of the chunks that lack has come."""
        state = look.state
        if look.too_slow and not look.silent:
            self._recompute(look, plan)
        elif look.prefix > look.computed and not (plan.has_more or state.given_up or state.load_over):
            self._metrics.unusable_prefixes += not state.lacks_boundary
            state.lacks_boundary = True
        reach = Reach(0, 0, unresolved=plan.has_more)
        if not plan.has_more:
            self._keep(plan, reach, state)
        return reach

    def _goes_on(self, plan: Plan, state: RequestState) -> bool:
        """Return whether a plan stays as it was decided, without another look."""
        if not plan.shares:
            return not state.load_over and self._search.none_has(plan.missing, state)
        may_wait = self._search.may_wait(state, is_whole=plan.is_whole)
        are_open = all(slot.available() and (may_wait or self._budget.room(slot)) for slot in plan.shares)
        return are_open and not state.load_over and not self._too_slow(plan, state)

    def _too_slow(self, plan: Plan, state: RequestState) -> dict[TierSlot, Sequence[OffloadKey]]:
        """Return the tiers that are too slow for their share of the plan, and the share."""
        if not self._waits.decides or (plan.is_whole and state.loading):
            return {}
        return {
            slot: share.keys
            for slot, share in plan.shares.items()
            if not self._waits.is_sooner(slot, len(share.keys), plan.tokens, plan.total, state)
        }

    def _advance(self, plan: Plan, state: RequestState, look: Look | None = None) -> Reach | None:
        """Reserve rows for the plan, or the next part of it; None: look again.

        ``look``: by which the plan was made in this call.
        """
        if look is None:
            self._strip(plan)
        if plan.shares:
            may_wait = self._search.may_wait(state, is_whole=plan.is_whole)
            if may_wait and (slot := self._lacks_rows(plan)) is not None:
                return self._in_line(slot, plan, state)
            if not self._reserve(plan, state):
                return None
        if look is not None and look.too_slow and not look.silent:
            self._recompute(look, plan)
        return self._waited(plan, state, is_new=look is not None)

    def _waited(self, plan: Plan, state: RequestState, *, is_new: bool) -> Reach | None:
        """Return how far a request is whose plan has rows; None: it has waited for its loads as long as it may.

        Or some of a plan that is not new has left the primary since it was made.
        """
        ready, pending = self._standing(plan)
        if not (is_new or plan.shares) and ready + pending < plan.boundary - plan.question.computed:
            return None
        if pending:
            plan.tokens = plan.tokens or self._waited_for(plan)[0]
            if self._waits.load_over(state, plan.tokens):
                self._give_up(plan, state)
                return None
            for span in plan.spans:
                self._promotions.share(span.keys, state)
        first = min((span.keys[0] for span in plan.spans), key=group_of)
        begins = self._primary.ready_run([first]) > 0
        is_complete = ready + pending == plan.boundary - plan.question.computed
        plan.awaited = self._awaited(plan, first) if pending and is_complete else ()
        reach = Reach(ready, pending, plan.has_more or bool(plan.shares), begins)
        if plan.shares or (reach.tokens and not plan.has_more):
            self._keep(plan, reach, state)
        return reach

    def _awaited(self, plan: Plan, first: OffloadKey) -> list[OffloadKey]:
        """Return the last chunk of a plan that is on its way, and the first one if it is, too."""
        for span in plan.spans:  # full attention first, which comes last
            if last := self._primary.last_pending(span.keys):
                return last + self._primary.last_pending([first])
        return []

    def _keep(self, plan: Plan, reach: Reach, state: RequestState, line: TierSlot | None = None) -> None:
        """Keep a plan, with the answer by it."""
        state.plan, plan.reach, plan.changes, plan.line = plan, reach, self._primary.changes, line

    def _standing(self, plan: Plan) -> tuple[int, int]:
        """Return how many tokens up to the boundary are ready in the primary, and how many are pending there."""
        reach, pending = plan.boundary, 0
        for keys, first, tokens, ahead in plan.spans:
            length, waits = self._primary.resident_run(keys)
            if length < len(keys):
                reach = min(reach, (first + length - ahead) * tokens // plan.step * plan.step)
            pending = max(pending, waits * tokens)
        total = max(0, reach - plan.question.computed)
        pending = min(pending, total)
        return total - pending, pending

    def _waited_for(self, plan: Plan) -> tuple[int, int]:
        """Return the tokens that are computed if nothing is waited for, and the chunks that are not readable yet."""
        missing = [(self._primary.not_ready(span.keys), span.tokens) for span in plan.spans]
        whole = plan.boundary - plan.question.computed
        tokens = whole if plan.is_whole else max(chunks * size for chunks, size in missing)
        return tokens, sum(chunks for chunks, _ in missing)

    def _recompute(self, look: Look, plan: Plan) -> None:
        """Strike out chunks that are computed sooner than loaded, and count them."""
        left = [self._absent(keys) for keys in look.too_slow.values()]
        for slot, keys in zip(look.too_slow, left, strict=True):
            slot.metrics.recomputed_cheaper += len(keys)
        self._metrics.recomputed_cheaper += len({key for keys in left for key in keys})
        look.state.given_up.update(keys[0] for keys in left if keys)
        first, chunks = next(iter(look.too_slow.items()))
        if trial := self._waits.trial(first):
            self._try_out(first, chunks[: min(trial, self._budget.room(first))], plan)
        look.too_slow = {}

    def _absent(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [keys[place] for place in self._primary.absent(keys)]

    def _try_out(self, slot: TierSlot, keys: Sequence[OffloadKey], plan: Plan) -> None:
        """Load a few chunks from a tier that seems too slow, to measure it; no request waits for them."""
        if some := self._absent(keys):
            here = self._primary.present(plan.in_prefix_order())
            state = RequestState(RequestContext(""), (slot,), is_prefetch=True, load_over=True)
            self._promotions.reserve([*here, *some], {slot: Share(some, [0] * len(some))}, state, is_whole=False)

    def _give_up(self, plan: Plan, state: RequestState) -> None:
        """Strike out what is on its way, since the request waits no longer."""
        keys = [key for span in plan.spans for key in span.keys]
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

    def _lacks_rows(self, plan: Plan) -> TierSlot | None:
        """Return the first tier that may not have the rows of its share before others have given some back."""
        wanted = 0
        for slot, share in plan.shares.items():
            wanted += self._wanted(share)
            if self._wanted(share) > self._budget.room(slot) or wanted > self._budget.room_in_all:
                return slot
        return None

    def _in_line(self, slot: TierSlot, plan: Plan, state: RequestState) -> Reach | None:
        """Let the plan wait for its rows; None: it has waited long enough, and is computed."""
        ready, pending = self._standing(plan)
        if (self._waits.load_over if pending else self._waits.line_over)(state, plan.tokens):
            slot.metrics.budget_misses += 1
            self._strike_out(plan.shares, state)
            if pending:
                self._give_up(plan, state)
            return None
        reach = Reach(ready, pending, unresolved=True)
        self._keep(plan, reach, state, slot)
        return reach

    @staticmethod
    def _strike_out(shares: Mapping[TierSlot, Share], state: RequestState) -> None:
        state.given_up.update(share.keys[0] for share in shares.values() if share.keys)

    def _reserve(self, plan: Plan, state: RequestState) -> bool:
        """Reserve rows for the plan, or its next part; False: there are none, what may be had is looked for again."""
        part = self._next_part(plan, state)
        mine = [key for share in part.values() for key in share.keys]
        if not mine:
            return False  # all of it has come meanwhile
        run, used = self._stays(plan, mine, state)
        is_part, plan.is_begun = plan.is_begun or bool(plan.shares), True
        if self._promotions.reserve(run, part, state, is_whole=plan.is_whole, used=used):
            state.given = run
            return True
        if not (plan.is_whole or is_part):
            return True
        self._strike_out(part, state)
        return False

    def _strip(self, plan: Plan) -> None:
        """Take from a plan what has come since it was made: others have loaded or stored it."""
        for slot, (keys, positions) in list(plan.shares.items()):
            places = self._primary.absent(keys)
            if not places:
                del plan.shares[slot]
            elif len(places) < len(keys):
                plan.shares[slot] = Share([keys[place] for place in places], [positions[place] for place in places])

    def _next_part(self, plan: Plan, state: RequestState) -> dict[TierSlot, Share]:
        """Take the next chunks from the plan, as many as one call reserves and the budgets have rows for."""
        most = _MOST_BESIDE_PROMPTS if self._waits.has_prompts_beside(state) else _MOST_AT_ONCE
        left = min(self._budget.room_in_all, most)
        part, rest = dict[TierSlot, Share](), dict[TierSlot, Share]()
        for slot, share in plan.shares.items():
            now, later = share.split(min(left, self._budget.room(slot)))
            left -= len(now.keys)
            part[slot] = now
            if later.keys:
                rest[slot] = later
        plan.shares = rest
        return part

    def _stays(self, plan: Plan, mine: list[OffloadKey], state: RequestState) -> tuple[list[OffloadKey], int]:
        """Return these chunks behind those that do not make room for them, and how many of those were given before.

        In prefix order, with the last part at the latest: the eviction policy keeps it.
        """
        run, given, wanted = plan.in_prefix_order(), state.given, set(mine)
        is_head = wanted.isdisjoint(given) and given == list(run[: len(given)])
        if plan.is_begun and plan.shares and not is_head:
            given = [key for key in given if key not in wanted]
            return [*given, *mine], len(given)
        if not is_head:
            given = []
        rest = list(run[len(given) :])
        if not plan.is_begun or rest[: len(mine)] != mine:
            return [*given, *self._primary.present(rest, wanted)], len(given)
        return [*given, *mine], len(given)


def _known_tokens(groups: Sequence[Group]) -> int:
    """Return up to which token a load is possible by the keys that there are in all groups."""
    return min((len(group.keys) - group.ahead) * group.tokens for group in groups)
