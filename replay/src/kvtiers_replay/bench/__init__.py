"""Benchmarks of tiers on this machine: what is measured, what limits it, and what suits."""

from kvtiers_replay.bench.advice import Advice, advise
from kvtiers_replay.bench.cases import BenchTier, Case, Figures, measure
from kvtiers_replay.bench.limits import Limits, measure_limits
from kvtiers_replay.bench.run import Bench, BenchOptions, run_bench

__all__ = [
    "Advice",
    "Bench",
    "BenchOptions",
    "BenchTier",
    "Case",
    "Figures",
    "Limits",
    "advise",
    "measure",
    "measure_limits",
    "run_bench",
]
