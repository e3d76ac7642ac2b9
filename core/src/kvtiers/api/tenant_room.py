"""The room of tenants in a tier that keeps their quotas by itself: what each has there, and what goes for a new chunk.

A tier of the third rung may count in this way or in its own (``SupportsQuotas``); so does a plan's simulated tier. It
is for chunks of one length. They go as values go from a store with quotas (``host/quotas.py``): a tenant that has no
room loses its oldest ones, a tenth of its quota at a time.
"""

from collections.abc import Callable, Collection
from itertools import islice

from kvtiers.api.keys import OffloadKey, tenant_of

__all__ = ["KEPT_OF_QUOTA", "TenantRoom"]

KEPT_OF_QUOTA = 0.9
"""The part of a quota that stays when something has to go: so that not every new chunk evicts."""


class TenantRoom:
    """The chunks of each tenant with a quota, the oldest first. Not thread-safe; it moves and holds no bytes.

    ``quota_of``: bytes by tenant, as ``set_quotas`` is given it; ``chunk_bytes``: of each chunk.
    """

    def __init__(self, quota_of: Callable[[str], int | None], chunk_bytes: int) -> None:
        self._quota_of = quota_of
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[str, dict[OffloadKey, None]] = {}

    def take(self, key: OffloadKey, spared: Collection[OffloadKey] = ()) -> list[OffloadKey] | None:
        """Add a new chunk; return what is to be evicted for it, none of ``spared``. None: there is no room for it.

        Then all chunks of the tenant are spared, and each was looked at: do not ask for its others with these spared.
        """
        tenant = tenant_of(key)
        quota = self._quota_of(tenant)
        if quota is None:
            return []
        chunks, most = self._chunks.get(tenant, {}), quota // self._chunk_bytes
        evicted: list[OffloadKey] = []
        if len(chunks) >= most:
            too_many = len(chunks) - int(most * KEPT_OF_QUOTA)
            evicted += islice((old for old in chunks if old not in spared), too_many)
            if not evicted:
                return None
        for old in evicted:
            del chunks[old]
        chunks[key] = None
        self._chunks[tenant] = chunks
        return evicted

    def leave(self, key: OffloadKey) -> None:
        """Record that a chunk has gone for another reason. One that was never counted changes nothing."""
        tenant = tenant_of(key)
        chunks = self._chunks.get(tenant, {})
        chunks.pop(key, None)
        if not chunks:
            self._chunks.pop(tenant, None)

    def used(self, tenant: str) -> int:
        """Return the bytes that a tenant with a quota has here."""
        return len(self._chunks.get(tenant, {})) * self._chunk_bytes
