"""The results of benchmarks: common options, shares of turns beside each other, goals, and how they are printed."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from typing import Any

WAYS = ("write", "read")


def options_of(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark. ``doc``: its docstring. ``quick``: what is less then."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def middle_share(ones: Iterable[float], others: Iterable[float]) -> float:
    """Return one as a share of the other, turn by turn, in the middle: those side by side differ less."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def at_least(name: str, value: float, goal: float) -> dict[str, Any]:
    return {"name": name, "value": value, "goal": goal, "met": value >= goal}


def at_most(name: str, value: float, goal: float) -> dict[str, Any]:
    return {"name": name, "value": value, "goal": goal, "met": value <= goal}


def say(found: dict[str, Any], report: Callable[[dict[str, Any]], None], *, as_json: bool) -> None:
    """Print what was found as one JSON object, or as the report and a line for each goal."""
    if as_json:
        print(json.dumps(found))
        return
    report(found)
    for goal in found["goals"]:
        each = ", ".join(f"{size} {value:.2f}" for size, value in goal.get("by_size", {}).items())
        value = f"{goal['value']:.2f}" if goal["value"] >= 1 else f"{goal['value']:.3g}"
        print(
            f"{goal['name']}: {value}{f' ({each})' if each else ''}; goal {goal['goal']:g}: "
            f"{'met' if goal['met'] else 'MISSED'}"
        )
