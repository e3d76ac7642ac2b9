"""The plugin boundary: failures of third-party code, kept as one line of text and logged with backoff.

Plugins and their client libraries may raise anything. ``plugin_boundary`` marks where that ends. ``TierSlot`` alone
catches by hand: an engine's step makes a dozen of its calls.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["error_text", "log_with_backoff", "plugin_boundary"]

_LONGEST_ERROR = 1_000


def error_text(error: BaseException) -> str:
    """Return an exception in one line of bounded length, whatever a plugin has put into it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- a broken __str__
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_LONGEST_ERROR]


class plugin_boundary:  # noqa: N801 -- reads as a keyword, like contextlib.suppress
    """Run a plugin's code in a ``with`` block; what it raises ends the block and goes no further.

    ``error`` is then a line of text, "" if nothing was raised. The exception itself is not kept: its traceback holds
    the block's variables, and with them views of rows. ``passing``: exceptions that do go further. ``exits``: end
    ``SystemExit`` and ``KeyboardInterrupt`` here too, on threads where they would end the thread alone and lose its
    result.
    """

    __slots__ = ("_ended", "_passing", "error")

    def __init__(self, *passing: type[Exception], exits: bool = False) -> None:
        self._passing = passing
        self._ended = BaseException if exits else Exception
        self.error = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, self._passing) or not isinstance(error, self._ended):
            return False
        self.error = error_text(error)
        return True


def log_with_backoff(times: int, log: Callable[..., object], message: str, *args: object) -> None:
    """Log the 1st, 2nd, 4th, 8th ... time, so that what fails in every step is no flood.

    ``times``: how often it has happened, this time included. ``log``: a logger's method, or what takes the same.
    """
    if times.bit_count() == 1:
        log(message, *args)
