"""The in-process backend: a store's I/O on threads of the engine's own process (``io: thread``).

For tests, notebooks and regions that another process cannot map. Nothing can be killed here: a call that hangs keeps
its rows until it returns.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvtiers.api import ChunkStore, OffloadKey, TierConfig
from kvtiers.encryption.config import EncryptionConfig, encryption_of
from kvtiers.host.messages import Event, Limits, Opened
from kvtiers.host.transfer_pool import PoolOptions, TransferPool
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.fingerprint_record import Described
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.tier_jobs import JobPart

__all__ = ["InProcessBackend"]

_EVENTS_PER_POLL = 1024


class InProcessBackend:
    """A ``TransferPool`` and a queue for its events."""

    def __init__(
        self,
        config: TierConfig,
        open_store: Callable[[], ChunkStore],
        views: ValueViews,
        names: StorageNames,
        sizes: Sequence[tuple[int, int]],
        described: Described | None = None,
        encryption: EncryptionConfig | None = None,
    ) -> None:
        self.parts: dict[int, JobPart] = {}
        self._events: deque[Event] = deque()
        self._opened = threading.Event()
        self._open_error = "not opened yet"
        self._pool = TransferPool(
            open_store,
            views,
            names,
            PoolOptions.of(config, sizes),
            self._emit,
            described=None if described is None else described.of_tier(config),
            encryption=encryption_of(config, encryption),
        )

    def wait_open(self, timeout: float) -> str:
        """Wait until the store is open; return "" then, else why it is not."""
        self._opened.wait(timeout)
        return self._open_error

    def open_state(self) -> str | None:
        """Return "" if the store is open, why it is not, or None while it has said neither. From any thread."""
        return self._open_error if self._opened.is_set() else None

    def send_job(self, part: JobPart) -> bool:
        """Queue a job."""
        self.parts[part.message.job_id] = part
        self._pool.submit(part.message)
        return True

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Queue a question."""
        self._pool.probe(probe_id, keys, is_prefix=is_prefix)
        return True

    def set_names(self, names: StorageNames) -> None:
        """Use these names from now on."""
        self._pool.set_names(names)

    def set_limits(self, limits: Limits) -> None:
        """Use these limits from now on."""
        self._pool.set_limits(limits)

    def abandon(self, job_id: int) -> None:
        """Begin nothing more for this job."""
        self._pool.abandon(job_id)

    def expect_end(self) -> None:
        """Do nothing: there is no process to be killed."""

    def release(self, job_id: int) -> None:
        """Detach a job from its memory, if it can be."""
        self._pool.release(job_id)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def poll(self) -> Sequence[Event]:
        """Return the events that have come, a bounded number."""
        self._pool.check_kept()
        events = self._events
        return [events.popleft() for _ in range(min(len(events), _EVENTS_PER_POLL))]

    def restart(self, reason: str) -> None:
        """Do nothing: a thread that hangs cannot be ended, so nothing can be restarted here."""

    def stats(self) -> dict[str, float]:
        """Return the pool's and the store's figures."""
        return self._pool.stats()

    def _emit(self, event: Event) -> None:
        if isinstance(event, Opened):
            self._open_error = event.error
            self._opened.set()
        self._events.append(event)

    def drain(self, timeout: float) -> bool:
        """Wait for all jobs to end."""
        return self._pool.drain(timeout)

    def close(self, timeout: float) -> None:
        """End the threads and close the store."""
        self._pool.close(timeout)
