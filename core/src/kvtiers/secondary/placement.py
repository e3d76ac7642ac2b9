"""The placement of tiers in tier hosts: which hosts each tier has, and the HELLO message of each host."""

import itertools
import json
import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers._version import __version__
from kvtiers.api import TierConfig, TierPlugin
from kvtiers.api.config import dump_resolved
from kvtiers.encryption.config import EncryptionConfig, dump_sources, encryption_of
from kvtiers.host.messages import Hello
from kvtiers.host.wire import PROTOCOL_FORMAT, encode
from kvtiers.layout.fingerprint_record import Described
from kvtiers.layout.storage_name import StorageNames
from kvtiers.region.early_memory import LentMemory
from kvtiers.region.limits import usable_processors
from kvtiers.secondary.host_client import HostClient
from kvtiers.secondary.host_connection import HostConnection
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.supervisor import USUAL_PACE, HostLauncher, HostPace, HostProcess

__all__ = ["HostedRegion", "TierHosts", "host_count", "share_of", "store_threads"]

_log = logging.getLogger("kvtiers.secondary")
_POLL_SECONDS = 0.005
_MOST_REMEMBERED = 100  # lines of the log that come once
_MOST_BY_ITSELF = 8  # each takes 20 to 60 MB of memory
_PROCESSORS_A_HOST = 2  # the engine, its workers and the store's server need some, too
_PROCESSORS_A_WRITER = 2


@dataclass(frozen=True, slots=True)
class HostedRegion:
    """The parameters with which a host maps the region; ``sizes[g]``: payload and value bytes of group g.

    ``callers``: the region of a client's caller, if there is one: a descriptor (``fd``; None: this one), and where it
    lies in it (``at``, ``nbytes``).
    """

    fd: int
    map_bytes: int
    nbytes: int
    row_stride: int
    sizes: Sequence[tuple[int, int]]
    core_dumps: bool = False
    callers: Mapping[str, Any] | None = None
    lender: LentMemory | None = None


