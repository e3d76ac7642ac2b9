"""Plans: the hit rates of other sizes and policies on a trace, found without moving a byte."""

from kvtiers_replay.plan.other_policy import Change, cases_of_interest, change_line, changes
from kvtiers_replay.plan.results import Plan
from kvtiers_replay.plan.simulate import PlanCase, PlanPoint, PlanTier, PlanTrace, simulate
from kvtiers_replay.plan.sizes import PlanSizes, Wanted, plan_cases
from kvtiers_replay.plan.sweep import Search, Task, searches, sweep

__all__ = [
    "Change",
    "Plan",
    "PlanCase",
    "PlanPoint",
    "PlanSizes",
    "PlanTier",
    "PlanTrace",
    "Search",
    "Task",
    "Wanted",
    "cases_of_interest",
    "change_line",
    "changes",
    "plan_cases",
    "searches",
    "simulate",
    "sweep",
]
