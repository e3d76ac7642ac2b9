"""The trial process of ``kvtiers check``: opens one tier, probes it, runs its diagnosis, closes it.

It reports to the command by a pipe, a JSON object a line: each stage, each finding, and its end. The tier's own
output goes elsewhere.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from kvtiers._child_watch import ChildWatch
from kvtiers._failures import end_forked_child, error_message
from kvtiers._process import die_with_parent
from kvtiers.api import (
    ChunkStore,
    Compression,
    ConfigError,
    Finding,
    KvtiersError,
    NotKept,
    SecondaryTierManager,
    StoreContractError,
    SupportsDiagnosis,
    TierConfig,
    TierPluginError,
)
from kvtiers.api.config import load_resolved
from kvtiers.cli.check.abilities import probe_abilities
from kvtiers.cli.check.round_trip import OWN_FAULT, REACH, Bench, ProbeError, not_kept, probe_manager, probe_store
from kvtiers.cli.open_tier import open_tier
from kvtiers.host.compressed_store import compressed_store
from kvtiers.host.quotas import TenantQuotas
from kvtiers.plugins import load_tier

__all__ = ["main", "run_trial"]

_DRAIN_SECONDS = 5.0
_LEFT_SECONDS = 1.0
_NAMED = 5
_UNEXPECTED = f"if it is not what the backend said, {OWN_FAULT}"
_LONGEST_TEXT = 1_000
_LEVELS = ("ok", "warning", "error")
_T = TypeVar("_T")


def main() -> None:
    """Try the tier of the task on standard input; end the process then, even if threads of the tier still run.

    Arguments: the descriptor of the pipe to the command, and the command's process id.
    """
    pipe, parent = map(int, sys.argv[1:3])
    die_with_parent(parent)
    faulthandler.enable()
    task = json.loads(sys.stdin.readline())
    with os.fdopen(pipe, "wb", buffering=0) as out:
        run_trial(task, lambda message: out.write(json.dumps(message).encode() + b"\n"))
        out.write(b'{"done": true}\n')
        os._exit(0)


def run_trial(task: Mapping[str, Any], report: Callable[[dict[str, Any]], object]) -> None:
    """Try the tier of a task (``task_of``) in this process; ``report`` gets each message. No failure is raised."""
    _TrialRun(task, report).run()


class _TrialRun:
    """One trial; ``report`` gets each message."""

    def __init__(self, task: Mapping[str, Any], report: Callable[[dict[str, Any]], object]) -> None:
        self._task = task
        self._bound = report
        self._process = os.getpid()
        self._tier: ChunkStore | SecondaryTierManager | None = None

    def _report(self, message: dict[str, Any]) -> None:
        """Report, in the process that was started: a child that a tier has forked ends here."""
        if os.getpid() != self._process:
            end_forked_child()
        self._bound(message)

    def run(self) -> None:
        """Run the trial; report every failure."""
        threads, watch = set(threading.enumerate()), ChildWatch()
        self._bench: Bench | None = None
        config = self._attempt(self._config)
        if config is None:
            return
        bench = self._bench = Bench(
            self._task["value_bytes"],
            self._task["namespace"],
            read_only=config.read_only,
            needs_listing=bool(config.quotas),
            report=lambda stage: self._report({"stage": stage}),
        )
        tier = self._attempt(
            lambda: open_tier(config, namespace=bench.namespace, value_bytes=bench.value_bytes, region=bench.region)
        )
        if tier is None:
            return
        self._tier = tier
        if isinstance(tier, SecondaryTierManager):
            self._attempt(lambda: self._take(probe_manager(tier, bench)))
        else:
            self._try_store(tier, bench, config.compression)
            if problem := TenantQuotas.problem(tier, config.quotas):
                self._say(Finding("error", problem, "use a store that can list, or no quotas"))
        if isinstance(tier, SupportsDiagnosis):
            bench.stage = "diagnosing its backend"
            self._attempt(lambda: self._take(_diagnosis(tier, bench.value_bytes)))
        if not bench.is_still_called:
            bench.stage = "being closed"
            if self._attempt(lambda: _close(tier)):
                self._take(_left_behind(tier, threads, watch))

    def _config(self) -> TierConfig:
        return load_resolved(load_tier(self._task["type"]).config, self._task["options"])

    def _try_store(self, store: ChunkStore, bench: Bench, compression: Compression) -> None:
        if self._attempt(lambda: compressed_store(store, compression)) is None:
            return  # no engine could use it, which has been said
        if self._attempt(lambda: self._take(probe_store(store, bench))):
            for probe in probe_abilities(store, bench):
                self._attempt(lambda probe=probe: self._take(probe()))  # type: ignore[misc]

    def _take(self, findings: Iterable[Finding]) -> bool:
        for finding in findings:
            self._say(finding)
        return True

    def _say(self, finding: Finding) -> None:
        self._report({"level": finding.level, "text": finding.text[:_LONGEST_TEXT], "fix": finding.fix[:_LONGEST_TEXT]})

    def _attempt(self, action: Callable[[], _T]) -> _T | None:
        """Do one step; any failure is a finding."""
        stage = self._bench.stage if self._bench else "being started"
        try:
            return action()
        except NotKept as error:
            problem = not_kept(error)
            self._say(Finding("error", str(problem), problem.fix))
        except ProbeError as error:
            self._say(Finding("error", str(error), error.fix))
        except TierPluginError as error:
            self._say(Finding("error", str(error), OWN_FAULT))
        except ConfigError as error:
            self._take(Finding("error", problem, "correct the tier's options") for problem in error.problems)
        except BaseException as error:  # noqa: BLE001 -- whatever a tier raises is a line of the report
            stage = self._bench.stage if self._bench else stage
            self._say(Finding("error", f"failed while {stage}: {in_words(error)}", self._fix(error)))
        return None

    def _fix(self, error: BaseException) -> str:
        """Return what is to be done about what a tier has raised: what it must not raise is a bug of its plugin."""
        if isinstance(error, StoreContractError) or not isinstance(error, Exception):
            return OWN_FAULT
        expected = (KvtiersError, OSError, *getattr(self._tier, "transient_errors", ()))
        return REACH if isinstance(error, expected) else _UNEXPECTED


def in_words(error: BaseException) -> str:
    """Return an error's text, in one line; the name of its class comes last, for bug reports."""
    name, text = type(error).__name__, error_message(error).rstrip(".")
    if text and isinstance(error, KvtiersError):
        return text
    return f"{text} ({name})" if text else name


