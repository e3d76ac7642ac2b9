"""vLLM's general plugin: registers kvtiers in each of vLLM's processes at its start.

Every installed tier is registered as ``kvtiers-<type>``, every eviction policy that vLLM has not as ``kvtiers-<name>``,
the whole stack as the connector ``KvtiersConnector``. Nothing is imported but vLLM's registries, its arguments and its
executor; the rest is loaded when a config names it. The functions of vLLM's start that kvtiers wraps (``compat``) are
wrapped here.
"""

import contextlib
import logging
import os
from collections.abc import Callable

from kvtiers._failures import plugin_boundary
from kvtiers.api import StartError
from kvtiers.plugins import EVICTION_GROUP, installed_names, installed_tiers
from kvtiers_vllm import compat
from kvtiers_vllm.engine_args import examine_config, prepare_engine_args
from kvtiers_vllm.own_tiering.tier_names import PREFIX
from kvtiers_vllm.stack.memory import begin_memory_of
from kvtiers_vllm.stack.options import CONNECTOR_NAME, SPEC_NAME, VARIABLE

__all__ = ["register"]

_log = logging.getLogger("kvtiers.vllm")
_TIERS = "kvtiers_vllm.own_tiering.tier"
_POLICIES = "kvtiers_vllm.own_tiering.cache_policy"
_SPEC = "kvtiers_vllm.stack.spec"
_CONNECTOR = "kvtiers_vllm.stack.connector"


def register() -> None:
    """Register all tiers, eviction policies, and the whole stack.

    Raises only where ``KVTIERS_CONFIG`` is set and cannot be followed: a vLLM that does not use kvtiers must not notice
    it, and one that is to use it must not serve without. One that is to use it by an argument is refused when that is
    read (``compat.refuse_unwrapped``).
    """
    wanted = bool(os.environ.get(VARIABLE))
    try:
        from vllm import __version__ as version
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        if wanted:
            raise StartError(f"{VARIABLE} is set, but this vLLM has no place for kvtiers: {error}") from error
        _log.info("kvtiers is not registered, since this vLLM has no tiers: %s", error)
        return
    _log_like_vllm()
    for name in dict.fromkeys(entry.name for entry in installed_tiers()):
        _register(SecondaryTierFactory.register_tier, f"{PREFIX}{name}", _TIERS, "KvtiersTier")
    _register_policies()
    _register(OffloadingSpecFactory.register_spec, SPEC_NAME, _SPEC, SPEC_NAME)
    _register(KVConnectorFactory.register_connector, CONNECTOR_NAME, _CONNECTOR, CONNECTOR_NAME)
    _wrap(lambda: compat.wrap_factory(KVConnectorFactory, version))
    _wrap(lambda: _follow_engine_args(version), wanted=wanted)
    _begin_memory_early(version)


def _register_policies() -> None:
    """Register eviction policies, where vLLM calls its own with what a whole request has used: from 0.31 on."""
    try:
        from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
        from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    except ImportError:
        return
    if hasattr(CachePolicy, "on_request_finished"):
        for name in installed_names(EVICTION_GROUP):
            _register(CachePolicyFactory.register_cache_policy, f"{PREFIX}{name}", _POLICIES, name)


def _follow_engine_args(version: str) -> None:
    """Make engines of this process follow the environment, and the old spelling."""
    from vllm.engine.arg_utils import EngineArgs

    compat.wrap_engine_args(EngineArgs, lambda args: prepare_engine_args(args, version), examine_config, version)


def _begin_memory_early(version: str) -> None:
    """Make engines of this process populate their primary's memory while they load the model."""
    with plugin_boundary() as wrapping:
        from vllm.v1.executor.abstract import Executor

        compat.wrap_executor(Executor, begin_memory_of, version)
    if wrapping.error:
        _log.info("the primary's memory is populated when the model has been loaded: %s", wrapping.error)


def _wrap(wrap: Callable[[], None], *, wanted: bool = False) -> None:
    try:
        wrap()
    except Exception as error:
        if wanted:
            raise
        compat.note_unwrapped(str(error))
        _log.warning("%s", error)


def _register(registry: Callable[[str, str, str], None], name: str, module: str, kind: str) -> None:
    # ValueError: vLLM loads its plugins more than once in a process. Anything else: a registry of another shape.
    with plugin_boundary() as registering, contextlib.suppress(ValueError):
        registry(name, module, kind)
    if registering.error:
        _log.warning("%s cannot be registered with this vLLM: %s", name, registering.error)


def _log_like_vllm() -> None:
    """Write kvtiers' lines where vLLM writes its own, unless logging was configured otherwise.

    By a parent and not by vLLM's handlers: releases from 0.32 on have none yet when they load plugins.
    """
    ours = logging.getLogger("kvtiers")
    if not (ours.handlers or logging.getLogger().handlers):
        ours.parent = logging.getLogger("vllm")
