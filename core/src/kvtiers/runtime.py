"""The composition root: builds the stack from a config, and shuts it down in the right order.

Start: the region, then the tiers, all at once and each on a thread of its own, without waiting for ranks or stores.
Shutdown (``engine_lifecycle.py``): the tiers are drained and closed, then the region, since a tier may write into it
until it is closed.
"""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtiers._log_queue import QueuedLogs, queue_logs
from kvtiers._process import hold_standard_descriptors
from kvtiers.api import StartError
from kvtiers.api.units import format_size
from kvtiers.config import OffloadConfig, load_config
from kvtiers.engine_lifecycle import EngineLifecycle
from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.worker import GpuWorker
from kvtiers.kv_events.naming import OWN_NAMES, EventNaming, event_groups
from kvtiers.kv_events.open import event_publisher
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import RankMap
from kvtiers.layout.storage_name import StorageNames
from kvtiers.live_config import LiveEngine
from kvtiers.model_identity import with_model, with_weights
from kvtiers.plugins import SHADOW_GROUP, load_class
from kvtiers.pool.loan import PoolLoan, is_served
from kvtiers.primary.pooled import PooledPrimaryTier
from kvtiers.primary.tier import CPUPrimaryTier, PoolState
from kvtiers.recorder import Recorder
from kvtiers.region.client import RegionJoin
from kvtiers.region.early_memory import EarlyMemory
from kvtiers.region.region import AnonymousRegion, OffloadRegion, SharedOffloadRegion
from kvtiers.tiering.engine_side import EventSide, ShadowSide, TraceSide, Watchers
from kvtiers.tiering.estimates import prior_seconds_per_token
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager

__all__ = ["EngineFacts", "begin_memory", "open_manager", "open_worker"]

_log = logging.getLogger("kvtiers")
_START_PIECE_SECONDS = 0.05  # of pinning at a time, where the start waits for it
_anonymous_regions: dict[str, AnonymousRegion] = {}
"""By engine id, where the region cannot be shared with other processes: its ranks are in this one."""


