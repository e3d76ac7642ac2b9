"""An operator's commands to a running engine: work for the engine's thread at the begin of a step."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvtiers.api import OffloadKey, tenant_of
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.command_queue import CommandRefused
from kvtiers.tiering.estimates import PRIOR_BYTES_PER_SECOND
from kvtiers.tiering.jobs import JobTable
from kvtiers.tiering.plans import Plans
from kvtiers.tiering.prefetch import MOST_WAITING_KEYS, Prefetches
from kvtiers.tiering.prefetch_state import Prefetch
from kvtiers.tiering.promotion import Promotions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["ChunkCommands", "TierCommands", "WarmUpCommands"]

_KEYS_IN_ONE_STEP = 16_384  # that are looked at: some milliseconds
_MOST_WARM_UPS = 4
SWITCHES = ("on", "off", "read-only")


class _Changes(NamedTuple):
    """How many chunks have been stored, and lost on their way, so far."""

    stored: int
    failed: int

    @classmethod
    def of(cls, slots: Sequence[TierSlot]) -> "_Changes":
        return cls(sum(s.metrics.stored_chunks for s in slots), sum(s.metrics.failed_stores for s in slots))


class TierCommands:
    """Commands that switch, add and remove tiers. ``slots``: the manager's own list.

    A tier that is switched off is asked nothing and given nothing. Its loads are misses at once, and their rows come
    back when nothing of the tier can touch them any more, as with a load that fails. Its stores are written to the end.
    """

    def __init__(
        self,
        slots: list[TierSlot],
        jobs: JobTable,
        promotions: Promotions,
        provenance: Provenance,
        cascades: Cascades,
        row_stride: int,
    ) -> None:
        self._slots = slots
        self._jobs = jobs
        self._promotions = promotions
        self._provenance = provenance
        self._cascades = cascades
        self._row_stride = row_stride

    def slot(self, name: str) -> TierSlot:
        """Return the tier of this name; CommandRefused, with the names there are, if there is none."""
        for slot in self._slots:
            if slot.name == name:
                return slot
        names = ", ".join(slot.name for slot in self._slots) or "no tier at all"
        raise CommandRefused(f"there is no tier {name!r}; this engine has {names}")

    def switch(self, name: str, to: str) -> dict[str, Any]:
        """Switch a tier; return what it was and is, and what has become of its jobs. One that is so already stays."""
        slot = self.slot(name)
        if to not in SWITCHES:
            raise CommandRefused(f"a tier cannot be switched to {to!r}; expected {', '.join(SWITCHES)}")
        if slot.retired:
            raise CommandRefused(f"{name}: out of use for good: {slot.retired}")
        was, metrics = slot.switch, slot.metrics
        metrics.switched_off = int(to == "off")
        metrics.switched_read_only = int(to == "read-only")
        cancelled = self._cancel_loads(slot) if to == "off" != was else 0
        return {
            "tier": name,
            "was": was,
            "is": slot.switch,
            "cancelled_chunks": cancelled,
            "running_jobs": metrics.running_jobs,
        }

    def add(self, slot: TierSlot, place: int) -> None:
        """Use another tier, asked after the first ``place`` of those that there are."""
        slot.rate.prior = self._row_stride / PRIOR_BYTES_PER_SECOND
        self._provenance.add(slot)
        self._cascades.add(slot)
        self._slots.insert(place, slot)

    def remove(self, name: str) -> TierSlot | None:
        """Switch a tier off; return it when it has no job in flight any more, and is not one of the tiers any more."""
        slot = self.slot(name)
        if not slot.metrics.switched_off:
            slot.metrics.switched_off = 1
            self._cancel_loads(slot)
        if self._jobs.has_jobs_of(slot):
            return None
        slot.leave()
        self._slots.remove(slot)
        self._cascades.remove(slot)
        self._provenance.remove(slot)
        return slot

    def _cancel_loads(self, slot: TierSlot) -> int:
        return self._promotions.cancel_loads(slot) + self._jobs.cancel_loads(slot)


class ChunkCommands:
    """Commands about the chunks in the primary and on their way. ``reset``: the manager's, of the cache."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        slots: Sequence[TierSlot],
        jobs: JobTable,
        plans: Plans,
        provenance: Provenance,
        cascades: Cascades,
        reset: Callable[[], None],
    ) -> None:
        self._primary = primary
        self._slots = slots
        self._jobs = jobs
        self._plans = plans
        self._provenance = provenance
        self._cascades = cascades
        self._reset = reset

    def drain(self) -> Callable[[], dict[str, Any] | None]:
        """Return the work of a drain: done when the stores that are in flight at its begin have ended.

        First those to the primary, whose chunks then go down, then those to the tiers.
        """
        before = _Changes.of(self._slots)
        plans, jobs = self._plans.newest_store, -1

        def drain() -> dict[str, Any] | None:
            nonlocal jobs
            if self._plans.has_store_until(plans):
                return None
            if jobs < 0:
                jobs = self._jobs.newest
            if self._jobs.has_store_until(jobs):
                return None
            stored, failed = (now - then for now, then in zip(_Changes.of(self._slots), before, strict=True))
            memory_only = self._primary.evictable - self._primary.clean_rows if self._cascades.works_ahead else 0
            return {"stored_chunks": stored, "failed_chunks": failed, "memory_only_chunks": max(0, memory_only)}

        return drain

    def clear(self) -> dict[str, Any]:
        """Forget all chunks of the primary, and which chunks the tiers have: what those hold stays there."""
        chunks = self._primary.chunks
        self._reset()
        return {"cleared_chunks": chunks}

    def clear_tenant(self, tenant: str) -> Callable[[], dict[str, Any] | None]:
        """Return the work of forgetting a tenant's chunks in the primary: done when those of its begin are gone.

        A chunk that is being read or written is forgotten when that has ended. What the tiers hold stays there.
        """
        todo: deque[OffloadKey] | None = None
        in_use: list[OffloadKey] = []
        cleared = 0

        def clear() -> dict[str, Any] | None:
            nonlocal todo, in_use, cleared
            if todo is None:
                todo = deque(self._primary.residents())
            some = [
                key
                for key in [todo.popleft() for _ in range(min(len(todo), _KEYS_IN_ONE_STEP))]
                if tenant_of(key) == tenant
            ]
            wanted = [*in_use, *some]
            in_use = self._primary.forget(wanted)
            left = set(in_use)
            gone = [key for key in wanted if key not in left]
            cleared += len(gone)
            self._provenance.forget(gone)
            self._cascades.forget(gone)
            return None if todo or in_use else {"tenant": tenant, "cleared_chunks": cleared}

        return clear


