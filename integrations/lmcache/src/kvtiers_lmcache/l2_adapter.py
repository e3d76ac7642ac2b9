"""The L2 adapter of LMCache's multi-process server: its objects over kvtiers' tiers, one client a kind of objects.

===========================  ==================================================================================
thread                       does
===========================  ==================================================================================
LMCache's controllers        submit tasks, take results, unlock: no call of theirs waits
LMCache's eviction, HTTP     ``delete``, ``list_l2_keys``, ``report_status``, ``get_usage``
a lane's (lookup 2, load 4,  the tasks: calls of the clients, which end within the task's deadline
store 2)
===========================  ==================================================================================

A task reads or writes its objects during a client's call alone, and has its result when the last one has ended. What a
store, a lookup and a load say of an object's shape and type has to agree, or it is a miss (``identity.py``).
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvtiers import Client
from kvtiers._failures import logged_boundary
from kvtiers_lmcache.clients import Clients
from kvtiers_lmcache.identity import ObjectKind, kind_of, name_of
from kvtiers_lmcache.lane import Lane
from kvtiers_lmcache.ledger import Ledger
from kvtiers_lmcache.options import Options, describe_options, options_of

__all__ = ["KvtiersL2Adapter", "KvtiersL2AdapterConfig"]

_log = logging.getLogger("kvtiers.lmcache")
_WHERE = "kvtiers: adapter_params of --l2-adapter"
_FORM = "multi-process object"
_CLOSE_SECONDS = 5.0
_DOUBT_SECONDS = 2.0  # after a failure of a tier: what it did not answer counts as absent for a second
_LAST_SECONDS = 1.0  # for tasks to take in that their client is closed


class KvtiersL2AdapterConfig(L2AdapterConfigBase):
    """The options, as LMCache hands them over: ``adapter_params`` of ``--l2-adapter``."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "KvtiersL2AdapterConfig":
        """Read ``adapter_params``; ConfigError, a line for each problem."""
        return cls(options_of(d, _WHERE))

    @classmethod
    def help(cls) -> str:
        """Return the options with their meaning."""
        return f"adapter_params of kvtiers:\n{describe_options()}"


