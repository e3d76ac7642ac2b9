"""Plans whose copies run on vLLM's workers. A plan ends when every rank has reported its copy, also after a vLLM reset.

A store of a request with an adapter ends when the adapter's files have been checked once more: vLLM has loaded them
by then, and if they are unchanged since the request's arrival, its keys are right. Else the store fails.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtiers.tiering.manager import TieringManager
from kvtiers.types import LoadPlan, StorePlan
from kvtiers_vllm.stack.adapter_digests import Confirmation
from kvtiers_vllm.stack.requests import OpenRequest

__all__ = ["CopyReport", "RunningPlans"]

_CONFIRM_SECONDS = 5.0  # for the check of an adapter's files; its rows are held meanwhile


@dataclass
class CopyReport:
    """The results of copies: by plan, how many ranks have ended theirs, and the plans with a failed copy."""

    ended: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)

    def add(self, other: "CopyReport") -> None:
        """Add another rank's report."""
        self.ended.update(other.ended)
        self.failed |= other.failed


@dataclass(slots=True, eq=False)
class _Running:
    """A plan whose copies run on this many ranks."""

    plan: StorePlan | LoadPlan
    request: OpenRequest
    ranks: int
    failed: bool = False
    confirmation: Confirmation | None = None
    confirm_until: float = 0.0
    ended: bool = False


class RunningPlans:
    """The plans in flight. ``ranks``: workers that copy."""

    def __init__(self, manager: TieringManager, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._ranks = ranks
        self._clock = clock
        self._running: dict[int, _Running] = {}
        self._unconfirmed: list[_Running] = []

    def start(self, plan: StorePlan | LoadPlan, request: OpenRequest) -> None:
        """Record a plan that goes to the workers."""
        self._running[plan.plan_id] = _Running(plan, request, self._ranks)

    def copies_ended(self, report: CopyReport) -> None:
        """Add the results of copies, and end the plans that all ranks have reported."""
        for plan_id, ranks in report.ended.items():
            running = self._running.get(plan_id)
            if running is None:
                continue
            running.failed |= plan_id in report.failed
            running.ranks -= ranks
            if running.ranks <= 0:
                del self._running[plan_id]
                self._copied(running)

    def are_running(self) -> bool:
        """Return whether copies run."""
        return bool(self._running)

    def has_unconfirmed(self) -> bool:
        """Return whether a store waits for a check of an adapter's files."""
        return bool(self._unconfirmed)

    def confirm(self) -> None:
        """End the stores whose adapters have been examined again, and those that have waited for that too long."""
        for running in self._unconfirmed:
            found = running.confirmation
            assert found is not None
            if found.answered or self._clock() >= running.confirm_until:
                running.failed |= not found.unchanged or running.request.keys is None
                self._end(running)
        self._unconfirmed = [running for running in self._unconfirmed if not running.ended]

    def _copied(self, running: _Running) -> None:
        digesting = running.request.digesting
        if digesting is None or running.failed or isinstance(running.plan, LoadPlan):
            self._end(running)
            return
        running.confirmation = digesting.confirm()
        running.confirm_until = self._clock() + _CONFIRM_SECONDS
        self._unconfirmed.append(running)

    def _end(self, running: _Running) -> None:
        running.ended = True
        plan = running.plan
        with self._manager.lock:
            if isinstance(plan, StorePlan):
                self._manager.complete_store(plan, success=not running.failed)
            else:
                running.request.load_failed |= running.failed
                self._manager.complete_load(plan, success=not running.failed)
