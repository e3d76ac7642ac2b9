"""The differential suite: every integration over every tier kind, with the same scenes (``scenes.py``).

``python tests/differential/differential.py``; ``make test-differential`` makes what that needs before. Each integration
runs in its own environment, in two processes that serve all scenes (``worker.py``). Lanes of integrations run beside
each other, each in a process with servers of its own, as an outage stops one. ``--write`` keeps the outcomes in
``outcomes.json``, in the place of those of the same cells, and writes the table of ``docs/what-works-where.md`` from
them. Exit status 1: a scene failed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from kinds import KINDS  # noqa: E402
from scenes import SCENES, Cell, DoesNotApply  # noqa: E402
from table import write_table  # noqa: E402

ENVIRONMENTS = {
    "client": "",
    "replay": "",
    "transformers": ".venv-transformers",
    "sglang": ".venv-sglang",
    "lmcache": ".venv-lmcache",
    "lmcache-in-process": ".venv-lmcache",
    "vllm": ".venv-vllm",
    "vllm-own-tiering": ".venv-vllm",
}
"""The integrations, each with the environment that has it; without one, the suite's own has it."""
ENGINES = {"client": "", "lmcache-in-process": "lmcache", "vllm-own-tiering": "vllm"}
"""The engines' names in the fingerprint, where they are not the integration's."""
LANES = (
    ("vllm",),
    ("vllm-own-tiering",),
    ("transformers", "sglang", "replay"),
    ("lmcache", "lmcache-in-process", "client"),
)
"""Integrations that take turns. Most scenes wait, for a deadline or a server; vLLM's engines take long to start."""
NOT_TAKEN = {
    ("vllm-own-tiering", "memory-async"): "vLLM's own tiering takes no tier that moves its values by itself; the whole "
    "stack does"
}
"""The pairs of an integration and a kind that cannot be opened together, with the reason."""
OUTCOMES = HERE / "outcomes.json"
PATIENCE = 420.0
"""Seconds after which a worker that has not answered hangs."""


def python_of(integration):
    """Return the interpreter of an integration's environment."""
    environment = ENVIRONMENTS[integration]
    return ROOT / environment / "bin" / "python" if environment else Path(sys.executable)


class WorkerError(Exception):
    """What a worker answered instead of a result."""