def begin_memory(config: OffloadConfig, name: str) -> EarlyMemory | None:
    """Begin to populate the primary's memory before its layout is known, for ``open_manager``.

    None where that is not possible. StartError in one line if the memory is not there. ``name``: for ``/proc``.
    """
    primary = config.primary
    if primary.pool is not None and is_served(primary.pool):
        return None
    if sys.platform != "linux" or primary.numa_node is not None:  # its pages are placed by the region's mapping
        return None
    return EarlyMemory(
        name,
        primary.capacity,
        huge_pages=primary.huge_pages,
        prefault=primary.prefault,
        window=primary.prefault_window,
    )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of the engine that an integration serves.

    ``way_in``: what uses kvtiers, for the start line in the log; ``checkpoints``: where a hybrid model's are, for the
    same line; ``release``: the engine's, for what is recorded beside the values. ``memory``: by ``begin_memory``, for
    this config. ``naming``: how KV events name the engine; ``listener``: its own, of the manager's events.
    ``prefill_seconds``: its estimate of what computing a token of a prompt takes; None: it has none.
    """

    way_in: str = "by its Python API"
    checkpoints: str = "where the engine keeps blocks of all groups"
    release: str = ""
    memory: EarlyMemory | None = None
    naming: EventNaming = OWN_NAMES
    listener: EventSide | None = None
    prefill_seconds: float | None = None


def open_manager(
    config: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any],
    layout: CacheLayout,
    *,
    engine_id: str | None = None,
    engine: EngineFacts | None = None,
) -> TieringManager:
    """Build the scheduler's side and return at once; ranks may join before or after. ``wait_ready`` waits for them.

    ``engine_id``: unique on this machine; by default a random one, which ``open_worker`` is given. ``engine``: what an
    integration adds. ConfigError or StartError if it cannot start.
    """
    hold_standard_descriptors()
    config = config if isinstance(config, OffloadConfig) else load_config(config)
    layout, engine_id, engine = with_model(config, layout), engine_id or secrets.token_hex(8), engine or EngineFacts()
    with _threads_are_there(), contextlib.ExitStack() as undo:
        logs = queue_logs()  # first: what follows logs, too
        undo.callback(logs.close)
        if engine.memory is not None:
            undo.callback(engine.memory.close)
        named = layout if config.primary.pool is None else with_weights(layout)
        loan = _loan(config, named)
        if loan is not None:
            undo.callback(loan.close)
            if engine.memory is not None:
                engine.memory.close()
        region = _create_region(config, layout, engine_id, loan or engine.memory)
        undo.callback(_release_region, region)
        primary = _primary(config, region, loan, record_events=bool(engine.listener or config.events))
        undo.callback(primary.close)  # it holds the rows' memory
        release_region = partial(_release_region_and_logs, region, loan, logs)
        side = EngineLifecycle(config, named, region, primary, engine.release, release_region, loan)
        undo.callback(side.close_region)
        undo.callback(side.close_tiers, 0.0)
        side.write_start_line(engine.way_in, engine.checkpoints)
        recorder = _recorder(config, layout, undo)
        publisher = _publisher(config, layout, engine.naming, undo)
        tracing = _tracing(config, layout, engine_id, undo)
        options = partial(_tiering_options, prior=prior_seconds_per_token(layout), estimate=engine.prefill_seconds)
        what_if = _what_if(config, primary, layout)  # last: nothing below starts a thread, which can fail
        manager = TieringManager(
            engine_id,
            primary,
            side.slots,
            [layout.tokens_per_chunk(group) for group in range(len(layout.groups))],
            side,
            options(config),
            prefix_group=layout.prefix_group,
            watchers=Watchers(recorder, what_if, tracing, publisher, engine.listener),
            tenants=config.tenant_rule(),
        )
        manager.live = LiveEngine(config, manager, side.tiers, options)
        undo.pop_all()
    return manager


def open_worker(
    config: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any],
    layout: CacheLayout,
    kv_tensors: Sequence[Any],
    *,
    engine_id: str,
    rank: int = 0,
    rank_map: RankMap | None = None,
    copying: CopySettings | None = None,
) -> GpuWorker:
    """Build one rank's side and return at once; it joins the engine's region in the background.

    ``rank_map``: where the rank's bytes lie in a canonical row. ``copying``: how copies to and from a GPU are made.
    """
    hold_standard_descriptors()
    config = config if isinstance(config, OffloadConfig) else load_config(config)
    layout = with_model(config, layout)
    anonymous = _anonymous_regions.get(engine_id)
    if anonymous is not None:
        join = RegionJoin.in_process(anonymous, layout, rank)
    else:
        join = RegionJoin(engine_id, layout, rank, core_dumps=config.primary.core_dumps)
    with _threads_are_there(), contextlib.ExitStack() as undo:
        undo.callback(join.close)
        logs = queue_logs()
        undo.callback(logs.close)
        worker = GpuWorker(
            layout,
            kv_tensors,
            join,
            rank=rank,
            rank_map=rank_map,
            copying=_copying(config, copying),
            on_shutdown=logs.close,
        )
        undo.callback(worker.shutdown)
        if anonymous is None:
            join.begin(config.primary.start_deadline)  # last: a rank that has joined is given transfers
        undo.pop_all()
    return worker


@contextlib.contextmanager
def _threads_are_there() -> Iterator[None]:
    """Turn what Python raises where no thread can be started into a StartError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise StartError(
            f"{error}: raise the limit of processes and threads (of the user, or the container: pids)"
        ) from None


def _copying(config: OffloadConfig, settings: CopySettings | None) -> CopySettings:
    """Return how copies are made: as given, or as the config says."""
    if settings is not None:
        return settings
    if config.primary.prefault == "all":  # nothing is served yet that would feel it
        return CopySettings(pin_share=1.0, pin_seconds=_START_PIECE_SECONDS)
    return CopySettings(pin_share=config.primary.pin_share, pin_seconds=config.primary.pin_piece)


def _create_region(
    config: OffloadConfig, layout: CacheLayout, engine_id: str, memory: EarlyMemory | PoolLoan | None
) -> OffloadRegion:
    primary = config.primary
    capacity = memory.nbytes if isinstance(memory, PoolLoan) else primary.capacity
    if sys.platform != "linux":
        _log.warning(
            "no shared region on %s: ranks must run in this process, and tiers with 'io: thread'", sys.platform
        )
        region = AnonymousRegion.create(layout, capacity_bytes=primary.capacity, engine_id=engine_id)
        _anonymous_regions[engine_id] = region
        return region
    return SharedOffloadRegion.create(
        engine_id,
        layout,
        capacity,
        huge_pages=primary.huge_pages,
        numa_node=primary.numa_node,
        prefault=primary.prefault,
        prefault_window=primary.prefault_window,
        start_deadline=primary.start_deadline,
        core_dumps=primary.core_dumps,
        memory=memory,
    )


