"""When the rows of a load that is given up are left alone, although a call of the store is still under way.

Where values are read beside their rows (``staging.py``), a row is touched by nothing but the copy of a sound value into
it. So a load can let go of its rows before its calls have ended: from then on nothing is copied any more.
"""

import threading
from collections.abc import Callable

__all__ = ["RowFence"]


class RowFence:
    """Guards the rows of one load; used by all threads that work on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landing = 0
        self._tell: Callable[[], None] | None = None
        self._is_over = False

    def land(self, copy: Callable[[], None]) -> bool:
        """Copy a value into its row; False, with nothing copied, if the rows have been let go."""
        with self._lock:
            if self._tell is not None:
                return False
            self._landing += 1
        try:
            copy()
        finally:
            with self._lock:
                self._landing -= 1
                self._tell_when_free()
        return True

    def let_go(self, tell: Callable[[], None]) -> None:
        """Copy nothing from now on; ``tell``, which must not block, is called when no copy is under way any more.

        Not at all if the load is over, or has let go before.
        """
        with self._lock:
            if self._tell is None:
                self._tell = tell
                self._tell_when_free()

    def end(self) -> None:
        """The load is over, and its result is on its way."""
        with self._lock:
            self._is_over = True

    def _tell_when_free(self) -> None:
        if self._tell is not None and not self._landing and not self._is_over:
            self._is_over = True
            self._tell()
