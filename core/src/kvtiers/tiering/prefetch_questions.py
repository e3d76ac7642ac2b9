"""The questions of prefetches: which tier each key is loaded from.

The tiers are asked in the config's order. A warm-up from a far tier also asks the near one: the first that other
processes share and that takes stores. What was loaded from behind the near tier is stored in it, so that an engine
that is warmed up later finds it there.
"""

from collections import deque
from collections.abc import Collection, Sequence

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.api.keys import first_misfit
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.prefetch_state import Prefetch
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext

__all__ = ["PATIENCE", "Questions"]

PATIENCE = 30.0
"""Seconds for the answers of one question, and for a prefix to get its turn."""
_EARLIER_PATIENCE = 1.0
"""Seconds for the answer of a tier while a later one has the chunk: no request waits, and the earlier one is nearer."""
_NO_REQUEST = RequestContext("")


class Questions:
    """Asks the tiers for the prefetches of one engine. Engine's thread only."""

    def __init__(self, primary: CPUPrimaryTier, slots: Sequence[TierSlot]) -> None:
        self._primary = primary
        self._slots = slots

    def tiers_of(self, one: Prefetch, slots: Sequence[TierSlot]) -> list[TierSlot]:
        """Return the usable ones of these tiers, in the config's order; for a warm-up also the near tier."""
        usable = [slot for slot in slots if slot.available()]
        near = self.near_of(usable[-1]) if usable and one.is_warm_up else None
        return [slot for slot in self._slots if slot in usable or slot is near]

    def near_of(self, far: TierSlot) -> TierSlot | None:
        """Return the near tier for what was loaded from this one."""
        places = self._slots[: self._slots.index(far)] if far in self._slots else ()
        return next((slot for slot in places if _can_be_near(slot) and slot.available()), None)

    def put_back(self, one: Prefetch, usable: Collection[TierSlot]) -> None:
        """Let the other tiers be asked for what was found in one that was switched off since."""
        gone = [key for slot, key in one.found if slot not in usable]
        if gone:
            one.found = deque(pair for pair in one.found if pair[0] in usable)
            one.waiting.extendleft(reversed(gone))

    def ask(self, one: Prefetch, tiers: Sequence[TierSlot], now: float) -> None:
        """Ask the tiers about the next keys, each by itself: one that is missing says nothing of the others."""
        if not one.asking:
            if len(one.found) >= one.question:
                return
            self._take_question(one)
            one.asked_at = now
        asking, one.asking = one.asking, []
        found, unknown, left = dict[OffloadKey, TierSlot](), set[OffloadKey](), asking
        for tier in tiers:
            said = tier.ask_each(left, _NO_REQUEST)
            found.update((key, tier) for key in left if said.get(key) is LookupResult.HIT)
            unknown.update(key for key in left if said.get(key) is LookupResult.RETRY)
            left = [key for key in left if key not in found]
        for key in asking:
            slot = found.get(key)
            if key in unknown and now - one.asked_at < (PATIENCE if slot is None else _EARLIER_PATIENCE):
                one.asking.append(key)
            elif slot is not None:
                one.found.append((slot, key))
            else:
                one.missing += 1
        if asking and not one.asking:
            one.answered_in(now - one.asked_at)

    def end_run(self, one: Prefetch) -> None:
        """End a prefix, as the eviction policy sees it."""
        if one.run:
            self._primary.on_request_finished(one.run)
            one.run = ""

    def _take_question(self, one: Prefetch) -> None:
        """Take the keys of the next question, within one prefix, that are not resident."""
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
