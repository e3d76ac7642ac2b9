"""The busy loop that engines are measured with and beside: pure Python, here or in an unrelated process."""

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

from rigs.engine_step import EngineStep

STEP_SECONDS = 0.01
TICK_SECONDS = 0.001
_CALLS_UNTIL_FAST = 16  # Python 3.11 specialises what has been called 8 times


class Loop:
    """Pure Python, flat out, and what came of each run: units of work a second, and how late each tick was.

    A unit is a step of an engine (``rigs/engine_step.py``), one after the other. ``processor_speeds``: a second of
    processor time. A run that was over before it began has a speed of 0.
    """

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.processor_speeds: list[float] = []
        self.late_us: list[list[int]] = []
        self._unit = EngineStep()
        for _ in range(_CALLS_UNTIL_FAST):
            self.run((time.perf_counter() + TICK_SECONDS).__le__)
        for figures in (self.speeds, self.processor_speeds, self.late_us):
            figures.clear()

    def run(self, is_over: Callable[[float], bool], step: Callable[[], None] | None = None) -> None:
        """Run until it is over; ``step`` comes every 10 ms."""
        begin, processor_begin = time.perf_counter(), time.thread_time()
        now = begin
        next_tick, next_step = begin + TICK_SECONDS, begin
        units, late, unit = 0, list[float](), self._unit
        while not is_over(now):
            unit()
            units += 1
            now = time.perf_counter()
            if now >= next_tick:
                late.append(now - next_tick)
                next_tick = now + TICK_SECONDS
            if step is not None and now >= next_step:
                step()
                next_step = now + STEP_SECONDS
        self.speeds.append(units / (now - begin) if now > begin else 0.0)
        processor = time.thread_time() - processor_begin
        self.processor_speeds.append(units / processor if processor > 0 else 0.0)
        self.late_us.append([round(seconds * 1e6) for seconds in late])

    def figures(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {"speeds": self.speeds, "processor_speeds": self.processor_speeds, "late_us": self.late_us}


class OtherLoop:
    """The loop in an unrelated process: it runs while a byte of shared memory is the number that a line of stdin says.

    While it waits for a line it blocks: it must not cost the engine anything then.
    """

    def __enter__(self) -> Self:
        memory = os.memfd_create("running")
        os.ftruncate(memory, mmap.PAGESIZE)
        self._running = mmap.mmap(memory, mmap.PAGESIZE)
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rigs.busy_loop", str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory],
            cwd=Path(__file__).resolve().parents[1],
        )
        os.close(memory)
        return self

    def __exit__(self, *_: object) -> None:
        self._running[0] = 0
        self._process.communicate(timeout=60)

    def run_for(self, seconds: float, step: Callable[[], None]) -> None:
        """Let it run for so long, while ``step`` is called every 10 ms here."""
        assert self._process.stdin is not None
        until = time.perf_counter() + seconds
        self._runs += 1
        self._running[0] = number = self._runs % 255 + 1
        self._process.stdin.write(b"%d\n" % number)
        self._process.stdin.flush()
        while time.perf_counter() < until:
            step()
            time.sleep(STEP_SECONDS)
        self._running[0] = 0

    def end(self) -> dict[str, Any]:
        """End it; return its figures."""
        return json.loads(self._process.communicate(timeout=60)[0])  # type: ignore[no-any-return]


def be_other_loop(memory: int) -> dict[str, Any]:
    """Be the unrelated process."""
    running, loop = mmap.mmap(memory, mmap.PAGESIZE), Loop()
    for line in sys.stdin:
        number = int(line)
        loop.run(lambda _, number=number: running[0] != number)  # type: ignore[misc]
    return loop.figures()


def be_busy(seconds: float) -> None:
    """Run pure Python for so long, as an engine's thread does between its questions to a tier."""
    number, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        number = (number * 31 + 7) % 1_000_003


class Driven(Protocol):
    """What drives a tier. ``step_seconds``: how often it asks for events; ``rest``: what it does in between."""

    step_seconds: float
    rest: Callable[[float], None]


@contextlib.contextmanager
def busy_driver(driver: Driven, step_seconds: float) -> Iterator[None]:
    """Have the thread that drives the tier run pure Python between its questions."""
    before = driver.step_seconds, driver.rest
    driver.step_seconds, driver.rest = step_seconds, be_busy
    try:
        yield
    finally:
        driver.step_seconds, driver.rest = before


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Run the same loop in a process that has nothing to do with ours."""
    code = "n = 0\nprint(flush=True)\nwhile True:\n    n = (n * 31 + 7) % 1_000_003"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    print(json.dumps(be_other_loop(int(sys.argv[1]))))
