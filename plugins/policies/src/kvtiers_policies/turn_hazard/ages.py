"""The ages of runs: what is learnt when one is used or is not, and which runs are to be ranked again.

Each run waits for the end of the bin that its age is in. Uses and bins that passed are gathered, then learnt from and
ranked together; so is the work of a step bounded after a long pause, when many bins have passed.
"""

import heapq
from collections.abc import Callable

from kvtiers_policies.turn_hazard.hazard_model import (
    BIN_ENDS,
    BINS,
    HazardModel,
    Row,
    bin_of,
    half_octave,
    octave,
)
from kvtiers_policies.turn_hazard.prefix_tree import Run

__all__ = ["Ages"]

_BATCH = 48  # examples and ranks that are computed together
_MOST_PASSED = 256  # bins that may end in one call
_SMALL = 64
# Chunks up to the end, of the run, added by the last use, before it; the last gap, their mean; whether others follow;
# left over; uses and what the last one added; tokens of the last answer; when the next turn is expected.
_SIZES = (12, 12, 12, 12, 32, 32, 2, 4, 48, 12, 12)
assert sum(_SIZES) <= 256, "a row is of bytes"
_STARTS = [sum(_SIZES[:index]) for index in range(len(_SIZES))]


def features(run: Run) -> Row:
    """Return the model's row for a run as it is since its last use."""
    end, size, grown, before, gap, mean, followed, left_over, turn, output, expected = _STARTS
    depth, length, added = run.depth, len(run.keys), octave(run.grown, 11)
    again, hints = run.uses - 1, run.hints
    numbers = (
        end + octave(depth + length, 11),
        size + octave(length, 11),
        grown + added,
        before + octave(depth, 11),
        gap + (half_octave(run.gap, 31) if again else 0),
        mean + (half_octave((run.last - run.first) / again, 31) if again else 0),
        followed + (run.kids > 0),
        left_over + run.left_over,
        turn + 12 * min(3, again) + added,
        output + octave(hints.output_tokens / 8, 11),
        expected + (0 if hints.expects_turn_in is None else 1 + octave(hints.expects_turn_in, 10)),
    )
    return bytes(numbers)


class Ages:
    """The ages of all runs that may be used again. ``ranked(run)`` is called with each new rank of a run."""

    def __init__(self, ranked: Callable[[Run], None]) -> None:
        self._ranked = ranked
        self.clear()

    def clear(self) -> None:
        """Forget everything, also what was learnt."""
        self.model = HazardModel(_SIZES)
        self._waiting: list[tuple[float, int, int, Run]] = []
        self._limit = _SMALL
        self._examples: list[tuple[Row, int, bool]] = []
        self._to_rank: dict[Run, None] = {}

    def use(self, run: Run, begin: float) -> None:
        """Learn from a use; until ``restart`` the run has no age."""
        gap = max(0.0, begin - run.last)
        if run.features and not run.ended:  # else it is new, and used for the first time, or its client was wrong
            self._examples.append((run.features, bin_of(gap, run.bin), True))
        run.gap, run.last, run.bin = gap, max(begin, run.last), 0
        run.uses += 1
        run.grown = run.left_over = 0
        run.version += 1

    def restart(self, run: Run) -> None:
        """Let the run's age begin again at its last use, in the bin in which it is."""
        run.features = features(run)
        run.version += 1
        if not run.ended:
            self._wait(run)
        self.rank_soon(run)

    def rank_soon(self, run: Run) -> None:
        """Rank a run again with the next batch."""
        self._to_rank[run] = None

    def passes(self, now: float) -> None:
        """Let time pass: learn from the bins that have ended."""
        waiting, examples, to_rank = self._waiting, self._examples, self._to_rank
        for _ in range(_MOST_PASSED):
            if not waiting or waiting[0][0] > now:
                break
            _, serial, version, run = waiting[0]
            if version != run.version:
                heapq.heappop(waiting)
                continue
            examples.append((run.features, run.bin, False))
            if run.bin < BINS - 1:
                run.bin += 1
                heapq.heapreplace(waiting, (run.last + BIN_ENDS[run.bin], serial, version, run))
            else:
                heapq.heappop(waiting)
            if run.resident:
                to_rank[run] = None
        if len(to_rank) >= _BATCH or len(examples) >= _BATCH:
            self.settle()

    def settle(self) -> bool:
        """Learn from what was gathered and rank the runs that wait for it; return whether there were any."""
        if self._examples:
            self.model.learn(*zip(*self._examples, strict=True))
            self._examples = []
        runs = [run for run in self._to_rank if run.may_leave]
        self._to_rank = {}
        if runs:
            ranks = self.model.rank([run.features for run in runs], [run.bin for run in runs])
            for run, rank in zip(runs, ranks, strict=True):
                run.rank = 0.0 if run.ended else rank
                self._ranked(run)
        return bool(runs)

    def rank_now(self, run: Run) -> float:
        """Return the rank of a run as if it was used just now."""
        return self.model.rank_one(features(run))

    def _wait(self, run: Run) -> None:
        waiting = self._waiting
        heapq.heappush(waiting, (run.last + BIN_ENDS[run.bin], run.serial, run.version, run))
        if len(waiting) > self._limit:
            self._waiting = [entry for entry in waiting if entry[2] == entry[3].version]
            heapq.heapify(self._waiting)
            self._limit = max(_SMALL, 2 * len(self._waiting))
