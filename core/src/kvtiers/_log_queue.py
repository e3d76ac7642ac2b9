"""A queue between kvtiers' loggers and the handlers that the user has configured.

A handler may wait: for a pipe that is not read, a full disk, a slow journal. The engine's thread must not. So while an
engine runs, the first filter on each of kvtiers' loggers hands the record to a `logging.handlers.QueueHandler`. The
thread of a `QueueListener` passes it to the same logger again, so that levels, filters, handlers and propagation stay
what the user has configured. A bounded number of lines of bounded length waits; more are dropped, counted, and the
count is logged.

The listener's thread polls a pipe for room before it calls the handler, and so holds no lock of the handler's or its
stream's while the pipe is full: the process can end all the same.
"""

import atexit
import contextlib
import logging
import os
import queue
import select
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener

__all__ = ["LOGGERS", "QueuedLogs", "dropped_lines", "flush_logs", "queue_logs"]

LOGGERS = (
    "kvtiers", "kvtiers.control", "kvtiers.events", "kvtiers.gpu", "kvtiers.lmcache", "kvtiers.plugins",
    "kvtiers.pool", "kvtiers.record", "kvtiers.region", "kvtiers.scheduler", "kvtiers.secondary", "kvtiers.sglang",
    "kvtiers.tiering", "kvtiers.vllm", "kvtiers.what_if",
)  # fmt: skip
"""All that core, its integrations and the policies log to: a filter on a logger does not see what its children log."""

_MOST_WAITING = 1_000
# With its prefix less than the 4,096 bytes of room from which on a pipe polls as writable (PIPE_BUF of pipe(7)).
_LONGEST_LINE = 3_500
_CLOSE_SECONDS = 1.0
_EXIT_SECONDS = 2.0
_QUEUED = "kvtiers_was_queued"
_REACHED = "kvtiers_reached"
_log = logging.getLogger("kvtiers")


class _BoundedHandler(QueueHandler):
    """Puts records into the queue as plain text; never waits."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(self.lines)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy that holds text alone: arguments may change, and a traceback would hold views of rows."""
        try:
            prepared: logging.LogRecord = super().prepare(record)
        except Exception:  # noqa: BLE001 -- arguments that do not fit, or whose repr raises
            text = f"{record.msg} (its arguments cannot be shown)"
            prepared = logging.makeLogRecord(record.__dict__ | {"msg": text, "args": None, "exc_info": None})
        if len(prepared.msg) > _LONGEST_LINE:
            prepared.msg = f"{prepared.msg[:_LONGEST_LINE]}... ({len(prepared.msg)} characters)"
        prepared.message = prepared.msg
        setattr(prepared, _QUEUED, True)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put the record into the queue, or count it as dropped."""
        if self.lines.qsize() < _MOST_WAITING:
            self.lines.put(record)
        else:
            self.dropped += 1


class _UserHandlers(logging.Handler):
    """Passes queued records to the user's handlers, by way of the logger that they were logged to."""

    def __init__(self, posted: _BoundedHandler) -> None:
        super().__init__()
        self._posted = posted
        self._reported = posted.dropped

    def createLock(self) -> None:  # noqa: N802 -- logging's name
        """Have no lock: the listener's thread would hold it while it polls, and `logging.shutdown` waits for it."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Have the record handled, and a line about dropped ones after it."""
        if reached := getattr(record, _REACHED, None):
            reached.set()
            return
        self._handle(record)
        if unreported := self._posted.dropped - self._reported:
            self._reported += unreported
            text = f"{unreported} log lines were dropped, since the log is too slow"
            line = _log.makeRecord(_log.name, logging.WARNING, __file__, 0, text, (), None)
            setattr(line, _QUEUED, True)
            self._handle(line)

    @staticmethod
    def _handle(record: logging.LogRecord) -> None:
        logger = logging.getLogger(record.name)
        _wait_for_room(logger)
        with contextlib.suppress(BaseException):  # a handler is the user's, also one that exits: the thread must go on
            logger.handle(record)