class WarmUpCommands:
    """Commands that fill the primary from a tier, ahead of requests."""

    def __init__(self, tiers: TierCommands, prefetches: Prefetches, row_stride: int) -> None:
        self._tiers = tiers
        self._prefetches = prefetches
        self._row_stride = row_stride

    def begin(self, tier: str, bytes_per_second: float | None, most_bytes: float | None) -> dict[str, Any]:
        """Begin to fill the primary from a tier, with keys that are given later; return its figures, with its id."""
        slot = self._tiers.slot(tier)
        if slot.retired or slot.metrics.switched_off:
            raise CommandRefused(f"{tier}: it is switched off or out of use; nothing is loaded from it")
        if self._prefetches.warm_ups >= _MOST_WARM_UPS:
            raise CommandRefused(f"{_MOST_WARM_UPS} warm-ups are on their way already; wait for one of them")
        return self._figures(self._prefetches.warm_up(tier, bytes_per_second, most_bytes))

    def give(
        self, number: int, runs: Sequence[Sequence[OffloadKey]], *, continues: bool, is_last: bool
    ) -> dict[str, Any]:
        """Give a warm-up more keys, by prefix; return its figures, and how many keys it has taken: all or none.

        ``continues``: the last prefix goes on with the next keys.
        """
        one, keys = self._find(number), sum(map(len, runs))
        takes = len(one.waiting) <= MOST_WAITING_KEYS - keys
        if takes:
            for place, run in enumerate(runs, 1):
                one.give(run, ends_prefix=place < len(runs) or not continues)
            one.is_complete = one.is_complete or is_last
        if one.ended:
            one.waiting.clear()
        return self._figures(one) | {"taken": keys if takes else 0}

    def end(self, number: int) -> dict[str, Any]:
        """Stop a warm-up, and return its last figures."""
        one = self._find(number)
        self._prefetches.close(one)
        return self._figures(one)

    def _find(self, number: int) -> Prefetch:
        one = self._prefetches.find(number)
        if one is None:
            raise CommandRefused(f"there is no warm-up {number}: it is over, or nothing was heard of its keys for long")
        return one

    def _figures(self, one: Prefetch) -> dict[str, Any]:
        return one.figures(self._row_stride)
