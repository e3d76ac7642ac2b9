"""The compatibility layer: all functions of vLLM's that kvtiers wraps, since vLLM has no interface for them.

=====================================  ================================================================================
wrapped                                for
=====================================  ================================================================================
EngineCore.preprocess_add_request      requests as they arrive, on vLLM's input thread: tiers are probed ahead
EngineCore.add_lora                    adapters that are loaded without a request: their files are digested before
EngineCore.collective_rpc              weights that change in place
EngineCore.set_weight_version          the version of the weights from then on
EngineCore.reset_prefix_cache          vLLM's own prefix cache holds no KV of other weights any more
EngineCoreProc.run_busy_loop           the core, from its start: it can be woken for a command before its first request
OffloadingConnectorScheduler           after a reset requests that run offer no window again (``reset_cache``)
KVConnectorFactory.create_connector    the VllmConfig for tiers under vLLM's own tiering, which vLLM does not pass
EngineArgs.create_engine_config        KVTIERS_CONFIG, and configs in the spelling before ``KvtiersConnector``
Executor.__init__                      the primary's memory is populated while the model loads
=====================================  ================================================================================

Each is wrapped on its class, once a process, by a function of the same signature, and every core's calls reach its
link. ``check`` compares the real functions with the expected parameters: a release of vLLM on
which it would not work is refused at the start, in one line. The two functions of the start are wrapped before it is
known whether an engine is to use kvtiers: one that is not gets a warning, one that is is refused when its connector or
its tiers are made (``refuse_unwrapped``). kvtiers replaces no other function.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvtiers.api import StartError
from kvtiers_vllm.engine import CoreLink, Engine, being_built
from kvtiers_vllm.start_problems import logged_first

__all__ = [
    "CONNECTOR", "CORE", "check", "follow_core", "note_unwrapped", "refuse_unwrapped", "wrap_core", "wrap_engine_args",
    "wrap_executor", "wrap_factory", "wrap_offloading",
]  # fmt: skip

_MARK = "_kvtiers_wraps"
_LOOP = "run_busy_loop"
_Wrapper = Callable[..., Any]

CORE = {
    "preprocess_add_request": ("self", "request"),
    "add_lora": ("self", "lora_request"),
    "collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "set_weight_version": ("self", "weight_version"),
    "get_weight_version": ("self",),
    "reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
}
"""The parameters of what kvtiers wraps or calls of ``EngineCore``, the same in every release that it supports."""
CONNECTOR = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "on_new_request": ("self", "request"),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "bind_connector_metadata": ("self", "connector_metadata"),
    "update_connector_output": ("self", "connector_output"),
    "build_connector_worker_meta": ("self",),
    "get_transfer_results": ("self", "finished_req_ids"),
    "get_block_ids_with_load_errors": ("self",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
}
"""The same of ``OffloadingConnector``, whose methods ``KvtiersConnector`` extends."""
_FACTORY = {"create_connector": ("config", "role", "kv_cache_config")}
_ENGINE_ARGS = {"create_engine_config": ("self", "usage_context", "headless")}
_EXECUTOR = {"__init__": ("self", "vllm_config")}

_unwrapped: list[str] = []
"""Why functions of vLLM's start could not be wrapped in this process; empty if they are."""
_by_config: weakref.WeakValueDictionary[int, CoreLink] = weakref.WeakValueDictionary()
"""Links by the identity of their config, which a link keeps alive."""
_by_core: weakref.WeakKeyDictionary[Any, CoreLink] = weakref.WeakKeyDictionary()


