"""The storage backend of HiCache: SGLang's host pools over kvtiers' tiers, one client a pool.

=======================  ======================================================================================
SGLang's thread          calls
=======================  ======================================================================================
scheduler's              the constructor, ``register_*``, ``on_host_pools_registered``, ``close``
prefetch, prefetch I/O   ``batch_exists``, ``batch_exists_v2``, ``batch_get_v1``, ``batch_get_v2``
backup                   ``batch_set_v1``, ``batch_set_v2``
=======================  ======================================================================================

A pool's client is opened when SGLang registers the pool: only then it is known what its pages are. What cannot be used
is refused there, in one line. After that no call raises, and each ends within ``deadline``. No page is on the engine's
thread, and no I/O in its process: the tiers run in their hosts.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from kvtiers import Client, open_client
from kvtiers.api import ConfigError
from kvtiers_sglang.hit_policies import ALL, TRAILING, restorable
from kvtiers_sglang.identity import identity_of
from kvtiers_sglang.never_raise import never_raises
from kvtiers_sglang.options import options_of
from kvtiers_sglang.pages import Pages, keys_of
from kvtiers_sglang.server import release, server_arguments

__all__ = ["KvtiersHiCache", "forget_weights"]

_log = logging.getLogger("kvtiers.sglang")
_KV = str(PoolName.KV)
_open: "set[KvtiersHiCache]" = set()


def _misses(keys: Sequence[str], *_: object, **__: object) -> list[bool]:
    return [False] * len(keys)


def _misses_of(transfers: Sequence[Any], *_: object, **__: object) -> dict[str, list[bool]]:
    return {str(transfer.name): [False] * len(transfer.keys or ()) for transfer in transfers}


class _Pool(NamedTuple):
    """A registered host pool."""

    host_pool: Any
    pages: Pages
    client: Client


class KvtiersHiCache(HiCacheStorage):
    """kvtiers as a storage backend: named by ``dynamic``, with ``interface_v1``. See ``options.py`` for its options."""

    def __init__(self, storage_config: Any, _kwargs: Any = None) -> None:
        """ConfigError, a line for each problem, if the options are wrong."""
        self._storage = storage_config
        self._options = options_of(storage_config.extra_config)
        if storage_config.should_split_heads:
            raise ConfigError(
                "kvtiers: 'tp_lcm_size' has no effect: pages are stored as each rank has them; leave it out"
            )
        self._pools: dict[str, _Pool] = {}
        self._opening = threading.Lock()
        self.bugs = 0
        self.weights_changed = ""
        """Why no page is stored or found any more; "" while the weights are those of the start."""

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the KV itself. ConfigError or StartError, in one line, if it cannot be used."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        with self._opening:
            known = self._pools.get(name)
            if known is not None and known.host_pool is host_pool:
                return
            pages = Pages(host_pool, torch.arange(int(getattr(host_pool, "page_size", 1) or 1)))
            identity = identity_of(
                name, host_pool, pages.sizes, self._storage, server_arguments(), self._options.weights, release()
            )
            client = open_client(
                self._options.config,
                identity,
                pages.nbytes,
                bounce_bytes=self._options.bounce_bytes,
                deadline=self._options.deadline,
                way_in=f"in SGLang {release()}, pool {name}",
                release=f"sglang {release()}",
            )
            self._pools[name] = _Pool(host_pool, pages, client)
            _open.add(self)
        if known is not None:
            known.client.close()

    # -- queries

    @never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002 -- SGLang's
        """Return how many of the leading pages of KV there are."""
        return self._pools[_KV].client.exists_prefix(keys_of(keys)) if self._is_usable else 0

    @never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether this page of KV is there."""
        return bool(self.batch_exists([key]))

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return the prefixes at which every pool of the model has what its hit policy asks for."""
        kv_pages = self.batch_exists(keys, extra_info)
        found = {_KV: kv_pages} if kv_pages else {}
        usable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            name, policy = str(transfer.name), str(transfer.hit_policy.value)
            if policy not in {ALL, TRAILING}:
                continue  # it never limits the KV, and without a verdict nothing is believed of it
            there = self._there(name, keys[:kv_pages]) if usable else []
            lengths = restorable(policy, there, max(1, len(transfer.keys or ())))
            if lengths:
                found[name] = max(lengths)
            usable &= lengths
        return PoolTransferResult(max(usable, default=0), found, sorted(usable))

    def _there(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(name)
        return pool.client.exists(keys_of(keys)) if pool is not None else [False] * len(keys)

    # -- pages

    @never_raises(_misses)
    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Fill pages of KV; return for each whether it was found."""
        return self._get(_KV, keys, host_indices)

    @never_raises(_misses)
    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Store pages of KV; return for each whether a tier has it."""
        return self._set(_KV, keys, host_indices)

    @never_raises(_misses_of)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Fill pages of several pools."""
        return {str(it.name): self._get(str(it.name), it.keys or (), it.host_indices) for it in transfers}

    @never_raises(_misses_of)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Store pages of several pools."""
        return {str(it.name): self._set(str(it.name), it.keys or (), it.host_indices) for it in transfers}

    @never_raises(lambda _, keys, __: [False] * len(keys))
    def _get(self, name: str, keys: Sequence[str], slots: Any) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or not self._is_usable:
            return [False] * len(keys)
        return pool.client.get_into(keys_of(keys), pool.pages.views(slots, len(keys)))

    @never_raises(lambda _, keys, __: [False] * len(keys))
    def _set(self, name: str, keys: Sequence[str], slots: Any) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or not self._is_usable:
            return [False] * len(keys)
        return list(pool.client.put(keys_of(keys), pool.pages.views(slots, len(keys))).stored)

    # -- what is left of the interface

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Find nothing: pages are moved in place (``interface_v1``), never as tensors of their own."""

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:  # noqa: ARG002
        """Find nothing, as ``get``."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        """Store nothing, as ``get``."""
        return False

    def batch_set(self, keys: Sequence[str], values: Any = None, *_: Any, **__: Any) -> bool:  # noqa: ARG002
        """Store nothing, as ``get``."""
        return False

    def clear(self) -> None:
        """Say how values are removed: other servers use them too."""
        _log.warning("values are shared with other servers and stay; 'kvtiers store bump' retires them all")

    def stats(self) -> dict[str, Any]:
        """Return the figures of each pool's client, by the pool's name."""
        return {name: pool.client.stats() for name, pool in self._pools.items()}

    @never_raises(lambda *_, **__: None)
    def close(self) -> None:
        """Close the tiers. SGLang's threads have ended by then; calls after it miss."""
        _open.discard(self)
        for pool in self._pools.values():
            pool.client.close()

    @property
    def _is_usable(self) -> bool:
        return not self.weights_changed


def forget_weights(why: str) -> None:
    """Let all backends of this process store and find nothing more: their identity is of other weights now."""
    for backend in list(_open):
        if not backend.weights_changed:
            backend.weights_changed = why
            _log.warning("%s: pages are of other weights now; nothing is stored or found until a restart", why)
