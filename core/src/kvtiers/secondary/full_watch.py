"""The watch over full stores: one log line when a store stops taking values, with what to do, and one when it resumes.

A full store is no failure: it is still read, its breaker stays closed, and what is dropped is counted. Without the line
an operator would see a healthy engine and a tier that gets nothing new.
"""

from collections.abc import Callable

__all__ = ["FullWatch"]

_QUIET_SECONDS = 30.0  # for so long it must have dropped nothing: at its limit a store takes some values and drops some


class FullWatch:
    """The watch of one tier. ``advice``: what to do. By the caller's clock; engine's thread."""

    def __init__(self, name: str, advice: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._advice = advice
        self._clock = clock
        self._dropped = 0
        self._last = 0.0
        self.is_full = False

    def stored(self, written: int, dropped: int) -> str:
        """Record how many of a job's values were written and dropped; return a line for the log, or "" for none."""
        if dropped:
            self._last = self._clock()
            self._dropped = self._dropped + dropped if self.is_full else dropped
            began, self.is_full = not self.is_full, True
            if began:
                return (
                    f"{self._name}: full: its store has not taken {dropped} values; what it holds is read as before; "
                    f"{self._advice}"
                )
        elif self.is_full and written and self._clock() - self._last >= _QUIET_SECONDS:
            self.is_full = False
            return f"{self._name}: takes values again; {self._dropped} were dropped while it was full"
        return ""
