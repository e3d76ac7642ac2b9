"""What the benchmarks of tiers make of their figures: shares of turns beside each other, goals, what they print."""

import json
import statistics
from collections.abc import Callable, Iterable
from typing import Any

WAYS = ("write", "read")


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
        found_it = f"{goal['value']:.2f}{f' ({each})' if each else ''}"
        print(f"{goal['name']}: {found_it}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")
