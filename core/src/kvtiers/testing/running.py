"""Functions that run code in threads and find what it leaves behind; a hang is a failure with a name."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvtiers._failures import CallThread

__all__ = [
    "call_within",
    "descriptors_left_since",
    "frequent_switches",
    "open_descriptors",
    "run_test",
    "run_together",
    "stack_of",
    "threads_left_since",
]

_TESTS_AT_LEAST = 10.0
_CALLS_IN_A_TEST = 3
_STACK_LINES = 8


def run_together(
    functions: Sequence[Callable[[], object]], *, meanwhile: Sequence[Callable[[], object]] = (), patience: float
) -> None:
    """Run all functions at the same time, each in a thread; raise the first error, or name how many did not end.

    Those in ``meanwhile`` are called again and again, each in a thread too, until the others have returned.
    """
    barrier = threading.Barrier(len(functions) + len(meanwhile))
    errors: list[BaseException] = []
    busy = set(range(len(functions)))
    until = time.monotonic() + patience

    def run(number: int, function: Callable[[], object]) -> None:
        try:
            barrier.wait(patience)
            function()
            while number >= len(functions) and busy and time.monotonic() < until:
                function()
        finally:
            busy.discard(number)

    # Daemons, so that a call which never returns fails its test and does not keep pytest from ending.
    threads = [
        CallThread(partial(run, number, function), errors) for number, function in enumerate([*functions, *meanwhile])
    ]
    for thread in threads:
        thread.start()
    deadline = until + 0.1  # leaves time for the last call of those that look at the clock themselves
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hung = [thread for thread in threads if thread.is_alive()]
    assert not hung, f"{len(hung)} of {len(threads)} threads were not done after {patience:g} s{stack_of(hung[0])}"


def call_within(seconds: float, function: Callable[[], object]) -> str:
    """Call the function in a thread; return where it hangs, "" if it returned in time. Its error is raised here."""
    __tracebackhide__ = True
    errors: list[BaseException] = []
    thread = CallThread(function, errors)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return stack_of(thread)


def run_test(test: Callable[[], object], tests: Any) -> None:
    """Run one test of the kit in a thread: a call that never returns fails it, with the stack, and ends no others.

    A test makes many calls, each of which may take some of the patience of its class ``tests``.
    """
    __tracebackhide__ = True
    seconds = _TESTS_AT_LEAST + _CALLS_IN_A_TEST * tests.patience
    where = call_within(seconds, test)
    assert not where, f"not done after {seconds:g} s (patience = {tests.patience:g}): a call does not return{where}"


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread stands, in lines to be put behind a message; "" if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 -- the one way there is
    if frame is None or not thread.is_alive():
        return ""
    lines = traceback.format_stack(frame)[-_STACK_LINES:]
    return "; it stands here:\n" + "".join(lines).rstrip()


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Make Python switch threads every few microseconds, so that a race shows within few tries."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def threads_left_since(before: set[threading.Thread], *, patience: float = 5.0) -> list[str]:
    """Return the names of the threads that are not in ``before`` and do not end within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    # Threads that a native library started and that called into Python once stay listed as dummies; they cannot be
    # joined, and the library shares them between its users.
    new = [t for t in threading.enumerate() if t not in before and type(t).__name__ != "_DummyThread"]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in new if thread.is_alive()]


def descriptors_left_since(before: set[str], *, patience: float = 5.0) -> list[str]:
    """Return the descriptors that are not in ``before`` and are not closed within ``patience`` seconds.

    A native library may close its sockets on a thread of its own, a moment after the call that closes them.
    """
    deadline = time.monotonic() + patience
    while (left := open_descriptors() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(left)


def open_descriptors() -> set[str]:
    """Return this process's open descriptors, each as its number and, where the system says it, what it is."""
    descriptors = set()
    for entry in list(Path("/dev/fd").iterdir()):
        number = int(entry.name)
        link = Path(f"/proc/self/fd/{number}")
        try:
            what = link.readlink() if link.is_symlink() else "open"
            os.fstat(number)
        except OSError:  # closed meanwhile: by another thread, or the one that the listing itself needed
            continue
        descriptors.add(f"{number} ({what})")
    return descriptors
