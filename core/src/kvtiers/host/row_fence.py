"""The row fence: what detaches one job from memory that its engine, or a client's caller, takes back early.

A load is copied out of a bounce buffer, and no copy begins once the job is detached. A store has no copy that could be
held back: it asks after it has read the memory whether that was still the job's, so that the bytes are those to store.
"""

import threading
from collections.abc import Callable, Sequence

from kvtiers.host.messages import Status

__all__ = ["RowFence"]


class RowFence:
    """Guards the memory of one job; used by all threads that work on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landing = 0
        self._landed: set[int] = set()
        self._notify: Callable[[], None] | None = None
        self._is_over = False

    def is_given(self) -> bool:
        """Return whether the job is not detached, so that what was read from its memory before is its values."""
        with self._lock:
            return self._notify is None

    def land(self, row: int, copy: Callable[[], None]) -> bool:
        """Copy a value into its row; False, with nothing copied, if the job is detached."""
        with self._lock:
            if self._notify is not None:
                return False
            self._landing += 1
        try:
            copy()
            self._landed.add(row)
            return True
        finally:
            with self._lock:
                self._landing -= 1
                self._notify_when_free()

    def statuses(self, rows: Sequence[int]) -> bytes:
        """Return the status of the value in each of the rows: DONE if it has landed, else FAILED."""
        return bytes(Status.DONE if row in self._landed else Status.FAILED for row in rows)

    def detach(self, notify: Callable[[], None]) -> None:
        """Copy nothing from now on; ``notify``, which must not block, is called when no copy is in flight any more.

        It is not called if the job is over, or was detached before.
        """
        with self._lock:
            if self._notify is None:
                self._notify = notify
                self._notify_when_free()

    def end(self) -> None:
        """End the job: its result is on its way, so ``notify`` is not called any more."""
        with self._lock:
            self._is_over = True

    def _notify_when_free(self) -> None:
        if self._notify is not None and not self._landing and not self._is_over:
            self._is_over = True
            self._notify()
