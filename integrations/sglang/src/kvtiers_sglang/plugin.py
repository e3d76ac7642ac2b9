"""SGLang's plugin: turns HiCache on with kvtiers' backend where ``KVTIERS_CONFIG`` is set, by that alone.

::

    KVTIERS_CONFIG=tiers.yaml python -m sglang.launch_server --model-path MODEL

SGLang calls ``register`` in each of its processes before it reads arguments. Arguments that say where pages go
(``--hicache-storage-backend``) win.
"""

import json
import logging
import os
from typing import Any

from kvtiers.config import load_config
from kvtiers_sglang.options import VARIABLE, extra_config
from kvtiers_sglang.weight_updates import register_hooks

__all__ = ["prepare_arguments", "register"]

_log = logging.getLogger("kvtiers.sglang")
_ARGUMENTS = "sglang.srt.server_args.ServerArgs.resolve_once"  # its class calls no __post_init__ that is set later


def register() -> None:
    """Register the hooks. A server without ``KVTIERS_CONFIG`` and without the backend does not notice them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(VARIABLE):
        HookRegistry.register(_ARGUMENTS, prepare_arguments, HookType.BEFORE)
    register_hooks()


def prepare_arguments(arguments: Any, *_: Any, **__: Any) -> None:
    """Give a server's arguments the backend; ConfigError, before a model is loaded, if the config is wrong.

    Those that are resolved already are left alone, as a child process gets them.
    """
    path = os.environ.get(VARIABLE, "")
    if not path or getattr(arguments, "_resolution_finished", False):
        return
    if arguments.hicache_storage_backend is not None:
        _log.info("%s=%s is not used: --hicache-storage-backend is given, and wins", VARIABLE, path)
        return
    load_config(path)
    arguments.enable_hierarchical_cache = True
    arguments.hicache_storage_backend = "dynamic"
    arguments.hicache_storage_backend_extra_config = json.dumps(extra_config(path))
