"""The vLLM engine that is being built, and the link to its core.

vLLM's factories build a spec and its tiers from an ``OffloadingConfig``, which names neither weights nor quantisation.
The ``VllmConfig`` that it was made from is handed down beside it, by a context variable that the connector's
constructor sets (``being_built``).
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

__all__ = ["INITIAL_WEIGHTS", "CoreLink", "Engine", "being_built", "engine_being_built"]

INITIAL_WEIGHTS = "default"
"""The version of its weights with which every engine core of vLLM's starts."""


@dataclass(eq=False)
class CoreLink:
    """A link to one engine core: callbacks at its calls (``compat`` wraps them). ``vllm_config``: the core's own.

    ``request_arrived`` gets each request as vLLM has prepared it, on vLLM's input thread. ``adapter_loads`` gets vLLM's
    request to load an adapter, before it does; ``workers_called`` the method that all workers are about to run;
    ``weights_named`` and ``cache_reset`` come after the call.
    """

    vllm_config: Any = None
    request_arrived: list[Callable[[Any], None]] = field(default_factory=list)
    adapter_loads: list[Callable[[Any], None]] = field(default_factory=list)
    workers_called: list[Callable[[Any], None]] = field(default_factory=list)
    weights_named: list[Callable[[], None]] = field(default_factory=list)
    cache_reset: list[Callable[[], None]] = field(default_factory=list)
    sees_requests: bool = False
    """Whether a request has been seen as the core took it in: a core that is attached may have a function of its own
    in the place of a wrapped one."""
    _core: Callable[[], Any] = lambda: None

    def attach(self, core: Any) -> None:
        """Record the core: at the start of its loop, or at its first call."""
        self._core = weakref.ref(core)

    def is_idle(self) -> bool:
        """Return whether the engine has begun no request that it could go on with; in a pass, none in it either."""
        running = getattr(getattr(self._core(), "scheduler", None), "running", None)
        return running is not None and not running

    def is_ending(self) -> bool:
        """Return whether the engine is shutting down, and goes on only to finish its work."""
        return getattr(getattr(self._core(), "shutdown_state", None), "name", "RUNNING") != "RUNNING"

    def wake(self) -> None:
        """Have an idle core look again whether it has to step. Any thread; nothing before the core's loop starts."""
        waiting = getattr(self._core(), "input_queue", None)
        if waiting is not None:
            from vllm.v1.engine import EngineCoreRequestType

            waiting.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def weights_version(self) -> str:
        """Return vLLM's version of its current weights."""
        core = self._core()
        return INITIAL_WEIGHTS if core is None else str(core.get_weight_version())


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM's configs, as its connector was given them; None where they are not known.

    ``whole_stack``: the connector that is being built is kvtiers' own.
    """

    vllm_config: Any
    kv_cache_config: Any
    whole_stack: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether no other engine steps with it: data parallel engines would wait for each other's pauses."""
        parallel = getattr(self.vllm_config, "parallel_config", None)
        return int(getattr(parallel, "data_parallel_size", 1) or 1) == 1


_being_built: ContextVar[Engine | None] = ContextVar("kvtiers_engine", default=None)


@contextmanager
def being_built(engine: Engine) -> Iterator[None]:
    """Make ``engine_being_built`` return this engine within the block."""
    token = _being_built.set(engine)
    try:
        yield
    finally:
        _being_built.reset(token)


def engine_being_built() -> Engine:
    """Return the engine whose connector is being built; one without configs outside of that."""
    return _being_built.get() or Engine(None, None)
