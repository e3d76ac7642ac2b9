"""The seal thread: opens a tier of the third rung, seals the rows of its stores, checks those of its loads.

Such a tier runs in the engine's process and moves rows by itself; hashing its values on the engine's thread would take
that thread's time. So would the tier's ``stats``, which may wait for a lock: they are read here, too.
"""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtiers._failures import error_text, plugin_boundary
from kvtiers.api import JobResult, OffloadKey, SecondaryTierManager, TierRequest, TransferJob, group_of
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.seal import SealVerdict, check_value, seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.tier_jobs import good_keys

__all__ = ["SealedJob", "Sealer"]

_log = logging.getLogger("kvtiers.secondary")


@dataclass(slots=True, eq=False)
class SealedJob:
    """A job between core and the tier, which sees ``inner``. ``names``: those current when it was submitted."""

    job: TransferJob
    inner: TransferJob
    names: StorageNames
    handed_over: bool = False
    reported: bool = False
    failed_in_use: bool = False
    """Core has given it up; its result still follows."""
    error: str = ""
    """Why it could not be sealed."""
    result: JobResult | None = None
    """The one that ended it, as it was passed on."""


class Sealer:
    """Posts what it has done to ``sealed`` and ``results``, for the engine's thread to take.

    ``reopen``: seconds until a tier that could not be opened is tried again, doubling from the first to the second.
    """

    def __init__(
        self,
        open_tier: Callable[[], SecondaryTierManager],
        views: ValueViews,
        sizes: Sequence[tuple[int, int]],
        reopen: tuple[float, float],
        label: str,
    ) -> None:
        self.tier: SecondaryTierManager | None = None
        """The tier, once it is open."""
        self.sealed: deque[SealedJob | TierRequest] = deque()
        """Stores, and the ends of requests, in the order in which they were submitted."""
        self.results: deque[JobResult] = deque()
        self.seal_failures = 0
        self.figures: dict[str, float] = {}
        """The tier's own, as they were last read."""
        self._reads_figures = False
        self._views = views
        self._sizes = sizes
        self._reopen = reopen
        self._label = label
        self._opened = threading.Event()
        self._open_error = "not opened yet"
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(open_tier,), name=f"kvtiers-{label}-seal", daemon=True)
        self._thread.start()

    # -- from the engine's thread; only the last three wait

    def seal(self, job: SealedJob) -> None:
        """Queue a store's rows for sealing."""
        self._work.put(lambda: self._seal(job))

    def pass_on(self, context: TierRequest) -> None:
        """Post the end of a request behind the stores before it."""
        self._work.put(lambda: self.sealed.append(context))

    def check(self, job: SealedJob, result: JobResult) -> None:
        """Queue the rows that a load reports as filled for checking."""
        self._work.put(lambda: self._check(job, result))

    def read_figures(self) -> None:
        """Queue the reading of the tier's own figures, unless it is queued already."""
        if not self._reads_figures:
            self._reads_figures = True
            self._work.put(self._read_figures)

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the tier is open; return "" then, else why it is not."""
        self._opened.wait(timeout)
        return self._open_error

    def open_state(self) -> str | None:
        """Return "" if the tier is open, why it is not, or None while it has said neither. From any thread."""
        return self._open_error if self._opened.is_set() else None

    def settle(self, timeout: float) -> None:
        """Wait until everything that was asked for so far is done."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait(timeout)

    def leave_tier(self) -> None:
        """Make no further call to the tier, not even to close it."""
        self.tier = None

    def close(self, timeout: float) -> None:
        """End the thread, which closes the tier; one that hangs is left behind."""
        self._work.put(None)
        self._thread.join(timeout)

    # -- on the sealing thread

    def _run(self, open_tier: Callable[[], SecondaryTierManager]) -> None:
        tier = self._open(open_tier)
        del open_tier  # it refers to the region, which must not outlive the tier
        if tier is None:
            return
        self.tier = tier
        del tier
        self._open_error = ""
        self._opened.set()
        while (work := self._work.get()) is not None:
            work()
            del work  # its rows' views must not outlive the region
        tier, self.tier = self.tier, None
        if tier is None:
            return
        with plugin_boundary() as closing:
            tier.close()
        if closing.error:
            _log.warning("%s: its close() failed: %s", self._label, closing.error)

    def _open(self, open_tier: Callable[[], SecondaryTierManager]) -> SecondaryTierManager | None:
        """Open the tier, trying again as long as it takes; None: it was closed meanwhile."""
        pause, longest = self._reopen
        while True:
            with plugin_boundary(exits=True) as opening:
                return open_tier()
            self._open_error = opening.error
            if not self._opened.is_set():
                self._opened.set()
                _log.warning("%s: out of use: %s; its lookups miss until it is back", self._label, self._open_error)
            with contextlib.suppress(queue.Empty):
                while (work := self._work.get(timeout=pause)) is not None:
                    work()
                return None
            pause = min(2 * pause, longest)

    def _seal(self, sealed: SealedJob) -> None:
        try:
            sizes = [self._sizes[group_of(key)] for key in sealed.job.keys]
            values = self._views.own(sealed.job.chunk_ids, [value for _, value in sizes])
            for key, value, (payload, _) in zip(sealed.job.keys, values, sizes, strict=True):
                seal_value(value, payload, sealed.names.name(key), sealed.names.layout_id)
        except Exception as error:  # noqa: BLE001 -- even a bug of ours must not end this thread
            sealed.error = error_text(error)
        self.sealed.append(sealed)

    def _check(self, known: SealedJob, result: JobResult) -> None:
        landed: list[OffloadKey] = []
        good = set(good_keys(known.inner, result))
        try:
            pairs = zip(known.inner.keys, known.job.keys, known.job.chunk_ids, strict=True)
            landed += [key for inner, key, row in pairs if inner in good and self._is_sound(known.names, key, row)]
        except Exception as error:  # noqa: BLE001 -- as above
            _log.warning("%s: job %d cannot be checked: %s", self._label, known.job.job_id, error_text(error))
        if len(landed) < len(good):
            self.seal_failures += len(good) - len(landed)
            _log.warning(
                "%s: %d of %d values are damaged; counted as misses", self._label, len(good) - len(landed), len(good)
            )
        success = len(landed) == len(known.job.keys)
        self.results.append(JobResult(result.job_id, success, landed, result.nbytes, result.seconds))

    def _read_figures(self) -> None:
        self._reads_figures = False
        if self.tier is not None:
            self.figures = _figures_of(self.tier)

    def _is_sound(self, names: StorageNames, key: OffloadKey, row: int) -> bool:
        payload, nbytes = self._sizes[group_of(key)]
        [value] = self._views.own([row], [nbytes])
        return check_value(value, payload, names.name(key), names.layout_id) is SealVerdict.OK


def _figures_of(tier: SecondaryTierManager) -> dict[str, float]:
    """Return a tier's own figures, if it has some; none if reading them fails."""
    stats = getattr(tier, "stats", None)
    if stats is None:
        return {}
    with plugin_boundary(exits=True):  # figures are no promise
        return {str(name): float(figure) for name, figure in stats().items()}
    return {}
