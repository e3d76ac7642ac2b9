"""The metrics: what is counted as plain data (``counts``), and how Prometheus gets it (``exposition``)."""

from kvtiers.metrics.counts import (
    BUDGET_FIGURES,
    CLIENT_TIER_FIGURES,
    PRIMARY_HELP,
    TIER_HELP,
    WHAT_IF_COUNTERS,
    WHAT_IF_HELP,
    WHAT_IF_LABELS,
    ClientMetrics,
    EngineMetrics,
    Histogram,
    TierMetrics,
    budget_advice,
    help_texts,
    unread_chunks,
    what_if_figures,
)
from kvtiers.metrics.exposition import Described, Found, described, export, families, name_of_own

__all__ = [
    "BUDGET_FIGURES",
    "CLIENT_TIER_FIGURES",
    "PRIMARY_HELP",
    "TIER_HELP",
    "WHAT_IF_COUNTERS",
    "WHAT_IF_HELP",
    "WHAT_IF_LABELS",
    "ClientMetrics",
    "Described",
    "EngineMetrics",
    "Found",
    "Histogram",
    "TierMetrics",
    "budget_advice",
    "described",
    "export",
    "families",
    "help_texts",
    "name_of_own",
    "unread_chunks",
    "what_if_figures",
]
