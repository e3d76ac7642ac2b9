"""A benchmark from start to end: sizes of values, then batches, threads and processes at the size that suits.

Tiers that are compared take turns, case by case, so that what else the machine does hits all of them.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtiers.api.units import format_size
from kvtiers_replay.bench.advice import Advice, advise, best_of
from kvtiers_replay.bench.cases import BenchTier, Case, Figures, NotStoredError, fitting, measure
from kvtiers_replay.bench.limits import Limits, measure_limits

__all__ = ["Bench", "BenchOptions", "run_bench"]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """``value_bytes``: sizes of values. ``blocks``: of a model, by the size of a value with so many; empty: no model.

    ``most_bytes``, ``seconds``: the most that one case moves in calls of a batch and that they take, each way; a batch
    that is more is measured as one of fewer values. A quarter of it is moved value by value, too.
    """

    value_bytes: Sequence[int]
    blocks: Mapping[int, int] = field(default_factory=dict)
    batches: Sequence[int] = (1, 4, 16)
    threads: Sequence[int] = (1, 4, 16)
    processes: Sequence[int] = (1, 2)
    most_bytes: int = 64 << 20
    seconds: float = 0.5


@dataclass(slots=True)
class Bench:
    """The results: by tier, the figures by size, batch, threads and processes, and what suits.

    ``load``: processes that ran or waited for this machine's ``processors`` before the first case. ``not_stored``: one
    line for each case that a tier did not take the values of, and that has no figures.
    """

    limits: Limits
    tiers: list[BenchTier]
    load: float = 0.0
    processors: int = 1
    not_stored: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, list[Figures]] = field(default_factory=dict)
    batches: dict[str, list[Figures]] = field(default_factory=dict)
    threads: dict[str, list[Figures]] = field(default_factory=dict)
    processes: dict[str, list[Figures]] = field(default_factory=dict)
    advice: dict[str, Advice] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON values; rates are bytes per second, times seconds."""
        return {
            "limits": dataclasses.asdict(self.limits),
            "load": self.load,
            "processors": self.processors,
            "not_stored": self.not_stored,
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
    """Measure these tiers. ``progress`` is called before each case; its exceptions end the benchmark between two.

    KvtiersError, one line, if a tier takes values of no size, or gives others back.
    """
    progress("measuring this machine")
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    found = Bench(measure_limits(_folder(tiers)), list(tiers), load, processors)
    cases = _Cases(found, options, progress)
    usual = {tier.label: Case(0, options.batches[-1], tier.tier.threads, tier.tier.processes) for tier in tiers}
    # The largest first: a slab is made for values of the length that comes first.
    found.sizes = cases.sweep(usual, "value_bytes", options.value_bytes[::-1])
    for name, figures in found.sizes.items():
        if not figures:
            raise NotStoredError(found.not_stored[name][-1])
        figures.reverse()
    base = {name: best_of(figures, lambda each: each.case.value_bytes).case for name, figures in found.sizes.items()}
    found.batches = cases.sweep(base, "batch", options.batches)
    found.threads = cases.sweep(base, "threads", options.threads)
    found.processes = cases.sweep(base, "processes", options.processes)
    for name in base:
        found.advice[name] = advise(
            found.sizes[name], found.batches[name], found.threads[name], found.processes[name], options.blocks
        )
    return found


class _Cases:
    """The cases of a benchmark, each measured once."""

    def __init__(self, bench: Bench, options: BenchOptions, progress: Callable[[str], None]) -> None:
        self._bench = bench
        self._options = options
        self._progress = progress
        self._done: dict[tuple[str, Case], Figures | None] = {}
        self._number = 0
        values = {
            "value_bytes": options.value_bytes, "batch": options.batches, "threads": options.threads,
            "processes": options.processes,
        }  # fmt: skip
        self._whole = sum(len(each) for tier in bench.tiers for name, each in values.items() if _applies(tier, name))

    def sweep(self, base: Mapping[str, Case], option: str, values: Sequence[int]) -> dict[str, list[Figures]]:
        """Measure each tier's case with each value of this option, in turns; leave out what it does not take."""
        into: dict[str, list[Figures]] = {tier.label: [] for tier in self._bench.tiers}
        for value in values:
            for tier in self._bench.tiers:
                if _applies(tier, option):
                    self._number += 1
                    figures = self._figures(tier, dataclasses.replace(base[tier.label], **{option: value}))
                    into[tier.label] += [figures] if figures else []
        return into

    def _figures(self, tier: BenchTier, case: Case) -> Figures | None:
        case = fitting(tier, case, self._options.most_bytes)
        if (tier.label, case) not in self._done:
            hosts = f", threads: {case.threads}" if tier.has_hosts else ""
            hosts += f", processes: {case.processes}" if tier.may_have_hosts else ""
            what = f"{tier.label}: values of {format_size(case.value_bytes)}, {case.batch} at a time{hosts}"
            self._progress(f"{self._number} of {self._whole}: {what}")
            figures = None
            try:
                figures = measure(tier, case, most_bytes=self._options.most_bytes, seconds=self._options.seconds)
            except NotStoredError as error:
                self._bench.not_stored.setdefault(tier.label, []).append(f"{what}: {error}")
            self._done[tier.label, case] = figures
        return self._done[tier.label, case]


def _applies(tier: BenchTier, option: str) -> bool:
    """Return whether a tier has this option."""
    return {"value_bytes": True, "batch": True, "threads": tier.has_hosts, "processes": tier.may_have_hosts}[option]


def _folder(tiers: Sequence[BenchTier]) -> Path | None:
    """Return the folder of the first tier that keeps files on this machine, or the nearest above it that is there."""
    path = next((getattr(tier.tier, "path", None) for tier in tiers if tier.plugin.writes_locally), None)
    if not isinstance(path, Path):
        return None
    return next((each for each in (path, *path.parents) if each.is_dir()), None)
