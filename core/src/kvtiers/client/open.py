"""The composition root of a client: rows, tiers and the driver, opened from a config and closed in the right order."""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvtiers._log_queue import QueuedLogs, queue_logs
from kvtiers._process import hold_standard_descriptors
from kvtiers.api import ConfigError, TierConfig
from kvtiers.client.client import Client
from kvtiers.client.driver import Driver
from kvtiers.client.rows import BounceRows, CallersMemory, UnmappableMemoryError
from kvtiers.config import OffloadConfig, load_config
from kvtiers.kv_events.naming import OWN_NAMES, event_groups
from kvtiers.kv_events.open import event_publisher
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.fingerprint_record import Described
from kvtiers.layout.storage_name import StorageNames
from kvtiers.metrics import CLIENT_TIER_FIGURES
from kvtiers.model_identity import described, is_shared, with_model, with_weights
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import require_linux
from kvtiers.secondary.tier_counts import LEAST_STORE_QUEUE
from kvtiers.start_line import StartFacts, StartLine
from kvtiers.tier_set import TierSet

__all__ = ["client_layout", "open_client"]

_log = logging.getLogger("kvtiers")
_BOUNCE_BYTES = 256 << 20
_LEAST_MAPPED = 256 << 10  # of a value: the copy of a shorter one costs less (benchmarks/client.py)
_MOST_LENGTHS = 64
_EVENT_SECONDS = 1.0  # what a close gives the KV events that wait


def open_client(
    config: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any],
    identity: ModelIdentity,
    value_bytes: int | Sequence[int],
    *,
    bounce_bytes: int = _BOUNCE_BYTES,
    region_bytes: int = 0,
    region: tuple[int, Any] | None = None,
    region_required: bool = True,
    deadline: float | None = None,
    way_in: str = "as a client",
    release: str = "",
    tenant: str = "",
) -> Client:
    """Open the tiers of a config for a caller that has bytes and keys, and return a thread-safe, blocking client.

    ``identity``: what decides the meaning of the bytes; two clients share values only if all of it, and the set of
    ``value_bytes``, are equal, and never with an engine that has a scheduler of kvtiers'. Different contents that have
    the same keys and lengths need a difference here, such as in ``kv_layout``. Without ``weights`` nothing is shared.

    ``value_bytes``: the lengths that values have, in bytes, 64 at most; a value of another length is refused, and one
    that is asked for is a miss: a seal states its value's length. ``bounce_bytes``: shared memory through which values
    pass; a value of any length takes as much of it as the longest. ``region_bytes``: of memory for the caller
    (``Client.region``), which tier hosts map, so that values in it are not copied through the rows. ``region``: shared
    memory of the caller's own instead: a descriptor of a memfd or of ``shm_open``, and the buffer that is mapped from
    it. With ``region_required=False`` it is left out where all values are shorter than 256 KiB, whose copy costs less,
    and, with a line of the log, where tier hosts cannot map it. ``deadline``: seconds in which a call ends, by default
    the longest ``deadline`` among the tiers. ``way_in``, ``release``: what uses the client, for the log and for what is
    recorded beside the values. ``tenant``: whose values they are where a call names no other; "" for no one's.

    Of the config, ``primary`` and what belongs to it has no effect. Waits up to ``start_wait`` for the tiers to open;
    one that is not open by then is used when it is. ConfigError or StartError, in one line each, if it cannot start.
    """
    hold_standard_descriptors()
    config = _usable(config, tenant)
    lengths = [value_bytes] if isinstance(value_bytes, int) else list(value_bytes)
    layout = with_weights(with_model(config, client_layout(identity, lengths)))
    sizes = [(layout.payload_bytes(group), layout.value_bytes(group)) for group in range(len(layout.groups))]
    names = StorageNames.of_layout(config.namespace, layout)
    longest = deadline if deadline is not None else max((tier.deadline for tier in config.secondary), default=1.0)
    with contextlib.ExitStack() as undo:
        logs = queue_logs()  # first: what follows logs, too
        undo.callback(logs.close)
        memory = _memory(region, region_bytes, max(lengths), way_in, required=region_required)
        rows = _bounce_rows(config, layout.row_stride, bounce_bytes, memory)
        undo.callback(rows.close)
        tiers = _tiers(config, rows, sizes, names, described(names, layout, release))
        undo.callback(tiers.release_rows)
        undo.callback(tiers.close, 0.0)
        tiers.wait_open((now := time.monotonic()) + config.start_wait, now + config.primary.start_deadline)
        driver = _driver(config, tiers, layout, undo)
        driver.start()
        undo.callback(driver.stop, 0.0)
        facts = StartFacts(way_in, rows.in_words(), config.namespace, names.fingerprint, shared=is_shared(layout.model))
        line = StartLine(facts, {it.tier_name: (it.type, tiers.tiers[it.tier_name]) for it in config.secondary})
        undo.pop_all()
    close = partial(_close, driver, rows, tiers, line, logs)
    groups, whose = {nbytes: group for group, (nbytes, _) in enumerate(sizes)}, config.tenant_rule()
    return Client(driver, rows, groups, lengths[0], longest, partial(_stats, tiers), close, whose, tenant)


