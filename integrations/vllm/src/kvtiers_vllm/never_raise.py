"""A guard around calls from vLLM's step: an exception is logged, and the call returns a safe answer."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvtiers._failures import log_with_backoff

__all__ = ["BugCount", "never_raises"]

_log = logging.getLogger("kvtiers.vllm")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class BugCount:
    """The count of suppressed exceptions; logs the 1st, 2nd, 4th, 8th ... of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.count = 0

    def note(self, where: str) -> None:
        """Log that this method would have raised."""
        self.count += 1
        message = "%s: %s failed (%d times so far); a bug of kvtiers"
        log_with_backoff(self.count, _log.exception, message, self._name, where, self.count)


class _Counted(Protocol):
    bugs: BugCount


def never_raises(default: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Make a method answer ``default()`` where it would raise. Its object has a ``bugs``."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: _Counted, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 -- after any error the engine's step goes on
                self.bugs.note(method.__name__)
                return default()

        return cast("_Method", guarded)

    return decorate