def _diagnosis(tier: SupportsDiagnosis, value_bytes: int) -> list[Finding]:
    """Return the tier's own findings; ProbeError if what it returned is not findings."""
    result: object = tier.diagnose(value_bytes)
    what = f"diagnose() of {type(tier).__name__}"
    if not isinstance(result, Iterable):
        raise ProbeError(f"{what} returned {result!r:.80}, expected a list of findings")
    findings = list(result)
    for finding in findings:
        if not (isinstance(finding, Finding) and isinstance(finding.text, str) and isinstance(finding.fix, str)):
            raise ProbeError(f"{what} returned {finding!r:.80} in its list, expected a Finding")
        if finding.level not in _LEVELS:
            raise ProbeError(f"{what} has a finding of level {finding.level!r:.80}, expected ok, warning or error")
    return findings


def _close(tier: ChunkStore | SecondaryTierManager) -> bool:
    if isinstance(tier, SecondaryTierManager):
        tier.drain(_DRAIN_SECONDS)
    tier.close()
    return True


def _left_behind(
    tier: ChunkStore | SecondaryTierManager, before: set[threading.Thread], watch: ChildWatch
) -> Iterator[Finding]:
    """Yield a warning for what is there after ``close``; only a warning, since a library may share what it starts."""
    until = time.monotonic() + _LEFT_SECONDS
    threads = [t for t in threading.enumerate() if t not in before and type(t).__name__ != "_DummyThread"]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    kind = type(tier).__name__
    if names := [thread.name for thread in threads if thread.is_alive()]:
        text = f"after close, {kind} still runs {len(names)} threads: {', '.join(names[:_NAMED])}"
        yield Finding("warning", text, f"unless a library shares them, {OWN_FAULT}")
    for pid, starter in list(watch.left(tier, max(0.0, until - time.monotonic())).items())[:_NAMED]:
        yield Finding("warning", f"{starter} left a child process ({pid}), which close did not end", OWN_FAULT)
