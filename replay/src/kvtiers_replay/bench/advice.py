"""Advice from a benchmark: the smallest value, the fewest threads and processes that are nearly as fast as the best."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtiers_replay.bench.cases import Figures

__all__ = ["Advice", "advise"]

_NEARLY = 0.9  # of the best rate: what is measured differs by more from run to run


@dataclass(frozen=True, slots=True)
class Advice:
    """What suits a tier on this machine. ``blocks_per_chunk``: None without a model; the others: None if not tried."""

    value_bytes: int
    batch: int
    blocks_per_chunk: int | None = None
    threads: int | None = None
    processes: int | str | None = None


def rate(figures: Figures) -> float:
    """Return what counts: reading, from cold where there is that, and writing a third as much as reading."""
    read = figures.hot if figures.cold is None else figures.cold
    return 1 / (0.75 / read + 0.25 / figures.write)


def best_of(found: Sequence[Figures], key: Callable[[Figures], float]) -> Figures:
    """Return the first, by ``key``, that is nearly as fast as the fastest."""
    fastest = max(rate(each) for each in found)
    return next(each for each in sorted(found, key=key) if rate(each) >= _NEARLY * fastest)


def advise(
    sizes: Sequence[Figures],
    batches: Sequence[Figures],
    threads: Sequence[Figures],
    processes: Sequence[Figures],
    blocks: Mapping[int, int],
) -> Advice:
    """Return what suits. ``blocks``: how many blocks of the model a value of so many bytes has; empty: no model."""
    size = best_of(sizes, lambda each: each.case.value_bytes).case.value_bytes
    batch = best_of([*batches], lambda each: each.case.batch).case.batch if batches else sizes[0].case.batch
    few = best_of(threads, lambda each: each.case.threads).case.threads if threads else None
    one = best_of(processes, lambda each: float(each.case.processes)).case.processes if processes else None
    return Advice(size, batch, blocks.get(size), few, one)
