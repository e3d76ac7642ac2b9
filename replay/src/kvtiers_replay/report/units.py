"""Durations and shares as the text, the page and the charts write them."""

from kvtiers_replay.results import Latencies

__all__ = ["at_most", "percent", "seconds"]

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def seconds(value: float) -> str:
    """Return a duration with three digits, from microseconds to seconds."""
    if not value:
        return "0"
    unit, size = next(((unit, size) for unit, size in _UNITS if value >= 0.9995 * size), _UNITS[-1])
    return f"{value / size:.3g} {unit}" if value < 999.5 else f"{value:,.0f} s"


def at_most(times: Latencies, value: float) -> str:
    """Return a percentile of these durations; one that is the edge of a bucket is no measurement, and says so."""
    if times.exact or not value:
        return seconds(value)
    is_open = times.counts[-1] and value >= times.bounds[-1]  # the last bucket has no edge
    return f"{'over' if is_open else 'at most'} {seconds(value)}"


def percent(part: float, whole: float = 1.0) -> str:
    """Return a share in percent with one decimal; of nothing, a dash."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