def _loan(config: OffloadConfig, layout: CacheLayout) -> PoolLoan | None:
    """Return the loan of the config's pool, if it names one; None, and a line in the log, where it cannot be had."""
    primary = config.primary
    if primary.pool is None:
        return None
    prefix = StorageNames.of_layout(config.namespace, layout).prefix
    try:
        return PoolLoan.take(primary.pool, prefix, layout, primary.start_deadline)
    except StartError as error:
        _log.warning("pool: %s; this engine's primary is its own, of %s", error, format_size(primary.capacity))
    return None


def _primary(
    config: OffloadConfig, region: OffloadRegion, loan: PoolLoan | None, *, record_events: bool
) -> CPUPrimaryTier:
    own = PoolState.NONE if config.primary.pool is None else PoolState.ABSENT
    make = partial(CPUPrimaryTier, region.num_rows, pool=own) if loan is None else partial(PooledPrimaryTier, loan)
    return make(
        region.row_stride,
        region.view,
        policy=config.primary.eviction,
        protected_share=config.budgets.protected,
        protect_seconds=config.budgets.protect_for,
        kept_share=config.budgets.kept,
        record_events=record_events,
        shares=config.tenants.shares() if config.tenants is not None else None,
    )


def _release_region(region: OffloadRegion) -> None:
    region.close()
    _anonymous_regions.pop(region.engine_id, None)


def _release_region_and_logs(region: OffloadRegion, loan: PoolLoan | None, logs: QueuedLogs) -> None:
    _release_region(region)
    if loan is not None:
        loan.close()
    logs.close()


def _recorder(config: OffloadConfig, layout: CacheLayout, undo: contextlib.ExitStack) -> Recorder | None:
    if config.record is None:
        return None
    group = layout.prefix_group
    tokens_per_block = layout.groups[group].tokens_per_block
    recorder = Recorder(config.record.path, config.record.max_bytes, tokens_per_block, group)
    undo.callback(recorder.close, 0.0)
    return recorder


def _publisher(
    config: OffloadConfig, layout: CacheLayout, naming: EventNaming, undo: contextlib.ExitStack
) -> EventSide | None:
    publisher = event_publisher(config, event_groups(layout, naming), naming.rank)
    if publisher is not None:
        undo.callback(publisher.close, 0.0)
    return publisher


def _tracing(
    config: OffloadConfig, layout: CacheLayout, engine_id: str, undo: contextlib.ExitStack
) -> TraceSide | None:
    """Return what records spans, with its writer; ConfigError if the extra is not installed."""
    if config.tracing is None:
        return None
    # Imported here: nothing of it is loaded where it is off.
    from kvtiers.tracing.span_writer import SpanWriter, otlp_exporter
    from kvtiers.tracing.spans import SpanQueue

    queue = SpanQueue(config.tracing.sample, [layout.payload_bytes(group) for group in range(len(layout.groups))])
    writer = SpanWriter(queue, otlp_exporter(config.tracing.endpoint), engine_id)
    undo.callback(writer.close, 0.0)
    return writer


def _what_if(config: OffloadConfig, primary: CPUPrimaryTier, layout: CacheLayout) -> ShadowSide | None:
    """Return shadow caches, of the group by which prompts are measured."""
    if not config.what_if:
        return None
    shadows = load_class(SHADOW_GROUP, "what-if", "shadow cache")
    opened: ShadowSide = shadows.of_engine(config, layout, primary.num_rows, primary.row_stride)
    return opened


def _tiering_options(config: OffloadConfig, prior: float = 0.0, estimate: float | None = None) -> TieringOptions:
    return TieringOptions(
        lookup_wait=config.lookup_wait,
        load_wait=None if config.load_wait == "auto" else config.load_wait,
        prior_seconds_per_token=prior,
        estimated_seconds_per_token=estimate or 0.0,
        store_reserve=config.budgets.store_reserve,
        all_tiers=config.budgets.all_tiers,
        one_tier=config.budgets.one_tier,
        clean_reserve=config.clean_reserve,
    )
