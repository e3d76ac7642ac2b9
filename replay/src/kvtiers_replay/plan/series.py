"""The series of a plan's chart: the size on the x axis, and the points of each line."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtiers_replay.plan.results import Plan
from kvtiers_replay.plan.simulate import PlanCase, PlanPoint

__all__ = ["Swept", "series_of", "swept_size"]


@dataclass(frozen=True, slots=True)
class Swept:
    """The size that was swept: whose it is, in which unit, how many chunks a case has of it, and as text."""

    name: str
    unit: str
    size_of: Callable[[PlanCase], int]
    values: list[int]
    text: Callable[[int], str]


def swept_size(plan: Plan) -> Swept:
    """Choose the size with the most values, the primary's before any other."""
    unique, sizes = plan.trace.unique, plan.sizes

    def held(name: str) -> Callable[[PlanCase], int]:
        def size(case: PlanCase) -> int:
            tier = next((tier for tier in case.tiers if tier.name == name), None)
            return 0 if tier is None else unique if tier.chunks is None else tier.chunks

        return size

    sources: dict[str, Callable[[PlanCase], int]] = {"primary": lambda case: case.primary}
    sources |= {name: held(name) for name in plan.tier_names}
    values = {name: sorted({size(point.case) for point in plan.points}) for name, size in sources.items()}
    name = max(values, key=lambda each: len(values[each]))

    def text(chunks: int) -> str:
        return f"{100 * chunks / unique:.3g} %" if sizes.value_bytes is None else sizes.amount(chunks)

    unit = "share of the trace's chunks" if sizes.value_bytes is None else "size"
    return Swept(name, unit, sources[name], values[name], text)


def series_of(plan: Plan, swept: Swept) -> dict[str, list[PlanPoint]]:
    """Return the points that differ in nothing but the swept size, by what distinguishes them from the others."""
    found: dict[str, list[PlanPoint]] = {}
    for point in sorted(plan.points, key=lambda each: swept.size_of(each.case)):
        case = point.case
        parts = [case.policy] + [f"primary {plan.sizes.shown(case.primary)}"] * (swept.name != "primary")
        held = {tier.name: tier.chunks for tier in case.tiers}
        parts += [f"{name} {plan.sizes.shown(held.get(name, 0))}" for name in plan.tier_names if name != swept.name]
        found.setdefault(", ".join(parts), []).append(point)
    return found
