"""Many cases at once: processes that find the same, and leave nothing; and the search for the smallest sizes."""

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.api import KvtiersError
from kvtiers_replay.plan import PlanCase, PlanTier, Search, searches, simulate, sweep

CASES = [PlanCase(rows, policy) for policy in ("lru", "arc") for rows in (70, 150, 400)]


def test_processes_find_what_one_process_finds(trace):
    served = []
    found = dict(sweep(trace, CASES, processes=2, progress=served.append, small=0))
    assert found == {index: simulate(trace, case) for index, case in enumerate(CASES)}
    assert sum(served) == len(CASES) * len(trace.requests)


def test_a_sweep_that_is_given_up_leaves_no_process(trace):
    before = children()

    def stop(_requests):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        list(sweep(trace, CASES * 50, processes=2, progress=stop, small=0))
    assert children() <= before


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def test_a_process_that_is_killed_is_one_clear_line(trace):
    before = children()

    def kill(_requests):
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(KvtiersError, match="a process of the plan ended by signal 9, perhaps for want of memory; try"):
        list(sweep(trace, CASES * 50, processes=2, progress=kill, small=0))


ENDLESS = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
import kvtiers_replay.plan as plan
from synthetic import synthetic

if __name__ == "__main__":
    warned = False

    def report(requests):
        global warned
        if not warned:
            warned = True
            print(*Path("/proc/thread-self/children").read_text().split(), flush=True)

    trace = plan.PlanTrace(synthetic())
    list(plan.sweep(trace, [plan.PlanCase(100)] * 100_000, processes=2, progress=report, small=0))
"""


def test_a_sweep_that_is_killed_leaves_no_process(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS.format(folder=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        ends = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    for end in ends:
        assert select.select([end], [], [], 60)[0], "a worker outlives its parent"
        os.close(end)


# -- the smallest sizes


def test_a_search_finds_the_smallest_primary_that_reaches_the_wish(trace):
    wish = 0.35
    points = [simulate(trace, PlanCase(rows)) for rows in (70, 150, 400, 3000)]
    (search,) = searches(points, wish)
    served = []
    found = search.run(trace, served.append)
    rows = found.case.primary
    assert found == simulate(trace, PlanCase(rows))
    assert found.rate >= wish
    assert search.low < rows <= search.high.case.primary
    below = rows - 1 - math.ceil(search.high.case.primary * 0.02)
    assert simulate(trace, PlanCase(below)).rate < wish
    assert sum(served) <= search.steps * len(trace.requests)


def test_each_policy_and_choice_of_tiers_is_searched_alone_if_it_reaches_the_wish(trace):
    case = PlanCase(100)
    tiers = (PlanTier("tier", 50),)
    point = simulate(trace, case)

    def with_rate(case: PlanCase, rate: float):
        return replace(point, case=case, hits={"primary": round(rate * point.references)})

    points = [
        *(with_rate(replace(case, primary=rows), rate) for rows, rate in ((100, 0.1), (200, 0.4), (300, 0.5))),
        *(with_rate(replace(case, primary=rows, tiers=tiers), rate) for rows, rate in ((100, 0.4), (200, 0.4))),
        *(with_rate(replace(case, primary=rows, policy="arc"), 0.1) for rows in (100, 200)),
    ]
    assert searches(points, 0.3) == [Search(100, points[1], 0.3), Search(0, points[3], 0.3)]
    assert searches(points, 0.6) == []
