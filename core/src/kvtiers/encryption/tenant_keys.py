"""The reader of tenants' own keys for one store: several at a time, and again later where they cannot be had.

Tenants are apart in this, too: one whose key is gone, or whose KMS does not answer, is without this store until its key
can be read, and no other tenant is. The namespace's own keys are not read here: without them nothing is opened.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
transfer           starts the others when a store is opened, and waits some seconds for their first attempts
key (8 or fewer)   read keys, and end when those that they began with have been read
=================  ==========================================================================================
"""

import logging
import threading
import time
from collections import deque

from kvtiers.api import ConfigError
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keys import KeyRing

__all__ = ["KEY_WAIT", "TenantKeyReader"]

KEY_WAIT = 5.0
"""How long a store that is opened waits for its tenants' keys: a command that hangs must not keep the others out."""

_log = logging.getLogger("kvtiers.secondary")
_MOST_THREADS = 8  # each of which may run an operator's command
_MOST_NAMED = 8  # tenants, in one line of the log


class TenantKeyReader:
    """Reads the keys of all tenants that a config lists, and adds them to the namespace's (``ring``).

    ``pauses``: seconds until keys that could not be had are tried again, doubling from the first to the second.
    ``wait``: seconds for the first attempts, at most. ``threads``: the most that read keys.
    """

    def __init__(
        self,
        config: EncryptionConfig,
        namespace: str,
        ring: KeyRing,
        label: str,
        pauses: tuple[float, float],
        *,
        wait: float = KEY_WAIT,
        threads: int = _MOST_THREADS,
    ) -> None:
        self._wait = wait
        self._threads = threads
        self._config = config
        self._namespace = namespace
        self._ring = ring
        self._label = label
        self._pauses = pauses
        # Commands, which may take long, do not keep tenants from keys that are at hand.
        self._waiting = deque(sorted(config.listed, key=lambda tenant: config.of(tenant).runs_a_command))
        self._goes_on = False
        self._lock = threading.Lock()
        self._tried = threading.Semaphore(0)
        self._closed = threading.Event()

    def read(self) -> None:
        """Begin to read, and wait some seconds for the first attempts; what comes later is added then."""
        tenants, until = len(self._waiting), time.monotonic() + self._wait
        threads = [
            threading.Thread(target=self._run, name=f"kvtiers-{self._label}-keys", daemon=True)
            for _ in range(min(self._threads, tenants))
        ]
        for thread in threads:
            thread.start()  # a RuntimeError, since none can be had, is the store's that is opened
        for _ in range(tenants):
            if not self._tried.acquire(timeout=max(0.0, until - time.monotonic())) or self._closed.is_set():
                break
        self._goes_on = True
        self._log_all()

    def close(self) -> None:
        """Read nothing more; a command that runs, runs to its end."""
        self._closed.set()
        self._tried.release()

    def _run(self) -> None:
        failed: list[str] = []
        while not self._closed.is_set():
            try:
                tenant = self._waiting.popleft()
            except IndexError:
                break
            if not self._read(tenant):
                failed.append(tenant)
            self._tried.release()
        pause, longest = self._pauses
        while failed and not self._closed.wait(pause):
            failed = [tenant for tenant in failed if self._closed.is_set() or not self._read(tenant)]
            pause = min(2 * pause, longest)

    def _read(self, tenant: str) -> bool:
        try:
            ring = open_keys(self._config, self._namespace, tenant)
        except ConfigError as error:
            problem = str(error)
        else:
            self._add(tenant, ring)
            return True
        if not self._closed.is_set():
            text = "%s: %s; tenant %r is without this tier until its key can be read, and no other one is"
            _log.warning(text, self._label, problem, tenant, extra={"once": True})
        return False

    def _add(self, tenant: str, ring: KeyRing) -> None:
        with self._lock:
            other = self._ring.add(tenant, ring)
        if other:
            text = "%s: tenant %r and %s have the same key: with it, who can read one's values can read the other's"
            _log.warning(text, self._label, tenant, other, extra={"once": True})
        if self._goes_on:
            _log.info("%s: tenant %r has this tier now: %s", self._label, tenant, ring.in_words())

    def _log_all(self) -> None:
        if missing := len(self._ring.missing):
            text = "%s: without this tier, until their keys can be read: %d of the %d tenants that have their own"
            _log.warning(text, self._label, missing, len(self._config.listed), extra={"once": True})
        rings = self._ring.of_tenants
        words = [f"{tenant!r}: {ring.in_words()}" for tenant, ring in [*rings.items()][:_MOST_NAMED]]
        if len(rings) > _MOST_NAMED:
            words.append(f"and {len(rings) - _MOST_NAMED} more")
        if words:
            text = "%s: encrypted with keys of their own: tenants %s"
            _log.info(text, self._label, "; ".join(words), extra={"once": True})
