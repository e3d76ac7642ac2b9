"""The measures of one engine, as plain data that can travel between processes.

Counted on the engine's thread, so cheaply: durations go into arrays, and time series get a few points a second at
most.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtiers.types import TransferResult
from kvtiers_replay.results import Link

__all__ = ["LOAD_LINK", "STORE_LINK", "Curve", "Measures", "Progress", "hits_by_origin", "total_progress"]

STORE_LINK, LOAD_LINK = "gpu -> primary", "primary -> gpu"
_POINTS = 512
_SHORTEST_INTERVAL = 0.02


class Progress(NamedTuple):
    """The progress of a replay; ``hits`` by origin: ``gpu``, ``primary``, or a tier's name."""

    requests: int
    requests_in_all: int
    references: int
    wrong_bytes: int
    hits: Mapping[str, int]


def total_progress(parts: Sequence[Progress]) -> Progress:
    """Return how far several engines are together."""
    hits: Counter[str] = Counter()
    for part in parts:
        hits.update(part.hits)
    return Progress(
        sum(part.requests for part in parts),
        sum(part.requests_in_all for part in parts),
        sum(part.references for part in parts),
        sum(part.wrong_bytes for part in parts),
        hits,
    )


@dataclass(slots=True)
class Curve:
    """Figures at times (seconds since the beginning), in a bounded number of points: the longer, the further apart.

    ``counts`` only grow; ``depths`` are of that moment.
    """

    interval: float = _SHORTEST_INTERVAL
    seconds: list[float] = field(default_factory=list)
    counts: dict[str, list[float]] = field(default_factory=dict)
    depths: dict[str, list[float]] = field(default_factory=dict)

    def is_due(self, now: float) -> bool:
        """Return whether it is time for another point."""
        return not self.seconds or now - self.seconds[-1] >= self.interval

    def add(self, now: float, counts: Mapping[str, float], depths: Mapping[str, float]) -> None:
        """Add a point; every point has the names of the one before, and those of tiers that were attached since."""
        if len(self.seconds) >= _POINTS:
            self.interval *= 2
            for column in (self.seconds, *self.counts.values(), *self.depths.values()):
                del column[1::2]
        self.seconds.append(now)
        for columns, values in ((self.counts, counts), (self.depths, depths)):
            for name, value in values.items():
                columns.setdefault(name, [0.0] * (len(self.seconds) - 1)).append(value)


@dataclass(slots=True)
class Measures:
    """The figures of one engine so far; references and hits are full blocks.

    ``gpu_hits``: in the engine's own prefix cache (None: it has none); ``loaded``: from the primary, however they came
    there. A request counts when it is done, with what it hit when it was first served: what it reads again after a
    preemption is no hit. ``asked``, ``waited``: by request, the seconds until a lookup had its answer and until a load
    had ended. ``stalls``: by step, the seconds that kvtiers took on the engine's thread. ``stats``: the manager's.
    ``foreign_hits``: blocks that no request of this engine had computed before. ``last_troubles``: by tier, the last
    warning that was logged of it.
    """

    has_prefix_cache: bool
    requests: int = 0
    references: int = 0
    gpu_hits: int = 0
    loaded: int = 0
    infinite_hits: int = 0
    foreign_hits: int = 0
    tokens: int = 0
    tokens_saved: int = 0
    preemptions: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    wrong_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    by_tenant: dict[str, Counter[str]] = field(default_factory=dict)
    """Of requests that have one: ``requests``, ``references`` and ``hits``."""
    asked: "array[float]" = field(default_factory=lambda: array("d"))
    waited: "array[float]" = field(default_factory=lambda: array("d"))
    prompts: "array[int]" = field(default_factory=lambda: array("q"))
    """By request: its tokens; ``computed``: those of them that were no hits; ``delays``: its wait for hits, seconds."""
    computed: "array[int]" = field(default_factory=lambda: array("q"))
    delays: "array[float]" = field(default_factory=lambda: array("d"))
    stalls: "array[float]" = field(default_factory=lambda: array("d"))
    links: dict[str, Link] = field(default_factory=lambda: {STORE_LINK: Link(), LOAD_LINK: Link()})
    curve: Curve = field(default_factory=Curve)
    stats: dict[str, Any] = field(default_factory=dict)
    last_troubles: dict[str, str] = field(default_factory=dict)

    @property
    def hits(self) -> dict[str, int]:
        """Prefix hits by origin."""
        gpu = {"gpu": self.gpu_hits} if self.has_prefix_cache else {}
        return gpu | hits_by_origin(self.loaded, self.stats)

    def progress(self, requests_in_all: int) -> Progress:
        """Return how far the engine is."""
        return Progress(self.requests, requests_in_all, self.references, self.wrong_bytes, self.hits)

    def take_loads(self, results: Iterable[TransferResult], ranks: int) -> None:
        """Count loads as one of the ranks saw them; the ranks' run side by side, so a link's time is their mean."""
        for result in results:
            self.links[LOAD_LINK] = self.links[LOAD_LINK].plus(result.nbytes, result.seconds / ranks)

    def take_stores(self, results: Iterable[TransferResult], ranks: int) -> None:
        """Count stores, likewise."""
        for result in results:
            self.links[STORE_LINK] = self.links[STORE_LINK].plus(result.nbytes, result.seconds / ranks)
            self.failed_stores += not result.success

    def note(self, now: float, stats: dict[str, Any], waiting: int) -> None:
        """Copy the manager's figures, and add a point to the curve."""
        if gone := {name: tier for name, tier in self.stats.get("tiers", {}).items() if name not in stats["tiers"]}:
            stats = {**stats, "tiers": {**gone, **stats["tiers"]}}  # was detached: what it has done stays counted
        self.stats = stats
        counts: dict[str, float] = {"references": self.references, **self.hits}
        depths: dict[str, float] = {"engine: requests waiting": waiting}
        for name, tier in stats["tiers"].items():
            depths[f"{name}: chunks to load"] = tier["loading_chunks"]
            depths[f"{name}: chunks to store"] = tier["own"].get("storing_chunks", 0)
        self.curve.add(now, counts, depths)


def hits_by_origin(loaded: int, stats: Mapping[str, Any]) -> dict[str, int]:
    """Share out blocks that were loaded among the primary and the tiers that had brought their chunks into it.

    The manager counts chunks, and of the chunks at the ends of a load perhaps not all blocks are wanted, so it is done
    in proportion; with one block a chunk it is exact.
    """
    if not stats:
        return {"primary": loaded}
    of_tiers = {name: tier["hits"] for name, tier in stats["tiers"].items()}
    chunks = stats["engine"]["primary_hits"] + sum(of_tiers.values())
    shares = {name: loaded * hits // chunks if chunks else 0 for name, hits in of_tiers.items()}
    return {"primary": loaded - sum(shares.values())} | shares
