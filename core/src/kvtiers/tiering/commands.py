"""Commands of an operator to a running engine: a bounded queue that each step looks at, and what each command does.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
any                ``post``s a command, waits for its answer, withdraws it
the engine's       ``run``s what is waiting at the begin of a step; without commands a step asks for the queue's
                   truth value, and no more
=================  ==========================================================================================

A command has begun or is withdrawn, never both: so an answer that says that nothing was changed is true.
"""

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtiers._failures import error_text
from kvtiers.api import KvtiersError, OffloadKey, tenant_of
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.estimates import PRIOR_BYTES_PER_SECOND
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.load_or_recompute import Waits
from kvtiers.tiering.plans import Plans
from kvtiers.tiering.prefetch import MOST_WAITING_KEYS, Prefetches
from kvtiers.tiering.prefetch_state import Prefetch
from kvtiers.tiering.promotion import Promotions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.tier_slot import PinBudget, TierSlot

__all__ = ["Command", "CommandQueue", "CommandRefused", "Operations", "Parts"]

_MOST_WAITING = 64
_IN_ONE_STEP = 8
_KEYS_IN_ONE_STEP = 16_384  # that are looked at: some milliseconds
_MOST_WARM_UPS = 4
SWITCHES = ("on", "off", "read-only")


class CommandRefused(KvtiersError):  # noqa: N818 -- an answer, as WritesRefused is
    """A command that cannot be carried out; nothing was changed. The text is one line for the operator."""


class Command:
    """A command. ``work``: on the engine's thread; what it returns is the answer, None: to be called in the next step.

    ``on_withdrawn``: what the work has done so far, for a command of several steps that is withdrawn.
    """

    def __init__(self, work: Callable[[], Mapping[str, Any] | None]) -> None:
        self._work = work
        self._right_to_begin = [True]  # taken by the one that begins the command, or withdraws it: one call, no lock
        self._answers: queue.SimpleQueue[Mapping[str, Any] | CommandRefused] = queue.SimpleQueue()
        self._has_begun = False
        self._is_withdrawn = False

    def answer(self, seconds: float) -> Mapping[str, Any]:
        """Wait for the answer; CommandRefused if it is refused, ``queue.Empty`` if there is none in time."""
        answer = self._answers.get(timeout=max(0.0, seconds))
        if isinstance(answer, CommandRefused):
            raise answer
        return answer

    def withdraw(self) -> bool:
        """Withdraw the command; True: it had not begun, so nothing was changed. Else no further step works on it."""
        self._is_withdrawn = True
        return self._take_right()

    def step(self) -> bool:
        """Work on the command for this step, on the engine's thread; return whether it goes on in the next one."""
        if not self._has_begun:
            if not self._take_right():
                return False
            self._has_begun = True
        elif self._is_withdrawn:
            return False
        try:
            answer = self._work()
        except CommandRefused as refusal:
            self._answers.put(refusal)
            return False
        except Exception as error:  # noqa: BLE001 -- nothing may raise into the engine's step
            self._answers.put(CommandRefused(f"{error_text(error)}; a bug of kvtiers"))
            return False
        if answer is None:
            return True
        self._answers.put(answer)
        return False

    def _take_right(self) -> bool:
        try:
            return self._right_to_begin.pop()
        except IndexError:
            return False


class CommandQueue:
    """The commands that wait for a step. ``waiting`` is what a step looks at.

    ``wake``: called after each that is posted, by its thread, for an engine that may sleep while it has no request.
    """

    def __init__(self) -> None:
        self.waiting: deque[Command] = deque()
        self.wake: Callable[[], None] = lambda: None

    def post(self, command: Command) -> bool:
        """Queue a command; False if too many wait. From any thread."""
        if len(self.waiting) >= _MOST_WAITING:
            return False
        self.waiting.append(command)
        self.wake()
        return True

    def run(self) -> None:
        """Work on the commands that wait, a bounded number: for the engine's thread, at the begin of a step."""
        for _ in range(min(len(self.waiting), _IN_ONE_STEP)):
            command = self.waiting.popleft()
            if command.step():
                self.waiting.append(command)


@dataclass(frozen=True, slots=True)
class Parts:
    """The manager's parts that commands reach. ``slots``: the manager's own list; ``reset``: its reset of the cache."""

    primary: CPUPrimaryTier
    slots: list[TierSlot]
    jobs: JobTable
    plans: Plans
    promotions: Promotions
    prefetches: Prefetches
    cascades: Cascades
    provenance: Provenance
    waits: Waits
    budget: PinBudget
    reset: Callable[[], None]


class _Changes(NamedTuple):
    """How many chunks have been stored, and lost on their way, so far."""

    stored: int
    failed: int

    @classmethod
    def of(cls, slots: Sequence[TierSlot]) -> "_Changes":
        return cls(sum(s.metrics.stored_chunks for s in slots), sum(s.metrics.failed_stores for s in slots))


