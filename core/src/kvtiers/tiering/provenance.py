"""The provenance of chunks: the tier that each is loaded from, and how much was written to a tier and not read since.

The latter is exact for a few chunks; beyond these, every 16th chunk is tracked and counts as 16.
"""

from collections.abc import Iterable, Sequence
from itertools import compress, islice, repeat

from kvtiers.api import OffloadKey
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["Provenance"]

_EXACT_KEYS = 4096  # unread keys of a tier of which each is remembered
_SAMPLE = 16
_UNREAD_KEYS = 1 << 16  # most keys remembered a tier; the oldest are forgotten, and stay counted as unread


class Provenance:
    """The tier of each chunk that is resident or pending, and unread. Never more entries than rows."""

    def __init__(self, slots: Sequence[TierSlot]) -> None:
        self._slots = slots
        self._tier_of: dict[OffloadKey, TierSlot] = {}
        self._unread: list[dict[OffloadKey, int]] = [{} for _ in slots]
        self._turns = [0] * len(slots)

    def add(self, slot: TierSlot) -> None:
        """Take in another tier, with an index that no other has had."""
        while len(self._unread) <= slot.index:
            self._unread.append({})
            self._turns.append(0)

    def remove(self, slot: TierSlot) -> None:
        """Forget what was written to a tier and not read: it is none any more."""
        self._unread[slot.index] = {}

    def expect(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> None:
        """Record that rows are reserved for these chunks, to be loaded from this tier."""
        self._tier_of.update(dict.fromkeys(keys, slot))

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks that are not resident any more, or will not become so."""
        if self._tier_of:
            for key in keys:
                self._tier_of.pop(key, None)

    def expired(self, keys: Iterable[OffloadKey], *, overtaken: bool) -> None:
        """Count pending chunks that a request waits for no longer, each for the tier that loads it.

        ``overtaken``: computing them is sooner, else it has waited as long as it may.
        """
        for key in keys:
            if (slot := self._tier_of.get(key)) is not None:
                slot.metrics.wait_expired += not overtaken
                slot.metrics.recomputed_cheaper += overtaken

    def brought(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, TierSlot]:
        """Return those keys that a tier has loaded, or loads, and that were not read since, each with that tier."""
        return {key: self._tier_of[key] for key in keys if key in self._tier_of} if self._tier_of else {}

    def served(self, keys: Sequence[OffloadKey]) -> dict[TierSlot, list[OffloadKey]]:
        """Return by tier those keys that were loaded from it and are read for the first time. Asked once a key."""
        if not self._tier_of:
            return {}
        slots = list(map(self._tier_of.pop, keys, repeat(None)))
        return {slot: list(compress(keys, [of is slot for of in slots])) for slot in set(slots) if slot is not None}

    def written(self, slot: TierSlot, keys: Sequence[OffloadKey], nbytes: int) -> None:
        """Record that this tier has these chunks now; ``nbytes`` were written for those that it lacked before."""
        unread = self._unread[slot.index]
        keys = [key for key in keys if key not in unread]
        share = nbytes // len(keys) if keys else 0
        if not share:
            return
        if len(unread) >= _EXACT_KEYS:
            turn = self._turns[slot.index] = (self._turns[slot.index] + 1) % _SAMPLE
            keys = keys[turn::_SAMPLE]
            share *= _SAMPLE
        unread.update(dict.fromkeys(keys, share))
        slot.metrics.unread_bytes += share * len(keys)
        if len(unread) > _UNREAD_KEYS:
            # Many at once: finding the oldest key of a dict costs time for each that was removed before it.
            for key in list(islice(unread, _UNREAD_KEYS // 8)):
                del unread[key]

    def read(self, slot: TierSlot, keys: Iterable[OffloadKey]) -> None:
        """Record that these chunks were loaded from this tier."""
        unread = self._unread[slot.index]
        if unread:
            slot.metrics.unread_bytes -= sum([unread.pop(key, 0) for key in keys])

    def reset(self) -> None:
        """Forget all chunks: none is resident any more."""
        self._tier_of.clear()

    def retire_keys(self) -> None:
        """Forget all keys, which name other values from now on; unread bytes of the old ones stay counted."""
        for unread in self._unread:
            unread.clear()
