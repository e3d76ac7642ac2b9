"""The start and the end of a vLLM engine, as far as they concern its tiers.

vLLM gives figures to its ``/metrics`` in steps only, and an engine without a request makes none: so it is kept stepping
at its start, until one report has the state of the tiers. At its end it steps as long as there is work, for as long as
``--shutdown-timeout`` allows: work of a slow tier alone must not take all of that time.
"""

import time
from collections.abc import Callable

__all__ = ["FirstReport"]

_LONGEST_SECONDS = 30.0


class FirstReport:
    """The first report of the tiers' states. ``have_spoken``: each tier is open, or has logged why not."""

    def __init__(self, have_spoken: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._have_spoken = have_spoken
        self._clock = clock
        self._until = clock() + _LONGEST_SECONDS
        self._spoken = False
        self._is_due = True

    def is_due(self) -> bool:
        """Return whether the engine has to go on stepping for it."""
        if self._is_due:
            self._spoken = self._spoken or self._have_spoken()
            self._is_due = self._clock() < self._until
        return self._is_due

    def given(self) -> None:
        """Record a report; one that was given before all had spoken is not yet the one."""
        self._is_due = self._is_due and not self._spoken
