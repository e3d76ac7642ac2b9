"""Scheduler options, and the limits that a request may set."""

import logging
import reprlib
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from kvtiers._failures import log_with_backoff, plugin_boundary
from kvtiers.api import ConfigError
from kvtiers.types import RequestContext

__all__ = ["RequestLimits", "SchedulerOptions", "StoreMode"]

_log = logging.getLogger("kvtiers.scheduler")

_LONGEST_SHOWN = 60
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, _LONGEST_SHOWN, _LONGEST_SHOWN
_ignored: Counter[str] = Counter()
"""Counts of parameters that were not a number of tokens, by name; in this process."""

StoreMode = Literal["eager", "lazy"]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The engine's choices; ConfigError if one of them is out of range.

    ``mode``: store chunks as soon as they are computed, or when their blocks are about to be reused. ``prompt_only``:
    store no chunk with generated tokens. ``min_offload_tokens``: store nothing of a prefix shorter than that.
    ``min_load_tokens``: a shorter hit is not loaded. ``prefix_caching``: the engine finds loaded blocks in its own
    prefix cache, so a request waits for a chunk that is being loaded for another one. ``null_block``: the id in a
    request's block table that stands for no block.
    """

    mode: StoreMode = "eager"
    prompt_only: bool = False
    min_offload_tokens: int = 0
    min_load_tokens: int = 0
    prefix_caching: bool = True
    null_block: int = -1

    def __post_init__(self) -> None:
        problems = [
            f"scheduler: {name} is {value!r}, expected a number of tokens, 0 for no limit"
            for name in ("min_offload_tokens", "min_load_tokens")
            if (value := getattr(self, name)) < 0
        ]
        if self.mode not in get_args(StoreMode):
            problems.append(f"scheduler: mode is {self.mode!r}, expected one of {', '.join(get_args(StoreMode))}")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """A request's own limits, from its ``params``; None: no limit.

    ``max_load_tokens``: at most so many tokens are loaded at once. ``max_offload_tokens``: only the first so many are
    stored. 0 switches the one or the other off. ``skip_reading_prefix_cache``: nothing is looked up.
    """

    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None

    @classmethod
    def of(cls, context: RequestContext) -> "RequestLimits":
        """Read a request's limits. A value that is not a number of tokens is ignored, with a warning."""
        load = _tokens(context, "max_load_tokens")
        if context.params.get("skip_reading_prefix_cache") is True:
            load = 0
        return cls(load, _tokens(context, "max_offload_tokens"))


def _tokens(context: RequestContext, name: str) -> int | None:
    value = context.params.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    _ignored[name] += 1
    times = f" ({_ignored[name]} times so far)" if _ignored[name] > 1 else ""
    text = "request %s: %s is %s, expected a number of tokens; ignored%s"
    request = context.request_id[:_LONGEST_SHOWN]
    log_with_backoff(_ignored[name], _log.warning, text, request, name, _shown(value), times)
    return None


def _shown(value: object) -> str:
    """Return a request's parameter in a few characters, without reading all of it."""
    if isinstance(value, dict | set) and len(value) > _LONGEST_SHOWN:  # reprlib sorts these
        return f"a {type(value).__name__} of {len(value)}"
    with plugin_boundary():  # raised by a number of thousands of digits, and by the repr of an engine's class
        return _short.repr(value)
    return f"of type {type(value).__name__}"
