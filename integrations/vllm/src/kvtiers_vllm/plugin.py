"""What vLLM calls at the start of each of its processes: make kvtiers known by its short names.

Every installed tier is registered as ``kvtiers-<type>``, the whole stack as ``KvtiersOffloadingSpec``. Nothing is
imported but vLLM's registries, which it has imported itself; the rest is loaded when a config names it.
"""

import logging
from collections.abc import Callable

from kvtiers.plugins import installed_tiers
from kvtiers_vllm.early import follow_engine_args
from kvtiers_vllm.own_tiering.options import PREFIX

__all__ = ["register"]

_log = logging.getLogger("kvtiers.vllm")
_TIERS = "kvtiers_vllm.own_tiering.tier"
_SPEC = "kvtiers_vllm.stack.spec"


def register() -> None:
    """Register all tiers and the whole stack. Never raises: a vLLM that does not use kvtiers must not notice it."""
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        _log.info("this vLLM has no tiers that kvtiers could be: %s", error)
        return
    _log_like_vllm()
    for name in dict.fromkeys(entry.name for entry in installed_tiers()):
        _register(SecondaryTierFactory.register_tier, f"{PREFIX}{name}", _TIERS, "KvtiersTier")
    _register(OffloadingSpecFactory.register_spec, "KvtiersOffloadingSpec", _SPEC, "KvtiersOffloadingSpec")
    follow_engine_args()


def _register(registry: Callable[[str, str, str], None], name: str, module: str, kind: str) -> None:
    try:
        registry(name, module, kind)
    except ValueError:  # vLLM loads its plugins more than once in a process
        return
    except Exception as error:  # noqa: BLE001 -- a registry of another shape: nothing of ours, but an engine
        _log.warning("%s cannot be registered with this vLLM: %s", name, error)


def _log_like_vllm() -> None:
    """Write kvtiers' lines where vLLM writes its own, unless somebody has set up logging otherwise.

    By a parent and not by vLLM's handlers: releases from 0.32 on have none yet when they load plugins.
    """
    ours = logging.getLogger("kvtiers")
    if not (ours.handlers or logging.getLogger().handlers):
        ours.parent = logging.getLogger("vllm")
