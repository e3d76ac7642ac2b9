"""Durations and shares as the text, the page and the charts write them."""

__all__ = ["percent", "seconds"]

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def seconds(value: float) -> str:
    """Return a duration with three digits, from microseconds to seconds."""
    if not value:
        return "0"
    unit, size = next(((unit, size) for unit, size in _UNITS if value >= 0.9995 * size), _UNITS[-1])
    return f"{value / size:.3g} {unit}" if value < 999.5 else f"{value:,.0f} s"


def percent(part: float, whole: float = 1.0) -> str:
    """Return a share in percent with one decimal; of nothing, a dash."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
