"""Many cases at once: worker processes, each with the trace, fed one task after the other.

A worker gets its tasks and reports its progress over one connection. It ends with its parent, however that happened.
"""

import contextlib
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Self, TypeAlias

from kvtiers._process import end
from kvtiers.api import KvtiersError
from kvtiers_replay.engine.processes import Child
from kvtiers_replay.plan.simulate import PlanCase, PlanPoint, PlanTrace, simulate

__all__ = ["Search", "Task", "searches", "sweep"]

Progress: TypeAlias = Callable[[int], None]

_SMALL = 400_000
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Search:
    """Find the smallest primary whose hit rate is at least ``wish``, above ``low`` chunks, which are too few.

    ``high`` is enough, so that the answer is it or a smaller one, to within 2 % of it.
    """

    low: int
    high: PlanPoint
    wish: float

    @property
    def steps(self) -> int:
        """About how many simulations that takes."""
        return max(0, math.ceil(math.log2(max(1, (self.high.case.primary - self.low) / self._tolerance))))

    @property
    def _tolerance(self) -> float:
        return max(1.0, self.high.case.primary * 0.02)

    def run(self, trace: PlanTrace, progress: Progress) -> PlanPoint:
        """Halve the gap until it is small. More memory hits more but for rare exceptions, so any answer is tested."""
        low, best = self.low, self.high
        for _ in range(self.steps):
            middle = (low + best.case.primary) // 2
            if middle <= low:
                break
            point = simulate(trace, replace(best.case, primary=middle), progress=progress)
            low, best = (low, point) if point.rate >= self.wish else (middle, best)
        return best


Task: TypeAlias = PlanCase | Search


def searches(points: Sequence[PlanPoint], wish: float) -> list[Search]:
    """Return a search for each policy and choice of tiers with which one of the points reaches the wished hit rate."""
    found = []
    for case in dict.fromkeys(replace(point.case, primary=0) for point in points):
        alike = [point for point in points if replace(point.case, primary=0) == case]
        enough = [point for point in alike if point.rate >= wish]
        if enough:
            high = min(enough, key=lambda point: point.case.primary)
            below = [point.case.primary for point in alike if point.case.primary < high.case.primary]
            found.append(Search(max(below, default=0), high, wish))
    return found


def sweep(
    trace: PlanTrace,
    tasks: Sequence[Task],
    *,
    processes: int = 1,
    progress: Progress = lambda _requests: None,
    small: int = _SMALL,
) -> Iterator[tuple[int, PlanPoint]]:
    """Yield (index of the task, its point) as they end. ``progress`` gets the requests served, in this process.

    ``small``: references of all tasks; fewer are done here, before a worker would have started.
    KvtiersError if a worker ends before its time.
    """
    processes = min(processes, len(tasks))
    if processes <= 1 or trace.references * len(tasks) < small:
        for index, task in enumerate(tasks):
            yield index, _run(trace, task, progress)
        return
    with contextlib.ExitStack() as closing:
        workers = [closing.enter_context(_Worker(trace)) for _ in range(processes)]
        waiting = list(enumerate(tasks))[::-1]
        for worker in workers:
            worker.give(waiting.pop())
        busy = {worker.pipe: worker for worker in workers}
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # only pipes were waited for
                message = worker.hear()
                if isinstance(message, int):
                    progress(message)
                    continue
                yield worker.index, message
                if waiting:
                    worker.give(waiting.pop())
                else:
                    del busy[worker.pipe]


def _run(trace: PlanTrace, task: Task, progress: Progress) -> PlanPoint:
    return task.run(trace, progress) if isinstance(task, Search) else simulate(trace, task, progress=progress)


class _Worker:
    """One process, from its start to its end."""

    def __init__(self, trace: PlanTrace) -> None:
        self.index = -1
        self._child = Child("a process of the plan", _work)
        self.pipe = self._child.connection
        self._trace: PlanTrace | None = trace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def give(self, task: tuple[int, Task]) -> None:
        """Hand over a task; before the first one, the trace."""
        self.index = task[0]
        with self._saying_how_it_ended():
            if self._trace is not None:
                self.pipe.send(self._trace)
                self._trace = None
            self.pipe.send(task[1])

    def hear(self) -> int | PlanPoint:
        """Return what it says next: requests served, or the point of its task."""
        with self._saying_how_it_ended():
            message: int | PlanPoint | str = self.pipe.recv()
        if isinstance(message, str):
            raise KvtiersError(message)
        return message

    @contextlib.contextmanager
    def _saying_how_it_ended(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            status = end(self._child.process, _CLOSE_SECONDS)
            why = "by signal 9, perhaps for want of memory" if status == -signal.SIGKILL else f"with status {status}"
            text = f"a process of the plan ended {why}; try --processes 1, or fewer --requests"
            raise KvtiersError(text) from None


def _work(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        trace = pipe.recv()
        while True:
            task = pipe.recv()
            try:
                pipe.send(_run(trace, task, pipe.send))
            except KvtiersError as error:  # a policy that cannot be made for this size, for example
                pipe.send(str(error))
