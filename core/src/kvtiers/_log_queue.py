"""The queue between kvtiers' loggers and the handlers that an engine has configured.

A handler may wait: for a pipe that is not read, a full disk, a slow journal. The engine's thread must not. So while an
engine runs, a filter on each of kvtiers' loggers takes the record out of the calling thread, as one line of bounded
length, and a thread of its own has it handled: by the same logger and in order, so that levels, filters, handlers and
propagation stay what the user has configured. A bounded number of lines waits; more are dropped, counted, and said.

A log that stays stuck must not keep the process from ending either. A handler that writes to a pipe which is not read
holds its own lock, for which ``logging.shutdown`` waits, and its stream's, for which the interpreter's last flush does.
So the thread waits for a pipe to take more before it calls the handler, without any lock, and the process's exit takes
handlers out of use that it is stuck in all the same.
"""

import atexit
import contextlib
import logging
import os
import queue
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["LOGGERS", "QueuedLogs", "dropped_lines", "flush_logs", "queue_logs"]

LOGGERS = (
    "kvtiers", "kvtiers.control", "kvtiers.events", "kvtiers.gpu", "kvtiers.lmcache", "kvtiers.plugins",
    "kvtiers.record", "kvtiers.region", "kvtiers.scheduler", "kvtiers.secondary", "kvtiers.sglang", "kvtiers.status",
    "kvtiers.tiering", "kvtiers.vllm", "kvtiers.what_if",
)  # fmt: skip
"""All that core and its integrations log to: a filter on a logger does not see what its children log."""

_MOST_WAITING = 1_000
_LONGEST_LINE = 8_000
_CLOSE_SECONDS = 1.0
_EXIT_SECONDS = 2.0
_HANDLED_HERE = "kvtiers_handled_here"
_log = logging.getLogger("kvtiers")


class _Writer:
    """One thread and its queue. ``post``: any thread; never waits.

    ``may_end``: asked by the thread, with the queue empty, whether it is to end; what is posted from then on is handled
    by the thread that posts it.
    """

    def __init__(self, may_end: Callable[[], bool]) -> None:
        self._lines: queue.SimpleQueue[logging.LogRecord | _Request] = queue.SimpleQueue()
        self._may_end = may_end
        self._has_ended = False
        self._unsaid = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="kvtiers-log-queue", daemon=True)
        self._thread.start()

    def post(self, record: logging.LogRecord) -> None:
        """Queue a record for its logger."""
        if self._lines.qsize() >= _MOST_WAITING:
            self.dropped += 1
            self._unsaid += 1
            return
        _make_plain(record)
        self._lines.put(record)
        if self._has_ended:  # looked at after the put: the thread looks into the queue after it has set this
            self._handle_rest()

    def flush(self, seconds: float, *, end: bool = False) -> bool:
        """Wait until all that was posted has been handled, for so many seconds at most; return whether it has been.

        ``end``: the thread is to end then, if it may.
        """
        request = _Request(end)
        self._lines.put(request)
        if self._has_ended:
            self._handle_rest()
        return request.done.wait(seconds)

    def end(self, seconds: float) -> None:
        """Wait as ``flush`` does; the thread has ended then, if it may."""
        self.flush(seconds, end=True)
        if self._has_ended and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._has_ended:
            line = self._lines.get()
            if isinstance(line, _Request) and line.end:  # before who waits for it goes on
                self._has_ended = self._may_end()
            self._do(line)
        self._handle_rest()

    def _handle_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._do(self._lines.get_nowait())

    def _do(self, line: "logging.LogRecord | _Request") -> None:
        if isinstance(line, _Request):
            line.done.set()
            return
        _handle(line)
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, 0
            text = f"{unsaid} log lines were dropped, since the log is too slow"
            _handle(_log.makeRecord(_log.name, logging.WARNING, __file__, 0, text, (), None))


class _Request:
    """A place in the queue of lines: ``done`` is set when the thread has reached it."""

    def __init__(self, end: bool) -> None:
        self.end = end
        self.done = threading.Event()


