"""The comparison with another eviction policy: points of hits and GPU seconds, where the primary is scarce.

A policy that learns pays where a primary holds 1 to 10 % of the chunks that are asked for. With less, nearly everything
leaves before it comes back, whatever is kept; with more, nearly nothing that comes back has left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtiers_replay.plan.simulate import PlanCase, PlanPoint, PlanTrace

__all__ = ["DEFAULT_PREFILL_SPEED", "LEARNING_POLICY", "Change", "cases_of_interest", "change_line", "changes"]

LEARNING_POLICY = "turn-hazard"
DEFAULT_PREFILL_SPEED = 10_000.0
"""Tokens a second, as for a replay."""
_SCARCE = 0.01, 0.10  # of the trace's chunks
_WORTH_IT = 0.3  # points
_MOST_CASES = 8


@dataclass(frozen=True, slots=True)
class Change:
    """Two points that differ in the policy alone. ``gpu_seconds``: of prefill that ``after`` saves over the trace."""

    before: PlanPoint
    after: PlanPoint
    gpu_seconds: float

    @property
    def points(self) -> float:
        """The percent of all chunks asked for that ``after`` hits more."""
        return 100 * (self.after.rate - self.before.rate)


def cases_of_interest(trace: PlanTrace, cases: Sequence[PlanCase]) -> list[PlanCase]:
    """Return the cases with a scarce primary and another policy, with the learning one instead."""
    low, high = (share * trace.unique for share in _SCARCE)
    found = [
        replace(case, policy=LEARNING_POLICY)
        for case in cases
        if case.policy != LEARNING_POLICY and low * 0.99 <= case.primary <= high * 1.01
    ]
    return [case for case in dict.fromkeys(found) if case not in cases][:_MOST_CASES]


def changes(
    trace: PlanTrace, points: Sequence[PlanPoint], learnt: Sequence[PlanPoint], prefill_speed: float
) -> list[Change]:
    """Return what the learning policy changes at each scarce size. ``prefill_speed``: tokens a second."""
    after = {point.case: point for point in [*points, *learnt] if point.case.policy == LEARNING_POLICY}
    low, high = (share * trace.unique for share in _SCARCE)
    found = []
    for before in points:
        other = after.get(replace(before.case, policy=LEARNING_POLICY))
        if other is None or other is before or not low * 0.99 <= before.case.primary <= high * 1.01:
            continue
        tokens = (sum(other.hits.values()) - sum(before.hits.values())) * trace.tokens_per_chunk
        found.append(Change(before, other, tokens / prefill_speed))
    return found


def change_line(found: Sequence[Change], trace: PlanTrace, prefill_speed: float) -> str:
    """Return in one line whether the learning policy pays, with its points and GPU seconds; "" if it was not tried."""
    if not found:
        return ""
    best = max(found, key=lambda change: change.points)
    policy = best.before.case.policy
    if best.points < _WORTH_IT:
        return f"'primary.eviction: {LEARNING_POLICY}' would not pay: {best.points:+.1f} points over {policy} at best."
    each = ", ".join(
        f"{change.points:+.1f} at {100 * change.before.case.primary / trace.unique:.3g} %"
        for change in found
        if change.before.case.policy == policy
    )
    return (
        f"'primary.eviction: {LEARNING_POLICY}' instead of {policy}, in points of hits by the primary's share of all "
        f"different chunks: {each}. "
        f"At best {best.gpu_seconds:,.0f} GPU seconds of prefill over this trace, at {prefill_speed:,.0f} tokens/s."
    )