class _LogQueue(logging.Filter):
    """The filter on each logger, and the listener behind it while there is a user: an engine, a worker or a client.

    The listener outlives the last user while a handler keeps its thread waiting: no other thread is to wait then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._users = 0
        self._listener: QueueListener | None = None
        self.handler = _BoundedHandler()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the calling thread handles the record itself."""
        if hasattr(record, _QUEUED) or self._listener is None:
            return True
        self.handler.handle(record)
        if self._listener is None:  # it has ended meanwhile, perhaps without this record
            self._handle_rest()
        return False

    def enter(self) -> None:
        """Add a user."""
        with self._lock:
            if self._listener is None:
                listener = QueueListener(self.handler.lines, _UserHandlers(self.handler))
                listener.start()  # fails where no thread can be started
                self._listener = listener
            self._users += 1
            for name in LOGGERS:
                filters = logging.getLogger(name).filters
                if self not in filters:
                    filters.insert(0, self)  # the user's filters are run by the listener alone: they may wait or raise

    def leave(self, seconds: float) -> None:
        """Remove a user; after the last one, when no line waits, each thread handles its own lines again."""
        with self._lock:
            self._users -= 1
        if not self.flush(seconds):
            return
        with self._lock:
            listener = self._listener
            if self._users or listener is None:
                return
            listener.stop()  # its thread has handled all that waited, so it ends at once
            self._listener = None
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(self)
        self._handle_rest()

    def flush(self, seconds: float) -> bool:
        """Wait until all lines so far have been handled, for so many seconds at most; return whether they have been."""
        if self._listener is None:
            return True
        reached = threading.Event()
        self.handler.lines.put(logging.makeLogRecord({_REACHED: reached}))
        return reached.wait(seconds)

    def forget_in_child(self) -> None:
        """Make a forked child, which has no listener's thread, handle its lines itself."""
        self.__init__()  # type: ignore[misc]  # locks and the queue may be in any state

    def _handle_rest(self) -> None:
        rest = _UserHandlers(self.handler)
        with contextlib.suppress(queue.Empty):
            while True:
                rest.emit(self.handler.lines.get_nowait())


class QueuedLogs:
    """One user of the queue, until ``close``. ``seconds``: how long the last one's end waits for lines."""

    seconds = _CLOSE_SECONDS

    def __init__(self) -> None:
        self._is_open = True
        self._pid = os.getpid()
        _log_queue.enter()

    def close(self, seconds: float | None = None) -> None:
        """End the use; if it was the last, wait for the lines that wait, up to ``seconds``. May be called again."""
        if self._is_open and self._pid == os.getpid():  # a forked child has no use of it: the queue starts again there
            self._is_open = False
            _log_queue.leave(self.seconds if seconds is None else seconds)


def queue_logs() -> QueuedLogs:
    """Keep the lines of all kvtiers' loggers off the threads that log them until ``close`` of what is returned."""
    return QueuedLogs()


def flush_logs(seconds: float) -> None:
    """Wait until all lines so far have been handled, for so many seconds at most."""
    _log_queue.flush(seconds)


def dropped_lines() -> int:
    """Return how many lines this process has dropped."""
    return _log_queue.handler.dropped


def _wait_for_room(logger: logging.Logger) -> None:
    """Wait until each stream that this logger's handlers write to has some room; no lock is held meanwhile.

    Another process that takes the room first still keeps the handler waiting.
    """
    for handler in _handlers(logger):
        # What a handler is, is the user's: a stream without a descriptor, or a closed one, is written to as it is.
        with contextlib.suppress(Exception):
            poll = select.poll()
            poll.register(handler.stream.fileno(), select.POLLOUT)  # type: ignore[attr-defined]
            poll.poll()


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield the handlers that a line of this logger reaches."""
    above: logging.Logger | None = logger
    while above is not None:
        yield from list(above.handlers)
        above = above.parent if above.propagate else None


_log_queue = _LogQueue()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_log_queue.forget_in_child)
atexit.register(_log_queue.flush, _EXIT_SECONDS)