class Worker:
    """A process of an integration."""

    def __init__(self, integration, log):
        python = python_of(integration)
        if not Path(python).exists():
            raise SystemExit(f"{integration}: {python} is missing; make test-differential makes it")
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", HERE / "worker.py", integration],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self.pid = self._process.pid

    def ask(self, command, **arguments):
        """Have it do something; return the result. WorkerError if it fails."""
        self.send(command, **arguments)
        return self.receive()

    def send(self, command, **arguments):
        self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self):
        timer = threading.Timer(PATIENCE, self._process.kill)  # a hang is loud
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise WorkerError(f"it has ended; see {self.log.read_text(errors='replace')[-1500:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["is"]

    def end(self):
        """Let it end by itself; kill it where it does not."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Run:
    """All cells that were asked for. ``outcomes[integration][kind][scene]``: "works", its limit behind, or a reason."""

    def __init__(self, integrations, kinds, scenes, folder):
        self.integrations, self.kinds, self.scenes = integrations, kinds, scenes
        self._folder = folder
        self.outcomes, self.releases, self.failures = {}, {}, []
        self._kinds = {}

    def run(self):
        with contextlib.ExitStack() as servers:
            for integration in self.integrations:
                self._integration(integration, servers)

    def _integration(self, integration, servers):
        begin = time.monotonic()
        workers = []
        with contextlib.ExitStack() as stack:
            for number in range(2):
                workers.append(Worker(integration, self._folder / f"{integration}-{number}.log"))
                stack.callback(workers[-1].end)
            self.releases[integration] = workers[0].ask("release")
            for name in self.kinds:
                self._cell(integration, name, self._kind(name, servers), workers)
        print(f"{integration}: {time.monotonic() - begin:.0f} s", flush=True)

    def _kind(self, name, servers):
        if name not in self._kinds:
            begin = time.monotonic()
            kind = KINDS[name](self._folder)
            kind.start(servers)
            self._kinds[name] = kind
            print(f"{name}: ready after {time.monotonic() - begin:.1f} s", flush=True)
        return self._kinds[name]

    def _cell(self, integration, name, kind, workers):
        others = {ENGINES.get(it, it) for it in ENVIRONMENTS} - {ENGINES.get(integration, integration)}
        cell = Cell(integration, kind, workers, sorted(others))
        outcomes = self.outcomes.setdefault(integration, {}).setdefault(name, {})
        if reason := NOT_TAKEN.get((integration, name)):
            self._not_taken(cell, reason, outcomes)
            return
        for scene in self.scenes:
            begin = time.monotonic()
            try:
                limit = SCENES[scene](cell)
                outcomes[scene] = f"works: {limit}" if limit else "works"
            except DoesNotApply as reason:
                outcomes[scene] = f"does not apply: {reason}"
            except Exception as error:
                outcomes[scene] = f"fails: {type(error).__name__}: {error}"
                self.failures.append(f"{integration} over {name}, {scene}: {outcomes[scene]}")
                traceback.print_exc()
            print(
                f"{integration:20}{name:14}{scene:20}{time.monotonic() - begin:6.1f} s  {outcomes[scene]}", flush=True
            )
        with contextlib.suppress(WorkerError):
            cell.close()

    def _not_taken(self, cell, reason, outcomes):
        """Hold that the pair cannot be opened, still."""
        try:
            cell.engine()
        except WorkerError as error:
            outcomes |= dict.fromkeys(self.scenes, f"does not apply: {reason}")
            print(f"{cell.integration} over {cell.kind.tier()['type']}: {reason}: {error}"[:200], flush=True)
        else:
            self.failures.append(f"{cell.integration}: this is not true any more: {reason}")
        cell.close()


def chosen(known):
    def parse(text):
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; expected some of {', '.join(known)}")
        return names

    return parse


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, known in (("integrations", ENVIRONMENTS), ("kinds", KINDS), ("scenes", SCENES)):
        parser.add_argument(
            f"--{name}", type=chosen(known), default=list(known), help=f"some of {','.join(known)} (default: all)"
        )
    parser.add_argument("--write", action="store_true", help="keep the outcomes, and write the table in docs/")
    parser.add_argument("--outcomes", type=Path, help="write the outcomes to this file")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    lanes = [lane for them in LANES if (lane := [it for it in options.integrations if it in them])]
    with tempfile.TemporaryDirectory(prefix="differential-") as folder:
        run = Run(options.integrations, options.kinds, options.scenes, Path(folder))
        if len(lanes) > 1:
            run_lanes(run, lanes, Path(folder))
        else:
            run.run()
    if options.outcomes:
        options.outcomes.write_text(json.dumps([run.outcomes, run.releases, run.failures]), encoding="utf-8")
        return 0
    print("\n".join(run.failures) or "ok: every scene works in every cell where it applies")
    print(f"{time.monotonic() - begin:.0f} s in all")
    if options.write:
        keep(run)
    return int(bool(run.failures))


def run_lanes(run, lanes, folder):
    """Run each lane in a process of its own, and take their outcomes together."""
    chosen = ["--kinds", ",".join(run.kinds), "--scenes", ",".join(run.scenes)]
    children = {}
    try:
        for lane in lanes:
            file = folder / lane[0]
            command = [sys.executable, __file__, "--integrations", ",".join(lane), *chosen, "--outcomes", file]
            children[file] = subprocess.Popen(command)
        for file, child in children.items():
            if child.wait() or not file.exists():
                run.failures.append(f"the lane of {file.name} has ended with status {child.returncode}")
                continue
            outcomes, releases, failures = json.loads(file.read_text(encoding="utf-8"))
            run.outcomes |= outcomes
            run.releases |= releases
            run.failures += failures
    finally:
        for child in children.values():
            child.terminate()  # its servers and workers end with it
            child.wait()


def keep(run):
    """Put the outcomes of a run in the place of those that are kept, and write the table."""
    kept = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {"releases": {}, "outcomes": {}}
    kept["releases"] |= run.releases
    for integration, kinds in run.outcomes.items():
        for kind, scenes in kinds.items():
            kept["outcomes"].setdefault(integration, {}).setdefault(kind, {}).update(scenes)
    kept["releases"] = _in_order(kept["releases"], ENVIRONMENTS)
    kept["outcomes"] = {
        integration: {kind: _in_order(scenes, SCENES) for kind, scenes in _in_order(kinds, KINDS).items()}
        for integration, kinds in _in_order(kept["outcomes"], ENVIRONMENTS).items()
    }
    OUTCOMES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    write_table(kept)


def _in_order(given, order):
    return {name: given[name] for name in order if name in given}


if __name__ == "__main__":
    # Ended from outside, it ends its servers and workers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