def client_layout(identity: ModelIdentity, lengths: Sequence[int]) -> CacheLayout:
    """Return the layout for values of these lengths, in bytes; their order and repetitions make no difference.

    One KV group for each length, under a tensor name that no engine's layout has. A seal states the length of its
    value, and the length enters the fingerprint: so values of one length are a KV group, whose index is a part of each
    key. The alternative, one group with room for the largest value and a length in each, would store and hash the room.
    """
    known = sorted(set(lengths))
    if not known or known[0] < 1 or len(known) > _MOST_LENGTHS:
        raise ConfigError(f"value_bytes is {list(lengths)!r}, expected 1 to {_MOST_LENGTHS} positive numbers of bytes")
    return CacheLayout(
        identity,
        tuple(KVGroup(f"{nbytes} bytes", 1) for nbytes in known),
        # The name is a part of the fingerprint. Engines name their tensors after layers.
        tuple(KVTensor(f"kvtiers-client/{nbytes}", group, nbytes) for group, nbytes in enumerate(known)),
    )


def _memory(
    region: tuple[int, Any] | None, region_bytes: int, longest: int, way_in: str, *, required: bool
) -> int | CallersMemory:
    """Return the caller's memory for tier hosts to map, or how much the client is to make; 0 where it is left out."""
    if region_bytes < 0 or (region is not None and region_bytes):
        raise ConfigError(f"region_bytes is {region_bytes!r}, expected a number of bytes, and none beside a region")
    if region is None or not (required or longest >= _LEAST_MAPPED):
        return region_bytes
    try:
        return CallersMemory(*region)
    except UnmappableMemoryError as error:
        if required:
            raise
        _log.warning("kvtiers %s: the caller's memory is not mapped, values pass the bounce rows: %s", way_in, error)
        return 0


def _bounce_rows(config: OffloadConfig, row_stride: int, bounce_bytes: int, region: int | CallersMemory) -> BounceRows:
    """Return the memory of a client: so few rows, the region's included, that no store queue has to drop one.

    The region has none where a tier moves values in this process: that needs bounce rows.
    """
    given = [tier.store_queue for tier in config.secondary if not tier.read_only]
    queues = [LEAST_STORE_QUEUE if most == "auto" else most for most in given]
    most = min([*queues, 1 << 20]) // (2 if region else 1)
    hosts_alone = all(tier.io == "process" and load_tier(tier.type).kind == "store" for tier in config.secondary)
    in_region = most if region and hosts_alone else 0
    return BounceRows(min(bounce_bytes // row_stride, most), row_stride, region, in_region)


def _tiers(
    config: OffloadConfig,
    rows: BounceRows,
    sizes: Sequence[tuple[int, int]],
    names: StorageNames,
    record: Described | None,
) -> TierSet:
    hosted, encryption = rows.for_tiers(sizes, core_dumps=config.primary.core_dumps), config.encryption
    return TierSet(config.secondary, hosted, config.namespace, names, record, is_awaited=True, encryption=encryption)


def _stats(tiers: TierSet) -> dict[str, dict[str, Any]]:
    moved = {slot.name: slot.metrics.as_data() for slot in tiers.slots}
    return {
        name: tier.stats() | {"transfers": {figure: moved[name][figure] for figure in CLIENT_TIER_FIGURES}}
        for name, tier in tiers.tiers.items()
    }


def _driver(config: OffloadConfig, tiers: TierSet, layout: CacheLayout, undo: contextlib.ExitStack) -> Driver:
    is_polled = any(tier.io == "thread" or load_tier(tier.type).kind == "manager" for tier in config.secondary)
    wait = tiers.hosts.wait if tiers.hosts is not None else _wait
    publisher = event_publisher(config, event_groups(layout, OWN_NAMES))
    if publisher is not None:
        undo.callback(publisher.close, 0.0)
    driver = Driver(tiers.slots, wait, is_polled=is_polled, publisher=publisher)
    undo.callback(driver.close)
    return driver


def _usable(given: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any], tenant: str) -> OffloadConfig:
    """Return the config; ConfigError or StartError if a client, or one of this tenant, cannot use it."""
    config = given if isinstance(given, OffloadConfig) else load_config(given)
    if tenant:
        config.tenant_rule().check(tenant)
    _refuse_admissions(config.secondary)
    require_linux()
    return config


def _refuse_admissions(tiers: Sequence[TierConfig]) -> None:
    problems = [
        f"{tier.tier_name}: admission {tier.admission!r} needs a primary tier, which a client has not; leave it out"
        for tier in tiers
        if tier.admission != "all"
    ]
    if problems:
        raise ConfigError(problems)


def _wait(seconds: float | None, wake: int) -> None:
    """Wait until the descriptor is readable."""
    waiting = select.poll()
    waiting.register(wake, select.POLLIN)
    waiting.poll(None if seconds is None else seconds * 1e3)


def _close(driver: Driver, rows: BounceRows, tiers: TierSet, line: StartLine, logs: QueuedLogs, timeout: float) -> None:
    """Close everything: calls in flight, then the tiers, then the rows, which a tier may use until it is closed."""
    until = time.monotonic() + timeout
    line.close()
    rows.end()
    steps: list[Callable[[], None]] = [logs.close, rows.close, driver.close, tiers.release_rows]
    with contextlib.ExitStack() as last:
        for step in steps:
            last.callback(step)
        driver.stop(timeout)
        if driver.publisher is not None:
            driver.publisher.close(min(timeout, _EVENT_SECONDS))
        tiers.close(max(0.0, until - time.monotonic()))
