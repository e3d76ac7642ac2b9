"""The two ways in: the config that puts tiers under an engine, by vLLM's own tiering or by the whole stack."""

from pathlib import Path
from typing import Any

PATIENT = {"lookup_wait": "30s", "load_wait": "60s"}
"""Waits of an engine: longer than the defaults, since a busy machine is to cost time here, not hits."""
DEFAULT: dict[str, Any] = {}
"""Those of an engine whose config says nothing of them."""


def tiers(
    *secondary: dict[str, Any], waits: dict[str, Any] = PATIENT, options: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return vLLM's kv_connector_extra_config for its own tiering, with these tiers."""
    common = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_spec",
        "cpu_bytes_to_use": 64 << 20,
        "kvtiers": waits | (options or {}),
    }
    named = [tier | {"type": f"kvtiers-{tier['type']}"} for tier in secondary]
    return common | {"secondary_tiers": named} | more


def whole_stack(
    *secondary: dict[str, Any], waits: dict[str, Any] = PATIENT, options: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return vLLM's kv_connector_extra_config for kvtiers' own manager, primary and workers, over these tiers.

    A chunk is one block: the prompts of these tests are short.
    """
    config = {"version": 1, "primary": {"capacity": "64MiB"}, "secondary": list(secondary)} | waits | (options or {})
    return {"kvtiers_config": config, "blocks_per_chunk": 1} | more


def fs(path: Path, **more: Any) -> dict[str, Any]:
    """Return a tier in a directory."""
    return {"type": "fs", "path": str(path), "capacity": "1GiB", "required": True} | more