class Operations:
    """What an operator's commands do to the manager's parts; engine's thread.

    A tier that is switched off is asked nothing and given nothing. Its loads are misses at once, and their rows come
    back when nothing of the tier can touch them any more, as with a load that fails. Its stores are written to the end.
    """

    def __init__(self, parts: Parts) -> None:
        self._slots = parts.slots
        self._parts = parts

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

    def drain(self) -> Callable[[], dict[str, Any] | None]:
        """Return the work of a drain: done when the stores that are in flight at its begin have ended.

        First those to the primary, whose chunks then go down, then those to the tiers.
        """
        parts, before = self._parts, _Changes.of(self._slots)
        plans, jobs = parts.plans.newest_store, -1

        def drain() -> dict[str, Any] | None:
            nonlocal jobs
            if parts.plans.has_store_until(plans):
                return None
            if jobs < 0:
                jobs = parts.jobs.newest
            if parts.jobs.has_store_until(jobs):
                return None
            stored, failed = (now - then for now, then in zip(_Changes.of(self._slots), before, strict=True))
            memory_only = parts.primary.evictable - parts.primary.clean_rows if parts.cascades.works_ahead else 0
            return {"stored_chunks": stored, "failed_chunks": failed, "memory_only_chunks": max(0, memory_only)}

        return drain

    def clear(self) -> dict[str, Any]:
        """Forget all chunks of the primary, and which chunks the tiers have: what those hold stays there."""
        chunks = self._parts.primary.chunks
        self._parts.reset()
        return {"cleared_chunks": chunks}

    def clear_tenant(self, tenant: str) -> Callable[[], dict[str, Any] | None]:
        """Return the work of forgetting a tenant's chunks in the primary: done when those of its begin are gone.

        A chunk that is being read or written is forgotten when that has ended. What the tiers hold stays there.
        """
        parts = self._parts
        todo: deque[OffloadKey] | None = None
        in_use: list[OffloadKey] = []
        cleared = 0

        def clear() -> dict[str, Any] | None:
            nonlocal todo, in_use, cleared
            if todo is None:
                todo = deque(parts.primary.residents())
            some = [
                key
                for key in [todo.popleft() for _ in range(min(len(todo), _KEYS_IN_ONE_STEP))]
                if tenant_of(key) == tenant
            ]
            wanted = [*in_use, *some]
            in_use = parts.primary.forget(wanted)
            left = set(in_use)
            gone = [key for key in wanted if key not in left]
            cleared += len(gone)
            parts.provenance.forget(gone)
            parts.cascades.forget(gone)
            return None if todo or in_use else {"tenant": tenant, "cleared_chunks": cleared}

        return clear

    def warm_up(self, tier: str, bytes_per_second: float | None, most_bytes: float | None) -> dict[str, Any]:
        """Begin to fill the primary from a tier, with keys that are given later; return its figures, with its id."""
        slot = self.slot(tier)
        if slot.retired or slot.metrics.switched_off:
            raise CommandRefused(f"{tier}: it is switched off or out of use; nothing is loaded from it")
        if self._parts.prefetches.warm_ups >= _MOST_WARM_UPS:
            raise CommandRefused(f"{_MOST_WARM_UPS} warm-ups are on their way already; wait for one of them")
        return self._figures(self._parts.prefetches.warm_up(tier, bytes_per_second, most_bytes))

    def warm_up_keys(
        self, number: int, runs: Sequence[Sequence[OffloadKey]], *, continues: bool, is_last: bool
    ) -> dict[str, Any]:
        """Give a warm-up more keys, by prefix; return its figures, and how many keys it has taken: all or none.

        ``continues``: the last prefix goes on with the next keys.
        """
        one, keys = self._warm_up(number), sum(map(len, runs))
        takes = len(one.waiting) <= MOST_WAITING_KEYS - keys
        if takes:
            for place, run in enumerate(runs, 1):
                one.give(run, ends_prefix=place < len(runs) or not continues)
            one.is_complete = one.is_complete or is_last
        if one.ended:
            one.waiting.clear()
        return self._figures(one) | {"taken": keys if takes else 0}

    def warm_up_end(self, number: int) -> dict[str, Any]:
        """Stop a warm-up, and return its last figures."""
        one = self._warm_up(number)
        self._parts.prefetches.close(one)
        return self._figures(one)

    def _warm_up(self, number: int) -> Prefetch:
        one = self._parts.prefetches.find(number)
        if one is None:
            raise CommandRefused(f"there is no warm-up {number}: it is over, or nothing was heard of its keys for long")
        return one

    def _figures(self, one: Prefetch) -> dict[str, Any]:
        return one.figures(self._parts.primary.row_stride)

    def add(self, slot: TierSlot, place: int) -> None:
        """Use another tier, asked after the first ``place`` of those that there are."""
        parts = self._parts
        slot.rate.prior = parts.primary.row_stride / PRIOR_BYTES_PER_SECOND
        parts.provenance.add(slot)
        parts.cascades.add(slot)
        self._slots.insert(place, slot)

    def remove(self, name: str) -> TierSlot | None:
        """Switch a tier off; return it when it has no job in flight any more, and is not one of the tiers any more."""
        slot = self.slot(name)
        if not slot.metrics.switched_off:
            slot.metrics.switched_off = 1
            self._cancel_loads(slot)
        if self._parts.jobs.has_jobs_of(slot):
            return None
        slot.leave()
        self._slots.remove(slot)
        self._parts.cascades.remove(slot)
        self._parts.provenance.remove(slot)
        return slot

    def set_bounds(self, options: TieringOptions) -> None:
        """Use other bounds of waits and of rows from now on."""
        parts = self._parts
        parts.waits.set_options(options)
        parts.budget.set_shares(parts.primary.num_rows, options.all_tiers, options.one_tier)
        parts.promotions.set_store_reserve(options.store_reserve)
        parts.prefetches.set_store_reserve(options.store_reserve)

    def _cancel_loads(self, slot: TierSlot) -> int:
        return self._parts.promotions.cancel_loads(slot) + self._parts.jobs.cancel_loads(slot)
