"""The plugin boundary: failures of third-party code, kept as one line of text and logged with backoff.

Plugins and their client libraries may raise anything. ``plugin_boundary`` marks where that ends; ``logged_boundary``
where a bug of our own may be the cause, so that the traceback is wanted. ``TierSlot`` alone catches by hand: an
engine's step makes a dozen of its calls.

A plugin's call may also fork, and its child return from it: that child would go on with a copy of our queues, in
memory without our rows. It ends where the call ends (``same_process``).
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

__all__ = [
    "FORKED_STATUS", "CallThread", "end_forked_child", "error_message", "error_text", "forks", "log_with_backoff",
    "logged_boundary", "plugin_boundary", "same_process",
]  # fmt: skip

_LONGEST_ERROR = 1_000
FORKED_STATUS = 70
"""The exit status of a forked child that has come back from a plugin's call."""


class _Forks:
    """How many forks lie between this process and the one that was started as a program: what a step can afford to ask.

    A system call for the process's id takes up to half a microsecond. Forks of libraries in C are not counted.
    """

    count = 0

    @classmethod
    def _add(cls) -> None:
        cls.count += 1


forks = _Forks
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forks._add)  # noqa: SLF001 -- its own module


def end_forked_child() -> NoReturn:
    """End this process, which a plugin's call has forked and in which that call has ended: nothing of ours is its."""
    text = (
        f"kvtiers: {threading.current_thread().name}: a plugin's call has forked, and its child {os.getpid()} has "
        "come back from the call: the child ends here. A plugin must not fork without exec\n"
    )
    with contextlib.suppress(OSError):  # without a standard error
        os.write(2, text.encode(errors="replace"))
    os._exit(FORKED_STATUS)


class same_process:  # noqa: N801 -- reads as a keyword, like contextlib.suppress
    """Run a plugin's code in a ``with`` block; a child that is forked in it and comes to its end is ended there."""

    __slots__ = ("_process",)

    def __enter__(self) -> Self:
        self._process = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            end_forked_child()


def error_text(error: BaseException) -> str:
    """Return an exception, its class first, in one line of bounded length, whatever a plugin has put into it."""
    name, text = type(error).__name__, error_message(error)
    return (f"{name}: {text}" if text else name)[:_LONGEST_ERROR]


def error_message(error: BaseException) -> str:
    """Return an exception's text in one line, "" if it has none."""
    try:
        return " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- a broken __str__
        return ""


class plugin_boundary:  # noqa: N801 -- as above
    """Run a plugin's code in a ``with`` block; what it raises ends the block and goes no further.

    ``error`` is then a line of text, "" if nothing was raised. The exception itself is not kept: its traceback holds
    the block's variables, and with them views of rows. ``passing``: exceptions that do go further. ``exits``: end
    ``SystemExit`` and ``KeyboardInterrupt`` here too, on threads where they would end the thread alone and lose its
    result.
    """

    __slots__ = ("_ended", "_passing", "_process", "error")

    def __init__(self, *passing: type[BaseException], exits: bool = False) -> None:
        self._passing = passing
        self._ended = BaseException if exits else Exception
        self.error = ""

    def __enter__(self) -> Self:
        self._process = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if os.getpid() != self._process:  # as in ``same_process``
            end_forked_child()
        if error is None or isinstance(error, self._passing) or not isinstance(error, self._ended):
            return False
        self.error = error_text(error)
        return True


class logged_boundary(plugin_boundary):  # noqa: N801 -- as above
    """Like ``plugin_boundary``, and log what is raised, with its traceback: it may be a bug of kvtiers.

    Used where the exception would end a thread, and where a call that fails must not stop the next one.
    """

    __slots__ = ("_args", "_log", "_message")

    def __init__(self, log: logging.Logger, message: str, *args: object, exits: bool = False) -> None:
        super().__init__(exits=exits)
        self._log, self._message, self._args = log, message, args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        ended = super().__exit__(kind, error, traceback)
        if ended:
            self._log.error(self._message, *self._args, exc_info=error)
        return ended


class CallThread(threading.Thread):
    """One call on a daemon thread: if it never returns, nothing waits for it at the end of the process.

    What it raises is added to ``errors``, for the thread that wants the call's result to raise.
    """

    def __init__(self, call: Callable[[], object], errors: list[BaseException]) -> None:
        super().__init__(daemon=True)
        self._call, self._errors = call, errors

    def run(self) -> None:
        """Make the call."""
        try:
            with same_process():
                self._call()
        except BaseException as error:  # noqa: BLE001 -- raised again, on the other thread
            self._errors.append(error)


def log_with_backoff(times: int, log: Callable[..., object], message: str, *args: object) -> None:
    """Log the 1st, 2nd, 4th, 8th ... time, so that what fails in every step is no flood.

    ``times``: how often it has happened, this time included. ``log``: a logger's method, or what takes the same.
    """
    if times.bit_count() == 1:
        log(message, *args)
