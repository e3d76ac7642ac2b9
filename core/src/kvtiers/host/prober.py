"""The lookup thread of one store: answers which values it has, so that questions do not queue behind transfers.

When there is nothing to ask it reads the store's own figures, here too because they may need a lock that the store
holds during I/O.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, OffloadKey, SupportsStats
from kvtiers.host.messages import Probed
from kvtiers.host.transfer import ValueMover
from kvtiers.layout.storage_name import StorageNames

__all__ = ["Prober"]

_log = logging.getLogger("kvtiers.secondary")
_STATS_SECONDS = 1.0
_MOST_FIGURES = 256


@dataclass(frozen=True, slots=True)
class _Probe:
    probe_id: int
    keys: Sequence[OffloadKey]
    names: StorageNames
    is_prefix: bool
    give_up_at: float


class Prober:
    """Answers questions about one store, in order. ``emit`` gets the answers, on the prober's thread."""

    def __init__(self, deadline: float, emit: Callable[[Probed], None], label: str) -> None:
        self._deadline = deadline
        self._emit = emit
        self._label = label
        self._probes: deque[_Probe] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.figures: dict[str, float] = {}
        """The store's own figures, as of about a second ago."""

    def thread(self, store: ChunkStore, mover: ValueMover) -> threading.Thread:
        """Return the thread that asks this store, to be started."""
        return threading.Thread(
            target=self._run, args=(store, mover), name=f"kvtiers-{self._label}-lookup", daemon=True
        )

    def ask(self, probe_id: int, keys: Sequence[OffloadKey], names: StorageNames, *, is_prefix: bool) -> None:
        """Queue a question; never waits."""
        probe = _Probe(probe_id, keys, names, is_prefix, time.monotonic() + self._deadline)
        with self._changed:
            self._probes.append(probe)
            self._changed.notify()

    def close(self) -> None:
        """Answer nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, store: ChunkStore, mover: ValueMover) -> None:
        stats_at = time.monotonic()
        while not self._closed:
            probe = self._next(stats_at)
            if probe is not None:
                self._emit(self._answer(mover, probe))
            if time.monotonic() >= stats_at:
                self._take_figures(store)
                stats_at = time.monotonic() + _STATS_SECONDS

    def _next(self, until: float) -> _Probe | None:
        with self._changed:
            self._changed.wait_for(lambda: self._probes or self._closed, max(0.0, until - time.monotonic()))
            return self._probes.popleft() if self._probes and not self._closed else None

    @staticmethod
    def _answer(mover: ValueMover, probe: _Probe) -> Probed:
        if time.monotonic() >= probe.give_up_at:
            return Probed(probe.probe_id, b"", "it was not asked in time")
        with plugin_boundary(exits=True) as store:
            answers = mover.probe(probe.names, probe.keys, is_prefix=probe.is_prefix, give_up_at=probe.give_up_at)
            return Probed(probe.probe_id, bytes(answers))
        return Probed(probe.probe_id, b"", store.error)

    def _take_figures(self, store: ChunkStore) -> None:
        if not isinstance(store, SupportsStats):
            return
        with plugin_boundary(exits=True) as stats:
            figures = list(store.stats().items())[:_MOST_FIGURES]
            self.figures = {str(name)[:100]: float(figure) for name, figure in figures}
        if stats.error:  # figures are no promise
            _log.debug("%s: stats: %s", self._label, stats.error)
