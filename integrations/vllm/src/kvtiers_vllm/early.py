"""Early checks: a primary tier that does not fit the machine is refused before vLLM loads a model.

The memory is taken when vLLM builds its scheduler, minutes later and in another process, whose failure fills the log.
The sizes are known as soon as vLLM has made its config from its arguments, so the same sum is checked there.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["refuse_large_primary"]

_log = logging.getLogger("kvtiers.vllm")
_CONFIG_KEY = "kvtiers_config"


def refuse_large_primary(vllm_config: Any, problem_with: Callable[[int], str | None] | None = None) -> None:
    """Raise StartError, and log it in one line, if the whole stack's primaries do not fit this machine.

    ``vllm_config``: vLLM's. Problems of kvtiers' own config are reported where it is read for use.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None)
    given = extra.get(_CONFIG_KEY) if isinstance(extra, Mapping) else None
    if not given:
        return
    # Imported here: every process of every vLLM has this module, and few get as far as this.
    from kvtiers.api import StartError
    from kvtiers.config import load_config
    from kvtiers.region.limits import memory_problem

    try:
        primary = load_config(given).primary
    except Exception:  # noqa: BLE001 -- as above
        return
    if primary.huge_pages != "off":  # these are counted apart
        return
    engines = max(1, int(getattr(vllm_config.parallel_config, "data_parallel_size_local", 1) or 1))
    if problem := (problem_with or memory_problem)(primary.capacity * engines):
        of = "" if engines == 1 else f", for {engines} engines on this machine"
        text = f"primary.capacity{of}: {problem}"
        _log.error("kvtiers: %s", text)
        raise StartError(text)
