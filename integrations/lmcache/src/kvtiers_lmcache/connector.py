"""The remote storage plugin of LMCache inside an engine: its chunks over kvtiers' tiers, by one client.

=====================  =========================================================================================
thread                 does
=====================  =========================================================================================
engine's               the constructor, which waits for the tiers to open; ``exists_sync``, ``batched_contains``,
                       ``remove_sync``, which wait for an answer
LMCache's event loop   every ``async`` method: hands the work to a thread, so that the loop goes on
``kvtiers-lmcache``    the calls of the client, which end within their deadline
=====================  =========================================================================================

All chunks have one length: that of a full chunk of the model. A shorter one, at the end of a prompt, is not stored.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvtiers import load_config, open_client
from kvtiers._failures import log_with_backoff
from kvtiers.api import ConfigError
from kvtiers_lmcache.identity import ObjectKind, identity_of, kind_of, release
from kvtiers_lmcache.key_tenants import KeyTenants
from kvtiers_lmcache.options import Options, options_of

__all__ = ["KvtiersConnectorAdapter"]

_log = logging.getLogger("kvtiers.lmcache")
_TYPE = "kvtiers"
_URL = "plugin://"
_LMCACHES = frozenset({"module_path", "class_name"})
_THREADS = 4
_MOST_LISTED = 100_000
T = TypeVar("T")


class KvtiersConnectorAdapter(ConnectorAdapter):
    """Makes the connector, for a plugin named ``kvtiers`` or ``kvtiers.NAME``."""

    def __init__(self) -> None:
        super().__init__(f"{_URL}{_TYPE}")

    def can_parse(self, url: str) -> bool:
        """Return whether this names the plugin."""
        return url.startswith(_URL) and extract_plugin_type(url.removeprefix(_URL)) == _TYPE

    def create_connector(self, context: Any) -> "KvtiersConnector":
        """Return a connector. ConfigError or StartError, which LMCache logs: it goes on without."""
        name = context.plugin_name or _TYPE
        where = f"remote_storage_plugin.{name}"
        extra = context.config.extra_config or {}
        given = {key.removeprefix(f"{where}."): extra[key] for key in extra if key.startswith(f"{where}.")}
        options = options_of({key: given[key] for key in given.keys() - _LMCACHES}, f"kvtiers: extra_config: {where}")
        return KvtiersConnector(options, context.config, context.metadata, context.local_cpu_backend)


class KvtiersConnector(RemoteConnector):
    """kvtiers as remote storage. No method raises, but for what LMCache asks for; what was not done is a miss."""

    def __init__(self, options: Options, config: Any, metadata: Any, local_cpu: Any) -> None:
        super().__init__(config, metadata)
        _refuse(options, config)
        self._options = options
        self._local_cpu = local_cpu
        self._kind = _kind(self, config, metadata)
        self.short_chunks = 0
        """Chunks that were not stored since they are not full."""
        self.failed_calls = 0
        self._stored: dict[str, None] = {}
        tiers = load_config(options.config)
        self._tenants = KeyTenants(options, tiers)
        self._client = open_client(
            tiers,
            identity_of(self._kind, options),
            self._kind.nbytes,
            bounce_bytes=options.bounce_bytes,
            deadline=options.deadline,
            way_in=f"in LMCache {release()} inside an engine",
            release=f"lmcache {release()}",
        )
        self._pool = ThreadPoolExecutor(_THREADS, "kvtiers-lmcache")

    # -- questions

    async def exists(self, key: Any) -> bool:
        """Return whether a tier has this chunk."""
        return await self._in_thread(lambda: self._prefix([key]) == 1, otherwise=False)

    def exists_sync(self, key: Any) -> bool:
        """Return whether a tier has this chunk."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Support ``batched_contains``."""
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Return how many of the leading chunks the tiers have."""
        return self._guarded(lambda: self._prefix(keys), otherwise=0)

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:  # noqa: ARG002 -- LMCache's
        """Return how many of the leading chunks the tiers have."""
        return await self._in_thread(lambda: self._prefix(keys), otherwise=0)

    def _prefix(self, keys: Sequence[Any]) -> int:
        length = 0
        for tenant, run in self._by_tenant(keys):
            if tenant is None:
                break
            names = [_name_of(key) for key in keys[run]]
            here = self._client.exists_prefix(names, timeout=self._options.lookup_deadline, tenant=tenant)
            length += here
            if here < len(names):
                break
        return length

    def _by_tenant(self, keys: Sequence[Any]) -> Iterator[tuple[str | None, slice]]:
        """Yield the runs of keys of one tenant, nearly always one; None: of one that may not be."""
        start = 0
        for tenant, run in itertools.groupby(keys, lambda key: self._tenants.of_tags(key.tags)):
            end = start + len([*run])
            yield tenant, slice(start, end)
            start = end

    # -- loads

    async def get(self, key: Any) -> Any:
        """Return a memory object with this chunk; None if there is none."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Support ``batched_get``: a call of the client for all chunks is shorter than one for each."""
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """Return a memory object for each chunk that is there, and None for the others."""
        nothing: list[Any] = [None] * len(keys)
        return await self._in_thread(lambda: self._load(keys), otherwise=nothing, undo=_release)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:  # noqa: ARG002 -- LMCache's
        """Return memory objects of the leading chunks, up to the first that is not there."""
        found = await self.batched_get(keys)
        prefix = list(itertools.takewhile(lambda it: it is not None, found))
        _release(found[len(prefix) :])
        return prefix

    def _load(self, keys: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        try:
            for tenant, run in self._by_tenant(keys):
                some = keys[run]
                found += [None] * len(some) if tenant is None else self._load_of(tenant, some)
        except BaseException:
            _release(found)
            raise
        return found

    def _load_of(self, tenant: str, keys: Sequence[Any]) -> list[Any]:
        names = [_name_of(key) for key in keys]
        there = self._client.exists(names, timeout=self._options.lookup_deadline, tenant=tenant)
        # No memory for what is not there: LMCache would evict other chunks to make room.
        objects: list[Any] = [self._allocate() if is_there else None for is_there in there]
        wanted = [place for place, it in enumerate(objects) if it is not None]
        loaded: list[bool] = []
        try:
            loaded = self._client.get_into(
                [names[place] for place in wanted],
                [objects[place].byte_array for place in wanted],
                self._options.deadline,
                tenant=tenant,
            )
        finally:
            for place, is_loaded in itertools.zip_longest(wanted, loaded, fillvalue=False):
                if not is_loaded:
                    objects[place].ref_count_down()
                    objects[place] = None
        return objects

    def _allocate(self) -> Any:
        memory = self._local_cpu.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
        if memory is not None and memory.get_size() != self._kind.nbytes:
            memory.ref_count_down()
            return None
        return memory

    # -- stores

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Support ``batched_put``."""
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store chunks."""
        for memory in memory_objs:  # the caller's own reference ends with this call, and the thread's work may not
            memory.ref_count_up()

        def work() -> None:
            try:
                self._store(keys, memory_objs)
            finally:
                _release(memory_objs)

        await self._in_thread(work, otherwise=None, not_begun=lambda: _release(memory_objs))

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        full = [(key, it) for key, it in zip(keys, objects, strict=True) if self._is_full(it)]
        self.short_chunks += len(keys) - len(full)
        for tenant, run in self._by_tenant([key for key, _ in full]):
            if tenant is None:
                continue
            names, views = [_name_of(key) for key, _ in full[run]], [it.byte_array for _, it in full[run]]
            result = self._client.put(names, views, self._options.store_deadline, tenant=tenant)
            for (key, _), is_stored in zip(full[run], result.stored, strict=True):
                if is_stored:
                    self._stored[key.to_string()] = None
        while len(self._stored) > _MOST_LISTED:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):
                self._stored.pop(next(iter(self._stored)))

    def _is_full(self, memory: Any) -> bool:
        meta = memory.meta
        shapes = meta.shapes if meta.shapes is not None else [meta.shape]
        dtypes = meta.dtypes if meta.dtypes is not None else [meta.dtype]
        is_alike = [*shapes] == self.meta_shapes and [*dtypes] == self.meta_dtypes and meta.fmt == self.meta_fmt
        return bool(is_alike and memory.get_size() == self._kind.nbytes)

    # -- the rest

    async def list(self) -> list[str]:
        """Return the keys that this process has stored, the latest 100,000: names in the tiers are hashes."""
        return [*self._stored]

    def remove_sync(self, key: Any) -> bool:
        """Remove a chunk from all tiers that take stores; True if none has it now."""
        self._stored.pop(key.to_string(), None)
        tenant, seconds = self._tenants.of_tags(key.tags), self._options.store_deadline
        if tenant is None:
            return False
        gone = self._guarded(
            lambda: self._client.delete([_name_of(key)], timeout=seconds, tenant=tenant), otherwise=[False]
        )
        return gone == [True]

    def stats(self) -> dict[str, Any]:
        """Return the client's figures."""
        return self._client.stats() | {"short_chunks": self.short_chunks}

    async def close(self) -> None:
        """Let calls in flight end, within five seconds, and close the tiers. Later calls miss."""
        await asyncio.to_thread(self._client.close)
        self._pool.shutdown(wait=False)  # what is queued runs, and misses

    # -- inside

    async def _in_thread(
        self,
        work: Callable[[], T],
        *,
        otherwise: T,
        undo: Callable[[T], None] = lambda _: None,
        not_begun: Callable[[], None] = lambda: None,
    ) -> T:
        """Do this on a thread. ``undo``: for its result if the caller has gone on; ``not_begun``: if it never runs."""
        try:
            future: Future[T] = self._pool.submit(self._guarded, work, otherwise=otherwise)
        except RuntimeError:  # it is closed
            not_begun()
            return otherwise
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            # LMCache has waited for long enough; work that runs already goes on, and its result is not taken.
            future.add_done_callback(lambda done: not_begun() if done.cancelled() else undo(done.result()))
            future.cancel()
            raise

    def _guarded(self, work: Callable[[], T], *, otherwise: T) -> T:
        try:
            return work()
        except Exception:  # noqa: BLE001 -- the caller is an engine: a miss, a count and a line
            self.failed_calls += 1
            message = "a call failed (%d times so far); LMCache goes on without"
            log_with_backoff(self.failed_calls, _log.exception, message, self.failed_calls)
            return otherwise


