"""The memory of an engine's primary, begun before its model is loaded; the spec takes it when it opens the manager."""

import logging
import weakref
from typing import TYPE_CHECKING, Any

from kvtiers._failures import plugin_boundary
from kvtiers_vllm.stack.options import CONNECTOR_NAME, load_stack_config

if TYPE_CHECKING:
    from kvtiers.region.early_memory import EarlyMemory

__all__ = ["begin_memory_of", "take_memory_of"]

_log = logging.getLogger("kvtiers.vllm")
_memories: "dict[int, EarlyMemory]" = {}
"""By the identity of the engine's VllmConfig; given back when that goes."""


def begin_memory_of(vllm_config: Any) -> None:
    """Begin to populate the primary of an engine with ``KvtiersConnector``. Never raises: the start says what is wrong.

    On the thread that builds the engine core, which lives as long as the engine.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector != CONNECTOR_NAME or id(vllm_config) in _memories:
        return
    with plugin_boundary() as begun:
        from kvtiers.runtime import begin_memory  # late: most processes of vLLM's have no use for it

        config, _ = load_stack_config(transfer.kv_connector_extra_config)
        memory = begin_memory(config, f"kvtiers-{transfer.engine_id}")
        if memory is not None:
            _memories[id(vllm_config)] = memory
            weakref.finalize(vllm_config, _give_back, id(vllm_config))
    if begun.error:
        _log.debug("memory is not populated while the model loads: %s", begun.error)


def take_memory_of(vllm_config: Any) -> "EarlyMemory | None":
    """Return what was begun for this engine, once."""
    return _memories.pop(id(vllm_config), None)


def _give_back(key: int) -> None:
    memory = _memories.pop(key, None)
    if memory is not None:
        memory.close()
