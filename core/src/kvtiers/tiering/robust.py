"""The weighted quantile, a statistic that a few outliers do not move, on which the estimates of this package rest."""

from collections.abc import Iterable

__all__ = ["weighted_quantile"]


def weighted_quantile(pairs: Iterable[tuple[float, float]], share: float = 0.5) -> float:
    """Return the smallest value at which ``share`` of all weight is reached; ``pairs``: (value, weight), at least one.

    0.5 is the median. Weights are above 0.
    """
    ordered = sorted(pairs)
    wanted, reached = share * sum([weight for _, weight in ordered]), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return ordered[-1][0]
