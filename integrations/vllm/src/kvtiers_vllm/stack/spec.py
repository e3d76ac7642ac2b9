"""The offloading spec of ``KvtiersConnector``: the manager in the scheduler's process, and a worker in each rank's.

::

    "kv_connector": "KvtiersConnector",
    "kv_connector_extra_config": {"kvtiers_config": "tiers.yaml"}

A problem of the config stops the engine's start, in one line each. Code that uses more of vLLM than a spec itself is
imported once the release is known to be supported.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version

from kvtiers.api import StartError
from kvtiers.control_actions import EngineActions
from kvtiers.kv_events.naming import EventNaming
from kvtiers.layout.cache_layout import CacheLayout, ModelIdentity
from kvtiers.runtime import EngineFacts, open_manager, open_worker
from kvtiers.status import troubles_from_the_start
from kvtiers_vllm.compat import follow_core
from kvtiers_vllm.engine import engine_being_built
from kvtiers_vllm.identity import identity_of
from kvtiers_vllm.own_tiering.topology_check import refuse_several_hosts
from kvtiers_vllm.prefill_estimate import estimated_prefill_seconds
from kvtiers_vllm.releases import release_of, require_whole_stack
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.figures import StackFacts, StackFigures, definitions, open_stack_status
from kvtiers_vllm.stack.keys import GroupKeys
from kvtiers_vllm.stack.layout import cache_layout, checkpoints_in_words, group_keys, layer_tensors, rank_map
from kvtiers_vllm.stack.memory import take_memory_of
from kvtiers_vllm.stack.options import CONNECTOR_NAME, load_stack_config, noted_tier_types, way_in
from kvtiers_vllm.stack.requests import RequestBook, Weights, WeightUpdates
from kvtiers_vllm.stack.steps import StepClock
from kvtiers_vllm.weights import is_random

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingSpec
except ImportError:
    require_whole_stack(vllm_version)  # one that is not supported is refused by its name, not by that of what it lacks
    raise

if TYPE_CHECKING:
    from kvtiers_vllm.stack.events import ChunkDescriber, VllmEvents
    from kvtiers_vllm.stack.manager import KvtiersManager
    from kvtiers_vllm.stack.worker import KvtiersWorker

__all__ = ["KvtiersOffloadingSpec"]

_log = logging.getLogger("kvtiers.vllm")
_ONE_AXIS = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")


class KvtiersOffloadingSpec(OffloadingSpec):
    """kvtiers' manager, primary and workers, for ``KvtiersConnector``."""

    def __init__(self, config: Any) -> None:
        require_whole_stack(vllm_version)
        super().__init__(config)
        self._engine = engine_being_built()
        if not self._engine.whole_stack:
            raise StartError(
                f'KvtiersOffloadingSpec is no spec for vLLM\'s own connector any more: write "kv_connector": '
                f'"{CONNECTOR_NAME}" and leave spec_name out (kvtiers vllm-config --whole-stack)'
            )
        refuse_several_hosts(self._engine)
        _refuse_other_axes(self._engine.vllm_config)
        self._config, self._weights = load_stack_config(self.extra_config)
        self._manager: KvtiersManager | None = None
        self._worker: KvtiersWorker | None = None

    def get_manager(self) -> "KvtiersManager":
        """Open the region and the tiers; all ranks are there when this returns, or the start fails by name."""
        if self._manager is None:
            self._manager = self._open_manager()
        return self._manager

    def get_worker(self, kv_caches: Any) -> "KvtiersWorker":
        """Begin to join the region with this rank's KV memory."""
        from kvtiers_vllm.stack.worker import KvtiersWorker

        if self._worker is None:
            layout = cache_layout(ModelIdentity(""), self.config, self._engine)
            worker = open_worker(
                self._config,
                layout,
                layer_tensors(layout, kv_caches),
                engine_id=self.config.engine_id,
                rank=self.config.parallel.rank,
                rank_map=rank_map(layout, kv_caches),
            )
            self._worker = KvtiersWorker(worker, layout.blocks_per_chunk)
        return self._worker

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the figures' definitions."""
        return definitions(OffloadingCounterMetadata, OffloadingGaugeMetadata, noted_tier_types(extra_config))

    def _open_manager(self) -> "KvtiersManager":
        from kvtiers_vllm.stack.manager import KvtiersManager

        core = follow_core(self._engine, vllm_version)
        updates = WeightUpdates(core)
        identity = identity_of(self._engine, self.config, vllm_version, self._weights, own_rows=True)
        for warning in identity.warnings:
            _log.warning("%s", warning)
        layout = cache_layout(identity.model, self.config, self._engine)
        shared = not is_random(identity.model.weights) and not is_random(identity.model.hash_seed)
        groups = group_keys(layout, self.config)
        listener, describer = self._events(layout, groups)
        with troubles_from_the_start([tier.tier_name for tier in self._config.secondary]) as troubles:
            manager = open_manager(
                self._config,
                layout,
                engine_id=self.config.engine_id,
                engine=EngineFacts(
                    way_in=f"as the whole stack in vLLM {vllm_version}, {way_in(self.extra_config)}",
                    checkpoints=checkpoints_in_words(layout, self.config, self._engine),
                    release=f"vLLM {vllm_version}",
                    memory=take_memory_of(self._engine.vllm_config),
                    naming=self._naming(),
                    listener=listener,
                    prefill_seconds=estimated_prefill_seconds(self._engine.vllm_config),
                ),
            )
            try:
                manager.wait_ready(self._config.primary.start_deadline)
            except StartError:
                manager.shutdown(0.0)
                raise
        weights = Weights(identity.model.weights, updates.version, lambda: updates.resets)
        steps = StepClock()
        facts = StackFacts(manager.stats, layout, shared, noted_tier_types(self.extra_config))
        engine = f"vLLM {vllm_version}"
        manager.commands.wake = core.wake
        actions = EngineActions(manager, layout.model.name).actions()
        status = open_stack_status(
            facts, troubles, engine, self._config.namespace, manager.fingerprint, actions, manager.tend
        )
        digests, release = AdapterDigests(), release_of(vllm_version)
        core.adapter_loads.append(digests.digest_before_loading)

        def close() -> None:
            digests.close()
            status.close()

        return KvtiersManager(
            manager,
            RequestBook(
                groups,
                weights,
                digests,
                self._config.lookup_wait,
                tenants=manager.tenants,
                offloads_rightly=partial(release.offloads_rightly, prompt_only=self.offload_prompt_only),
                spoils_cache=release.spoils_cache,
            ),
            layout.world_size,
            steps,
            StackFigures(facts, OffloadingConnectorStats),
            close,
            core,
            alone=self._engine.is_alone,
            describer=describer if manager.wants_descriptions else None,
            vllm_events=listener,
        )

    def _naming(self) -> EventNaming:
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        rank = int(getattr(parallel, "data_parallel_index", 0) or 0)
        return EventNaming(rank, tuple(int(group.group_id) for group in self.config.groups))

    def _events(
        self, layout: CacheLayout, groups: Mapping[int, GroupKeys]
    ) -> "tuple[VllmEvents | None, ChunkDescriber | None]":
        """Return what vLLM's own publisher is given, and what describes chunks, where something publishes KV events."""
        vllms = getattr(self._engine.vllm_config, "kv_events_config", None)
        is_vllms = bool(getattr(vllms, "enable_kv_cache_events", False))
        if not is_vllms and self._config.events is None:
            return None, None
        from kvtiers_vllm.stack.events import ChunkDescriber, VllmEvents

        listener = VllmEvents(self._config, layout, self._naming()) if is_vllms else None
        return listener, ChunkDescriber(layout, groups)


def _refuse_other_axes(vllm_config: Any) -> None:
    """Refuse parallelism that spreads one KV group over ranks in another way than tensor parallel does."""
    parallel = vllm_config.parallel_config
    several = [f"{name} is {size}" for name in _ONE_AXIS if (size := int(getattr(parallel, name, 1) or 1)) > 1]
    if several:
        raise StartError(
            f"{CONNECTOR_NAME} runs with tensor and data parallel engines, but {', '.join(several)}; "
            "use kvtiers' tiers under vLLM's own tiering"
        )
