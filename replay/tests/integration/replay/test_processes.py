"""A child process that stops in the middle of a message does not keep its parent for ever."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller

import pytest

from kvtiers_replay.engine.processes import Child, ReplayError

MUCH = bytes(16 << 20)  # far more than a socket holds


@contextmanager
def child(serve) -> Iterator[Child]:
    started = Child("rank 3", serve, stuck_seconds=2)
    try:
        yield started
    finally:
        started.kill()


def test_orders_that_a_stopped_child_does_not_take_are_an_error_that_names_it() -> None:
    with child(methodcaller("poll", None)) as stopped:
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with pytest.raises(ReplayError, match=r"^rank 3 \(process \d+\) has not answered for 2 s"):
            stopped.send(MUCH)


def test_half_an_answer_is_an_error_that_names_the_child() -> None:
    with child(methodcaller("send_bytes", MUCH)) as stopped:
        assert stopped.connection.poll(60)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with pytest.raises(ReplayError, match=r"^rank 3 \(process \d+\) has not answered for 2 s"):
            stopped.receive(1.0)
