"""A process that writes values until it is killed, to test a store's promise of whole values.

The parent calls ``kill_while_writing``; ``main`` is the process.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from threading import Timer

from kvtiers._process import die_with_parent, end_group_with, kill_unreaped, spawn
from kvtiers.api import ChunkStore
from kvtiers.testing.guarded import GuardedMemory, version

__all__ = ["kill_while_writing", "main"]

_WRITES_BEFORE = 8
_VERSIONS = 4


def kill_while_writing(
    open_store: Callable[[], ChunkStore], names: Sequence[str], nbytes: int, *, part: float, patience: float
) -> None:
    """Start a process that writes these names in turn, and kill it after ``part`` of the time of one write."""
    try:
        task = pickle.dumps((open_store, list(names), nbytes))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(
            "a persistent store is also opened by a process that gets killed, so what the fixture open_store returns "
            f"must survive pickling (functools.partial of a class that can be imported, not a lambda): {error}"
        ) from None
    name = "kvtiers.testing.killed_writer"
    with (
        tempfile.TemporaryFile() as printed,  # no pipe, which a process that the store has started would hold open
        spawn(
            name,
            [],
            name="kvtiers-killed-writer",
            pass_fds=[],
            process_group=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
        ) as child,
    ):
        assert child.stdin and child.stdout
        group = end_group_with(child)
        watch = Timer(patience, kill_unreaped, (child,))  # a store that hangs ends the wait for its next line
        watch.start()
        try:
            with suppress(BrokenPipeError):  # it ended early: the missing lines say so
                child.stdin.write(task)
                child.stdin.close()
            begun = [time.monotonic() for _ in range(_WRITES_BEFORE) if child.stdout.readline()]
            if len(begun) == _WRITES_BEFORE:
                group.join(part * (begun[-1] - begun[0]) / (len(begun) - 1))
        finally:
            watch.cancel()
            kill_unreaped(child)
            group.join(patience)
        printed.seek(0)
        said = printed.read().decode(errors="replace").strip()
    assert len(begun) == _WRITES_BEFORE, (
        f"the process that should write until it is killed made {len(begun)} writes of {_WRITES_BEFORE} and ended, "
        f"or hung for {patience:g} s: {said[-2000:] or 'it said nothing'}"
    )


def main() -> None:
    """Write versions of the values, one line on stdout before each, for ever."""
    die_with_parent(int(sys.argv[1]))
    task: tuple[Callable[[], ChunkStore], list[str], int]
    task = pickle.load(sys.stdin.buffer)  # noqa: S301 -- written by the parent, which trusts it already
    open_store, names, nbytes = task
    store = open_store()
    # Filled before, so that a kill at any moment is most likely within a write.
    memory = GuardedMemory()
    rows = [memory.row(version(number, nbytes)) for number in range(1, _VERSIONS + 1)]
    for number in count():
        os.write(sys.stdout.fileno(), b"writing\n")
        store.write(names[number % len(names)], rows[number % _VERSIONS].source())
