"""What a replay found out: figures that grow while it runs, and how they are shown at its end."""

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.table import Table

from kvtiers.api.units import format_size

__all__ = ["Link", "ReplayReport"]


class Link(NamedTuple):
    """What went over one link in one direction; ``seconds``: the transfers' own time, not the run's."""

    nbytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: object) -> "Link":
        """Return both together."""
        assert isinstance(other, Link)
        return Link(self.nbytes + other.nbytes, self.seconds + other.seconds)


@dataclass(slots=True)
class ReplayReport:
    """The figures of a replay so far; hits and references are full blocks.

    ``prefix_hits``: blocks that were not computed again. ``infinite_hits``: what a cache without bounds would have
    hit. ``hits``: by where they came from (``gpu``: the engine's own prefix cache; ``primary``; a tier's name).
    """

    workload: str
    requests_in_all: int
    requests: int = 0
    references: int = 0
    prefix_hits: int = 0
    infinite_hits: int = 0
    tokens: int = 0
    tokens_saved: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    wrong_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    hits: dict[str, int] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)

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
        tiers = "".join(f", {name} {_percent(count, self.references)}" for name, count in self.hits.items())
        return (
            f"{self.requests:,} of {self.requests_in_all:,} requests, prefix hits "
            f"{_percent(self.prefix_hits, self.references)}{tiers}, wrong bytes {self.wrong_bytes:,}"
        )

    def verdict(self) -> str:
        """Return the outcome in one line."""
        if self.wrong_bytes:
            return f"WRONG: {self.wrong_bytes:,} bytes came back that are not those stored"
        if self.interrupted:
            return f"Stopped after {self.requests:,} of {self.requests_in_all:,} requests; all bytes so far were right."
        return "Every chunk that came back was compared byte by byte, and is right."

    def table(self) -> Table:
        """Return the figures as a table for people."""
        table = Table(title=f"Replay of {self.workload}: {self.requests:,} requests in {self.seconds:.1f} s")
        table.add_column("")
        table.add_column("blocks or bytes", justify="right")
        table.add_column("rate", justify="right")
        references = self.references
        table.add_row("full blocks asked for", f"{references:,}", f"{references / max(self.seconds, 1e-9):,.0f} /s")
        table.add_row("prefix hits", f"{self.prefix_hits:,}", _percent(self.prefix_hits, references))
        table.add_row("  an infinite cache's", f"{self.infinite_hits:,}", _percent(self.infinite_hits, references))
        for name, count in self.hits.items():
            table.add_row(f"  from {name}", f"{count:,}", _percent(count, references))
        table.add_row("tokens not recomputed", f"{self.tokens_saved:,}", _percent(self.tokens_saved, self.tokens))
        table.add_section()
        for name, link in self.links.items():
            rate = f"{link.nbytes / link.seconds / 1e9:.2f} GB/s" if link.seconds else ""
            table.add_row(name, format_size(link.nbytes), rate)
        table.add_section()
        if self.failed_loads or self.failed_stores:
            table.add_row("failed loads / stores", f"{self.failed_loads:,} / {self.failed_stores:,}", "")
        table.add_row("wrong bytes", f"{self.wrong_bytes:,}", "")
        return table


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
