"""The topology check: refuses engines whose ranks span hosts, where values would be partial."""

from typing import Any

from kvtiers.api import StartError
from kvtiers_vllm.engine import Engine

__all__ = ["refuse_several_hosts"]


def refuse_several_hosts(engine: Engine) -> None:
    """Raise StartError if the engine's ranks run on several machines. A data parallel replica counts as an engine."""
    parallel = getattr(engine.vllm_config, "parallel_config", None)
    if parallel is None:
        return
    placed = getattr(parallel, "placement_group", None)
    hosts = _hosts_of_group(placed) if placed is not None else _configured(parallel)
    if hosts > 1:
        raise StartError(
            f"the {parallel.world_size} ranks of this engine lie on {hosts} hosts, and each host has rows of its own: "
            "KV would come back in part; use kvtiers with engines of one host each"
        )


def _configured(parallel: Any) -> int:
    within = getattr(parallel, "nnodes_within_dp", None)
    return int(within if within is not None else getattr(parallel, "nnodes", 1))


def _hosts_of_group(group: Any) -> int:
    """Return on how many hosts Ray has placed the ranks, as vLLM itself asks it."""
    from ray.util import placement_group_table  # a placement group implies Ray

    return len(set(placement_group_table(group)["bundles_to_node_id"].values()))
