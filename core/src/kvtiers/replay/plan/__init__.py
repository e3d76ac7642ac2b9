"""Plans: what other sizes and policies would hit on a trace, found without moving a byte."""

from kvtiers.replay.plan.bars import as_bars
from kvtiers.replay.plan.chart import as_html, as_svg
from kvtiers.replay.plan.report import Plan
from kvtiers.replay.plan.simulate import PlanCase, PlanPoint, PlanTier, PlanTrace, simulate
from kvtiers.replay.plan.sizes import PlanSizes, Wanted, plan_cases
from kvtiers.replay.plan.sweep import Search, Task, searches, sweep

__all__ = [
    "Plan",
    "PlanCase",
    "PlanPoint",
    "PlanSizes",
    "PlanTier",
    "PlanTrace",
    "Search",
    "Task",
    "Wanted",
    "as_bars",
    "as_html",
    "as_svg",
    "plan_cases",
    "searches",
    "simulate",
    "sweep",
]
