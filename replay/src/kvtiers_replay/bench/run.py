"""A benchmark from start to end: sizes of values, then batches, threads and processes at the size that suits.

Tiers that are compared take turns, case by case, so that what else the machine does hits all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtiers_replay.bench.advice import Advice, advise, best_of
from kvtiers_replay.bench.cases import BenchTier, Case, Figures, measure
from kvtiers_replay.bench.limits import Limits, measure_limits

__all__ = ["Bench", "BenchOptions", "run_bench"]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """``value_bytes``: sizes of values. ``blocks``: of a model, by the size of a value with so many; empty: no model.

    ``most_bytes``, ``seconds``: the most that one case moves and takes, each way.
    """

    value_bytes: Sequence[int]
    blocks: Mapping[int, int] = field(default_factory=dict)
    batches: Sequence[int] = (1, 4, 16)
    threads: Sequence[int] = (1, 4, 16)
    processes: Sequence[int] = (1, 2)
    most_bytes: int = 64 << 20
    seconds: float = 1.0


@dataclass(slots=True)
class Bench:
    """The results: by tier, the figures by size, batch, threads and processes, and what suits."""

    limits: Limits
    tiers: list[BenchTier]
    sizes: dict[str, list[Figures]] = field(default_factory=dict)
    batches: dict[str, list[Figures]] = field(default_factory=dict)
    threads: dict[str, list[Figures]] = field(default_factory=dict)
    processes: dict[str, list[Figures]] = field(default_factory=dict)
    advice: dict[str, Advice] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON values; rates are bytes per second, times seconds."""
        return {
            "limits": dataclasses.asdict(self.limits),
            "tiers": {
                tier.label: {
                    "type": tier.tier.type,
                    "by_size": _data(self.sizes[tier.label]),
                    "by_batch": _data(self.batches[tier.label]),
                    "by_threads": _data(self.threads[tier.label]),
                    "by_processes": _data(self.processes[tier.label]),
                    "advice": dataclasses.asdict(self.advice[tier.label]),
                }
                for tier in self.tiers
            },
        }


def _data(found: Sequence[Figures]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in found]


def run_bench(
    tiers: Sequence[BenchTier], options: BenchOptions, progress: Callable[[str], None] = lambda _doing: None
) -> Bench:
    """Measure these tiers. ``progress`` is called before each case; its exceptions end the benchmark between two."""
    progress("measuring this machine")
    found = Bench(measure_limits(_folder(tiers)), list(tiers))
    done: dict[tuple[str, Case], Figures] = {}

    def sweep(base: Mapping[str, Case], option: str, values: Sequence[int]) -> dict[str, list[Figures]]:
        into: dict[str, list[Figures]] = {tier.label: [] for tier in tiers}
        for value in values:
            for tier in tiers:
                if not _applies(tier, option):
                    continue
                case = dataclasses.replace(base[tier.label], **{option: value})
                if (tier.label, case) not in done:
                    progress(f"{tier.label}: values of {case.value_bytes >> 10:,} KiB, {case.batch} at a time")
                    figures = measure(tier, case, most_bytes=options.most_bytes, seconds=options.seconds)
                    done[tier.label, case] = figures
                into[tier.label].append(done[tier.label, case])
        return into

    usual = {tier.label: Case(0, options.batches[-1], tier.tier.threads, tier.tier.processes) for tier in tiers}
    found.sizes = sweep(usual, "value_bytes", options.value_bytes)
    base = {name: best_of(figures, lambda each: each.case.value_bytes).case for name, figures in found.sizes.items()}
    found.batches = sweep(base, "batch", options.batches)
    found.threads = sweep(base, "threads", options.threads)
    found.processes = sweep(base, "processes", options.processes)
    for name in base:
        found.advice[name] = advise(
            found.sizes[name], found.batches[name], found.threads[name], found.processes[name], options.blocks
        )
    return found


def _applies(tier: BenchTier, option: str) -> bool:
    """Return whether a tier has this option."""
    return {"value_bytes": True, "batch": True, "threads": tier.has_hosts, "processes": tier.may_have_hosts}[option]


def _folder(tiers: Sequence[BenchTier]) -> Path | None:
    """Return the folder of the first tier that keeps files on this machine, or the nearest above it that is there."""
    path = next((getattr(tier.tier, "path", None) for tier in tiers if tier.tier.writes_locally), None)
    if not isinstance(path, Path):
        return None
    return next((each for each in (path, *path.parents) if each.is_dir()), None)
