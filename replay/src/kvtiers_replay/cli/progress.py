"""The progress of a replay: a bar on a terminal, a plain line every few seconds elsewhere; always on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from kvtiers_replay.engine.measures import Progress as Replayed
from kvtiers_replay.report.text import progress_line

__all__ = ["show_progress"]

_LINE_SECONDS = 5.0


@contextlib.contextmanager
def show_progress(
    stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Replayed], None]]:
    """Yield a function to call with the progress."""
    stream = stream or sys.stderr
    if stream.isatty():
        with _bar(stream) as update:
            yield update
    else:
        yield _Lines(stream, clock)


class _Lines:
    """Prints a line at times, and none for a run that is over before the first is due."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock() + _LINE_SECONDS

    def __call__(self, replayed: Replayed) -> None:
        now = self._clock()
        if now >= self._next:
            self._next = now + _LINE_SECONDS
            print(progress_line(replayed), file=self._stream, flush=True)


@contextlib.contextmanager
def _bar(stream: TextIO) -> Iterator[Callable[[Replayed], None]]:
    # Imported here: it is slow, and pipes do not need it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(10), TimeRemainingColumn(compact=True), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("starting")

        def update(replayed: Replayed) -> None:
            progress.update(
                task,
                completed=replayed.requests,
                total=replayed.requests_in_all,
                description=progress_line(replayed),
            )

        yield update
