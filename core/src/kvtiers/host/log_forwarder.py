"""Log forwarding: a tier host's log lines go to the engine's log, with the name of the tier that they are about."""

import logging
import time
from collections.abc import Callable, Sequence

from kvtiers._failures import plugin_boundary
from kvtiers.host.messages import SAY_ONCE

__all__ = ["send_logs"]

_LINES_PER_SECOND = 50
_LONGEST_LINE = 4_000


def send_logs(tiers: Sequence[str], level: int, send: Callable[[int, int, str], bool]) -> None:
    """Pass what is logged in this process to ``send(tier, level, text)``, which says whether it took the line.

    A line of a thread that no tier is known to have started goes out under the names of all of them. One that is logged
    with ``extra={"once": True}`` has SAY_ONCE added to its level: the engine logs it once, however many hosts send it.
    """
    root = logging.getLogger()
    root.setLevel(max(level, logging.INFO))  # what clients log for debugging can hold secrets
    root.addHandler(_LogSender(tiers, send))
    logging.captureWarnings(True)


class _LogSender(logging.Handler):
    """Sends a bounded number of lines a second; a backend that logs without end must not drown the engine."""

    def __init__(self, tiers: Sequence[str], send: Callable[[int, int, str], bool]) -> None:
        super().__init__()
        self._tiers = tiers
        self._send = send
        self._second = 0
        self._sent = 0
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. Called under the handler's lock."""
        with plugin_boundary() as formatting:  # a record that cannot be formatted must not fail a store's call
            if not self._may_send():
                self._dropped += 1
                return
            tier, names = self._tier_of(record.threadName or "")
            text = self.format(record)[:_LONGEST_LINE]
            if self._dropped:
                text += f" ({self._dropped} lines before this one were dropped)"
            level = min(record.levelno, SAY_ONCE - 1) | (SAY_ONCE if getattr(record, "once", False) else 0)
            about = "" if text.startswith(f"{names}: ") else f"{names}: "  # as lines of core's own do already
            if self._send(tier, level, about + text):
                self._dropped = 0
            else:
                self._dropped += 1
        if formatting.error:
            self._dropped += 1

    def _may_send(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._sent = second, 0
        self._sent += 1
        return self._sent <= _LINES_PER_SECOND

    def _tier_of(self, thread: str) -> tuple[int, str]:
        """Find the tier by its pool's threads, which are named after it."""
        pool = thread.rpartition("-")[0]
        for index, name in enumerate(self._tiers):
            if pool == f"kvtiers-{name}":
                return index, name
        return 0, ", ".join(self._tiers)
