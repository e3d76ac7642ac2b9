"""Plans whose copies run on vLLM's workers. A plan ends when every rank has reported its copy, whatever vLLM knows."""

from collections import Counter
from dataclasses import dataclass, field

from kvtiers.base import LoadPlan, StorePlan
from kvtiers.integrations.vllm.stack.requests import OpenRequest
from kvtiers.tiering.manager import TieringManager

__all__ = ["CopyReport", "RunningPlans"]


@dataclass
class CopyReport:
    """What became of copies: how many ranks have ended each plan's, and the plans of which one failed."""

    ended: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)

    def add(self, other: "CopyReport") -> None:
        """Take another rank's report in."""
        self.ended.update(other.ended)
        self.failed |= other.failed


@dataclass(slots=True, eq=False)
class _Running:
    """A plan whose copies run on so many ranks."""

    plan: StorePlan | LoadPlan
    request: OpenRequest
    ranks: int
    failed: bool = False


class RunningPlans:
    """The plans in flight. ``ranks``: workers that copy."""

    def __init__(self, manager: TieringManager, ranks: int) -> None:
        self._manager = manager
        self._ranks = ranks
        self._running: dict[int, _Running] = {}

    def start(self, plan: StorePlan | LoadPlan, request: OpenRequest) -> None:
        """Take note of a plan that goes to the workers."""
        self._running[plan.plan_id] = _Running(plan, request, self._ranks)

    def copies_ended(self, report: CopyReport) -> None:
        """Take what became of copies, and end the plans of which no rank is left."""
        for plan_id, ranks in report.ended.items():
            running = self._running.get(plan_id)
            if running is None:
                continue
            running.failed |= plan_id in report.failed
            running.ranks -= ranks
            if running.ranks <= 0:
                del self._running[plan_id]
                self._end(running)

    def _end(self, running: _Running) -> None:
        plan = running.plan
        with self._manager.lock:
            if isinstance(plan, StorePlan):
                self._manager.complete_store(plan, success=not running.failed)
            else:
                running.request.load_failed |= running.failed
                self._manager.complete_load(plan, success=not running.failed)
