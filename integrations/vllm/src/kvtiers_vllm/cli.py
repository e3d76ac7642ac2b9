"""``kvtiers vllm-config``: a checked config as vLLM's argument for its tiers, or for the whole stack."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig, load_config, read_config
from kvtiers.config.models import BudgetConfig, PrimaryConfig
from kvtiers.config.yaml_text import parse_yaml
from kvtiers.plugins import load_tier
from kvtiers_vllm.own_tiering.options import OPTIONS_KEY, load_tier_options
from kvtiers_vllm.own_tiering.tier_names import PREFIX, policy_name
from kvtiers_vllm.stack.options import CONFIG_KEY, CONNECTOR_NAME, load_stack_config

__all__ = ["NO_CONFIG", "stack_config", "transfer_config", "vllm_config"]

NO_CONFIG = "no-config:see-the-error-of-kvtiers-vllm-config"
"""Printed instead of a config: vLLM reads an empty argument as "no connector", and refuses this one."""


@click.command(
    "vllm-config",
    epilog="""\b
Examples:
  kvtiers vllm-config tiers.yaml                 an argument to paste after 'vllm serve MODEL'
  config=$(kvtiers vllm-config tiers.yaml --json) && vllm serve MODEL --kv-transfer-config "$config"
  kvtiers vllm-config tiers.yaml --whole-stack   kvtiers' own primary and manager in vLLM, not its tiers alone

Secrets stay out: what is written as ${NAME} or as {file: PATH} is passed on like that, and read by the engine.
The whole stack needs no argument: KVTIERS_CONFIG=tiers.yaml vllm serve MODEL.
Exit status: 0, or 2 if vLLM cannot have an option of the file; the output then is no config, and vLLM refuses it.""",
)
@click.argument("file", type=click.Path())
@click.option(
    "--blocks-per-chunk", type=click.IntRange(1, 64), help="vLLM's blocks that are stored as one value. [default: 1]"
)
@click.option("--whole-stack", is_flag=True, help="For kvtiers' own manager and primary, which read FILE themselves.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON object alone, without the option's name.")
def vllm_config(file: str, blocks_per_chunk: int | None, whole_stack: bool, as_json: bool) -> None:
    """Print FILE as vLLM's --kv-transfer-config."""
    try:
        text = json.dumps(_config_of(file, blocks_per_chunk, whole_stack=whole_stack))
    except Exception:
        click.echo(NO_CONFIG)
        raise
    click.echo(text if as_json else f"--kv-transfer-config {shlex.quote(text)}")


def _config_of(file: str, blocks_per_chunk: int | None, *, whole_stack: bool) -> dict[str, Any]:
    config = load_config(file)
    document = parse_yaml(read_config(file))
    assert isinstance(document, Mapping), "load_config has said so"
    try:
        if whole_stack:
            return stack_config(Path(file), blocks_per_chunk)
        return transfer_config(config, document, blocks_per_chunk)
    except ConfigError as error:
        raise ConfigError([f"{file}: {problem}" for problem in error.problems]) from None


def transfer_config(
    config: OffloadConfig, document: Mapping[Any, Any], blocks_per_chunk: int | None = None
) -> dict[str, Any]:
    """Return vLLM's config for these tiers. ``document``: the same config as it is written, with its variables.

    ConfigError with one line for every option that vLLM's own tiering does not have.
    """
    problems = _primary_problems(config) + _tier_problems(config)
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": config.primary.capacity,
        "eviction_policy": policy_name(config.primary.eviction),
    }
    tiers = [dict(entry) for entry in document.get("secondary") or ()]
    extra["secondary_tiers"] = [
        entry | {"type": f"{PREFIX}{tier.type}"} for entry, tier in zip(tiers, config.secondary, strict=True)
    ]
    extra[OPTIONS_KEY] = {
        "namespace": config.namespace,
        "lookup_wait": _milliseconds(config.lookup_wait),
        "load_wait": config.load_wait if config.load_wait == "auto" else _milliseconds(config.load_wait),
    }
    if config.tenants is not None:
        extra[OPTIONS_KEY]["tenants"] = dict(document.get("tenants") or {})
    if config.encryption is not None:
        extra[OPTIONS_KEY]["encryption"] = document["encryption"]
    if config.model is not None and config.model.revision:
        extra[OPTIONS_KEY]["weights"] = config.model.revision
    for entry in extra["secondary_tiers"]:
        try:
            load_tier_options(entry["type"], {k: v for k, v in entry.items() if k != "type"}, extra)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _connector(extra, blocks_per_chunk)


def stack_config(file: Path, blocks_per_chunk: int | None = None) -> dict[str, Any]:
    """Return vLLM's config for kvtiers' own manager and primary, which read this file when the engine starts."""
    extra = {CONFIG_KEY: str(file.resolve())}
    load_stack_config(extra)
    return _connector(extra, blocks_per_chunk, CONNECTOR_NAME)


def _connector(
    extra: dict[str, Any], blocks_per_chunk: int | None, name: str = "OffloadingConnector"
) -> dict[str, Any]:
    if blocks_per_chunk is not None:
        extra["blocks_per_chunk"] = blocks_per_chunk
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:g}ms"


def _primary_problems(config: OffloadConfig) -> list[str]:
    """Return the options of the primary that vLLM's own does not have."""
    problems = [
        f"primary.{name}: vLLM's own primary has no such option; leave it out"
        for name, field in PrimaryConfig.model_fields.items()
        if name not in {"capacity", "eviction"} and getattr(config.primary, name) != field.default
    ]
    if config.budgets != BudgetConfig():
        problems.append("budgets: vLLM's own primary has none; leave them out")
    problems += [
        f"{name}: vLLM's own tiering has no such bound; leave it out"
        for name in ("clean_reserve",)
        if getattr(config, name) != OffloadConfig.model_fields[name].default
    ]
    if config.model is not None:
        given = config.model.identity().keys() - {"name", "weights"}
        problems += [f"model.{name}: the engine sets it; remove it" for name in sorted(given)]
    return problems


def _tier_problems(config: OffloadConfig) -> list[str]:
    return [
        f"secondary[{index}] ({tier.type}): such a tier moves rows by itself, and vLLM's rows have no room for a seal"
        for index, tier in enumerate(config.secondary)
        if load_tier(tier.type).kind != "store"
    ]
