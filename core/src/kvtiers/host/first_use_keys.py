"""The keys of tenants that a config does not list, for one store: each read at its first use, off the threads that ask.

``encryption.tenants."*"`` says where they are. So many tenants may come that not all keys are kept: the least recently
used is closed, and read again at its next use. A tenant whose key cannot be had is without this store, as are listed
ones (``tenant_keys.py``); it is tried again at a use, not before its pause is over.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
transfer, lookup   ask for the keys of what they move or look up; wait a moment for a first attempt
first-use key (8   read keys, run an operator's commands, and end when nothing is to be read
or fewer)
=================  ==========================================================================================
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

from kvtiers._failures import log_with_backoff
from kvtiers.api import ConfigError, OffloadKey, tenant_of
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keys import KeyRing

__all__ = ["FirstUseKeys"]

_log = logging.getLogger("kvtiers.secondary")
_MOST_KEPT = 1024
_MOST_WAITING = 1024  # to be read; a tenant that comes then is without the store until a later use
_MOST_THREADS = 8  # each of which may run an operator's command
_WAIT_SECONDS = 0.02  # a file is read sooner; a lookup that comes later than that may be late for its request


class _Entry:
    """One tenant's keys. ``due``: when they may be tried, ``pause``: until the next time, if that fails."""

    __slots__ = ("awaited_until", "due", "is_queued", "pause", "ring")

    def __init__(self, pause: float) -> None:
        self.ring: KeyRing | None = None
        self.is_queued = False
        self.due, self.pause = 0.0, pause
        self.awaited_until = time.monotonic() + _WAIT_SECONDS


class FirstUseKeys:
    """The keys of at most ``most`` tenants beside the namespace's and the listed ones' (``ring``); for many threads.

    ``pauses``: seconds until keys that could not be had are tried again, doubling from the first to the second.
    """

    def __init__(
        self,
        config: EncryptionConfig,
        namespace: str,
        ring: KeyRing,
        label: str,
        pauses: tuple[float, float],
        most: int = _MOST_KEPT,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._ring = ring
        self._label = label
        self._pauses = pauses
        self._most = most
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._waiting: deque[tuple[str, _Entry]] = deque()
        self._threads = 0
        self._failures = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def ring_of(self, keys: Sequence[OffloadKey]) -> KeyRing:
        """Return the live keys of these chunks' tenants; it has them whatever is closed later.

        A tenant's keys are missing in it that cannot be had, or have not come yet.
        """
        tenants = [tenant for tenant in dict.fromkeys(map(tenant_of, keys)) if not self._ring.is_listed(tenant)]
        if not tenants:
            return self._ring
        with self._changed:
            found = {tenant: self._wanted(tenant) for tenant in tenants}
            while until := max((entry.awaited_until for entry in found.values() if entry.is_queued), default=0.0):
                if not self._changed.wait(until - time.monotonic()):
                    break
            return self._ring.with_tenants({tenant: entry.ring for tenant, entry in found.items()})

    def close(self) -> None:
        """Read nothing more; a command that runs, runs to its end."""
        with self._changed:
            self._is_closed = True
            for _, entry in self._waiting:
                entry.is_queued = False
            self._waiting.clear()
            self._changed.notify_all()

    def _wanted(self, tenant: str) -> _Entry:
        """Return a tenant's entry as used now, and have its keys read if that is due."""
        entry = self._entries.get(tenant)
        if entry is None:
            entry = self._entries[tenant] = _Entry(self._pauses[0])
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
        self._entries.move_to_end(tenant)
        is_due = entry.ring is None and not entry.is_queued and entry.due <= time.monotonic()
        if is_due and not self._is_closed and len(self._waiting) < _MOST_WAITING:
            entry.is_queued = True
            self._waiting.append((tenant, entry))
            self._start()
        return entry

    def _start(self) -> None:
        if self._threads < _MOST_THREADS:
            thread = threading.Thread(target=self._run, name=f"kvtiers-{self._label}-first-use-keys", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none can be had now: another use tries it again
                return
            self._threads += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    return
                tenant, entry = self._waiting.popleft()
            ring, problem = self._read(tenant)
            with self._changed:
                entry.ring, entry.is_queued = ring, False
                if ring is None:
                    self._failures += 1
                    failures, entry.due = self._failures, time.monotonic() + entry.pause
                    entry.pause = min(2 * entry.pause, self._pauses[1])
                self._changed.notify_all()
            if ring is None and not self._is_closed:
                text = (
                    "%s: %s; tenant %r is without this tier until its key can be read, and no other one is (%d so far)"
                )
                log_with_backoff(failures, _log.warning, text, self._label, problem, tenant, failures)

    def _read(self, tenant: str) -> tuple[KeyRing | None, str]:
        try:
            return open_keys(self._config, self._namespace, tenant), ""
        except ConfigError as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001 -- of a library, which is tried again
            return None, f"encryption.tenants.*: its keys cannot be read: {type(error).__name__}"
