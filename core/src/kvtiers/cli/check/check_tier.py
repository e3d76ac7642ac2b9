"""The trial of one tier, on a thread of its own: a backend that hangs is a line of the report, not the end of it."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvtiers._failures import error_text
from kvtiers.api import (
    ChunkStore,
    ConfigError,
    Finding,
    SecondaryTierManager,
    SupportsDiagnosis,
    TierConfig,
    TierPluginError,
)
from kvtiers.api.units import format_duration
from kvtiers.cli.check.round_trip import OWN_FAULT, Bench, ProbeError, probe_manager, probe_store
from kvtiers.cli.open_tier import open_tier

__all__ = ["Trial", "try_tiers"]

_REACH = "check the tier's options, and that its backend runs and can be reached from here"
_DRAIN_SECONDS = 5.0
_T = TypeVar("_T")


class Trial:
    """The trial of one tier. ``findings`` grows while it runs; ``hangs`` once it was waited for in vain."""

    def __init__(self, config: TierConfig, namespace: str, value_bytes: int) -> None:
        self.name = config.tier_name
        self.findings: list[Finding] = []
        self.hangs = False
        self._config = config
        self._bench = Bench(value_bytes, namespace, config.read_only)
        self._thread = threading.Thread(target=self._run, name=f"check {self.name}", daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def wait(self, until: float, timeout: float) -> None:
        """Wait until the trial has ended or the monotonic clock says ``until``; one that hangs gets a finding."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.hangs = self._bench.given_up = True
            text = f"no answer within {format_duration(timeout)} while {self._bench.stage}"
            self.findings = [*self.findings, Finding("error", text, f"{_REACH}; --timeout gives it longer")]

    def _run(self) -> None:
        tier = self._attempt(self._open)
        if tier is None:
            return
        self._attempt(lambda: self._probe(tier))
        if isinstance(tier, SupportsDiagnosis):
            self._bench.stage = "diagnosing its backend"
            self._attempt(lambda: self._take(tier.diagnose(self._bench.value_bytes)))
        self._bench.stage = "being closed"
        self._attempt(lambda: self._close(tier))

    def _open(self) -> ChunkStore | SecondaryTierManager:
        bench = self._bench
        return open_tier(self._config, namespace=bench.namespace, value_bytes=bench.value_bytes, region=bench.region)

    def _probe(self, tier: ChunkStore | SecondaryTierManager) -> None:
        self._take(probe_store(tier, self._bench) if isinstance(tier, ChunkStore) else probe_manager(tier, self._bench))

    def _close(self, tier: ChunkStore | SecondaryTierManager) -> None:
        if isinstance(tier, SecondaryTierManager):
            tier.drain(_DRAIN_SECONDS)
        tier.close()

    def _take(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._say(finding)

    def _say(self, finding: Finding) -> None:
        if not self.hangs:
            self.findings.append(finding)

    def _attempt(self, action: Callable[[], _T]) -> _T | None:
        """Do one thing; whatever goes wrong is a finding."""
        try:
            return action()
        except ProbeError as error:
            self._say(Finding("error", str(error), error.fix))
        except TierPluginError as error:
            self._say(Finding("error", str(error), OWN_FAULT))
        except ConfigError as error:
            self._take(Finding("error", problem, "correct the tier's options") for problem in error.problems)
        except Exception as error:  # noqa: BLE001 -- whatever a tier raises is a line of the report
            self._say(Finding("error", f"failed while {self._bench.stage}: {error_text(error)}", _REACH))
        return None


def try_tiers(configs: Sequence[TierConfig], namespace: str, value_bytes: int, timeout: float) -> list[Trial]:
    """Try these tiers, all at the same time, for at most ``timeout`` seconds; return the trials, which have ended."""
    trials = [Trial(config, namespace, value_bytes) for config in configs]
    for trial in trials:
        trial.start()
    until = time.monotonic() + timeout
    for trial in trials:
        trial.wait(until, timeout)
    return trials
