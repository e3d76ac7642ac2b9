"""What engines are measured with, and beside: a loop of pure Python, here or in an unrelated process."""

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Self

STEP_SECONDS = 0.01
TICK_SECONDS = 0.001


class Loop:
    """Pure Python, flat out, and what came of it: units of work a second, run by run, and how late each tick was."""

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.late: list[float] = []
        self._number = 1

    def run(self, is_over: Callable[[float], bool], step: Callable[[], None] | None = None) -> None:
        """Run until it is over, with ``step`` every 10 ms."""
        begin = now = time.perf_counter()
        next_tick, next_step = begin + TICK_SECONDS, begin
        number, units = self._number, 0
        while not is_over(now):
            for _ in range(200):
                number = (number * 31 + 7) & 0xFFFFFF
            units += 1
            now = time.perf_counter()
            if now >= next_tick:
                self.late.append(now - next_tick)
                next_tick = now + TICK_SECONDS
            if step is not None and now >= next_step:
                step()
                next_step = now + STEP_SECONDS
        if now > begin:  # else it was over before it began
            self.speeds.append(units / (now - begin))
        self._number = number

    def figures(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        late = [round(seconds * 1e6) for seconds in self.late]
        return {"speeds": self.speeds, "late_us": late}


class OtherLoop:
    """The loop in an unrelated process. It runs from a line of its stdin until a byte of shared memory says stop."""

    def __enter__(self) -> Self:
        memory = os.memfd_create("running")
        os.ftruncate(memory, mmap.PAGESIZE)
        self._running = mmap.mmap(memory, mmap.PAGESIZE)
        command = [sys.executable, __file__, str(memory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory])
        os.close(memory)
        return self

    def __exit__(self, *_: object) -> None:
        self._running[0] = False
        self._process.communicate(timeout=60)

    def run_for(self, seconds: float, step: Callable[[], None]) -> None:
        """Let it run for so long, while ``step`` is called every 10 ms here."""
        assert self._process.stdin is not None
        until = time.perf_counter() + seconds
        self._running[0] = True
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        while time.perf_counter() < until:
            step()
            time.sleep(STEP_SECONDS)
        self._running[0] = False

    def end(self) -> dict[str, Any]:
        """End it; return its figures."""
        return json.loads(self._process.communicate(timeout=60)[0])  # type: ignore[no-any-return]


def be_other_loop(memory: int) -> dict[str, Any]:
    """Be the unrelated process. While it waits it blocks: it must not cost the engine anything then."""
    running, loop = mmap.mmap(memory, mmap.PAGESIZE), Loop()
    for _ in sys.stdin:
        loop.run(lambda _: not running[0])
    return loop.figures()


if __name__ == "__main__":
    print(json.dumps(be_other_loop(int(sys.argv[1]))))