class TierHosts:
    """All hosts of one manager: one for each tier, or several. ``names``: those current now.

    ``is_awaited``: the caller waits for stores as for loads, so each poll looks at every host (see ``wait``).
    ``encryption``: where the hosts get the keys from, which are no part of a HELLO. ``pace``: of all hosts.
    """

    def __init__(
        self,
        region: HostedRegion,
        namespace: str,
        names: Callable[[], StorageNames],
        described: Described | None = None,
        *,
        is_awaited: bool = False,
        encryption: EncryptionConfig | None = None,
        pace: HostPace = USUAL_PACE,
    ) -> None:
        self._described = described
        self._pace = pace
        self._encryption = encryption
        self._is_awaited = is_awaited
        self._region = region
        self._namespace = namespace
        self._names = names
        self._said_once: deque[str] = deque(maxlen=_MOST_REMEMBERED)
        callers_fd = region.callers["fd"] if region.callers else None
        self._launcher = HostLauncher(region.fd, () if callers_fd is None else (callers_fd,), region.lender, pace)
        self._links: dict[str, list[HostConnection]] = {}
        """By tier."""

    def pool(self, config: TierConfig, plugin: TierPlugin) -> HostPool:
        """Start the hosts of one tier, in parallel."""
        count = host_count(config, plugin)
        share = share_of(config, plugin, count)
        names = [config.tier_name]
        if count > 1:
            names = [f"{config.tier_name} ({number} of {count})" for number in range(1, count + 1)]
        hosts = [PooledHost(name, self._started(share, name)) for name in names]
        return HostPool(
            hosts,
            max(value for _, value in self._region.sizes),
            plugin.shared_figures,
            self._is_awaited,
            close_seconds=self._pace.close_seconds,
        )

    def _started(self, config: TierConfig, name: str) -> HostClient:
        process = HostProcess(name, lambda: self._hello(config))
        link = HostConnection(self._launcher, process, self._said_once)
        client = HostClient(
            link,
            self._names(),
            deadline=config.deadline,
            grace=config.grace,
            longest_pause=config.breaker.max_delay,
            is_awaited=self._is_awaited,
        )
        self._links.setdefault(config.tier_name, []).append(link)
        self._launcher.start(process)
        return client

    def _all_links(self) -> Iterator[HostConnection]:
        return itertools.chain.from_iterable(list(self._links.values()))

    def end(self, tier: str, timeout: float) -> None:
        """End the hosts of this tier; those that do not end within ``timeout`` seconds are killed."""
        until = time.monotonic() + timeout
        links = self._links.pop(tier, [])
        for link in links:
            link.end(timeout)
        while any(link.host.life is not None for link in links) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            for link in links:
                link.poll()
        for link in links:
            link.kill("it did not end when its tier was detached")
            self._launcher.forget(link.host)
            link.detach()

    def wait(self, seconds: float | None, wake: int) -> None:
        """Wait until a host has sent something or has ended, the descriptor ``wake`` is readable, or the time is over.

        Called on the thread that polls the tiers, for ``is_awaited`` hosts: one that has not been polled since is
        reported again.
        """
        waiting = select.poll()
        waiting.register(wake, select.POLLIN)
        for link in self._all_links():
            if (connected := link.waitable()) is not None:
                waiting.register(*connected)
        waiting.poll(None if seconds is None else math.ceil(seconds * 1e3))

    def close(self, timeout: float) -> None:
        """End all hosts; those that do not within ``timeout`` seconds, but at least their pace's, are killed."""
        timeout = max(timeout, self._pace.end_seconds)
        until = time.monotonic() + timeout
        links = list(self._all_links())
        for link in links:
            link.end(timeout)
            link.poll()
        while any(link.host.life is not None for link in links) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            for link in links:
                link.poll()
        self._launcher.close(max(0.0, until - time.monotonic()))
        for link in links:
            link.poll()
            link.detach()

    def _hello(self, config: TierConfig) -> bytes:
        region, names, described = self._region, self._names(), self._described
        mapped: dict[str, object] = {
            "map_bytes": region.map_bytes,
            "nbytes": region.nbytes,
            "row_stride": region.row_stride,
        }
        if region.core_dumps:
            mapped["core_dumps"] = True
        if region.callers:
            mapped["callers"] = dict(region.callers)
        tier = {
            "name": config.tier_name,
            "options": dump_resolved(config),
            "namespace": self._namespace,
            "prefix": names.prefix,
            "layout_id": names.layout_id.hex(),
            "layout": "" if described is None or not described.is_of(names) else described.of_tier(config).document,
            "sizes": region.sizes,
            **self._key_sources(config),
        }
        hello = {
            "protocol": PROTOCOL_FORMAT,
            "release": __version__,
            "log_level": _log.getEffectiveLevel(),
            "cpus": sorted(set(config.cpus)),
            "region": mapped,
            "tier": tier,
        }
        return encode(Hello(json.dumps(hello)))

    def _key_sources(self, config: TierConfig) -> dict[str, Any]:
        encryption = encryption_of(config, self._encryption)
        return {} if encryption is None else {"encryption": dump_sources(encryption)}


def host_count(config: TierConfig, plugin: TierPlugin) -> int:
    """Return how many hosts a tier with ``io: process`` has.

    ``auto``: one for each two processors that it may use, at most eight. On 16 processors hosts of four threads read
    files in memory, seals checked, with 7.9 (one), 11 (two), 14.5 (four) and 18 GB/s (eight).
    """
    if config.processes != "auto":
        return config.processes
    if not plugin.shareable or config.quotas:  # which one process counts
        return 1
    return max(1, min(_MOST_BY_ITSELF, int(_processors_of(config) // _PROCESSORS_A_HOST)))


def store_threads(config: TierConfig, plugin: TierPlugin, count: int) -> int:
    """Return how many threads of each of a tier's ``count`` hosts may write at the same time.

    ``auto``: all but one. Where writing takes this machine's processors, at most half of those in all: 24 threads that
    wrote to files in memory on 16 processors made short requests of a GPU take .076 s instead of .053, 8 made it .055.
    """
    if config.store_threads != "auto":
        return config.store_threads
    most = config.threads - 1
    if plugin.writes_locally:
        most = min(most, int(_processors_of(config) // _PROCESSORS_A_WRITER // count))
    return max(1, most)


def _processors_of(config: TierConfig) -> float:
    return min(usable_processors(), len(config.cpus) or math.inf)


def share_of(config: TierConfig, plugin: TierPlugin, count: int) -> TierConfig:
    """Return the config for each of a tier's ``count`` hosts, with its share of the rate limits and of the writers."""
    limit = config.rate_limit
    share = {
        "bytes_per_second": limit.bytes_per_second and max(1, limit.bytes_per_second // count),
        "requests_per_second": limit.requests_per_second and limit.requests_per_second / count,
    }
    own = {"processes": 1, "store_threads": store_threads(config, plugin, count)}
    return config.model_copy(update={**own, "rate_limit": limit.model_copy(update=share)})