def _refuse(options: Options, config: Any) -> None:
    """Raise ConfigError, a line for each setting of LMCache's with which values would not be what the keys say."""
    problems = []
    if config.remote_serde not in {None, "naive"}:
        problems.append(f"kvtiers: 'remote_serde' is {config.remote_serde!r}: lengths vary then; use naive")
    if config.use_layerwise:
        problems.append("kvtiers: 'use_layerwise' is set: chunks are cut into layers then; set it to false")
    of_servers = [name for name in ("capacity", "salt_is_tenant") if getattr(options, name)]
    problems += [f"kvtiers: {name!r} is for the multi-process server; leave it out" for name in of_servers]
    if problems:
        raise ConfigError(problems)


def _kind(connector: RemoteConnector, config: Any, metadata: Any) -> ObjectKind:
    """Return the kind of the model's chunks: what CacheEngineKey has not, and what decides its hashes."""
    form = f"in-process chunk of {metadata.chunk_size} {connector.meta_fmt.name} {config.pre_caching_hash_algorithm}"
    return kind_of(metadata.model_name, form, connector.meta_shapes, connector.meta_dtypes)


def _name_of(key: Any) -> bytes:
    """Return a ``CacheEngineKey`` as the client's key."""
    tags = "".join(f"{len(part)}:{part}" for tag in key.tags or () for part in map(str, tag))
    rest = f"{key.model_name}\0{key.world_size} {key.worker_id} {key.chunk_hash_hex} {key.dtype}\0{tags}"
    return hashlib.sha256(rest.encode()).digest()


def _release(objects: Iterable[Any]) -> None:
    for memory in objects:
        if memory is not None:
            memory.ref_count_down()
