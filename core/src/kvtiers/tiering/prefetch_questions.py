"""The questions of prefetches: which tier each key is loaded from, by turns with the machine's other engines.

A chunk that a near tier may give other engines is fetched from a far one by right (``fetch_once.py``)::

    before, near --has it--> found
         |  none has: the right is taken, and near is asked again, as another engine may have stored the chunk since
         v
       after --has it--> found; when it has landed, it is stored in near, and the right is released
"""

import enum
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.api.keys import first_misfit
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.fetch_once import AGAIN_SECONDS, FetchRights, Turn
from kvtiers.tiering.prefetch_state import Prefetch
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext

__all__ = ["PATIENCE", "Questions"]

PATIENCE = 30.0
"""Seconds for the answers of one question, and for a prefix to get its turn."""
_QUESTIONS_BY_TURNS = 3  # about a chunk: to the near tier, to it again, to the far one
_NO_REQUEST = RequestContext("")


class _Answer(enum.Enum):
    """An answer about a chunk that names no tier to load it from."""

    MISSING = "missing"
    OPEN = "open"
    """It is to be asked again in the next step."""
    ANOTHERS = "another's"
    """Another engine is fetching it."""


class Way(NamedTuple):
    """The tiers that are asked, in order: ``before``, up to ``near``, and ``after``, by turns with other engines.

    ``near``: what is fetched from those after it is stored in it, for the others; None: there is no such tier.
    """

    before: Sequence[TierSlot]
    near: TierSlot | None
    after: Sequence[TierSlot]


class Questions:
    """Asks the tiers for the prefetches of one engine, ``all_prefetches``, by its ``rights``. Engine's thread only."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        slots: Sequence[TierSlot],
        all_prefetches: Sequence[Prefetch],
        rights: FetchRights,
    ) -> None:
        self._primary = primary
        self._slots = slots
        self._all = all_prefetches
        self._rights = rights

    def way(self, one: Prefetch, slots: Sequence[TierSlot]) -> Way:
        """Return how the usable ones of these tiers are asked."""
        usable = [slot for slot in slots if slot.available()]
        last = max((self._slots.index(slot) for slot in usable), default=0)
        for place, slot in enumerate(self._slots[:last]):
            is_allowed = one.is_warm_up or slot in slots
            if is_allowed and _can_be_near(slot) and slot.available():
                before = [other for other in self._slots[:place] if other in usable]
                return Way([*before, slot], slot, [other for other in self._slots[place + 1 :] if other in usable])
        return Way(usable, None, ())

    def near_of(self, far: TierSlot) -> TierSlot | None:
        """Return the near tier for what was fetched from this one."""
        places = self._slots[: self._slots.index(far)] if far in self._slots else ()
        return next(filter(_can_be_near, places), None)

    def put_back(self, one: Prefetch, usable: Collection[TierSlot]) -> None:
        """Let the other tiers be asked for what was found in one that was switched off since."""
        gone = [key for slot, key in one.found if slot not in usable]
        if gone:
            one.found = deque(pair for pair in one.found if pair[0] in usable)
            one.waiting.extendleft(reversed(gone))
            self.release(one, gone)

    def ask(self, one: Prefetch, way: Way, now: float) -> None:
        """Ask the tiers about the next keys, each by itself: one that is missing says nothing of the others."""
        if not one.asking:
            if len(one.found) >= one.question:
                return
            self._take_question(one, now)
            one.asked_at = now
        asking, one.asking = one.asking, []
        for key in asking:
            answer = self._answer(one, key, way, now)
            if isinstance(answer, TierSlot):
                one.found.append((answer, key))
            elif answer is _Answer.ANOTHERS:
                one.others.append((key, now + AGAIN_SECONDS))
            elif answer is _Answer.OPEN and now - one.asked_at < PATIENCE:
                one.asking.append(key)
            else:
                self.release(one, [key])
                one.missing += 1
        if asking and not one.asking:
            one.answered_in((now - one.asked_at) / (_QUESTIONS_BY_TURNS if way.near is not None else 1))

    def release(self, one: Prefetch, keys: Sequence[OffloadKey]) -> None:
        """Release the rights that this prefetch has to fetch these chunks."""
        if one.rights:
            one.rights.difference_update(keys)
            self._rights.release(keys)

    def end_run(self, one: Prefetch) -> None:
        """End a prefix, as the eviction policy sees it."""
        if one.run:
            self._primary.on_request_finished(one.run)
            one.run = ""

    def _answer(self, one: Prefetch, key: OffloadKey, way: Way, now: float) -> TierSlot | _Answer:
        """Return the tier to load a chunk from, or why there is none.

        A chunk that the near tier lacks is asked about there once more by right: another engine may have stored
        it since.
        """
        answer = _tier_with(key, way.before)
        if answer is not _Answer.MISSING or way.near is None:
            if isinstance(answer, TierSlot):
                self.release(one, [key])
            return answer
        if key in one.rights:
            return _tier_with(key, way.after)
        turn = self._take_right(one, key, way.near, now)
        if turn is Turn.ANOTHERS:
            return _Answer.ANOTHERS
        if turn is Turn.LATER:
            one.asked_at = now  # no fault of the tiers
        else:
            way.near.ask_again([key])
        return _Answer.OPEN

    def _take_right(self, one: Prefetch, key: OffloadKey, near: TierSlot, now: float) -> Turn:
        """Take the right to fetch a chunk, also from a prefetch of this engine that comes after this one."""
        owner = next((other for other in self._all if key in other.rights), None) if key in self._rights else None
        if owner is not None:
            owner.rights.discard(key)
        turn = Turn.OWN if owner is not None else self._rights.take(key, near.options.lock_file, now)
        if turn is Turn.OWN:
            one.rights.add(key)
        return turn

    def _take_question(self, one: Prefetch, now: float) -> None:
        """Take the keys of the next question, within one prefix, that are not resident."""
        while one.others and one.others[0][1] <= now and len(one.asking) < one.question:
            again = one.others.popleft()[0]
            if self._primary.resident_run([again])[0]:
                one.resident += 1
            else:
                one.asking.append(again)
        if one.waiting and one.waiting[0] is None and not one.found:
            one.waiting.popleft()
            self.end_run(one)
        while one.waiting and one.waiting[0] is not None and len(one.asking) < one.question:
            key = one.waiting.popleft()
            assert key is not None
            if first_misfit([key]) is not None:
                one.missing += 1
            elif self._primary.resident_run([key])[0]:
                one.resident += 1
            else:
                one.asking.append(key)


def _can_be_near(slot: TierSlot) -> bool:
    """Return whether other engines find what this one stores there; not in one whose writes are bounded."""
    return slot.options.shareable and not slot.read_only and slot.options.writes_per_hour is None


def _tier_with(key: OffloadKey, slots: Sequence[TierSlot]) -> TierSlot | _Answer:
    """Return the first of these tiers that has the chunk; OPEN: one is still to answer."""
    answer = _Answer.MISSING
    for slot in slots:
        hits, retry = slot.ask([key], _NO_REQUEST)
        if hits:
            return slot
        answer = _Answer.OPEN if retry else answer
    return answer
