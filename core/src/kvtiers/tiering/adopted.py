"""Chunks that an engine of a pool left at its end: which tiers lack them is asked and mended in the background.

It may have been killed before a tier had all that its admission lets in, and nobody else knows which chunks the tiers
have. The next engine finds them in its memory at the start. So each tier that takes stores is asked for each of them
once, for what was used last first::

    asked --has it-----> as if this engine had written it: it is not written again
          --lacks it---> all: written now;  second_access: it was wanted once;  any other: as before

No request waits for that. Of each tier one small question or one job is in flight, for half of the time at most,
and none begins while the tier loads. What a tier did not take is offered once more, after the others. Chunks that have
left since are left out, and so is what a neighbour in the pool has: its engine writes that.

As long as no engine has the part that one has left, a neighbour does so, for tiers that take ``all``: what they lack is
borrowed first, and asked for again once it is checked. Tiers of other rules miss nothing meanwhile: no chunk of such a
part is evicted, and whoever wants one a second time writes it. Engine's thread only.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.tier_slot import PinBudget, TierSlot
from kvtiers.types import RequestContext

__all__ = ["Adopted"]

_log = logging.getLogger("kvtiers.tiering")
_FIRST_QUESTION, _LONGEST_QUESTION = 8, 16  # keys
_LATE_SECONDS = 0.020  # to an answer: the next question is shorter
_REST = 1.0  # times what a question and its job took
_LATER = 0.1
"""Seconds until chunks are asked about again that could not be read: others' are borrowed and checked first."""
_PATIENCE = 30.0
"""Seconds for the answers of one question; and so long a tier rests that has taken nothing."""
_NO_REQUEST = RequestContext("")
_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


@dataclass(slots=True, eq=False)
class _Unknown:
    """What is not known of one tier: which of ``keys`` it has, the last of which are asked for next."""

    slot: TierSlot
    keys: deque[OffloadKey]
    question: int = _FIRST_QUESTION
    asking: list[OffloadKey] = field(default_factory=list)
    asked_at: float = 0.0
    looks: int = 0
    """How often it was looked for the answers to this question."""
    writing: int = 0
    rests_until: float = 0.0
    refused: list[OffloadKey] = field(default_factory=list)
    is_last_turn: bool = False
    had: int = 0
    written: int = 0

    @property
    def takes(self) -> bool:
        """The tier may be asked and given something now."""
        return self.slot.available() and not self.slot.read_only


class Adopted:
    """The chunks of before, by tier. ``tiers`` is empty when all is known; a step looks at it."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        cascades: Cascades,
        budget: PinBudget,
        job_rows: int,
        slots: Sequence[TierSlot],
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._cascades = cascades
        self._budget = budget
        self._job_rows = job_rows
        self._clock = clock
        self._slots = slots
        keys = primary.residents()  # those used last at the end, of which a tier may hold so many
        takers = [slot for slot in slots if keys and not slot.options.read_only]
        self.tiers = [_Unknown(slot, deque(keys, slot.options.chunks)) for slot in takers]

    def look(self) -> None:
        """Take in what engines have left that ended since. Once in a while."""
        takers = [slot for slot in self._slots if slot.options.admission == "all" and not slot.options.read_only]
        keys = self._primary.take_left() if takers else ()
        for slot in takers if keys else ():
            one = next((one for one in self.tiers if one.slot is slot), None)
            if one is None:
                one = _Unknown(slot, deque(maxlen=slot.options.chunks))
                self.tiers.append(one)
            listed = set(one.keys)  # of a part that was claimed before, and lent meanwhile
            one.keys.extend(key for key in keys if key not in listed)
            one.is_last_turn = False

    def is_due(self, now: float) -> bool:
        """Return whether a step would do something."""
        return any(now >= one.rests_until and not one.writing and one.takes for one in self.tiers)

    def reset(self) -> None:
        """Handle a reset of the cache: these chunks are gone."""
        self.tiers.clear()

    def advance(self) -> None:
        """Do a step's part."""
        now = self._clock()
        for one in list(self.tiers):
            if one.slot.retired:
                self.tiers.remove(one)
            elif not one.writing and now >= one.rests_until:
                self._work_on(one, now)

    def _work_on(self, one: _Unknown, now: float) -> None:
        if not one.takes:
            one.keys.extend(one.asking)  # what it answers when it is back counts
            one.asking = []
        elif one.asking:
            self._take_answers(one, now)
        elif one.keys:
            if not one.slot.metrics.loading_chunks:
                self._ask(one, now)
        elif one.refused and not one.is_last_turn:
            one.is_last_turn, one.keys, one.refused = True, deque(one.refused), []
        else:
            self.tiers.remove(one)
            left = f"; {len(one.refused)} were not taken" if one.refused else ""
            text = "%s: of the chunks that ended engines left it had %d, and %d were written to it now%s"
            _log.info(text, one.slot.name, one.had, one.written, left)

    def _ask(self, one: _Unknown, now: float) -> None:
        some = [one.keys.pop() for _ in range(min(one.question, len(one.keys)))]
        one.asking, one.asked_at, one.looks = self._primary.to_offer(some[::-1]), now, 0
        one.slot.ask_each(one.asking, _NO_REQUEST)

    def _take_answers(self, one: _Unknown, now: float) -> None:
        one.looks += 1
        some = one.asking
        said = one.slot.ask_each(some[:1], _NO_REQUEST)  # they come together
        if said.get(some[0], _RETRY) is not _RETRY:
            said |= one.slot.ask_each(some[1:], _NO_REQUEST)
        has = [key for key in some if said.get(key) is _HIT]
        lacks = [key for key in some if said.get(key) is _MISS]
        one.asking = [key for key in some if said.get(key, _RETRY) is _RETRY]
        if one.asking and now - one.asked_at >= _PATIENCE:
            one.refused += one.asking
            one.asking = []
            one.rests_until = now + _PATIENCE
        if has:
            one.had += len(has)
            self._cascades.found(one.slot, self._primary.to_offer(has))
        if lacks and (wanted := self._cascades.missed_by(one.slot, self._primary.to_offer(lacks))):
            self._write(one, wanted, now)
        if not one.asking:
            if one.looks == 1:
                one.question = min(_LONGEST_QUESTION, 2 * one.question)
            elif now - one.asked_at > _LATE_SECONDS:
                one.question = max(1, one.question // 2)
            self._rest(one, now)

    def _write(self, one: _Unknown, keys: Sequence[OffloadKey], now: float) -> None:
        most = min(self._job_rows, (self._budget.room(one.slot) + 3) // 4)
        some = keys[:most]
        one.keys.extend(keys[most:])
        one.writing = len(some)
        if some and self._cascades.hand_on(one.slot, some, partial(self._ended, one)) is None:
            one.writing = 0
            one.keys.extend(some)
            one.rests_until = now + _LATER

    def _ended(self, one: _Unknown, _slot: TierSlot, keys: Sequence[OffloadKey], failed: Sequence[OffloadKey]) -> None:
        now = self._clock()
        one.writing -= len(keys) + len(failed)
        one.written += len(keys)
        one.refused += failed
        self._rest(one, now)
        if not keys:
            one.rests_until = now + _PATIENCE

    @staticmethod
    def _rest(one: _Unknown, now: float) -> None:
        one.rests_until = max(one.rests_until, now + _REST * (now - one.asked_at))
