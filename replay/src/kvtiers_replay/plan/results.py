"""The results of a plan: as tables, as JSON, and its progress."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtiers.api.config import EACH_OTHER_TENANT
from kvtiers_replay.plan.other_policy import DEFAULT_PREFILL_SPEED, Change, change_line
from kvtiers_replay.plan.simulate import PlanCase, PlanPoint, PlanTrace
from kvtiers_replay.plan.sizes import PlanSizes

__all__ = ["Plan"]

_MOST_TENANTS = 8  # columns of a table; all of them are in the data


@dataclass(slots=True)
class Plan:
    """The points of a sweep so far, in the order of their cases, and the smallest ones that reach ``wish``.

    ``changes``: what the learning eviction policy would change; ``prefill_speed``, tokens a second, prices them.
    ``requests``, ``requests_in_all``: served and to be served by the simulations of what is being done now, ``doing``.
    """

    name: str
    trace: PlanTrace
    sizes: PlanSizes
    wish: float | None = None
    points: list[PlanPoint] = field(default_factory=list)
    smallest: list[PlanPoint] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    prefill_speed: float = DEFAULT_PREFILL_SPEED
    cases: int = 0
    requests: int = 0
    requests_in_all: int = 0
    doing: str = ""
    interrupted: bool = False

    @property
    def infinite_rate(self) -> float:
        """The hit rate of a cache without bounds."""
        return self.trace.infinite_hits / self.trace.references

    @property
    def tier_names(self) -> list[str]:
        """The secondary tiers of any case, in their order."""
        return list(dict.fromkeys(tier.name for point in self.points for tier in point.case.tiers))

    def progress_line(self) -> str:
        """Return the plan's progress, in one line."""
        share = 100 * self.requests / max(1, self.requests_in_all)
        best = f", best so far {_percent(max(p.rate for p in self.points))}" if self.points else ""
        return f"{self.doing}: {min(share, 100):.0f} %{best}"

    def heading(self) -> str:
        """Return what this is a plan for."""
        trace, sizes = self.trace, self.sizes
        amount = "" if sizes.value_bytes is None else f", {sizes.amount(trace.unique)}"
        counted = f", of which the last {len(trace.requests) - trace.counted_from:,} count" * bool(trace.counted_from)
        return (
            f"{self.name}: {len(trace.requests):,} requests{counted}, {trace.references:,} full blocks of "
            f"{trace.tokens_per_chunk} tokens, {trace.unique:,} different ones in all{amount}. "
            f"An infinite cache hits {_percent(self.infinite_rate)}."
        )

    @property
    def tenant_names(self) -> list[str]:
        """The tenants with a share or a quota of their own that the trace has, up to a few."""
        return [name for name in self._limited if self.trace.references_of.get(name)][:_MOST_TENANTS]

    @property
    def _limited(self) -> list[str]:
        """The tenants with a share of the primary, or a quota in a tier, of their own."""
        if not self.points:
            return []
        case = self.points[0].case
        names = dict(itertools.chain(case.shares, *(tier.quotas for tier in case.tiers)))
        return [name for name in names if name != EACH_OTHER_TENANT]

    def columns(self) -> list[str]:
        """Return the names of the columns of ``rows``."""
        names = self.tier_names
        unit = " (chunks)" if self.sizes.value_bytes is None else ""
        parts = ["from primary", *(f"from {name}" for name in names)] if names else []
        parts += [f"hits of {tenant}" for tenant in self.tenant_names]
        return ["policy", "primary", *names, "hits", *parts, *(f"to {name}{unit}" for name in names)]

    def rows(self, points: Sequence[PlanPoint]) -> list[list[str]]:
        """Return one row for each point."""
        return [self._row(point) for point in points]

    def verdict(self) -> str:
        """Return whether the wish was reached, or that the plan was stopped, in one line; empty: no wish."""
        if self.interrupted:
            return f"Stopped after {len(self.points)} of {self.cases} cases."
        if self.wish is None:
            return ""
        if not self.smallest:
            limit = (
                "" if self.wish <= self.infinite_rate else f"; an infinite cache hits {_percent(self.infinite_rate)}"
            )
            return f"No case reaches {_percent(self.wish)}{limit}."
        return f"The smallest primary that reaches {_percent(self.wish)}, for each policy and choice of tiers:"

    def other_policy(self) -> str:
        """Return whether the learning eviction policy would pay, in one line; empty: it was not tried."""
        return change_line(self.changes, self.trace, self.prefill_speed)

    def budget_lines(self) -> list[str]:
        """Return, for each tier, the largest primary at which a budget of its rows costs hits, and what to change."""
        found: dict[str, str] = {}
        for point in sorted(self.points, key=lambda point: point.case.primary):
            for tier, advice in point.budgets.items():
                if advice:
                    found[tier] = f"{tier}, with a primary of {self.sizes.shown(point.case.primary)}: {advice}."
        return list(found.values())

    def tenant_lines(self) -> list[str]:
        """Return what of the config's tenants does not fit the trace, a line each; none if all does."""
        lines, trace = [], self.trace
        if unused := [name for name in self._limited if name not in trace.references_of]:
            lines.append(
                f"tenants: the trace has no request of {', '.join(unused)}, whose share or quota has no effect; a "
                "recording has ids of its own instead of names: write these under 'tenants.named' and 'quotas'."
            )
        if trace.refused:
            lines.append(
                f"tenants: {trace.refused:,} of {len(trace.requests):,} requests would run without tiers in an engine "
                f"with this config, and were served here: {trace.refusal}."
            )
        return lines

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "trace": self.name,
            "requests": len(self.trace.requests),
            "counted_from": self.trace.counted_from,
            "references": self.trace.references,
            "unique_chunks": self.trace.unique,
            "tokens_per_chunk": self.trace.tokens_per_chunk,
            "bytes_per_chunk": self.sizes.value_bytes,
            "infinite_hit_rate": self.infinite_rate,
            "points": [self._data(point) for point in self.points],
            "wish": self.wish,
            "smallest": [self._data(point) for point in self.smallest],
            "other_policy": [
                {
                    "policy": change.after.case.policy,
                    "instead_of": change.before.case.policy,
                    "primary": self._size(change.before.case.primary),
                    "points": change.points,
                    "gpu_seconds": change.gpu_seconds,
                }
                for change in self.changes
            ],
            "interrupted": self.interrupted,
        }

    def _row(self, point: PlanPoint) -> list[str]:
        names, held = self.tier_names, _held(point.case)
        shares = ["primary", *names] if names else []
        return [
            point.case.policy,
            self.sizes.shown(point.case.primary),
            *(self.sizes.shown(held.get(name, 0)) for name in names),
            _percent(point.rate),
            *(_percent(point.hits.get(name, 0) / point.references) for name in shares),
            *(_percent(point.tenants[tenant] / self.trace.references_of[tenant]) for tenant in self.tenant_names),
            *(self.sizes.amount(point.written.get(name, 0)) for name in names),
        ]

    def _data(self, point: PlanPoint) -> dict[str, Any]:
        return {
            "policy": point.case.policy,
            "primary": self._size(point.case.primary),
            "secondary": {name: self._size(chunks) for name, chunks in _held(point.case).items()},
            "hit_rate": point.rate,
            "hits": dict(point.hits),
            "written": {name: self._size(chunks) for name, chunks in point.written.items()},
            "budgets": dict(point.budgets),
            "promoted": {name: self._size(chunks) for name, chunks in point.promoted.items()},
            "tenants": {
                name: {"references": self.trace.references_of[name], "hits": hits}
                for name, hits in point.tenants.items()
            },
        }

    def _size(self, chunks: int | None) -> dict[str, int | None]:
        known = chunks is not None and self.sizes.value_bytes is not None
        return {"chunks": chunks, "bytes": chunks * self.sizes.value_bytes if known else None}  # type: ignore[operator]


def _held(case: PlanCase) -> dict[str, int | None]:
    return {tier.name: tier.chunks for tier in case.tiers}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
