"""The plot of a plan in a terminal: a bar for each case, with a part for each place where hits came from."""

from kvtiers_replay.plan.results import Plan
from kvtiers_replay.plan.series import series_of, swept_size

__all__ = ["as_bars"]

_WIDTH = 48  # letters of what an infinite cache hits
_MOST_BARS = 100
_BLOCKS, _PLAIN = "█▒░▓", "#=-+"


def as_bars(plan: Plan, encoding: str = "utf-8") -> list[str]:
    """Return the lines of the plot, for a terminal with this encoding; none, if nothing or far too much is to be drawn.

    The full width is the hit rate of an infinite cache.
    """
    if not 0 < len(plan.points) <= _MOST_BARS or not plan.infinite_rate:
        return []
    letters = _BLOCKS if _can_write(_BLOCKS, encoding) else _PLAIN
    swept = swept_size(plan)
    origins = ["primary", *plan.tier_names]
    key = ", ".join(f"{letters[i % len(letters)]} from {origin}" for i, origin in enumerate(origins))
    lines = [f"Hit rate by {swept.name}: {key}; | infinite cache, {100 * plan.infinite_rate:.1f} %"]
    width = max(len(swept.text(value)) for value in swept.values)
    for name, points in series_of(plan, swept).items():
        lines.append(f"  {name}")
        for point in points:
            bar, seen = "", 0.0
            for index, origin in enumerate(origins):
                seen += point.hits.get(origin, 0) / point.references
                end = round(_WIDTH * seen / plan.infinite_rate)
                bar += letters[index % len(letters)] * (end - len(bar))
            size = swept.text(swept.size_of(point.case)).rjust(width)
            lines.append(f"    {size} {bar.ljust(_WIDTH)}| {100 * point.rate:.1f} %")
    return lines


def _can_write(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
