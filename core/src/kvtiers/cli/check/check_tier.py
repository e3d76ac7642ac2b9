"""The trial of one tier, in a process of its own: a crash or a hang, too, is a line of the report.

The process (``trial_process.py``) reports each stage before it begins, each finding, and its end. One that exits
before it has reported its end has failed, with any exit status: a tier's library may crash or end the process.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from kvtiers._process import end, end_group_with, kill_unreaped, spawn
from kvtiers.api import Finding, TierConfig
from kvtiers.api.config import dump_resolved
from kvtiers.api.units import format_duration
from kvtiers.cli.check.round_trip import OWN_FAULT, REACH

__all__ = ["Trial", "task_of", "try_tiers"]

_LAST_WORDS = 300
_LAST_SECONDS = 5.0
_CRASHED = "Fatal Python error"


class Trial:
    """The trial of one tier. ``findings`` is complete once ``wait`` has returned."""

    def __init__(self, config: TierConfig, namespace: str, value_bytes: int) -> None:
        self.name = config.tier_name
        self.findings: list[Finding] = []
        self._stage = "being started"
        self._done = False
        self._task = task_of(config, namespace, value_bytes)

    def start(self) -> None:
        """Begin, and return at once."""
        receive, send = os.pipe()
        self._printed = _unnamed_file()  # closed at the end of the trial
        self._process = spawn(
            "kvtiers.cli.check.trial_process",
            [str(send)],
            name=f"check {self.name}",
            pass_fds=[send],
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=self._printed,
            process_group=0,  # what its tier leaves behind ends with it
        )
        os.close(send)
        self._reader = threading.Thread(target=self._read, args=(receive,), name=f"check {self.name}", daemon=True)
        self._reader.start()
        self._ended = end_group_with(self._process)
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended already, which ``wait`` says
            # By a pipe, since secrets are among the options.
            self._process.stdin.write(json.dumps(self._task).encode() + b"\n")
            self._process.stdin.close()

    def wait(self, until: float, timeout: float) -> None:
        """Wait until the trial has ended, until ``until`` by the monotonic clock at most; how it ended is a finding."""
        # Not until the end of the pipe: a process that the tier has started may have its other end.
        self._ended.join(max(0.0, until - time.monotonic()))
        hangs = self._ended.is_alive()
        self.end()
        self._reader.join(_LAST_SECONDS)
        words = self._last_words()
        if self._done:
            return
        if hangs:
            text = f"no answer within {format_duration(timeout)} while {self._stage}"
            self._add(Finding("error", text, f"{REACH}; --timeout gives it longer"))
        else:
            text = f"its process {self._how_it_ended()} while {self._stage}{words}"
            self._add(Finding("error", text, OWN_FAULT))

    def end(self) -> None:
        """Kill the process, unless it has ended, with all that it has started."""
        kill_unreaped(self._process)
        self._ended.join(_LAST_SECONDS)
        end(self._process, _LAST_SECONDS)

    def _how_it_ended(self) -> str:
        status = self._process.returncode
        if status < 0:
            names = {int(known): known.name for known in signal.Signals}
            return f"was killed by signal {-status} ({names.get(-status, 'unknown')})"
        return f"ended by itself with exit status {status}"

    def _last_words(self) -> str:
        with self._printed:
            self._printed.seek(0)
            words = " ".join(self._printed.read().decode("utf-8", "replace").split())
        if _CRASHED in words:  # what follows it is the stack, and the names of modules
            words = words[words.index(_CRASHED) :][:_LAST_WORDS]
        return f" (it printed: {words[-_LAST_WORDS:]})" if words else ""

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)

    def _read(self, receive: int) -> None:
        with os.fdopen(receive, "rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else it was killed in the middle of it
                    self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"stage": str(stage)}:
                self._stage = stage
            case {"level": level, "text": str(text), "fix": str(fix)}:
                self._add(Finding(level, text, fix))
            case {"done": True}:
                self._done = True


def task_of(config: TierConfig, namespace: str, value_bytes: int) -> dict[str, Any]:
    """Return what a trial process is to do: all of it is JSON, its secrets in plain text."""
    return {
        "type": config.type,
        "options": dump_resolved(config),
        "namespace": namespace,
        "value_bytes": value_bytes,
    }


def try_tiers(configs: Sequence[TierConfig], namespace: str, value_bytes: int, timeout: float) -> list[Trial]:
    """Try these tiers, all at the same time, for at most ``timeout`` seconds; return the trials, which have ended."""
    trials = [Trial(config, namespace, value_bytes) for config in configs]
    started: list[Trial] = []
    until = time.monotonic() + timeout
    try:
        for trial in trials:
            trial.start()
            started.append(trial)
        for trial in trials:
            trial.wait(until, timeout)
    finally:
        for trial in started:
            trial.end()
    return trials


def _unnamed_file() -> IO[bytes]:
    """Open a file without a name; in memory where that is possible, as a container may have no folder to write to."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("kvtiers-check"), "w+b")
    return tempfile.TemporaryFile()