def check(owner: type, expected: Mapping[str, tuple[str, ...]], version: str, *, sets: Iterable[str] = ()) -> None:
    """Raise StartError, one line, if a class of vLLM's is not the one that kvtiers was written for.

    ``expected``: parameters by function. ``sets``: attributes that its constructor sets or reads.
    """
    problems = [
        f"{owner.__name__}.{name} takes ({', '.join(found)}), expected ({', '.join(parameters)})"
        for name, parameters in expected.items()
        if (found := _parameters(owner, name)) != parameters
    ]
    known = inspect.unwrap(vars(owner)["__init__"]).__code__.co_names if sets else ()
    problems += [f"{owner.__name__} has no {name}" for name in sets if name not in known]
    problems += [
        f"{kind.__name__}.{name} replaces {owner.__name__}.{name}"
        for kind in _descendants(owner)
        if kind.__module__ == owner.__module__
        for name in expected
        if name != "__init__" and name in vars(kind)
    ]
    if problems:
        raise _refusal(version, "; ".join(problems))


def _refusal(version: str, problem: str) -> StartError:
    return StartError(
        f"kvtiers does not work with vLLM {version}: {problem}; "
        "use another release of vLLM or of kvtiers, and report this"
    )


def note_unwrapped(problem: str) -> None:
    """Record that a function of vLLM's start could not be wrapped, and why."""
    if problem not in _unwrapped:
        _unwrapped.append(problem)


def refuse_unwrapped() -> None:
    """Raise StartError, one line, if a function of vLLM's start could not be wrapped: for engines that use kvtiers."""
    if _unwrapped:
        raise StartError("; ".join(_unwrapped))


def wrap_core(core: type, version: str) -> None:
    """Make the calls of every engine core reach its link. ``core``: the class; StartError: they would not."""
    check(core, CORE, version, sets=("vllm_config", "scheduler"))
    for name, make in _CORE_WRAPPERS.items():
        _wrap(core, name, make)
    for kind in _descendants(core):  # a core in the caller's own process has no loop
        if kind.__module__ == core.__module__ and _LOOP in vars(kind):
            _wrap(kind, _LOOP, _seen_first)


def wrap_offloading(scheduler: Any, state: Any, version: str) -> None:
    """Have running requests offer no block of a sliding window a second time after ``reset_cache``.

    vLLM makes them offer all their blocks again. A block that the window has moved past may belong to another request
    by then, and vLLM checks only blocks that were not offered before. ``scheduler``: ``OffloadingConnectorScheduler``;
    ``state``: ``RequestGroupState``, what it keeps of a request's KV group.
    """
    check(scheduler, {"reset_cache": ("self",)}, version, sets=("config", "_req_status"))
    if "next_stored_chunk_idx" not in state.__annotations__:
        raise _refusal(version, f"{state.__name__} has no next_stored_chunk_idx")
    _wrap(scheduler, "reset_cache", _reset_cache)


def follow_core(engine: Engine, version: str) -> CoreLink:
    """Return the link to the core of an engine that is being built. StartError: its calls would go unseen."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestGroupState,
    )
    from vllm.v1.engine.core import EngineCore

    refuse_unwrapped()
    wrap_core(EngineCore, version)
    wrap_offloading(OffloadingConnectorScheduler, RequestGroupState, version)
    if engine.vllm_config is None:
        return CoreLink()
    key = id(engine.vllm_config)
    link = _by_config.get(key)
    if link is None:
        link = _by_config[key] = CoreLink(engine.vllm_config)
    return link


def wrap_factory(factory: Any, version: str) -> None:
    """Make vLLM's factory build connectors with their configs available. ``factory``: ``KVConnectorFactory``."""
    check(factory, _FACTORY, version)
    create = vars(factory)["create_connector"].__func__
    if hasattr(create, _MARK):
        return

    @functools.wraps(create)
    def create_connector(cls: Any, config: Any, role: Any, kv_cache_config: Any) -> Any:
        with being_built(Engine(config, kv_cache_config)):
            return create(cls, config, role, kv_cache_config)

    setattr(create_connector, _MARK, True)
    factory.create_connector = classmethod(create_connector)


def wrap_engine_args(
    engine_args: Any, prepare: Callable[[Any], None], examine: Callable[[Any], None], version: str
) -> None:
    """Call ``prepare`` with the arguments of each engine, and ``examine`` with the config made from them.

    ``engine_args``: the class. What either raises stops the start, before a model is loaded, and is logged first.
    """
    check(engine_args, _ENGINE_ARGS, version)

    def make(create: _Wrapper) -> _Wrapper:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            with logged_first():
                prepare(self)
            config = create(self, *args, **kwargs)
            with logged_first():
                examine(config)
            return config

        return create_engine_config

    _wrap(engine_args, "create_engine_config", make)


