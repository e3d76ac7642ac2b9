"""A trial: the log's first requests through the whole stack, on this machine, with a real tier and every byte checked.

Chunks are small, so that it takes seconds. It shows two things that a plan cannot: that all bytes come back right, and
that the real stack has the hits that the plan has computed.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig, load_config
from kvtiers_replay.evaluate.evaluation import Evaluation, Trial
from kvtiers_replay.plan import PlanCase, PlanTier, PlanTrace, simulate
from kvtiers_replay.run import ReplayOptions, replay
from kvtiers_replay.workload import ReplayRequest

__all__ = ["try_it"]

_MOST_CHUNKS = 6000
_MOST_REQUESTS = 500
_CHUNK_BYTES = 4032  # with its seal, 4 KiB
_TIER_ROOM = "1GiB"
# What a tier has is loaded, however long it takes, so that two runs have the same hits.
_BASE: dict[str, Any] = {
    "version": 1, "namespace": "evaluate", "primary": {"capacity": "64MiB"}, "lookup_wait": "30s", "load_wait": "30s",
}  # fmt: skip


def try_it(
    evaluation: Evaluation, progress: Callable[[str, float], None], stop: threading.Event | None = None
) -> Trial | None:
    """Return what the stack did with the first requests; None: it was stopped, or no request is small enough."""
    requests = _first(evaluation.log.workload.requests)
    if not requests:
        return None
    workload = replace(evaluation.log.workload, requests=requests)
    trace = PlanTrace(workload)
    # A primary that is too small for all of it, so that the tier takes part.
    primary = max(workload.longest * 4, trace.unique // 4)
    with _config() as (config, tier):
        tiers = (PlanTier(tier),) if tier else ()
        options = ReplayOptions(_CHUNK_BYTES, primary_chunks=primary, prefill_speed=evaluation.question.prefill_speed)
        found = replay(
            config, workload, options, stop=stop,
            progress=lambda done: progress("replaying the first requests", done.requests / len(requests)),
        )  # fmt: skip
    if found.interrupted:
        return None
    planned = simulate(trace, PlanCase(primary, tiers=tiers, budgets=config.budgets))
    rate = found.prefix_hits / max(1, found.references)
    return Trial(found.requests, found.seconds, rate, planned.rate, found.wrong_bytes, found.stalls.p99, tier, primary)


def _first(requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    """Return the first requests that have no more than the trial's chunks together."""
    found: list[ReplayRequest] = []
    seen: set[bytes] = set()
    for request in requests:
        seen.update(request.block_hashes)
        if len(seen) > _MOST_CHUNKS or len(found) >= _MOST_REQUESTS:
            break
        found.append(request)
    return found if any(request.block_hashes for request in found) else []


@contextlib.contextmanager
def _config() -> Iterator[tuple[OffloadConfig, str]]:
    """Give a config with a directory that ends with the block, or with memory, or with no tier, as installed."""
    with tempfile.TemporaryDirectory(prefix="kvtiers-evaluate-") as folder:
        room = {"capacity": _TIER_ROOM, "exists_ttl": "200ms"}
        tiers: list[dict[str, Any]] = [
            {"type": "fs", "path": str(Path(folder) / "tier"), "min_free": 0, **room},
            {"type": "memory", "io": "thread", **room},
        ]
        yield next((found for tier in tiers if (found := _with(tier)) is not None), (load_config(_BASE), ""))


def _with(tier: dict[str, Any]) -> tuple[OffloadConfig, str] | None:
    """Return a config with this tier, and the tier's name; None: its type is not installed."""
    try:
        return load_config(_BASE | {"secondary": [tier]}), str(tier["type"])
    except ConfigError:
        return None
