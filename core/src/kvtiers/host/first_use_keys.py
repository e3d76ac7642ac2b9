"""The keys of tenants that a config does not list, for one store: each read at its first use, off the threads that ask.

``encryption.tenants."*"`` says where they are. So many tenants may come that not all keys are kept: the least recently
used is forgotten, and read again at its next use. A tenant whose key cannot be had is without this store, as are listed
ones (``tenant_keys.py``); it is tried again at a use, not before its pause is over. A tenant that has been used is in
one of three places::

    a use ---> queued: waits for a thread, or is read ---> kept: the least recently used is forgotten first
                 ^                                   '---> failed: has a pause; these push out only each other
                 '--- a use, when the pause is over ---------'

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
transfer, lookup   ask for the keys of what they move or look up; wait for a file's first attempt, a little in sum
first-use key (8   read keys, run an operator's commands, and end when nothing is to be read: first attempts before
or fewer)          further ones, which have one thread to four, so that neither is in the other's way; of the first
                   the tenant used last and the one that came first, in turns: a use brings a tenant forward in the
                   one order and never back in the other, so a flood of names used once keeps none waiting that is in
                   use, however long it goes on
=================  ==========================================================================================
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers._failures import log_with_backoff
from kvtiers.api import ConfigError, OffloadKey, tenant_of
from kvtiers.api.config import EACH_OTHER_TENANT
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keys import KeyRing

__all__ = ["FirstUseKeys"]

_log = logging.getLogger("kvtiers.secondary")
_MOST_KEPT = 1024
_MOST_FAILED = 8192  # with their pauses; one that is pushed out counts as new
_MOST_WAITING = 1024  # first attempts, and as many further ones; a later use queues who was left out
_MOST_THREADS = 8  # each of which may run an operator's command
_MOST_RETRYING = 4  # of them
_WAIT_SECONDS = 0.02  # for a file; at most so long at once, and so long a second for all tenants together


@dataclass(slots=True, eq=False)
class _Entry:
    """One tenant's keys. ``due``: when they may be tried again, ``pause``: until the next time, if that fails."""

    tenant: str
    pause: float
    awaited_until: float
    due: float = 0.0
    has_failed: bool = False
    ring: KeyRing | None = None


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
        self._is_awaited = not config.tenants[EACH_OTHER_TENANT].runs_a_command
        self._kept: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first, as of those that failed
        self._failed: OrderedDict[str, _Entry] = OrderedDict()
        self._queued: dict[str, _Entry] = {}
        self._first: OrderedDict[str, _Entry] = OrderedDict()  # of what is queued: what is not being read yet
        self._first_by_arrival: OrderedDict[str, _Entry] = OrderedDict()  # the same; a use does not reorder it
        self._retries: deque[_Entry] = deque()
        self._takes_newest = False
        self._threads = self._reading = self._retrying = 0  # all threads; those that read; those of these that retry
        self._failures, self._equal_keys, self._failed_starts = (itertools.count(1) for _ in range(3))
        self._allowance, self._allowed_at = _WAIT_SECONDS, time.monotonic()
        self._is_closed = False
        self._changed = threading.Condition()

    def ring_of(self, keys: Sequence[OffloadKey]) -> KeyRing:
        """Return the live keys of these chunks' tenants; it has them whatever is forgotten later.

        A tenant's keys are missing in it that cannot be had, or have not come yet.
        """
        tenants = [tenant for tenant in dict.fromkeys(map(tenant_of, keys)) if not self._ring.is_listed(tenant)]
        if not tenants:
            return self._ring
        with self._changed:
            entries = [self._use(tenant) for tenant in tenants]
            self._await(entries)
            return self._ring.with_tenants({entry.tenant: entry.ring for entry in entries})

    def close(self) -> None:
        """Read nothing more; a command that runs, runs to its end."""
        with self._changed:
            self._is_closed = True
            self._first.clear()
            self._first_by_arrival.clear()
            self._retries.clear()
            self._changed.notify_all()

    # -- on the threads that ask, under the lock

    def _use(self, tenant: str) -> _Entry:
        """Return a tenant's entry as used now, and have its keys read if that is due."""
        for used in (self._kept, self._failed, self._first):
            if tenant in used:
                used.move_to_end(tenant)
        entry = self._kept.get(tenant) or self._queued.get(tenant) or self._failed.get(tenant)
        if entry is None:
            awaited_until = time.monotonic() + _WAIT_SECONDS if self._is_awaited else 0.0
            entry = _Entry(tenant, self._pauses[0], awaited_until)
        if entry.ring is None and tenant not in self._queued and entry.due <= time.monotonic():
            self._queue(entry)
        if tenant in self._queued:
            self._start_thread()  # also if it was queued at an earlier use: none may have started then
        return entry

    def _queue(self, entry: _Entry) -> None:
        if self._is_closed or (entry.has_failed and len(self._retries) >= _MOST_WAITING):
            return
        self._failed.pop(entry.tenant, None)
        self._queued[entry.tenant] = entry
        if entry.has_failed:
            self._retries.append(entry)
            return
        self._first[entry.tenant] = self._first_by_arrival[entry.tenant] = entry
        if len(self._first) > _MOST_WAITING:
            left_out, _ = self._first.popitem(last=False)
            del self._first_by_arrival[left_out], self._queued[left_out]

    def _start_thread(self) -> None:
        """Start a thread, if there is more to take than there are threads about to take it."""
        to_take = len(self._first) + min(len(self._retries), _MOST_RETRYING - self._retrying)
        if to_take > self._threads - self._reading and self._threads < _MOST_THREADS:
            thread = threading.Thread(target=self._run, name=f"kvtiers-{self._label}-first-use-keys", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                times = next(self._failed_starts)
                text = "%s: no thread can be started that reads tenants' keys: %s; tried again at a use (%d so far)"
                log_with_backoff(times, _log.warning, text, self._label, error, times)
                return
            self._threads += 1

    def _await(self, entries: Sequence[_Entry]) -> None:
        """Wait for first attempts, while the allowance lasts that grows with time, and nothing stands before them."""
        now = time.monotonic()
        awaited = [entry for entry in entries if entry.awaited_until > now and entry.tenant in self._queued]
        if not awaited or len(self._first) > self._threads - self._reading:
            return
        self._allowance = min(_WAIT_SECONDS, self._allowance + (now - self._allowed_at) * _WAIT_SECONDS)
        self._allowed_at = now
        seconds = min(self._allowance, max(entry.awaited_until for entry in awaited) - now)
        if seconds > 0:
            self._changed.wait_for(
                lambda: self._is_closed or all(entry.tenant not in self._queued for entry in awaited), seconds
            )
            self._allowance -= time.monotonic() - now  # below 0 when several have waited at once

    # -- on the threads that read

    def _run(self) -> None:
        while entry := self._take():
            try:
                ring, problem = open_keys(self._config, self._namespace, entry.tenant), ""
            except ConfigError as error:
                ring, problem = None, str(error)
            if ring is None:
                self._fail(entry, problem)
            else:
                self._keep(entry, ring)

    def _take(self) -> _Entry | None:
        """Return what to read next; None: nothing, so the thread ends."""
        with self._changed:
            may_retry = self._retries and self._retrying < _MOST_RETRYING
            if may_retry and not (self._first and self._retrying):
                entry = self._retries.popleft()
                self._retrying += 1
            elif self._first:
                self._takes_newest = not self._takes_newest
                if self._takes_newest:
                    tenant, entry = self._first.popitem()
                    del self._first_by_arrival[tenant]
                else:
                    tenant, entry = self._first_by_arrival.popitem(last=False)
                    del self._first[tenant]
            else:
                self._threads -= 1
                return None
            self._reading += 1
            return entry

    def _keep(self, entry: _Entry, ring: KeyRing) -> None:
        with self._changed:
            self._end(entry)
            entry.ring = ring
            self._kept[entry.tenant] = entry
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
            rings = {tenant: kept.ring for tenant, kept in self._kept.items()}
        other = self._ring.with_tenants(rings).owner_of(ring.current, besides=entry.tenant)
        if other:
            times = next(self._equal_keys)
            text = (
                "%s: tenant %r and %s have the same key: with it, who can read one's values can read the other's; "
                "the file or command of '*' has to give each tenant its own (%d so far)"
            )
            log_with_backoff(times, _log.warning, text, self._label, entry.tenant, other, times)

    def _fail(self, entry: _Entry, problem: str) -> None:
        with self._changed:
            self._end(entry)
            entry.has_failed, entry.awaited_until = True, 0.0
            entry.due = time.monotonic() + entry.pause
            entry.pause = min(2 * entry.pause, self._pauses[1])
            self._failed[entry.tenant] = entry
            if len(self._failed) > _MOST_FAILED:
                self._failed.popitem(last=False)
        if not self._is_closed:
            times = next(self._failures)
            text = "%s: %s; tenant %r is without this tier until its key can be read, and no other one is (%d so far)"
            log_with_backoff(times, _log.warning, text, self._label, problem, entry.tenant, times)

    def _end(self, entry: _Entry) -> None:
        """Note that an attempt is over."""
        del self._queued[entry.tenant]
        self._reading -= 1
        self._retrying -= entry.has_failed
        self._changed.notify_all()
