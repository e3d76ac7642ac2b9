"""Which weights an engine has: its version of them, and the calls of vLLM's that change them in place.

::

    reload_weights(), update_weights(...)                        weights without a name: nobody else has their KV
    finish_weight_update(version), update_weight_version(...)    those that are called so
    reset_prefix_cache(...)                                      vLLM's own cache has nothing of the ones before
"""

import secrets
from functools import wraps
from typing import Any

from kvtiers.api import StartError

__all__ = ["WeightUpdates"]

_CHANGES = {
    "reload_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
}
"""What vLLM has its workers do to their weights, by the names in its ``collective_rpc``."""


class WeightUpdates:
    """Follows what changes the weights. ``core``: vLLM's engine core; None, where it was not found: StartError."""

    def __init__(self, core: Any, vllm_version: str) -> None:
        if core is None:
            raise StartError(
                f"vLLM {vllm_version} builds KvtiersOffloadingSpec outside of its engine core: weights that are "
                "updated in place would go unseen; use kvtiers' tiers under vLLM's own tiering, and report this"
            )
        self._core = core
        self._unnamed = ""
        self.resets = 0
        """How often vLLM has emptied its own prefix cache."""
        call, name, reset = core.collective_rpc, core.set_weight_version, core.reset_prefix_cache

        @wraps(call)  # a served engine turns a client's message into arguments by the signature
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(method, str) and method in _CHANGES:
                self._unnamed = f"+{secrets.token_hex(16)}"
            return call(method, *args, **kwargs)

        @wraps(name)
        def set_weight_version(version: str) -> None:
            name(version)
            self._unnamed = ""

        @wraps(reset)
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            done = reset(*args, **kwargs)
            self.resets += bool(done)
            return done

        core.collective_rpc, core.set_weight_version = collective_rpc, set_weight_version
        core.reset_prefix_cache = reset_prefix_cache

    def version(self) -> str:
        """Return what stands for the weights of now; another one after each change."""
        return f"{self._core.get_weight_version()}{self._unnamed}"
