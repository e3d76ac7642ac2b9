"""The row fence: detaches a load that is given up from its rows while a call of the store still runs.

Where values are read into bounce buffers (``bounce_buffers.py``), nothing touches a row but the copy of a sound value
into it. So a load's rows can be released before its calls have ended: from then on nothing is copied into them.
"""

import threading
from collections.abc import Callable

__all__ = ["RowFence"]


class RowFence:
    """Guards the rows of one load; used by all threads that work on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landing = 0
        self._notify: Callable[[], None] | None = None
        self._is_over = False

    def land(self, copy: Callable[[], None]) -> bool:
        """Copy a value into its row; False, with nothing copied, if the rows have been detached."""
        with self._lock:
            if self._notify is not None:
                return False
            self._landing += 1
        try:
            copy()
        finally:
            with self._lock:
                self._landing -= 1
                self._notify_when_free()
        return True

    def detach(self, notify: Callable[[], None]) -> None:
        """Copy nothing from now on; ``notify``, which must not block, is called when no copy is under way any more.

        It is not called if the load is over, or was detached before.
        """
        with self._lock:
            if self._notify is None:
                self._notify = notify
                self._notify_when_free()

    def end(self) -> None:
        """End the load: its result is on its way, so ``notify`` is not called any more."""
        with self._lock:
            self._is_over = True

    def _notify_when_free(self) -> None:
        if self._notify is not None and not self._landing and not self._is_over:
            self._is_over = True
            self._notify()
