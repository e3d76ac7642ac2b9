"""Weight versions: which weights an engine has, and the calls of vLLM's that change them in place.

::

    reload_weights(), update_weights(...)                        weights without a name: their KV is not shared
    finish_weight_update(version), update_weight_version(...)    weights of this version
    reset_prefix_cache(...)                                      vLLM's own cache holds no KV of earlier ones
"""

import secrets
from typing import Any

from kvtiers_vllm.engine import CoreLink

__all__ = ["WeightUpdates"]

_CHANGES = {
    "reload_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
}
"""The methods of vLLM's workers that change weights, by their names in ``collective_rpc``."""


class WeightUpdates:
    """Follows what changes the weights. ``core``: the link to vLLM's engine core."""

    def __init__(self, core: CoreLink) -> None:
        self._core = core
        self._unnamed = ""
        self.resets = 0
        """The number of times that vLLM has emptied its own prefix cache."""
        core.workers_called.append(self._called)
        core.weights_named.append(self._named)
        core.cache_reset.append(self._reset)

    def version(self) -> str:
        """Return the version of the current weights; another one after each change."""
        return f"{self._core.weights_version()}{self._unnamed}"

    def _called(self, method: Any) -> None:
        if isinstance(method, str) and method in _CHANGES:
            self._unnamed = f"+{secrets.token_hex(16)}"

    def _named(self) -> None:
        self._unnamed = ""

    def _reset(self) -> None:
        self.resets += 1
