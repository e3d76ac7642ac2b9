"""An engine's arguments: what ``KVTIERS_CONFIG`` adds to them, and what is refused before a model is loaded.

``KVTIERS_CONFIG`` is the whole stack for every engine of a process, without an argument of vLLM's::

    KVTIERS_CONFIG=/etc/kvtiers/tiers.yaml vllm serve MODEL

An argument that says itself where KV goes (``--kv-transfer-config``, ``--kv-offloading-size``) wins. A config that is
wrong stops the start before a model is loaded. The spelling of the whole stack before ``KvtiersConnector`` is read as
the one of now, for one release.

A primary tier's memory is taken when vLLM builds its scheduler, minutes later and in another process, whose failure
fills the log. The sizes are known as soon as vLLM has made its config from its arguments, so the same sum is checked
there. And the types of the whole stack's tiers are noted in it, for the figures that each process makes of them.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvtiers._failures import plugin_boundary
from kvtiers.api import ConfigError, StartError
from kvtiers_vllm.own_tiering.tier_names import tier_names
from kvtiers_vllm.releases import require_whole_stack
from kvtiers_vllm.stack.options import (
    CONFIG_KEY,
    CONNECTOR_NAME,
    SPEC_NAME,
    VARIABLE,
    load_stack_config,
    note_tier_types,
)

__all__ = ["examine_config", "prepare_engine_args", "refuse_large_primary"]

_log = logging.getLogger("kvtiers.vllm")


def prepare_engine_args(args: Any, version: str) -> None:
    """Give an engine's arguments the connector that the environment asks for; ConfigError if its file is wrong.

    ``args``: vLLM's ``EngineArgs``, which is changed; ``version``: vLLM's.
    """
    _read_old_spelling(args.kv_transfer_config)
    path = os.environ.get(VARIABLE, "")
    if not path:
        return
    if args.kv_transfer_config is not None or getattr(args, "kv_offloading_size", None) is not None:
        if not _is_ours(args.kv_transfer_config, path):
            given = "--kv-transfer-config" if args.kv_transfer_config is not None else "--kv-offloading-size"
            _log.info("%s=%s is not used: %s is given, and wins", VARIABLE, path, given)
        return
    extra = {CONFIG_KEY: str(Path(path).absolute())}
    try:
        load_stack_config(extra)
    except ConfigError as error:
        raise ConfigError([f"{VARIABLE}: {problem}" for problem in error.problems]) from None
    require_whole_stack(version)
    args.kv_transfer_config = _transfer_config(extra)


def examine_config(vllm_config: Any) -> None:
    """Refuse primaries that do not fit, and record the types of the whole stack's tiers. ``vllm_config``: vLLM's."""
    refuse_large_primary(vllm_config)
    extra = getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_connector_extra_config", None)
    if isinstance(extra, dict):
        with plugin_boundary():  # problems of the config are reported where it is read for use
            note_tier_types(extra)


def refuse_large_primary(vllm_config: Any, problem_with: Callable[[int], str | None] | None = None) -> None:
    """Raise StartError, one line, if the primaries do not fit this machine.

    That is the whole stack's, and vLLM's own with kvtiers' tiers below it. ``vllm_config``: vLLM's. Problems of the
    config are reported where it is read for use.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None)
    if not isinstance(extra, Mapping):
        return
    with plugin_boundary() as reading:
        option, nbytes = _primary_of(extra)
    if reading.error or not nbytes:
        return
    # Imported here: every process of every vLLM has this module, and few get as far as this.
    from kvtiers.region.limits import memory_problem

    engines = max(1, int(getattr(vllm_config.parallel_config, "data_parallel_size_local", 1) or 1))
    problem_with = problem_with or partial(memory_problem, option=option)
    if problem := problem_with(nbytes * engines):
        of = "" if engines == 1 else f", for {engines} engines on this machine"
        raise StartError(f"{option}{of}: {problem}")


def _primary_of(extra: Mapping[str, Any]) -> tuple[str, int]:
    """Return the option that gives the size of an engine's primary, and its bytes; 0: none that is ours to check."""
    if given := extra.get(CONFIG_KEY):
        from kvtiers.config import load_config

        primary = load_config(given).primary
        # Huge pages are counted apart; with a pool this memory is taken only where the pool is not to be had.
        is_sure = primary.huge_pages == "off" and primary.pool is None
        return "primary.capacity", primary.capacity if is_sure else 0
    return "cpu_bytes_to_use", int(extra.get("cpu_bytes_to_use") or 0) if tier_names(extra) else 0


def _transfer_config(extra: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both", kv_connector_extra_config=extra)


def _is_ours(transfer_config: Any, path: str) -> bool:
    """Return whether these arguments were prepared before: vLLM makes a config of the same ones more than once."""
    extra = getattr(transfer_config, "kv_connector_extra_config", None) or {}
    return getattr(transfer_config, "kv_connector", None) == CONNECTOR_NAME and extra.get(CONFIG_KEY) == str(
        Path(path).absolute()
    )


def _read_old_spelling(transfer_config: Any) -> None:
    """Rewrite a config that names the spec under vLLM's own connector to name kvtiers' connector."""
    extra = getattr(transfer_config, "kv_connector_extra_config", None) or {}
    if getattr(transfer_config, "kv_connector", None) == "OffloadingConnector" and extra.get("spec_name") == SPEC_NAME:
        transfer_config.kv_connector = CONNECTOR_NAME
        _log.warning(
            'kv_connector "OffloadingConnector" with spec_name %r is the old spelling of kv_connector %r, and is read '
            "as that for this release; write the new one (kvtiers vllm-config --whole-stack)",
            SPEC_NAME,
            CONNECTOR_NAME,
        )
