"""The limits record: which limits the process had that wrote to the directory last, beside those of this one.

Each process keeps the whole directory within its own limits, so the smallest capacity and age and the largest floor of
all who share it decide, and the others lose values by them. Nobody is in a place to judge that but people, so each
process that writes leaves its limits in ``.limits`` with its first value, and says in one line if others differ. The
record is for people alone: nothing depends on it, so it may be lost.
"""

import contextlib
import json
import logging
import os
import socket
import time
from datetime import UTC, datetime
from typing import Any

from kvtiers.api.units import format_duration, format_size
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import Directory

__all__ = ["ADVICE", "LIMITS_FILE", "Limits"]

LIMITS_FILE = ".limits"
_log = logging.getLogger("kvtiers_fs")
_MOST_BYTES = 4096
_BY_LIMITS = "each evicts by its own limits, so that the strictest hold for all"
_BY_ACCESS = "what the one writes may be closed to the other's user"
_ACCESS = frozenset({"mode", "group"})
ADVICE = "give all processes that share the directory the same"


class Limits:
    """The limits of this process in the record, and those of others, looked at every ``look_seconds``. Any thread."""

    def __init__(self, config: FsConfig, directory: Directory, look_seconds: float) -> None:
        self._look_seconds = look_seconds
        self._directory = directory
        self._path = config.path
        self._own = {
            "capacity": config.capacity,
            "max_age": config.max_age,
            "min_free": config.min_free,
            "mode": config.mode,
            "group": directory.permissions.gid,
        }
        self._is_recorded = False
        self._said = ""
        self._next_look = 0.0

    def record(self, name: str) -> None:
        """Leave the limits of this process for others, with the first value that it writes."""
        if self._is_recorded or name.startswith("_") or "/_" in name:  # of core's own, such as the probe of a check
            return
        self._is_recorded = True
        content = json.dumps({**self._own, "host": socket.gethostname(), "time": time.time()})
        with contextlib.suppress(OSError):
            self._directory.put(LIMITS_FILE, content.encode())

    def look(self) -> None:
        """Say, once, in what the process that wrote last differs. Not too often; never raises for the disk."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._look_seconds
        difference = self.difference()
        if difference and difference != self._said:
            self._said = difference
            _log.warning("%s: %s; %s", self._path, difference, ADVICE, extra={"once": True})

    def difference(self) -> str:
        """Return in what the limits of the process that wrote last differ from this one's; "" if in nothing."""
        theirs = self._read()
        differing = [name for name in self._own if name in theirs and theirs[name] != self._own[name]]
        if not differing:
            return ""
        there, here = (
            ", ".join(f"{name} {_in_words(name, of[name])}" for name in differing) for of in (theirs, self._own)
        )
        when = datetime.fromtimestamp(theirs["time"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        who = f"the process on {theirs['host']} that began to write to it at {when}"
        consequence = _BY_ACCESS if _ACCESS.issuperset(differing) else _BY_LIMITS
        return f"{who} has {there}, this process has {here}: {consequence}"

    def _read(self) -> dict[str, Any]:
        """Return the record; {} if there is none that can be read: any bytes may stand there."""
        try:
            fd = self._directory.open(LIMITS_FILE, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return {}
        try:
            found = json.loads(os.read(fd, _MOST_BYTES))
            host, when = found["host"], float(found["time"])
            datetime.fromtimestamp(when, UTC)
            numbers = {name: found[name] for name in self._own if isinstance(found.get(name), int | float | None)}
            sizes = {name: value for name, value in numbers.items() if value is not None or name == "max_age"}
            mode = {"mode": found["mode"]} if found.get("mode") in {"0600", "0640", "0660"} else {}
            return {**sizes, **mode, "host": repr(str(host)[:80])[1:-1], "time": when}
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return {}
        finally:
            os.close(fd)


def _in_words(name: str, value: float | str | None) -> str:
    if name == "max_age":
        return "none" if value is None else format_duration(float(value))
    return format_size(float(value or 0)) if name in {"capacity", "min_free"} else str(value)
