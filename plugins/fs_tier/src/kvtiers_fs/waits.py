"""The times of a store: how long its calls wait for its evictor and for other processes, and how often it looks."""

from dataclasses import dataclass

__all__ = ["USUAL_WAITS", "Waits"]


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits of a store, the length of its evictor's rounds, and how often it looks; in seconds."""

    room: float = 0.25
    """Of a write for room."""
    report: float = 5.0
    """Of a call for reports. Each is a round away, but on a disk or a machine that is too busy."""
    refusals: float = 4.0
    """Times as long as a wait in vain, the next writes are refused at once: threads that wait do not read."""
    round: float = 0.2
    close: float = 5.0
    """Of the end, for the evictor's thread."""
    lock: float = 1.0
    """For the lock on a slab's index, which another process holds for microseconds."""
    look: float = 60.0
    """Between looks at the limits of the process that wrote last."""


USUAL_WAITS = Waits()
