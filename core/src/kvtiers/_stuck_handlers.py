"""Log handlers that take no line: how the log thread waits for them, and how a process ends in spite of them.

A handler holds its lock while it writes, and its stream another one. Written to a pipe that is not read, it holds both
for ever: ``logging.shutdown`` would wait for the first, the interpreter's last flush of its streams for the second.
"""

import contextlib
import logging
import select
import sys
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["abandon_stuck_handlers", "wait_for_room"]


def wait_for_room(logger: logging.Logger) -> None:
    """Wait until each stream that this logger's handlers write to has some room; no lock is held meanwhile.

    A line that is longer than the room, or another process that takes the room, still keeps the handler waiting.
    """
    for handler in _handlers(logger):
        # What a handler is, is the user's: a stream without a descriptor, or a closed one, is written to as it is.
        with contextlib.suppress(Exception):
            poll = select.poll()
            poll.register(_stream(handler).fileno(), select.POLLOUT)
            poll.poll()


def abandon_stuck_handlers(loggers: Iterable[logging.Logger]) -> None:
    """Take the handlers of these loggers that another thread holds out of use, and with them the process's streams.

    For the exit of a process, by the thread that ends it: what is logged or printed there from now on is lost.
    """
    stuck = {id(handler): handler for logger in loggers for handler in _handlers(logger) if _is_held(handler)}
    for handler in stuck.values():
        handler.createLock()  # of its own: the old one is held for ever
        for name in ("emit", "flush", "close"):
            setattr(handler, name, _do_nothing)
        for name in ("stdout", "stderr"):
            for stream in (name, f"__{name}__"):
                if getattr(sys, stream) is _stream(handler):
                    setattr(sys, stream, None)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield the handlers that a line of this logger reaches."""
    above: logging.Logger | None = logger
    while above is not None:
        yield from list(above.handlers)
        above = above.parent if above.propagate else None


def _stream(handler: logging.Handler) -> Any:
    """Return what the handler writes to, if it is a file of some kind; else None."""
    return getattr(handler, "stream", None)


def _is_held(handler: logging.Handler) -> bool:
    lock = handler.lock
    if lock is None:
        return False
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def _do_nothing(*_: Any) -> None:
    """Stand in for a method of a handler that is out of use."""
