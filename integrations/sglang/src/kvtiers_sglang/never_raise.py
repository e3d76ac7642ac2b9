"""A guard around calls from SGLang's threads: an exception is logged, and the call returns a safe answer."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvtiers._failures import log_with_backoff

__all__ = ["never_raises"]

_log = logging.getLogger("kvtiers.sglang")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def never_raises(default: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Make a method answer ``default(*its arguments)`` where it would raise. Its object has a count ``bugs``."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 -- it is a miss for SGLang
                self.bugs += 1
                message = "%s failed (%d times so far); SGLang goes on without"
                log_with_backoff(self.bugs, _log.exception, message, method.__name__, self.bugs)
                return default(*args, **kwargs)

        return cast("_Method", guarded)

    return decorate