class KvtiersL2Adapter(L2AdapterInterface):
    """kvtiers as an L2 adapter of type ``plugin``."""

    def __init__(self, config: KvtiersL2AdapterConfig | Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """ConfigError, a line for each problem, if the options or the tiers' config are wrong."""
        options = config.options if isinstance(config, KvtiersL2AdapterConfig) else options_of(config, _WHERE)
        self._clients = Clients(options, l1_memory_desc)
        super().__init__(max_capacity_bytes=options.capacity)
        self._options = options
        self._ledger = Ledger()
        self._troubles: dict[ObjectKind, tuple[float, float]] = {}
        """Of the tiers of each kind, as last counted, and when that changed."""
        self._stores: Lane[L2StoreResult] = Lane("store", 2)
        self._lookups: Lane[Any] = Lane("lookup", 2)
        self._loads: Lane[Any] = Lane("load", 4)
        self._is_closed = False

    # -- descriptors

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable when a store has ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable when a lookup has ended."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable when a load has ended."""
        return self._loads.fd

    # -- stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects. The result is success if a tier has all of them."""
        until = time.monotonic() + self._options.store_deadline
        return self._stores.submit(lambda: self._store(keys, objects, until), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of all stores that have ended since the last call, by their tasks."""
        return self._stores.pop_all()

    def _store(self, keys: Sequence[Any], objects: Sequence[Any], until: float) -> L2StoreResult:
        stored = nbytes = 0
        for kind, tenant, places in self._parts(keys, _kinds_of_objects(keys, objects)):
            client = self._clients.get(kind, until)
            if client is None:
                continue
            result = client.put(
                [name_of(keys[place]) for place in places],
                [objects[place].byte_array for place in places],
                _left(until),
                tenant=tenant,
            )
            taken = [keys[place] for place, is_stored in zip(places, result.stored, strict=True) if is_stored]
            stored += len(taken)
            nbytes += len(taken) * kind.nbytes
            self._say_stored(taken, kind)
        return L2StoreResult(stored == len(keys), nbytes)

    def _say_stored(self, keys: Sequence[Any], kind: ObjectKind) -> None:
        added, forgotten = self._ledger.add(keys, kind)
        with logged_boundary(_log, "a listener of LMCache's failed"):
            if added:
                self._notify_keys_stored(added, [kind.nbytes] * len(added))
        self._say_removed(forgotten)

    # -- lookups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Look up keys, each by itself, and lock those that are found."""
        until = time.monotonic() + self._options.lookup_deadline
        return self._lookups.submit(lambda: self._lookup(keys, group_layout_descs, until), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a bitmap of the keys that are found and locked, once; None if the task has not ended yet."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Remove a lock of each key."""
        self._ledger.unlock(keys)

    def _lookup(self, keys: Sequence[Any], descs: Mapping[int, Any], until: float) -> Any:
        found: set[Any] = set()
        locked = self._ledger.lock(keys)  # before the question, so that no deletion comes between
        is_whole = False
        try:
            for kind, client, tenant, some in self._asked(keys, descs, until):
                there = client.exists([name_of(key) for key in some], kind.nbytes, _left(until), tenant=tenant)
                found.update(key for key, is_there in zip(some, there, strict=True) if is_there)
                absent = [key for key, is_there in zip(some, there, strict=True) if not is_there]
                self._forget_evicted(absent, kind, client, until)
            is_whole = True
        finally:
            kept = found if is_whole else ()
            self._ledger.unlock(key for key, took in zip(keys, locked, strict=True) if took and key not in kept)
        return _bitmap([took and key in found for key, took in zip(keys, locked, strict=True)])

    def _asked(
        self, keys: Sequence[Any], descs: Mapping[int, Any], until: float
    ) -> Iterator[tuple[ObjectKind, Client, str, list[Any]]]:
        """Yield the clients to ask for these keys; where LMCache gives no layout, those of all kinds in use."""
        kinds = _kinds_of_descs(keys, descs)
        for kind, tenant, places in self._parts(keys, kinds):
            if (client := self._clients.get(kind, until)) is not None:
                yield kind, client, tenant, [keys[place] for place in places]
        yield from self._where([key for key, kind in zip(keys, kinds, strict=True) if kind is None])

    # -- loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fill objects with the values of keys."""
        until = time.monotonic() + self._options.deadline
        return self._loads.submit(lambda: self._load(keys, objects, until), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """Return a bitmap of the objects that were filled, once; None if the task has not ended yet."""
        return self._loads.pop(task_id)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], until: float) -> Any:
        found = [False] * len(keys)
        for kind, tenant, places in self._parts(keys, _kinds_of_objects(keys, objects)):
            client = self._clients.get(kind, until)
            if client is None:
                continue
            names, views = [name_of(keys[place]) for place in places], [objects[place].byte_array for place in places]
            there = client.get_into(names, views, _left(until), tenant=tenant)
            for place, is_there in zip(places, there, strict=True):
                found[place] = is_there
            absent = [keys[place] for place, is_there in zip(places, there, strict=True) if not is_there]
            self._forget_evicted(absent, kind, client, until)
        loaded = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        with logged_boundary(_log, "a listener of LMCache's failed"):
            if loaded:
                self._notify_keys_accessed(loaded)
        return _bitmap(found)

    # -- what is there

    def delete(self, keys: list[Any]) -> None:
        """Remove the values of keys from all tiers that take stores, but for keys that are locked."""
        with logged_boundary(_log, "a deletion failed; LMCache goes on without"):
            until = time.monotonic() + self._options.store_deadline
            free = self._ledger.begin_deletion(keys)
            try:
                self._delete(free, until)
            finally:
                self._ledger.end_deletion(free)

    def _delete(self, keys: Sequence[Any], until: float) -> None:
        left = set()
        for kind, client, tenant, some in self._where(keys):
            gone = client.delete([name_of(key) for key in some], kind.nbytes, _left(until), tenant=tenant)
            left |= {key for key, is_gone in zip(some, gone, strict=True) if not is_gone}
        self._say_removed(self._ledger.remove(key for key in keys if key not in left))

    def _where(self, keys: Sequence[Any]) -> Iterator[tuple[ObjectKind, Client, str, list[Any]]]:
        """Yield the clients that may have values of these keys; another server's may be of any kind of their model."""
        for model in {key.model_name for key in keys}:
            for kind, client in self._clients.of_model(model):
                here = [key.model_name == model and kind in (self._ledger.kinds(key) or [kind]) for key in keys]
                for _, tenant, places in self._parts(keys, [kind if is_here else None for is_here in here]):
                    yield kind, client, tenant, [keys[place] for place in places]

    def _parts(
        self, keys: Sequence[Any], kinds: Sequence[ObjectKind | None]
    ) -> list[tuple[ObjectKind, str, list[int]]]:
        """Return the places of each kind and tenant; those without a kind, or whose tenant may not be, are left out."""
        tenants = self._clients.tenants.of_salts(key.cache_salt for key in keys)
        places: dict[tuple[ObjectKind, str], list[int]] = {}
        for place, (key, kind) in enumerate(zip(keys, kinds, strict=True)):
            if kind is not None and (tenant := tenants[key.cache_salt]) is not None:
                places.setdefault((kind, tenant), []).append(place)
        return [(kind, tenant, some) for (kind, tenant), some in places.items()]

    def _forget_evicted(self, keys: Sequence[Any], kind: ObjectKind, client: Client, until: float) -> None:
        """Forget keys that this server has stored and that no tier has any more, by the answers of usable tiers.

        An answer that did not come in time, or from a tier that is out of use, says nothing of what is there.
        """
        ours = [key for key in keys if self._ledger.kinds(key) == (kind,)]
        if not ours or time.monotonic() >= until:
            return
        now, troubles = time.monotonic(), _troubles(client.stats())
        before, since = self._troubles.get(kind, (0.0, 0.0))
        if troubles != before or troubles == float("inf"):
            self._troubles[kind] = troubles, now
        elif now - since > _DOUBT_SECONDS:
            self._say_removed(self._ledger.remove(ours))

    def _say_removed(self, removed: Sequence[tuple[Any, int]]) -> None:
        with logged_boundary(_log, "a listener of LMCache's failed"):
            if removed:
                self._notify_keys_deleted([key for key, _ in removed], [nbytes for _, nbytes in removed])

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """Return a page of the keys that this server has stored. ValueError for a size or a cursor that is none."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive (got {page_size})")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(f"cursor is {cursor!r}, which is none of this adapter's")
        page, following = self._ledger.page(model_name, page_size, int(cursor or 0))
        return KeyListPage(
            entries=tuple(KeyEntry(key=key.to_encoded_object_key(), size_bytes=nbytes) for key, nbytes in page),
            next_page_token=None if following is None else str(following),
        )

    def report_status(self) -> dict[str, Any]:
        """Return figures of the tasks and of each client. Healthy until closed: a tier that is out of use is a miss."""
        lanes = (self._stores, self._lookups, self._loads)
        found: dict[str, Any] = {
            "is_healthy": not self._is_closed,
            "type": type(self).__name__,
            "stored_keys": len(self._ledger),
            "locked_keys": self._ledger.locked(),
            "running_tasks": {lane.name: lane.running() for lane in lanes},
            "failed_tasks": {lane.name: lane.failed for lane in lanes},
        }
        with logged_boundary(_log, "a client's figures failed"):
            found["clients"] = self._clients.stats()
        return found

    def close(self) -> None:
        """End all tasks, each with its result, and close the tiers. Descriptors are signalled, and closed last."""
        if self._is_closed:
            return
        self._is_closed = True
        lanes: tuple[Lane[Any], ...] = (self._stores, self._lookups, self._loads)
        with contextlib.ExitStack() as last:
            for lane in lanes:
                last.callback(lane.release)
                lane.close()
            until = time.monotonic() + _CLOSE_SECONDS
            with logged_boundary(_log, "closing the tiers failed"):
                self._clients.close(_CLOSE_SECONDS)
            for lane in lanes:
                if not lane.join(max(until, time.monotonic() + _LAST_SECONDS)):
                    _log.warning("a %s task has not ended within %g s of the close", lane.name, _CLOSE_SECONDS)


def _kinds_of_objects(keys: Sequence[Any], objects: Sequence[Any]) -> list[ObjectKind | None]:
    """Return each object's kind; None for one that is not as its shapes say, as a serializer leaves it."""
    found: list[ObjectKind | None] = []
    for key, memory in zip(keys, objects, strict=True):
        meta = memory.meta
        shapes = meta.shapes if meta.shapes is not None else [meta.shape]
        dtypes = meta.dtypes if meta.dtypes is not None else [meta.dtype]
        kind = None if None in dtypes else kind_of(key.model_name, _FORM, shapes, dtypes)
        found.append(kind if kind is not None and memory.get_size() == kind.nbytes else None)
    return found


def _kinds_of_descs(keys: Sequence[Any], descs: Mapping[int, Any]) -> list[ObjectKind | None]:
    """Return the kind of each key's object, by what the engine has registered for its group; None if nothing.

    LMCache calls the layout a hint, and its own tools give none, or one without tensors.
    """
    found: dict[tuple[str, int], ObjectKind | None] = {}
    for key in keys:
        group = key.model_name, key.object_group_id
        if group not in found:
            desc = descs.get(key.object_group_id)
            if desc is None or not desc.shapes:
                found[group] = None
            else:
                found[group] = kind_of(key.model_name, _FORM, desc.shapes, desc.dtypes)
    return [found[key.model_name, key.object_group_id] for key in keys]


def _bitmap(found: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(found))
    for place, is_there in enumerate(found):
        if is_there:
            bitmap.set(place)
    return bitmap


def _troubles(stats: Mapping[str, Any]) -> float:
    """Return a count that is another one after each failure of a tier; infinite while one is out of use."""
    tiers = stats["tiers"].values()
    if not tiers or any(not tier.get("open", 1) or tier.get("breaker_state", 0) for tier in tiers):
        return float("inf")
    return sum(float(tier.get("errors", 0) + tier.get("breaker_opened", 0)) for tier in tiers)


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())
