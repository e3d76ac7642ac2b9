"""Cascades: what goes from the primary down to the tiers, when, and for whom.

Each tier has its own admission: ``all`` (as soon as a chunk is in the primary), ``second_access`` (when it is wanted a
second time), ``on_eviction`` (when it is among the coldest: worked off ahead of need, so that nobody waits for it).
A store that would break a pin budget, or whose tier is unavailable, is dropped and counted.
"""

from collections.abc import Sequence

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.base import RequestContext
from kvtiers.primary.chunks import CPUPrimaryTier
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tiers import TierSlot

__all__ = ["Cascades"]

_REMEMBERED = 1_000_000  # keys a tier with second_access remembers
_WORK_AHEAD_ROWS = 256  # most chunks that one step sends down ahead of their eviction


class Cascades:
    """Decides and submits stores; runs on the engine's thread."""

    def __init__(
        self, primary: CPUPrimaryTier, jobs: JobTable, slots: Sequence[TierSlot], options: TieringOptions
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        writable = [slot for slot in slots if not slot.options.read_only]
        self._at_once = [slot for slot in writable if slot.options.admission == "all"]
        self._second = {slot: _Seen() for slot in writable if slot.options.admission == "second_access"}
        self._late = [slot for slot in writable if slot.options.admission == "on_eviction"]
        self._clean_rows = max(1, round(options.clean_reserve * primary.num_rows))
        self._nobody = RequestState(RequestContext(""), slots)
        jobs.on_tier_has = self._note_clean

    def takers(self, chunks: int) -> list[TierSlot]:
        """Return the tiers that take all of this many newly stored chunks; the room for them is theirs from now on."""
        takers = []
        for slot in self._at_once:
            if self._jobs.room(slot) >= chunks and slot.available():
                self._jobs.hold(slot, chunks)
                takers.append(slot)
        return takers

    def stored(
        self, keys: Sequence[OffloadKey], rows: list[int], takers: Sequence[TierSlot], state: RequestState
    ) -> None:
        """Chunks have become readable, each with as many readers as ``takers``: send them to who wants them."""
        for slot in takers:
            self._jobs.submit(slot, keys, rows, state, promotion=False)
        for slot in self._at_once:
            if slot not in takers:
                self._send(slot, keys, state)
        for slot, seen in self._second.items():
            if again := seen.note(keys, resend=True):
                self._send(slot, again, state)
        for slot in state.whole:
            if slot not in self._at_once:
                self._send(slot, keys, state)

    def read(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Chunks are being read by the engine: their second access, for the tiers that wait for one."""
        for slot, seen in self._second.items():
            if again := seen.note(keys, resend=False):
                self._send(slot, again, state)

    def offered_again(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Chunks of a whole-request tier are in the primary already: send the readable ones, park the others."""
        state.parked.update(dict.fromkeys(keys))
        self.retry_parked(state)

    def retry_parked(self, state: RequestState) -> None:
        """Send the parked chunks that have become readable; forget those that never will."""
        keys = list(state.parked)
        found = list(zip(keys, self._primary.find(keys), strict=True))
        ready = [key for key, where in found if where is LookupResult.HIT]
        for slot in state.whole:
            self._send(slot, ready, state)
        state.parked = dict.fromkeys(key for key, where in found if where is LookupResult.HIT_PENDING)

    def work_ahead(self) -> None:
        """Send the coldest chunks down before their rows are needed, for tiers that take them on eviction only."""
        if not self._late:
            return
        short = self._clean_rows - self._primary.free_rows - self._primary.clean_rows
        slots = [slot for slot in self._late if self._jobs.room(slot) and slot.available()] if short > 0 else []
        dirty = self._primary.coldest(min(short, _WORK_AHEAD_ROWS)) if slots else []
        for slot in slots:
            self._send(slot, dirty, self._nobody)

    def _note_clean(self, slot: TierSlot, keys: Sequence[OffloadKey]) -> None:
        if slot in self._late:
            self._primary.mark_clean(keys)

    def _send(self, slot: TierSlot, keys: Sequence[OffloadKey], state: RequestState) -> None:
        if not keys:
            return
        some = keys[: self._jobs.room(slot)] if slot.available() else ()
        slot.metrics.dropped_cascades += len(keys) - len(some)
        if some:
            rows = self._primary.prepare_read(some)
            assert rows is not None, "only readable chunks are sent down"
            self._jobs.hold(slot, len(rows))
            self._jobs.submit(slot, some, rows, state, promotion=False)


class _Seen:
    """Keys that were wanted before, bounded; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._sent: dict[OffloadKey, bool] = {}

    def note(self, keys: Sequence[OffloadKey], *, resend: bool) -> list[OffloadKey]:
        """Note these keys as wanted; return those wanted before, without those already sent unless ``resend``."""
        known = self._sent
        again = []
        for key in keys:
            sent = known.pop(key, None)
            if sent is False or (sent and resend):
                again.append(key)
            known[key] = sent is not None
        while len(known) > _REMEMBERED:
            del known[next(iter(known))]
        return again
