"""The plan of a request's loads: the chunks that a boundary needs, what each tier brings of them, and the last answer.

A request keeps both between calls (``requests.py``), so that a call costs what is new since the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import Reach

__all__ = ["Answer", "Group", "Plan", "Share", "Span"]


class Span(NamedTuple):
    """The chunks of a group that a boundary needs, from number ``first`` on, of ``tokens`` tokens each."""

    keys: Sequence[OffloadKey]
    first: int
    tokens: int
    ahead: int


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
    is behind the boundary. ``tokens``: those that are computed if nothing is loaded; ``total``: the chunks that were
    not readable when it was made. ``is_begun``: a part of it has got rows in an earlier call.
    """

    question: tuple[object, ...]
    computed: int
    boundary: int
    step: int
    spans: Sequence[Span]
    shares: dict[TierSlot, Share]
    is_whole: bool
    has_more: bool
    tokens: int = 0
    total: int = 0
    is_begun: bool = False
    run: Sequence[OffloadKey] = ()

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


class Answer(NamedTuple):
    """The last answer to a request, which holds for the same ``question`` as long as one of these is true.

    In general: the primary's ``changes`` are the same. Where nothing was found: no boundary could be used without the
    chunks in ``missing``, and neither the primary nor a tier has got one of them. In line for rows: ``slot`` may not
    have ``chunks`` rows yet, to load these, of ``total`` chunks for ``tokens`` tokens, is still sooner than computing,
    and the last of them, which is ``missing``, has not come by another way.
    """

    question: tuple[object, ...]
    reach: Reach
    changes: int
    missing: Sequence[OffloadKey] = ()
    slot: TierSlot | None = None
    chunks: int = 0
    tokens: int = 0
    total: int = 0
