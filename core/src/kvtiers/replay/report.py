"""What a replay found out: figures that grow while it runs, and the texts in which they are shown."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtiers.api.units import format_size

__all__ = ["Link", "ReplayReport"]


class Link(NamedTuple):
    """What went over one link in one direction; ``seconds``: the transfers' own time, not the run's."""

    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> "Link":
        """Return the sum of this and one more transfer."""
        return Link(self.nbytes + nbytes, self.seconds + seconds)


@dataclass(slots=True)
class ReplayReport:
    """The figures of a replay so far; references and hits are full blocks.

    ``prefix_hits``: blocks that were not computed again, of which ``gpu_hits`` were in the engine's own prefix cache
    (None: it has none) and ``loaded`` came from the primary; ``tier_hits`` of these had come up from a tier, by name.
    ``infinite_hits``: what a cache without bounds would have hit.
    """

    workload: str
    requests_in_all: int
    gpu_hits: int | None = None
    requests: int = 0
    references: int = 0
    prefix_hits: int = 0
    loaded: int = 0
    infinite_hits: int = 0
    tokens: int = 0
    tokens_saved: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    wrong_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    tier_hits: dict[str, int] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)

    def take_tiers(self, tiers: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what the manager counts for each tier."""
        for name, figures in tiers.items():
            self.tier_hits[name] = int(figures["hits"])
            self.links[f"primary -> {name}"] = Link(int(figures["stored_bytes"]), figures["store_seconds"])
            self.links[f"{name} -> primary"] = Link(int(figures["loaded_bytes"]), figures["load_seconds"])

    @property
    def hits(self) -> dict[str, int]:
        """Prefix hits by where they came from: ``gpu``, ``primary``, or a tier's name."""
        gpu = {} if self.gpu_hits is None else {"gpu": self.gpu_hits}
        return gpu | {"primary": max(0, self.loaded - sum(self.tier_hits.values()))} | self.tier_hits

    def as_json(self) -> str:
        """Return the figures as one JSON object on one line."""
        return json.dumps(
            {
                "references": self.references,
                "prefix_hits": self.prefix_hits,
                "hits": self.hits,
                "wrong_bytes": self.wrong_bytes,
                "bytes": {name: link.nbytes for name, link in self.links.items()},
                "seconds": round(self.seconds, 3),
            }
        )

    def progress_line(self) -> str:
        """Return where the replay is, in one line."""
        # What matters most comes first: a narrow terminal cuts the end off.
        parts = ", ".join(f"{name} {_percent(count, self.references)}" for name, count in self.hits.items())
        hits = f"hits {_percent(self.prefix_hits, self.references)} ({parts})"
        return f"{self.requests:,}/{self.requests_in_all:,} requests, {self.wrong_bytes:,} wrong bytes, {hits}"

    def heading(self) -> str:
        """Return what this is the report of."""
        return f"Replay of {self.workload}: {self.requests:,} requests in {self.seconds:.1f} s"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the figures as a table: what, how many, and its share or rate."""
        per_second = self.references / self.seconds if self.seconds else 0.0
        rows = [
            ("full blocks asked for", f"{self.references:,}", f"{per_second:,.0f} /s"),
            ("prefix hits", f"{self.prefix_hits:,}", _percent(self.prefix_hits, self.references)),
            ("  an infinite cache's", f"{self.infinite_hits:,}", _percent(self.infinite_hits, self.references)),
            *(
                (f"  from {name}", f"{count:,}", _percent(count, self.references))
                for name, count in self.hits.items()
            ),
            ("tokens not recomputed", f"{self.tokens_saved:,}", _percent(self.tokens_saved, self.tokens)),
        ]  # fmt: skip
        for name, link in self.links.items():
            rate = f"{link.nbytes / link.seconds / 1e9:.2f} GB/s" if link.nbytes and link.seconds else ""
            rows.append((name, format_size(link.nbytes), rate))
        if self.failed_loads or self.failed_stores:
            rows.append(("failed loads, stores", f"{self.failed_loads:,}, {self.failed_stores:,}", ""))
        rows.append(("wrong bytes", f"{self.wrong_bytes:,}", ""))
        return _right_aligned(rows)

    def verdict(self) -> str:
        """Return the outcome in one line."""
        if self.wrong_bytes:
            return f"WRONG: {self.wrong_bytes:,} bytes that came back are not those that were stored."
        stopped = f"Stopped after {self.requests:,} of {self.requests_in_all:,} requests. " if self.interrupted else ""
        return f"{stopped}Every chunk that came back was compared byte by byte: all bytes are right."


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _right_aligned(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    second, third = (max(len(row[column]) for row in rows) for column in (1, 2))
    return [(what, number.rjust(second), rate.rjust(third)) for what, number, rate in rows]
