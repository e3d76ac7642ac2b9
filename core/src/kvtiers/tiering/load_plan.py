"""The plan of a request's loads: the chunks that a boundary needs, what each tier brings of them, and the last answer.

A request keeps it between calls (``requests.py``), so that the tiers are asked once, not in each step that it waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import Reach

__all__ = ["NOTHING", "Group", "Plan", "Question", "Share", "Span"]

NOTHING = Reach(0, 0, unresolved=False)


class Span(NamedTuple):
    """The chunks of a group that a boundary needs, from number ``first`` on, of ``tokens`` tokens each."""

    keys: Sequence[OffloadKey]
    first: int
    tokens: int
    ahead: int

    def behind(self, computed: int) -> "Span":
        """Return those of them that are needed behind so many tokens."""
        loaded = max(0, computed // self.tokens - self.first)
        return self._replace(keys=self.keys[loaded:], first=self.first + loaded)


class Group(NamedTuple):
    """A ``PromptGroup``, with the tokens of each of its chunks."""

    keys: Sequence[OffloadKey]
    window: int
    ahead: int
    tokens: int

    def first(self, computed: int, boundary: int) -> int:
        """Return the number of the first chunk that a load of the tokens from ``computed`` to the boundary needs."""
        return (max(computed, boundary - self.window) if self.window else computed) // self.tokens

    def span(self, computed: int, boundary: int) -> Span:
        """Return the chunks that this load needs."""
        if boundary <= computed:
            return Span((), 0, self.tokens, self.ahead)
        first = self.first(computed, boundary)
        return Span(self.keys[first : -(-boundary // self.tokens) + self.ahead], first, self.tokens, self.ahead)


class Question(NamedTuple):
    """What a request asks: from which token to which, and by which last key of how many groups.

    ``until``: as the engine says, ``end``: as far as there are keys.
    """

    computed: int
    until: int | None
    end: int
    last: OffloadKey
    groups: int


class Share(NamedTuple):
    """What one tier is to bring of a plan. ``positions``: of each chunk's first token in the prompt."""

    keys: list[OffloadKey]
    positions: list[int]

    def split(self, at: int) -> tuple["Share", "Share"]:
        """Return the first so many chunks, and the others."""
        keys, positions = self
        return Share(keys[:at], positions[:at]), Share(keys[at:], positions[at:])


@dataclass(slots=True)
class Plan:
    """The loads up to a boundary, decided as a whole. ``shares``: what has no rows yet.

    ``is_whole``: of windows and states, a part of it is worth nothing. ``has_more``: a tier gave no answer about what
    is behind the boundary. ``missing``: the chunks that nobody had, for the lack of which no later boundary can be
    used. ``tokens``: those that are computed if nothing is loaded; ``total``: the chunks that were not readable when it
    was made. ``is_begun``: a part of it has got rows in an earlier call.

    ``reach``: the last answer by it, which holds for the same question as long as one of these is true. In general: the
    primary's ``changes`` are the same. Where nothing was found: neither the primary nor a tier has got one of
    ``missing``. In line for rows: the tier ``line`` may not have them yet, to load its share is still sooner than
    computing, and the last chunk of it has not come by another way. ``awaited``: as long as these are on their way the
    request waits on, however many others have come.
    """

    question: Question
    boundary: int
    step: int
    spans: Sequence[Span]
    shares: dict[TierSlot, Share]
    is_whole: bool
    has_more: bool
    missing: Sequence[OffloadKey]
    tokens: int = 0
    total: int = 0
    is_begun: bool = False
    run: Sequence[OffloadKey] = ()
    reach: Reach = NOTHING
    changes: int = 0
    line: TierSlot | None = None
    awaited: Sequence[OffloadKey] = ()

    def serves(self, question: Question) -> bool:
        """Return whether this is the question's plan. If the first chunks were loaded since, go on with the rest."""
        loaded = question.computed - self.question.computed
        if question[1:] != self.question[1:] or loaded < 0:
            return False
        if loaded:
            if self.shares or question.computed >= self.boundary:
                return False
            self.question, self.changes = question, -1
            self.spans = [span.behind(question.computed) for span in self.spans]
        return True

    def in_prefix_order(self) -> Sequence[OffloadKey]:
        """Return all its chunks by where they end: eviction takes the last ones first, in all groups."""
        if not self.run:
            self.run = self.spans[0].keys
            if len(self.spans) > 1:
                placed = [
                    ((span.first + place) * span.tokens, key)
                    for span in self.spans
                    for place, key in enumerate(span.keys, 1)
                ]
                self.run = [key for _, key in sorted(placed, key=itemgetter(0))]
        return self.run
