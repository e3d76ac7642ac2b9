"""Benchmarks: what they import is there, shares and goals are what they say, an absent baseline is left out."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtiers_replay.plan import PlanTrace
from kvtiers_replay.workload import ReplayRequest, Workload

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted([*BENCHMARKS.rglob("*.py"), *ROOT.glob("integrations/*/benchmarks/*.py")])
OURS = {"baselines", "rigs", "lib"}


@pytest.fixture
def module_of(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.relative_to(ROOT).as_posix())
def test_every_module_of_ours_that_a_benchmark_imports_is_there(script, monkeypatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" if node.module in OURS else str(node.module) for name in names]
        for name in names:
            if name.partition(".")[0] in OURS or name.startswith("kvtiers"):
                assert find_spec(name) is not None, name


def test_a_share_is_of_turns_beside_each_other_and_none_is_without_its_other(module_of) -> None:
    results = module_of("lib.results")
    assert results.middle_share([1.0, 9.0, 30.0], [2.0, 10.0, 10.0]) == 0.9
    with pytest.raises(ValueError, match="shorter"):
        results.middle_share([1.0, 2.0], [1.0])


def test_goals_are_satisfied_at_their_limit_and_not_past_it(module_of) -> None:
    results = module_of("lib.results")
    assert [results.at_least("share", value, 0.9)["met"] for value in (0.89, 0.9, 1.0)] == [False, True, True]
    assert [results.at_most("requests", value, 9)["met"] for value in (8, 9, 10)] == [True, True, False]


@pytest.mark.parametrize(
    ("python", "why"), [("/nowhere/python", "No such file"), ("/bin/false", "its process ended with status 1")]
)
def test_a_python_that_cannot_run_the_connector_leaves_it_out_and_says_why(module_of, python, why) -> None:
    lmcache = module_of("baselines.lmcache_s3")
    with (
        pytest.raises(lmcache.LeftOutError, match=why),
        lmcache.LMCacheS3(python, "http://127.0.0.1:1", ("key", "secret"), 64 << 10, 2),
    ):
        pass


@pytest.mark.parametrize("moved", [(0.0, 0.0), (5.0, 0.0)], ids=["neither", "not the control"])
def test_turns_in_which_no_byte_moves_reach_no_goal_and_break_nothing(module_of, moved) -> None:
    stall = module_of("engine_stall")
    sides = {
        f"{where}, {turn}": {"bytes_per_second": rate, "speeds": [0.0], "processor_speeds": [0.0], "late_us": [[1, 2]]}
        for where, rate in zip(("inside", "outside"), moved, strict=True)
        for turn in ("alone", "busy")
    }
    sides["inside, busy"]["step_us"] = [10]
    compared = stall.comparison(sides)
    flat = {"process, flat out": compared, "process, paced": compared}
    found = stall.goals(flat | {"idle_host": {"private_mb": 1.0, "cpu_percent": 0.1}})
    assert [goal["met"] for goal in found] == [False, False, False, True, True, True, True]


def test_engines_in_a_pool_find_what_one_engine_with_all_memory_does(module_of) -> None:
    sharing = module_of("pool_sharing")
    prompts = [[bytes([prompt, at]) * 16 for at in range(9)] for prompt in range(4)]
    turns = [prompt[:chunks] for chunks in (3, 6, 9) for prompt in prompts]
    trace = PlanTrace(Workload("turns", 16, [ReplayRequest(16 * len(turn) + 1, turn) for turn in turns]))
    one, own = (sharing.of_their_own(trace, trace.unique, engines) for engines in (1, 3))
    pool = sharing.in_a_pool(trace, trace.unique, 3)
    assert [found["hit_rate"] for found in (one, pool, own)] == [0.5, 0.5, 0.0]
    assert pool["wrong_bytes"] == 0
