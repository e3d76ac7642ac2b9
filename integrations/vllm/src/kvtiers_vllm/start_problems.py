"""The lines of what stops an engine's start, before vLLM's tracebacks of it, which fill the log."""

import contextlib
import logging
from collections.abc import Iterator

from kvtiers.api import ConfigError, StartError

__all__ = ["logged_first"]

_log = logging.getLogger("kvtiers.vllm")
_LOGGED = "_kvtiers_logged"


@contextlib.contextmanager
def logged_first() -> Iterator[None]:
    """Log each problem of a ConfigError or StartError in a line of its own, once in a process, and raise it on."""
    try:
        yield
    except (ConfigError, StartError) as error:
        if not hasattr(error, _LOGGED):
            vars(error)[_LOGGED] = True
            for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
                _log.error("kvtiers: %s", problem)
        raise