def wrap_executor(executor: Any, begins: Callable[[Any], None], version: str) -> None:
    """Call ``begins`` with each engine's config before its executor loads the model. ``executor``: ``Executor``."""
    check(executor, _EXECUTOR, version)

    def make(init: _Wrapper) -> _Wrapper:
        def __init__(self: Any, vllm_config: Any) -> None:  # noqa: N807 -- the function that it replaces
            begins(vllm_config)
            init(self, vllm_config)

        return __init__

    _wrap(executor, "__init__", make)


def _link(core: Any) -> CoreLink | None:
    """Return the link of this core; None if it has none."""
    link = _by_core.get(core)
    if link is None:
        link = _by_config.get(id(getattr(core, "vllm_config", None)))
        if link is not None:
            link.attach(core)
            _by_core[core] = link
    return link


def _seen_first(call: _Wrapper) -> _Wrapper:
    def seen_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        _link(self)
        return call(self, *args, **kwargs)

    return seen_first


def _preprocess_add_request(prepare: _Wrapper) -> _Wrapper:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        prepared = prepare(self, request)
        link = _link(self)
        if link is not None:
            link.sees_requests = True
            for arrived in link.request_arrived:
                arrived(prepared[0])
        return prepared

    return preprocess_add_request


def _add_lora(add: _Wrapper) -> _Wrapper:
    def add_lora(self: Any, lora_request: Any) -> Any:
        link = _link(self)
        if link is not None:
            for loads in link.adapter_loads:
                loads(lora_request)
        return add(self, lora_request)

    return add_lora


def _collective_rpc(call: _Wrapper) -> _Wrapper:
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        link = _link(self)
        if link is not None:
            for called in link.workers_called:
                called(method)
        return call(self, method, *args, **kwargs)

    return collective_rpc


def _set_weight_version(name: _Wrapper) -> _Wrapper:
    def set_weight_version(self: Any, weight_version: Any) -> Any:
        done = name(self, weight_version)
        link = _link(self)
        if link is not None:
            for named in link.weights_named:
                named()
        return done

    return set_weight_version


def _reset_prefix_cache(reset: _Wrapper) -> _Wrapper:
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = reset(self, *args, **kwargs)
        link = _link(self) if done else None
        if link is not None:
            for was_reset in link.cache_reset:
                was_reset()
        return done

    return reset_prefix_cache


def _reset_cache(reset: _Wrapper) -> _Wrapper:
    def reset_cache(self: Any) -> Any:
        offered = [
            (state, state.next_stored_chunk_idx)
            for status in self._req_status.values()
            for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True)
            if group.sliding_window_size_in_chunks is not None
        ]
        done = reset(self)
        for state, chunks in offered:
            state.next_stored_chunk_idx = chunks
        return done

    return reset_cache


_CORE_WRAPPERS = {
    "preprocess_add_request": _preprocess_add_request,
    "add_lora": _add_lora,
    "collective_rpc": _collective_rpc,
    "set_weight_version": _set_weight_version,
    "reset_prefix_cache": _reset_prefix_cache,
}


def _wrap(owner: type, name: str, make: Callable[[_Wrapper], _Wrapper]) -> None:
    original = vars(owner)[name]
    if not hasattr(original, _MARK):
        # vLLM decodes a client's message by the function's signature, so the wrapper keeps it.
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)


def _parameters(owner: type, name: str) -> tuple[str, ...]:
    function = getattr(owner, name, None)
    return ("nothing: it is not there",) if function is None else tuple(inspect.signature(function).parameters)


def _descendants(owner: type) -> Iterator[type]:
    kinds: list[type] = owner.__subclasses__()
    for kind in kinds:
        yield kind
        yield from _descendants(kind)
