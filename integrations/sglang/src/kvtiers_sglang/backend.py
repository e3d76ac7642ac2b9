"""The storage backend of HiCache: SGLang's pools over kvtiers' tiers, one client a pool.

=======================  ======================================================================================
SGLang's thread          calls
=======================  ======================================================================================
scheduler's              the constructor, ``register_*``, ``on_host_pools_registered``, ``close``
prefetch, prefetch I/O   ``batch_exists``, ``batch_exists_v2``, ``batch_get_v1``, ``batch_get_v2``
backup                   ``batch_set_v1``, ``batch_set_v2``
=======================  ======================================================================================

A pool's client is opened when SGLang registers the pool: only then it is known what its pages are. What cannot be used
is refused there, in one line, and nothing stays open. After that no call raises, and each ends within ``deadline``,
however many pools it is about. No page is on the engine's thread, and no I/O in its process: the tiers run in their
hosts.

A hybrid model resumes at a prefix only if each of its pools has there what its hit policy asks for:

==================  ==========================================================================================
hit policy          a prefix of n pages can be restored if the pool has
==================  ==========================================================================================
``all_pages``       each of the n pages (an indexer)
``trailing_pages``  the last pages before n, as many as the transfer names (a sliding window, a recurrent state)
==================  ==========================================================================================

Such a set has gaps: with states at 512 and 1,024 tokens, nothing between them can be resumed. SGLang intersects the
sets of all ranks, so the set is reported, and not its largest member alone.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from kvtiers._failures import log_with_backoff
from kvtiers.api import ConfigError
from kvtiers_sglang.options import options_of
from kvtiers_sglang.pools import Pool, open_pool
from kvtiers_sglang.weight_updates import unhooked_updates, update_begun

__all__ = ["ALL", "TRAILING", "KvtiersHiCache", "never_raises", "restorable"]

_log = logging.getLogger("kvtiers.sglang")
_KV = str(PoolName.KV)
_CLOSE_SECONDS = 5.0
ALL, TRAILING = "all_pages", "trailing_pages"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def never_raises(default: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Make a method answer ``default(*its arguments)`` where it would raise. Its object has a count ``bugs``."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 -- it is a miss for SGLang
                self.bugs += 1
                message = "%s failed (%d times so far); SGLang goes on without"
                log_with_backoff(self.bugs, _log.exception, message, method.__name__, self.bugs)
                return default(*args, **kwargs)

        return cast("_Method", guarded)

    return decorate


def restorable(policy: str, there: Sequence[bool], trailing: int) -> set[int]:
    """Return the lengths, in pages, of the prefixes that a pool can serve. ``there[i]``: it has page i.

    None for a policy that is not of the table above: then SGLang computes.
    """
    if policy == ALL:
        run = next((place for place, answer in enumerate(there) if not answer), len(there))
        return set(range(1, run + 1))
    if policy == TRAILING:
        return {n for n in range(1, len(there) + 1) if all(there[max(0, n - trailing) : n])}
    return set()


def _misses(keys: Sequence[str], *_: object, **__: object) -> list[bool]:
    return [False] * len(keys)


def _misses_of(transfers: Sequence[Any], *_: object, **__: object) -> dict[str, list[bool]]:
    return {str(transfer.name): [False] * len(transfer.keys or ()) for transfer in transfers}


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
        self._pools: dict[str, Pool] = {}
        self._opening = threading.Lock()
        self.bugs = 0

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the KV itself. ConfigError or StartError, in one line, if it cannot be used."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool of a hybrid model; as above."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, memory: Any) -> None:
        try:
            _refuse_changed_weights()
            with self._opening:
                known = self._pools.get(name)
                if known is not None and known.memory is memory:
                    return
                self._pools[name] = open_pool(name, memory, self._storage, self._options)
        except BaseException:
            # SGLang does not close a backend that has refused a further pool, and would go on with half of it.
            self.close()
            raise
        if known is not None:
            known.client.close()

    # -- queries

    @never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002 -- SGLang's
        """Return how many of the leading pages of KV there are."""
        return self._prefix(keys, self._until())

    @never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether this page of KV is there."""
        return bool(self.batch_exists([key]))

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the prefixes at which every pool of the model has what its hit policy asks for."""
        until = self._until()
        kv_pages = self._prefix(keys, until)
        found = {_KV: kv_pages} if kv_pages else {}
        usable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            name, policy = str(transfer.name), str(transfer.hit_policy.value)
            if policy not in {ALL, TRAILING}:
                continue  # it never limits the KV, and without a verdict nothing is believed of it
            pool = self._pools.get(name)
            there = pool.there(keys[:kv_pages], until) if usable and pool is not None else []
            lengths = restorable(policy, there, max(1, len(transfer.keys or ())))
            if lengths:
                found[name] = max(lengths)
            usable &= lengths
        return PoolTransferResult(max(usable, default=0), found, sorted(usable))

    def _prefix(self, keys: Sequence[str], until: float) -> int:
        return self._pools[_KV].prefix(keys, until) if not update_begun() else 0

    # -- pages

    @never_raises(_misses)
    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Fill pages of KV; return for each whether it was found."""
        return self._get(_KV, keys, host_indices, self._until())

    @never_raises(_misses)
    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Store pages of KV; return for each whether a tier has it."""
        return self._set(_KV, keys, host_indices, self._until())

    @never_raises(_misses_of)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Fill pages of several pools, in one deadline."""
        until = self._until()
        return {str(it.name): self._get(str(it.name), it.keys or (), it.host_indices, until) for it in transfers}

    @never_raises(_misses_of)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Store pages of several pools, in one deadline."""
        until = self._until()
        return {str(it.name): self._set(str(it.name), it.keys or (), it.host_indices, until) for it in transfers}

    @never_raises(lambda _, keys, *__: [False] * len(keys))
    def _get(self, name: str, keys: Sequence[str], slots: Any, until: float) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or update_begun():
            return [False] * len(keys)
        found = pool.load(keys, slots, until)
        return found if not update_begun() else [False] * len(keys)

    @never_raises(lambda _, keys, *__: [False] * len(keys))
    def _set(self, name: str, keys: Sequence[str], slots: Any, until: float) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or update_begun():
            return [False] * len(keys)
        return pool.store(keys, slots, until)

    def _until(self) -> float:
        return time.monotonic() + self._options.deadline

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
        """Close the tiers of all pools, within some seconds. SGLang's threads have ended by then; later calls miss."""
        until = time.monotonic() + _CLOSE_SECONDS
        for pool in self._pools.values():
            pool.client.close(max(0.0, until - time.monotonic()))


def _refuse_changed_weights() -> None:
    if update := update_begun():
        raise ConfigError(
            f"kvtiers: {update} has changed the weights of this server, and the identity of its pages is that of those "
            "before; start the server again"
        )
    if unhooked := unhooked_updates():
        raise ConfigError(
            f"kvtiers: SGLang has not applied the hooks of kvtiers' plugin before {', '.join(unhooked)}, so that pages "
            "would outlive their weights; let SGLANG_PLUGINS name 'kvtiers' too, or leave it out"
        )
