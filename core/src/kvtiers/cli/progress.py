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
def show_progress(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Show progress: in one line that changes on a terminal, as a plain line every few seconds elsewhere."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _throttled(lambda text: print(text, file=stream, flush=True), _LINE_SECONDS, clock)
        return
    # Imported here: it is slow, and pipes do not need it.
    from rich.console import Console
    from rich.text import Text

    with Console(file=stream).status("starting") as status:
        # Text, not markup: names may have brackets in them.
        yield _throttled(lambda text: status.update(Text(text)), _BAR_SECONDS, clock)


def _throttled(show: Callable[[str], None], seconds: float, clock: Callable[[], float]) -> Report:
    due = clock() + seconds

    def report(text: Callable[[], str]) -> None:
        nonlocal due
        now = clock()
        if now >= due:
            due = now + seconds
            show(text())

    return report
