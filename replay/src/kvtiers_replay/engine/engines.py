"""Several engines, each a process of its own: opened, started and stopped together."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kvtiers.api import KvtiersError
from kvtiers_replay.engine.measures import Measures, Progress, total_progress
from kvtiers_replay.engine.processes import Child
from kvtiers_replay.engine.task import EngineTask, run_engine

__all__ = ["run_engines"]

_OPEN_SECONDS = 120.0  # many processes start at the same time
_LOOK_SECONDS = 0.1


def run_engines(
    tasks: Sequence[EngineTask], stop: threading.Event, progress: Callable[[Progress], None], answer_seconds: float
) -> list[Measures]:
    """Run each task in a process of its own and return their measures.

    What an engine raises is raised here. ReplayError names the engine that ended early, or that has not stepped for
    ``answer_seconds``. Whatever happens, no process is left.
    """
    engines: list[Child] = []
    try:
        for number, task in enumerate(tasks):
            engines.append(Child(f"engine {number}", _serve, task))
        for engine in engines:
            _next(engine, _OPEN_SECONDS)
        for engine in engines:
            engine.send("begin")
        measures = _gather(engines, [len(task.requests) for task in tasks], stop, progress, answer_seconds)
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
    for engine in engines:
        engine.end()
    return measures


def _gather(
    engines: Sequence[Child],
    requests: Sequence[int],
    stop: threading.Event,
    progress: Callable[[Progress], None],
    answer_seconds: float,
) -> list[Measures]:
    """Pass progress on until every engine has handed in its measures. Each says a few times a second where it is."""
    latest = [Progress(0, count, 0, 0, {}) for count in requests]
    heard = [time.monotonic()] * len(engines)
    measures: dict[int, Measures] = {}
    numbers = {engine.connection: number for number, engine in enumerate(engines)}
    stopping = False
    while numbers:
        if stop.is_set() and not stopping:
            stopping = True
            for number in numbers.values():
                engines[number].send("stop")
        for ready in wait(list(numbers), _LOOK_SECONDS):
            number = numbers[ready]  # type: ignore[index]  # of what was asked for
            message = _next(engines[number], _LOOK_SECONDS)
            heard[number] = time.monotonic()
            if isinstance(message, Measures):
                measures[number] = message
                latest[number] = message.progress(requests[number])
                del numbers[engines[number].connection]
            else:
                latest[number] = message
            progress(total_progress(latest))
        for number in numbers.values():
            if time.monotonic() - heard[number] > answer_seconds:
                raise engines[number].silent(answer_seconds)
    return [measures[number] for number in range(len(engines))]


def _next(engine: Child, timeout: float) -> Any:
    message = engine.receive(timeout)
    if isinstance(message, KvtiersError):
        raise type(message)(f"{engine.name}: {message}")
    return message


# -- in the engine's process


def _serve(connection: "Connection[Any, Any]", task: EngineTask) -> None:
    """Run one engine, from the parent's word on."""
    stop = threading.Event()
    due = time.monotonic() + _LOOK_SECONDS

    def begin() -> None:
        connection.send("open")
        connection.recv()
        threading.Thread(target=_listen, args=(connection, stop), name="replay-parent", daemon=True).start()

    def report(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _LOOK_SECONDS
            connection.send(progress)

    try:
        connection.send(run_engine(task, stop, report, begin))
    except KvtiersError as error:
        connection.send(error)


def _listen(connection: "Connection[Any, Any]", stop: threading.Event) -> None:
    """Wait for the request to stop. If the parent has ended, this process ends with everything that it owns."""
    try:
        while True:
            connection.recv()
            stop.set()
    except (EOFError, OSError):
        os._exit(1)
