"""What vLLM calls at the start of each of its processes: make every installed tier known under ``kvtiers-<type>``.

Nothing is imported but vLLM's registry, which it has imported itself; tiers are loaded when a config names them.
"""

import logging

from kvtiers.integrations.vllm.options import PREFIX
from kvtiers.plugins import installed_tiers

__all__ = ["register"]

_log = logging.getLogger("kvtiers.vllm")
_MODULE = "kvtiers.integrations.vllm.tier"


def register() -> None:
    """Register all tiers. Never raises: a vLLM that does not use kvtiers must not notice it."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        _log.info("this vLLM has no tiers that kvtiers could be: %s", error)
        return
    _log_like_vllm()
    for name in dict.fromkeys(entry.name for entry in installed_tiers()):
        try:
            SecondaryTierFactory.register_tier(f"{PREFIX}{name}", _MODULE, "KvtiersTier")
        except ValueError:  # vLLM loads its plugins more than once in a process
            continue
        except Exception as error:  # noqa: BLE001 -- a registry of another shape: no tier, but an engine
            _log.warning("%s%s cannot be registered with this vLLM: %s", PREFIX, name, error)


def _log_like_vllm() -> None:
    """Write kvtiers' lines where vLLM writes its own, unless somebody has set up logging otherwise."""
    ours, theirs = logging.getLogger("kvtiers"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