class _Queue(logging.Filter):
    """The filter on each logger, and the writer behind it. ``users``: engines and workers that run here.

    The writer outlives the last user while a handler keeps it: no other thread is to be kept by that handler then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._dropped_before = 0
        self._writer: _Writer | None = None
        self._users = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the calling thread handles the record itself."""
        writer = self._writer
        if writer is None or hasattr(record, _HANDLED_HERE):
            return True
        writer.post(record)
        return False

    @property
    def dropped(self) -> int:
        """Lines that were dropped since the process began."""
        writer = self._writer
        return self._dropped_before + (writer.dropped if writer is not None else 0)

    def enter(self) -> None:
        """Add a user."""
        with self._lock:
            if self._writer is None:
                self._writer = _Writer(self._end_writer)  # first: it fails where no thread can be started
            self._users += 1
            for logger in _loggers():
                logger.addFilter(self)  # does nothing where it is there already

    def leave(self, seconds: float) -> None:
        """Remove a user; after the last one, when no line waits, each thread handles its own lines again."""
        with self._lock:
            self._users -= 1
            writer = self._writer
            if self._users or writer is None:
                return
        writer.end(seconds)

    def _end_writer(self) -> bool:
        """Take the writer out of use, unless there is a user again; called by its thread."""
        with self._lock:
            writer = self._writer
            if self._users or writer is None:
                return False
            self._writer, self._dropped_before = None, self._dropped_before + writer.dropped
            for logger in _loggers():
                logger.removeFilter(self)
            return True

    def flush(self, seconds: float) -> bool:
        """Wait until all lines so far have been handled, for so many seconds at most; return whether they have been."""
        return (writer := self._writer) is None or writer.flush(seconds)

    def exit(self) -> None:
        """Handle the lines that wait, at the process's exit; take handlers out of use that take no line."""
        if not self.flush(_EXIT_SECONDS):
            _abandon_stuck_handlers(_loggers())

    def forget_in_child(self) -> None:
        """Make a forked child, which has no writer's thread, handle its lines itself."""
        self._lock, self._writer, self._users = threading.Lock(), None, 0


class QueuedLogs:
    """One user of the queue, until ``close``."""

    def __init__(self) -> None:
        self._is_open = True
        self._pid = os.getpid()
        _queue.enter()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """End the use; if it was the last, wait up to ``seconds`` for the lines that wait. May be called again."""
        if self._is_open and self._pid == os.getpid():  # a forked child has no use of it: the queue starts again there
            self._is_open = False
            _queue.leave(seconds)


def queue_logs() -> QueuedLogs:
    """Keep the lines of all kvtiers' loggers off the threads that log them until ``close`` of what is returned."""
    return QueuedLogs()


def flush_logs(seconds: float) -> None:
    """Wait until all lines so far have been handled, for so many seconds at most."""
    _queue.flush(seconds)


def dropped_lines() -> int:
    """Return how many lines this process has dropped."""
    return _queue.dropped


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in LOGGERS]


def _make_plain(record: logging.LogRecord) -> None:
    """Put the record into words here: its arguments may change, and a traceback would hold views of rows."""
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 -- arguments that do not fit, or whose repr raises
        text = f"{record.msg} (its arguments cannot be shown)"
    record.msg, record.args = _clipped(text, _LONGEST_LINE), None
    if record.exc_info and not record.exc_text:
        record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    record.exc_info = None


def _clipped(text: str, length: int) -> str:
    """Return the text, or its beginning and how long it was."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


def _handle(record: logging.LogRecord) -> None:
    setattr(record, _HANDLED_HERE, True)
    _wait_for_room(logging.getLogger(record.name))
    with contextlib.suppress(BaseException):  # a handler is the user's, also one that exits: this thread must go on
        logging.getLogger(record.name).handle(record)


def _wait_for_room(logger: logging.Logger) -> None:
    """Wait until each stream that this logger's handlers write to has some room; no lock is held meanwhile.

    A line that is longer than the room, or another process that takes the room, still keeps the handler waiting.
    """
    for handler in _handlers(logger):
        # What a handler is, is the user's: a stream without a descriptor, or a closed one, is written to as it is.
        with contextlib.suppress(Exception):
            poll = select.poll()
            poll.register(_stream(handler).fileno(), select.POLLOUT)
            poll.poll()


def _abandon_stuck_handlers(loggers: Iterable[logging.Logger]) -> None:
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


_queue = _Queue()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_queue.forget_in_child)
atexit.register(_queue.exit)
