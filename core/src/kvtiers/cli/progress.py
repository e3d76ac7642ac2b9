"""Progress lines of long commands, and their interruption by Ctrl-C."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

__all__ = ["Report", "show_progress", "stop_on_interrupt"]

_LINE_SECONDS = 5.0
_BAR_SECONDS = 0.1

Report = Callable[[Callable[[], str]], None]
"""Called at every progress; its argument makes the text, and is only called when the text is shown."""


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Make Ctrl-C a request to stop, so that the report is still printed; a second one exits at once."""
    stop = threading.Event()

    def ask(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def show_progress(
    stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, line_seconds: float = _LINE_SECONDS
) -> Iterator[Report]:
    """Show progress: in one line that changes on a terminal, as a plain line every ``line_seconds`` elsewhere.

    Where there were such lines, there is a last one at the end, since they stay: one of before would be the last word.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        lines = _Throttled(lambda text: print(text, file=stream, flush=True), line_seconds, clock)
        yield lines
        lines.end()
        return
    # Imported here: it is slow, and pipes do not need it.
    from rich.console import Console
    from rich.text import Text

    with Console(file=stream).status("starting") as status:
        # Text, not markup: names may have brackets in them.
        yield _Throttled(lambda text: status.update(Text(text)), _BAR_SECONDS, clock)


class _Throttled:
    """Shows a text at most every so many seconds."""

    def __init__(self, show: Callable[[str], None], seconds: float, clock: Callable[[], float]) -> None:
        self._show, self._seconds, self._clock = show, seconds, clock
        self._due = clock() + seconds
        self._has_shown = False
        self._waiting: Callable[[], str] | None = None

    def __call__(self, text: Callable[[], str]) -> None:
        """Show the text if it is time to; else it waits for the end."""
        now = self._clock()
        self._waiting = text
        if now >= self._due:
            self._due = now + self._seconds
            self._has_shown, self._waiting = True, None
            self._show(text())

    def end(self) -> None:
        """Show the last text, if it has not been and others have."""
        if self._has_shown and self._waiting is not None:
            self._show(self._waiting())
