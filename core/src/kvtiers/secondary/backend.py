"""The ``StoreBackend`` interface: the I/O of a store tier, in a tier host or on threads of this process."""

from collections.abc import Sequence
from typing import Protocol

from kvtiers.api import OffloadKey
from kvtiers.host.messages import Event, StoreJob
from kvtiers.layout.storage_name import StorageNames

__all__ = ["StoreBackend"]


class StoreBackend(Protocol):
    """The I/O of one store, seen from the engine's thread. No method blocks but ``wait_open``, ``drain``, ``close``."""

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the store is open; return "" then, else why it is not."""

    def open_state(self) -> str | None:
        """Return "" if the store is open, why it is not, or None while it has said neither. From any thread."""

    def send_job(self, job: StoreJob) -> bool:
        """Start a job under the names current now; False: there is no room for it."""

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Ask which of the keys the store has; of a prefix only as far as it is present. False: no room."""

    def set_names(self, names: StorageNames) -> None:
        """Use other names (another fingerprint) for all that is sent from now on."""

    def abandon(self, job_id: int) -> None:
        """Give this job up: no request waits for it any more. Its JobDone must still follow."""

    def release(self, job_id: int) -> None:
        """Detach a load from its rows, if possible: its JobReleased then comes although its calls are still running."""

    def flush(self) -> None:
        """Send what was collected since the last call."""

    def poll(self) -> Sequence[Event]:
        """Return new events, of a bounded number of messages."""

    def restart(self, reason: str) -> None:
        """Restart the I/O, if that is possible: the store does not answer any more."""

    def log(self, level: int, text: str) -> None:
        """Write a line to the log, on another thread than the engine's."""

    def stats(self) -> dict[str, float]:
        """Return the store's own figures, as of its last report."""

    def drain(self, timeout: float) -> bool:
        """Wait until all jobs have ended; False if some have not within ``timeout`` seconds."""

    def close(self, timeout: float) -> None:
        """Stop all I/O; what has not ended within ``timeout`` seconds is dropped."""
