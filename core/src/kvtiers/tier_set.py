"""The tiers of a config, opened over one region of rows, and closed together.

Shared by the roots that open tiers: an engine's manager (``engine_lifecycle.py``), and clients (``client/``). All tiers
are opened at once, and none is waited for. They are drained and closed at the same time.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvtiers._failures import logged_boundary
from kvtiers.api import ChunkStore, ConfigError, SecondaryTierManager, StartError, TierConfig, TierContext, TierPlugin
from kvtiers.encryption.config import EncryptionConfig, encryption_of
from kvtiers.host.messages import Limits
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.fingerprint_record import Described
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import is_remote, load_tier, open_plugin
from kvtiers.region.early_memory import LentMemory
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.managed.sealed_tier import SealedTier
from kvtiers.secondary.placement import HostedRegion, TierHosts, host_count, share_of
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tiering.tier_slot import TierOptions, TierSlot

__all__ = ["TierRows", "TierSet"]

_log = logging.getLogger("kvtiers")


@dataclass(frozen=True, slots=True)
class TierRows:
    """The rows that tiers move. ``sizes[g]``: payload and value bytes of group g; ``fd``: None: no host can map it.

    ``callers``: the region of a client's caller, as in ``HostedRegion``.
    """

    view: memoryview
    row_stride: int
    sizes: Sequence[tuple[int, int]]
    fd: int | None
    map_bytes: int
    core_dumps: bool = False
    callers: Mapping[str, Any] | None = None
    lender: LentMemory | None = None


class TierSet:
    """The open tiers. ``slots``: in the config's order; ``tiers``: the same by name.

    ``is_awaited``: callers wait for stores too, so their hosts are polled whenever something may have come (``wait``).
    """

    def __init__(
        self,
        configs: Sequence[TierConfig],
        rows: TierRows,
        namespace: str,
        names: StorageNames,
        described: Described | None,
        *,
        is_awaited: bool = False,
        encryption: EncryptionConfig | None = None,
    ) -> None:
        self._encryption = encryption
        self._rows = rows
        self._namespace = namespace
        self._names = names
        self._described = described
        self._views = ValueViews(rows.view, rows.row_stride)
        del rows  # the traceback of what fails below would hold its view: the region could not be unmapped
        self._hosts: TierHosts | None = None
        self._required = [config.tier_name for config in configs if config.required]
        self.tiers: dict[str, ChunkStoreTier | SealedTier] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.release_rows)
            undo.callback(self.close, 0.0)
            if any(config.io == "process" for config in configs):
                self._hosts = self._tier_hosts(is_awaited=is_awaited)
            self.slots = [self._slot(index, config) for index, config in enumerate(configs)]
            undo.pop_all()

    @property
    def hosts(self) -> TierHosts | None:
        """The tier hosts; None if no tier has one."""
        return self._hosts

    def set_names(self, names: StorageNames) -> None:
        """Use other names for all later keys and values."""
        self._names = names
        for tier in self.tiers.values():
            tier.set_names(names)

    def limits_of(self, config: TierConfig) -> Limits:
        """Return the limits of each host of a tier with this config."""
        share = config
        if config.io == "process":
            plugin = load_tier(config.type)
            share = share_of(config, plugin, host_count(config, plugin))
        writers = None if share.store_threads == "auto" else int(share.store_threads)
        limit = share.rate_limit
        return Limits(share.threads, writers, limit.bytes_per_second, limit.requests_per_second)

    def build(self, config: TierConfig, index: int) -> TierSlot:
        """Build another tier and start its hosts; it is none of the tiers before ``add``. Not the engine's thread.

        ``index``: one that no other tier had. KvtiersError, in one line, if its plugin cannot be loaded.
        """
        if self._hosts is None and config.io == "process":
            self._hosts = self._tier_hosts(is_awaited=False)
        return self._built(index, config)[0]

    def add(self, slot: TierSlot) -> None:
        """Count a tier that was built among the tiers; engine's thread."""
        tier = slot.tier
        assert isinstance(tier, ChunkStoreTier)
        tier.set_names(self._names)  # they may have changed since
        self.tiers[slot.name] = tier

    def take_out(self, name: str) -> ChunkStoreTier | SealedTier:
        """Count a tier, which has no job in flight, among the tiers no longer; engine's thread. ``end`` ends it."""
        return self.tiers.pop(name)

    def end(self, name: str, tier: ChunkStoreTier | SealedTier, timeout: float) -> None:
        """Close a tier that was taken out, and end its hosts. Waits; not the engine's thread."""
        _quietly(name, tier.close)
        if self._hosts is not None:
            self._hosts.end(name, timeout)

    def wait_open(self, soon: float, until: float) -> None:
        """Wait for all tiers to open until ``soon``, for those that are required until ``until``; StartError for these.

        Both are times of ``time.monotonic``.
        """
        for tier in self.tiers.values():
            tier.wait_open(max(0.0, soon - time.monotonic()))
        for name in self._required:
            error = self.tiers[name].wait_open(max(0.0, until - time.monotonic()))
            if error:
                raise StartError(f"{name}: required, but cannot be opened: {error}")

    def close(self, timeout: float) -> None:
        """Drain all tiers at the same time, each of which logs what it had to drop, and close them."""
        until = time.monotonic() + timeout
        _at_once({name: partial(_end, name, tier, until) for name, tier in self.tiers.items()})
        if self._hosts is not None:
            self._hosts.close(until - time.monotonic())

    def release_rows(self) -> None:
        """Release the rows' memory, after ``close``."""
        self._views.close()
        self._rows = replace(self._rows, view=memoryview(b""))

    def _tier_hosts(self, *, is_awaited: bool) -> TierHosts | None:
        rows = self._rows
        if rows.fd is None:
            return None
        hosted = HostedRegion(
            rows.fd,
            rows.map_bytes,
            len(rows.view),
            rows.row_stride,
            rows.sizes,
            rows.core_dumps,
            rows.callers,
            rows.lender,
        )
        return TierHosts(
            hosted,
            self._namespace,
            lambda: self._names,
            self._described,
            is_awaited=is_awaited,
            encryption=self._encryption,
        )

    def _slot(self, index: int, config: TierConfig) -> TierSlot:
        slot, tier = self._built(index, config)
        self.tiers[slot.name] = tier
        return slot

    def _built(self, index: int, config: TierConfig) -> tuple[TierSlot, ChunkStoreTier | SealedTier]:
        plugin = load_tier(config.type)
        name = config.tier_name
        tier: ChunkStoreTier | SealedTier
        if plugin.kind == "manager":
            opener = self._opener(plugin, config, SecondaryTierManager)
            if encryption_of(config, self._encryption) is not None:  # of a config that was changed after it was loaded
                raise ConfigError(f"{name}: its values cannot be encrypted, since it moves them by itself")
            tier = SealedTier(config, opener, self._views, self._names, self._rows.sizes)
        else:
            row_bytes = self._rows.row_stride
            rows = len(self._rows.view) // row_bytes
            pool = self._pool(plugin, config)
            tier = ChunkStoreTier(config, pool, rows=rows, row_bytes=row_bytes, when_full=plugin.when_full)
        value_bytes, capacity = max(value for _, value in self._rows.sizes), getattr(config, "capacity", None)
        options = TierOptions(
            name,
            config.read_only,
            config.admission,
            config.deadline,
            config.may_lose,
            None if config.writes_per_hour is None else config.writes_per_hour / value_bytes,
            capacity // value_bytes if isinstance(capacity, int) else None,
            shareable=plugin.shareable,
            is_remote=is_remote(plugin),
        )
        return TierSlot(index, tier, options), tier

    def _pool(self, plugin: TierPlugin, config: TierConfig) -> HostPool:
        if config.io == "process" and self._hosts is not None:
            return self._hosts.pool(config, plugin)
        if config.io == "process":
            name = config.tier_name
            _log.warning("%s: no tier host, since none could map this region: its io is 'thread'", name)
        from kvtiers.secondary.in_process import InProcessBackend  # late: it loads all that a tier host does

        opener = self._opener(plugin, config, ChunkStore)
        backend = InProcessBackend(
            config, opener, self._views, self._names, self._rows.sizes, self._described, self._encryption
        )
        return HostPool([PooledHost(config.tier_name, backend)])

    def _opener(self, plugin: TierPlugin, config: TierConfig, kind: type[Any]) -> Callable[[], Any]:
        context = TierContext(
            tier_name=config.tier_name,
            value_bytes=max(value for _, value in self._rows.sizes),
            namespace=self._namespace,
            read_only=config.read_only,
            region=self._rows.view,
            row_stride=self._rows.row_stride,
        )
        return partial(open_plugin, plugin, config, context, kind)


def _at_once(calls: Mapping[str, Callable[[], None]]) -> None:
    """Make all calls at the same time and wait for them; each ends by itself in time. The first runs on this thread."""
    threads: list[threading.Thread] = []
    here: list[Callable[[], None]] = []
    for name, call in calls.items():
        thread = threading.Thread(target=call, name=f"kvtiers-{name}-end", daemon=True)
        try:
            if here:
                thread.start()
                threads.append(thread)
            else:
                here.append(call)
        except RuntimeError:  # none can be had, as while the interpreter ends
            here.append(call)
    for call in here:
        call()
    for thread in threads:
        thread.join()


def _end(name: str, tier: ChunkStoreTier | SealedTier, until: float) -> None:
    _quietly(name, lambda: tier.drain(max(0.0, until - time.monotonic())))
    _quietly(name, tier.close)


def _quietly(name: str, call: Callable[[], object]) -> None:
    """Make a call of the shutdown; what goes wrong in it is logged and stops nothing else."""
    with logged_boundary(_log, "%s: shutdown", name):
        call()
