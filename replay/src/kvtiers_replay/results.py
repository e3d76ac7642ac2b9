"""The results of a replay, as plain data: ``--json`` prints them and the page draws them.

A replay fills a ``ReplayResults``; the page uses nothing else. Times are seconds (over time:
since the first request), sizes bytes, shares from 0 to 1.
"""

import dataclasses
import itertools
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtiers.config import OffloadConfig
from kvtiers.metrics import Histogram

__all__ = ["Latencies", "Link", "OverTime", "ReplayResults", "TimeToFirstToken", "config_as_data"]

_BOUNDS = tuple(1e-6 * 2 ** (step / 2) for step in range(56))  # 1 us to 190 s, in steps of the square root of 2
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@")


class Link(NamedTuple):
    """The traffic of one link in one direction; ``seconds``: the transfers' own time, not the run's."""

    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> "Link":
        """Return the sum of this and one more transfer."""
        return Link(self.nbytes + nbytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Durations by bucket: ``counts[i]`` times up to ``bounds[i]``, and one more count for longer ones.

    Of samples, percentiles are ``exact``; of a histogram, the upper edge of their bucket.
    """

    bounds: tuple[float, ...] = _BOUNDS
    counts: tuple[int, ...] = (0,) * (len(_BOUNDS) + 1)
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    worst: float = 0.0
    exact: bool = True

    @classmethod
    def of_samples(cls, seconds: Iterable[float]) -> "Latencies":
        """Return what these durations are."""
        ordered = sorted(seconds)
        if not ordered:
            return cls()
        counts = [0] * (len(_BOUNDS) + 1)
        for each in ordered:
            counts[bisect_left(_BOUNDS, each)] += 1

        def at(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(_BOUNDS, tuple(counts), math.fsum(ordered), at(0.5), at(0.99), ordered[-1])

    @classmethod
    def of_histogram(cls, figures: Mapping[str, Any]) -> "Latencies":
        """Return what one of the manager's histograms says, as ``stats()`` has it."""
        counts, bounds = tuple(figures["buckets"]), Histogram.bounds
        ends = list(itertools.accumulate(counts))

        def at(share: float) -> float:
            wanted = max(1, math.ceil(share * ends[-1]))
            return bounds[min(bisect_left(ends, wanted), len(bounds) - 1)] if ends[-1] else 0.0

        return cls(bounds, counts, figures["sum"], at(0.5), at(0.99), at(1.0), exact=False)

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)


@dataclass(slots=True)
class OverTime:
    """Figures over time. Interval i ends at ``seconds[i]``; every list has one value for each interval.

    ``hit_rates``: by origin (``gpu``, ``primary``, a tier's name), the share of the interval's references that were
    hits from there; None where nothing was asked for. ``queue_depths``: what was waiting, by name and with its unit in
    the name, such as ``fs: chunks to load``.
    """

    seconds: list[float] = field(default_factory=list)
    hit_rates: dict[str, list[float | None]] = field(default_factory=dict)
    queue_depths: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """The estimated time to the first token at a given prefill speed (tokens per second), with tiers and without."""

    prefill_speed: float
    with_tiers: Latencies
    without: Latencies


@dataclass(slots=True)
class ReplayResults:
    """All figures of a replay; references and hits are full blocks.

    ``hits``: prefix hits by origin (``gpu``, ``primary``, a tier's name); an origin that there was has its zero.
    ``infinite_hits``: what a cache without bounds would have hit. ``links``: bytes and the transfers' own seconds, by
    names such as ``gpu -> primary``. ``latencies``: of ``lookup`` and ``promotion from NAME``. ``stalls``: the time
    that kvtiers took on the engine's thread, per step. ``errors``: by what went wrong, as people read it.
    ``tenants``: ``requests``, ``references`` and ``hits`` of each tenant among them.
    ``dropped_cascades``: chunks that were not sent down, by tier; ``errors`` has them with the cause.
    ``last_troubles``: the last warning that was logged of a tier, by tier. ``own_figures``: what a tier counts itself,
    by tier, one mapping for each engine. ``warm``: there were hits of values that no request of this replay had stored,
    so that ``infinite_hits``, which begins empty, is no bound. ``settings``: the command's own, as people read them;
    ``config``: see ``config_as_data``. ``unreadable_tiers``: those of which no chunk that they said they have could be
    read, through a fault of their store. ``verdict``: lines, the most important first.
    """

    workload: str
    requests_in_all: int = 0
    requests: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    references: int = 0
    prefix_hits: int = 0
    infinite_hits: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    tokens_saved: int = 0
    preemptions: int = 0
    wrong_bytes: int = 0
    tenants: dict[str, dict[str, int]] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    over_time: OverTime = field(default_factory=OverTime)
    latencies: dict[str, Latencies] = field(default_factory=dict)
    stalls: Latencies = field(default_factory=Latencies)
    first_token: TimeToFirstToken | None = None
    errors: dict[str, int] = field(default_factory=dict)
    dropped_cascades: dict[str, int] = field(default_factory=dict)
    last_troubles: dict[str, str] = field(default_factory=dict)
    own_figures: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    warm: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    unreadable_tiers: list[str] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON values; ``bytes`` has the links' bytes alone, for short reports."""
        data = dataclasses.asdict(self)
        data["links"] = {name: link._asdict() for name, link in self.links.items()}
        data["bytes"] = {name: link.nbytes for name, link in self.links.items()}
        return data

    def to_json(self) -> str:
        """Return everything as one JSON object on one line."""
        return json.dumps(self.as_data(), allow_nan=False)


def config_as_data(config: OffloadConfig) -> dict[str, Any]:
    """Return a config as JSON values that may be shown: a secret says where it is from, a URL has no user in it."""
    shown: dict[str, Any] = _without_users(config.model_dump(mode="json"))
    return shown


def _without_users(value: Any) -> Any:
    match value:
        case str():
            return _USER_INFO.sub("***@", value)
        case list():
            return [_without_users(item) for item in value]
        case dict():
            return {key: _without_users(item) for key, item in value.items()}
    return value
