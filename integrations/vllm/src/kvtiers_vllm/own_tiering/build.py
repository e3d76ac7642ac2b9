"""The construction of one tier's driver from vLLM's config: its model identity, its backend, and whether it is on.

A problem of the config stops the engine's start, in one line each; a problem of the environment does not.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtiers._log_queue import queue_logs
from kvtiers._process import hold_standard_descriptors
from kvtiers.api import (
    ChunkStore,
    ConfigError,
    JobResult,
    LookupResult,
    OffloadKey,
    StartError,
    TierConfig,
    TierContext,
    TierPlugin,
    TierRequest,
    TransferJob,
)
from kvtiers.api.units import format_size
from kvtiers.host.bounce_buffers import value_views
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.fingerprint_record import Described, describe_layout
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier, open_plugin
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.in_process import InProcessBackend
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.start_line import OFF, Announced, StartFacts, StartLine
from kvtiers.tiering.estimates import PRIOR_BYTES_PER_SECOND, prior_seconds_per_token
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers_vllm.engine import CoreLink, Engine
from kvtiers_vllm.identity import identity_of, row_layout
from kvtiers_vllm.own_tiering.options import TierSettings
from kvtiers_vllm.own_tiering.region import address_of, open_mapped_file
from kvtiers_vllm.own_tiering.tier_driver import TierDriver
from kvtiers_vllm.own_tiering.topology_check import refuse_several_hosts
from kvtiers_vllm.prefill_estimate import estimated_prefill_seconds
from kvtiers_vllm.weights import is_random

__all__ = ["OffTier", "OpenedTier", "RequiredTierError", "begin_start_line", "open_tier"]

_log = logging.getLogger("kvtiers.vllm")


class RequiredTierError(StartError, OSError):
    """A tier that is required cannot be opened: an OSError, too, as vLLM's own tiers raise it there."""


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """A driver, and facts for its metrics. ``off``: why the tier is off in this engine; empty if it is on.

    ``shared``: another process can reproduce the keys and the weights' name. ``announced`` and ``facts``: for the start
    line, which all tiers of an engine have in common.
    """

    driver: TierDriver
    name: str
    model: str
    shared: bool
    off: str = ""
    namespace: str = ""
    fingerprint: str = ""
    kind: str = ""
    announced: Announced | None = None
    facts: StartFacts | None = None


def begin_start_line(tiers: Sequence[OpenedTier]) -> StartLine | None:
    """Begin to write the start line of an engine with these tiers; None if there is nothing to say of one."""
    facts = next((tier.facts for tier in tiers if tier.facts is not None), None)
    if facts is None:
        return None
    return StartLine(facts, {tier.name: (tier.kind, tier.announced) for tier in tiers if tier.announced is not None})


def open_tier(
    config: TierConfig,
    settings: TierSettings,
    offloading: Any,
    view: memoryview,
    engine: Engine,
    core: CoreLink,
    version: str,
) -> OpenedTier:
    """Open one tier of an engine. ``view``: vLLM's rows, one behind the other. ``version``: vLLM's."""
    name = config.tier_name
    hold_standard_descriptors()
    refuse_several_hosts(engine)
    plugin = load_tier(config.type)
    if plugin.kind != "store":
        raise ConfigError(
            f"{name}: a tier of type {config.type!r} moves rows by itself, and vLLM's rows have no room for a seal; "
            "use it with the whole stack (KvtiersConnector)"
        )
    if off := _why_off(engine):
        return _off_tier(
            config, settings, str(offloading.model.name), _start_facts(view, version, settings.namespace), off
        )
    identity = identity_of(engine, offloading, version, settings.weights)
    for warning in identity.warnings:
        _log.warning("%s: %s", name, warning)
    assert view.strides is not None
    layout = row_layout(identity.model, offloading, view.strides[0])
    shared = not is_random(identity.model.weights) and not is_random(identity.model.hash_seed)
    parts = _Parts(config, settings, plugin, layout, view.cast("B"), f"vLLM {version}" if shared else "")
    with contextlib.ExitStack() as undo:
        undo.callback(parts.close, 0.0)
        driver = _driver_of(parts, config, settings, layout, engine, core)
        if config.required and (error := parts.tier.wait_open(config.deadline)):
            raise RequiredTierError(f"{name}: required, but cannot be opened: {error}")
        undo.pop_all()
    return OpenedTier(
        driver,
        name,
        identity.model.name,
        shared,
        namespace=settings.namespace,
        fingerprint=parts.fingerprint,
        kind=config.type,
        announced=parts.tier,
        facts=_start_facts(view, version, settings.namespace, parts.fingerprint, shared=shared),
    )


def _driver_of(
    parts: "_Parts", config: TierConfig, settings: TierSettings, layout: CacheLayout, engine: Engine, core: CoreLink
) -> TierDriver:
    slot = TierSlot(0, parts.tier, _options(config))
    slot.rate.prior = layout.payload_bytes(0) / PRIOR_BYTES_PER_SECOND
    return TierDriver(
        slot,
        settings.lookup_wait,
        parts.close,
        [layout.tokens_per_chunk(group) for group in range(len(layout.groups))],
        None if settings.load_wait == "auto" else settings.load_wait,
        is_idle=core.is_idle if engine.is_alone else lambda: False,
        is_ending=core.is_ending,
        drain=settings.drain,
        prior=max(prior_seconds_per_token(layout), estimated_prefill_seconds(engine.vllm_config) or 0.0),
    )


