"""The keys of tenants that a config does not list, for one store: each read from its file at a use, and cached.

``encryption.tenants."*"`` says where the files are. A tenant whose file cannot be read is without this store, as are
listed ones (``tenant_keys.py``). Its file is tried again at each use: failures are not cached, so made-up names push
out no key.

The transfer threads and the lookup thread read the files themselves.
"""

import itertools
import logging
from collections.abc import Sequence
from functools import lru_cache

from kvtiers._failures import log_with_backoff
from kvtiers.api import ConfigError, OffloadKey, tenant_of
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keys import KeyRing

__all__ = ["FirstUseKeys"]

_log = logging.getLogger("kvtiers.secondary")
_MOST_KEPT = 1024


class FirstUseKeys:
    """The keys of at most ``most`` tenants beside the namespace's and the listed ones' (``ring``); for many threads."""

    def __init__(
        self, config: EncryptionConfig, namespace: str, ring: KeyRing, label: str, most: int = _MOST_KEPT
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._ring = ring
        self._label = label
        self._read = lru_cache(most)(self._read_file)  # which remembers no exception
        self._failures_of = lru_cache(most)(lambda _tenant: itertools.count(1))
        self._equal_keys = itertools.count(1)

    def ring_of(self, keys: Sequence[OffloadKey]) -> KeyRing:
        """Return the live keys of these chunks' tenants; it has them whatever is forgotten later.

        A tenant's keys are missing in it that cannot be read.
        """
        tenants = [tenant for tenant in dict.fromkeys(map(tenant_of, keys)) if not self._ring.is_listed(tenant)]
        return self._ring.with_tenants({tenant: self._of(tenant) for tenant in tenants}) if tenants else self._ring

    def _of(self, tenant: str) -> KeyRing | None:
        try:
            return self._read(tenant)
        except ConfigError as error:
            times = next(self._failures_of(tenant))
            text = "%s: %s; tenant %r is without this tier until its key can be read, and no other one is (%d so far)"
            log_with_backoff(times, _log.warning, text, self._label, error, tenant, times)
            return None

    def _read_file(self, tenant: str) -> KeyRing:
        ring = open_keys(self._config, self._namespace, tenant)
        if other := self._ring.owner_of(ring.current, besides=tenant):
            times = next(self._equal_keys)
            text = "%s: tenant %r and %s have the same key: with it, who can read one's values can read the other's"
            log_with_backoff(times, _log.warning, f"{text} (%d so far)", self._label, tenant, other, times)
        return ring
