"""An engine in a process of its own, as its caller sees it: a line of JSON each way. ``serve.py`` answers."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from demo.engine import Step
from demo.setting import EngineOptions

__all__ = ["Answer", "EngineError", "EngineProcess"]

_PATIENCE = 120.0


class EngineError(Exception):
    """An engine process ended, or did not answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a prompt. ``first_token``: seconds from its arrival; ``saved``: tokens that were not computed."""

    tokens: list[int]
    first_token: float
    saved: int
    sources: dict[str, int]
    """Tokens by where they lay: ``own cache``, ``primary``, or a tier's name; the most first."""
    steps: list[Step] = field(repr=False)

    @property
    def origin(self) -> str:
        """The sources, in words."""
        return ", ".join(f"{name} {tokens:,}" for name, tokens in self.sources.items()) or "-"


class EngineProcess:
    """Starts an engine; ``folder`` gets its log and its temporary files. EngineError if it does not come up."""

    def __init__(self, folder: Path, name: str, options: EngineOptions) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.temp = folder / f"{name}.tmp"
        self.temp.mkdir()
        examples = str(Path(__file__).parents[1])
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "demo.serve"],
                env={
                    **os.environ,
                    **threads,
                    "TMPDIR": str(self.temp),
                    "PYTHONPATH": os.pathsep.join([examples, *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.pid = self._process.pid
        try:
            self._send(options.as_data())
            self.engine_id = str(self._hear()["engine_id"])
        except BaseException:
            self.kill()
            raise

    def ask(self, prompt: Sequence[int], new_tokens: int, **params: object) -> Answer:
        """Have a prompt served; return when its answer is there."""
        self.begin(prompt, new_tokens, **params)
        return self.finish()

    def begin(self, prompt: Sequence[int], new_tokens: int, **params: object) -> None:
        """Have a prompt served, and return at once."""
        self._send({"prompt": list(prompt), "new_tokens": new_tokens, "params": params})

    def finish(self) -> Answer:
        """Return the answer to what was begun."""
        heard = self._hear()
        steps = [Step(seconds, computing, tuple(map(tuple, work))) for seconds, computing, work in heard.pop("steps")]
        return Answer(**heard, steps=steps)

    def settle(self, seconds: float = 60.0) -> bool:
        """Let it step until nothing is in flight; False: it still is, after so many seconds."""
        self._send({"settle": seconds})
        return bool(self._hear()["settled"])

    def stats(self) -> dict[str, Any]:
        """Return ``manager.stats()``."""
        self._send({"stats": True})
        return self._hear()

    def kill(self) -> None:
        """Kill it, as ``kill -9`` does."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Have it end by itself; whatever goes wrong, it is gone."""
        try:
            self._process.communicate(timeout=_PATIENCE)
        finally:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _send(self, what: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``_hear`` says so
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + _PATIENCE
        while not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            if time.monotonic() > until:
                raise EngineError(f"engine {self.name!r} has not answered for {_PATIENCE:g} s: {self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"engine {self.name!r} has ended: {self._last_words()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