def _off_tier(config: TierConfig, settings: TierSettings, model: str, facts: StartFacts, why: str) -> OpenedTier:
    _log.warning("%s: off: %s", config.tier_name, why)
    tier = OffTier()
    driver = TierDriver(TierSlot(0, tier, _options(config)), settings.lookup_wait, lambda _seconds: None)
    return OpenedTier(
        driver, config.tier_name, model, shared=False, off=why, kind=config.type, announced=tier, facts=facts
    )


def _start_facts(
    view: memoryview, version: str, namespace: str, fingerprint: str = "", *, shared: bool = False
) -> StartFacts:
    way_in, primary = f"under vLLM's own tiering in vLLM {version}", f"vLLM's, {format_size(view.nbytes)}"
    return StartFacts(way_in, primary, namespace, fingerprint, shared)


def _why_off(engine: Engine) -> str:
    if getattr(engine.vllm_config, "lora_config", None) is not None:
        return (
            "LoRA is enabled, and vLLM's tiers see block hashes without the adapter's files: two adapters of one name "
            "could be confused; use the whole stack (KvtiersConnector)"
        )
    return ""


class OffTier(EventTier):
    """A tier that is off in this engine: every lookup misses, every job is refused."""

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- it has nothing, for any request
        """Return a miss for each key."""
        return [LookupResult.MISS] * len(keys)

    def submit_store(self, job: TransferJob) -> None:
        """Refuse a job."""
        raise RuntimeError(f"job {job.job_id} was given to a tier that is off")

    def submit_load(self, job: TransferJob) -> None:
        """Refuse a job."""
        raise RuntimeError(f"job {job.job_id} was given to a tier that is off")

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return nothing."""
        return ()

    def drain(self, timeout: float) -> bool:  # noqa: ARG002 -- there is nothing to wait for
        """Do nothing: there are no jobs."""
        return True

    def is_available(self) -> bool:
        """Return False."""
        return False

    def open_state(self) -> str:
        """Return that it is off."""
        return OFF

    def warn_unusable(self, error: str) -> None:
        """Do nothing: why it is off has been logged."""


def _options(config: TierConfig) -> TierOptions:
    return TierOptions(config.tier_name, config.read_only, config.admission, config.deadline)


class _Parts:
    """The parts of a tier in the engine's process, and their shutdown."""

    def __init__(
        self,
        config: TierConfig,
        settings: TierSettings,
        plugin: TierPlugin,
        layout: CacheLayout,
        rows: memoryview,
        release: str = "",
    ) -> None:
        self._config = config
        self._plugin = plugin
        self._namespace = settings.namespace
        self._encryption = settings.encryption
        self._layout = layout
        self._names = StorageNames.of_layout(settings.namespace, layout)
        document = describe_layout(layout, release, self._names.fingerprint)
        self._described = Described(self._names.prefix, document) if release else None
        self._sizes = [(layout.payload_bytes(g), layout.value_bytes(g)) for g in range(len(layout.groups))]
        self._row_bytes = layout.payload_bytes(0)
        self._fd = -1
        self._rows: memoryview | None = None
        with contextlib.ExitStack() as undo:
            self._logs = queue_logs()  # first: what follows logs, too
            undo.callback(self._logs.close)
            self._hosts = self._hosts_on(rows) if config.io == "process" else None
            if self._hosts is not None:
                pool = self._hosts.pool(config, plugin)
            else:
                self._rows = rows
                self._views = value_views(rows, self._row_bytes, max(value for _, value in self._sizes))
                undo.callback(self._views.close)
                opener = self._opener(rows)
                backend = InProcessBackend(
                    config, opener, self._views, self._names, self._sizes, self._described, self._encryption
                )
                pool = HostPool([PooledHost(config.tier_name, backend)])
            self.tier = ChunkStoreTier(
                config, pool, rows=len(rows) // self._row_bytes, row_bytes=self._row_bytes, when_full=plugin.when_full
            )
            undo.pop_all()

    @property
    def fingerprint(self) -> str:
        """The fingerprint as it stands in the names of values."""
        return self._names.fingerprint

    def close(self, seconds: float) -> None:
        """Close the tier, which has been drained, within this many seconds, and release vLLM's memory."""
        self.tier.close()
        if self._hosts is not None:
            self._hosts.close(seconds)
            os.close(self._fd)
        elif self._rows is not None:
            self._views.close()
            self._rows.release()
        self._logs.close()

    def _hosts_on(self, rows: memoryview) -> TierHosts | None:
        try:
            self._fd, nbytes = open_mapped_file(address_of(rows), rows.nbytes)
        except OSError as error:
            name = self._config.tier_name
            _log.warning("%s: no tier host can map vLLM's memory: %s; its io is 'thread'", name, error)
            return None
        region = HostedRegion(self._fd, nbytes, nbytes, self._row_bytes, self._sizes)
        try:
            return TierHosts(region, self._namespace, lambda: self._names, self._described, encryption=self._encryption)
        except RuntimeError:  # no thread can be started
            os.close(self._fd)
            raise

    def _opener(self, rows: memoryview) -> Callable[[], ChunkStore]:
        plugin, config = self._plugin, self._config
        context = TierContext(
            tier_name=config.tier_name,
            value_bytes=max(value for _, value in self._sizes),
            namespace=self._namespace,
            read_only=config.read_only,
            region=rows,
            row_stride=self._row_bytes,
        )
        return partial(open_plugin, plugin, config, context, ChunkStore)
