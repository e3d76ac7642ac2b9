"""``KvtiersConnector``: vLLM's offloading connector over kvtiers' manager and workers.

::

    scheduler's side   a request, with its adapter and salt, is shown to the manager before vLLM names it
                       the results of copies go to the manager, also of those that vLLM has forgotten in a reset
    worker's side      the results of copies travel with vLLM's own report
                       a request whose load failed is reported in vLLM's own way for requests to compute, and
                       the blocks that a pipelined load has ended without in its own way for blocks
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version

from kvtiers.api import ConfigError, StartError
from kvtiers_vllm.compat import CONNECTOR, check, refuse_unwrapped
from kvtiers_vllm.engine import Engine, being_built, engine_being_built
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.plugin_figures import under_defined_names
from kvtiers_vllm.releases import require_whole_stack
from kvtiers_vllm.stack.figures import definitions
from kvtiers_vllm.stack.layout import auto_blocks_per_chunk, checkpoint_interval
from kvtiers_vllm.stack.options import CONNECTOR_NAME, SPEC_NAME, noted_tier_types
from kvtiers_vllm.stack.plans import CopyReport
from kvtiers_vllm.stack.worker import LoadPart
from kvtiers_vllm.start_problems import logged_first

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
except ImportError:
    require_whole_stack(vllm_version)  # one that is not supported is refused by its name, not by that of what it lacks
    raise

if TYPE_CHECKING:
    from kvtiers_vllm.stack.manager import WindowBlocks

__all__ = ["KvtiersConnector"]


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """vLLM's orders to the workers for one step. ``computes``: the step computes tokens, and does not only move KV.

    ``parts``: rows for pipelined loads that began in an earlier step.
    """

    computes: bool = True
    parts: list[LoadPart] = field(default_factory=list)


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """vLLM's report of a worker, with kvtiers' report."""

    copies: CopyReport = field(default_factory=CopyReport)

    def aggregate(self, other: Any) -> "WorkerReport":
        """Add another worker's report."""
        both = super().aggregate(other)
        copies = CopyReport()
        copies.add(self.copies)
        copies.add(other.copies)
        return WorkerReport(both.completed_jobs, both.transfer_stats, copies)


class StackMetrics(OffloadPromMetrics):
    """The figures of the whole stack in ``/metrics``.

    An engine on another node may have a config file of its own, and so tier types that this process has not defined
    figures of. vLLM ends its server over a figure that is not defined.
    """

    def __init__(self, vllm_config: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(vllm_config, *arguments, **more)
        types = noted_tier_types(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._defined_here = definitions(_no_kind, _no_kind, types).keys()

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None:
        """Add an engine's report to the figures."""
        super().observe(under_defined_names(transfer_stats_data, self._defined_here), engine_idx)


class KvtiersConnector(OffloadingConnector):
    """vLLM's connector with kvtiers' manager and worker. Exceptions of vLLM's own methods pass unchanged."""

    @logged_first()
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_whole_stack(vllm_version)
        refuse_unwrapped()
        check(OffloadingConnector, CONNECTOR, vllm_version, sets=("connector_scheduler", "connector_worker"))
        own = ("manager", "config", "_req_status", "_current_batch_load_jobs")
        check(OffloadingConnectorScheduler, {}, vllm_version, sets=own)
        check(OffloadingConnectorWorker, {}, vllm_version, sets=("worker",))
        _refuse_multi_connector()
        self.bugs = BugCount("kvtiers")
        # A load that fails is computed: the engine would end the request otherwise.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        _name_spec(vllm_config)
        _choose_chunk(vllm_config, kv_cache_config)
        with being_built(Engine(vllm_config, kv_cache_config, whole_stack=True)):
            super().__init__(vllm_config, role, kv_cache_config)
        if (scheduler := self.connector_scheduler) is not None:
            scheduler.config = _with_checkpoints(scheduler.config)
            scheduler.manager.window_blocks = _window_blocks(scheduler)
            scheduler.manager.requests.needs(_needs(scheduler.config))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any, **more: Any) -> Any:
        """Define the figures of the whole stack, in the process that serves ``/metrics``."""
        _name_spec(vllm_config)
        return StackMetrics(vllm_config, *arguments, **more)

    def on_new_request(self, request: Any) -> None:
        """Show a request to the manager."""
        self._show(request)
        super().on_new_request(request)

    @never_raises(lambda: None)
    def _show(self, request: Any) -> None:
        self.connector_scheduler.manager.requests.show(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Defer a request that waits for its chunks, or for its adapter's digest; let vLLM look up another one.

        A pass that has found loads and takes long defers its other requests, too, so that the loads begin.
        """
        if self._holds_back(request, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    @never_raises(lambda: False)
    def _holds_back(self, request: Any, computed: int) -> bool:
        manager = self.connector_scheduler.manager
        manager.requests.has_local_prefix(request.request_id, computed)
        if manager.requests.holds_back(request.request_id) or manager.pass_is_over():
            return True
        status = self.connector_scheduler._req_status[request.request_id]  # noqa: SLF001 -- vLLM shows it to no connector
        if status.transfer_jobs:
            return False
        end = computed  # vLLM computes all of it, for the probabilities of its tokens
        if not request.skip_reading_prefix_cache:
            end = _last_token(self.connector_scheduler, status, request.num_tokens, computed)
        return bool(manager.waits(status.req_context, computed, end))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Record how much a step computes; one that computes nothing leaves the copies some time."""
        meta = super().build_connector_meta(self._without_reloaded(scheduler_output) or scheduler_output)
        self._step_begins(scheduler_output)
        return self._with_step(meta, scheduler_output) or meta

    @never_raises(lambda: None)
    def _without_reloaded(self, scheduler_output: Any) -> Any:
        """Return a step without those of its preempted requests that are loaded in it; None: it has preempted none.

        A reset has preempted them before the step. vLLM before 0.33 takes each job of theirs for a store, and fails.
        """
        if not scheduler_output.preempted_req_ids:
            return None
        loads = self.connector_scheduler._current_batch_load_jobs  # noqa: SLF001 -- vLLM shows it to no connector
        step = copy.copy(scheduler_output)
        step.preempted_req_ids = set(scheduler_output.preempted_req_ids) - {job.req_id for job in loads.values()}
        return step

    @never_raises(lambda: None)
    def _with_step(self, meta: Any, scheduler_output: Any) -> StepMetadata:
        computes = bool(scheduler_output.total_num_scheduled_tokens)
        return StepMetadata(**vars(meta), computes=computes, parts=self._take_parts())

    @never_raises(list)
    def _take_parts(self) -> list[LoadPart]:
        parts: list[LoadPart] = self.connector_scheduler.manager.pipelined.take_parts()
        return parts

    @never_raises(lambda: None)
    def _step_begins(self, scheduler_output: Any) -> None:
        manager, tokens = self.connector_scheduler.manager, scheduler_output.total_num_scheduled_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        manager.steps.begins(tokens, len(scheduled), self._mean_position(scheduler_output) or 0.0)
        if tokens:
            manager.computes()
        manager.look_again()
        manager.back_off(computes=bool(tokens))

    @never_raises(lambda: 0.0)
    def _mean_position(self, scheduler_output: Any) -> float:
        """Return how many tokens are before each of a step's in its request, on average."""
        cached = scheduler_output.scheduled_cached_reqs
        before: dict[str, int] = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        before |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        positions = sum(tokens * (before.get(name, 0) + tokens / 2) for name, tokens in scheduled.items())
        return positions / max(1, sum(scheduled.values()))

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the results of copies to the manager."""
        self._take_results(connector_output.kv_connector_worker_meta)
        super().update_connector_output(connector_output)

    @never_raises(lambda: None)
    def _take_results(self, metadata: Any) -> None:
        if isinstance(metadata, WorkerReport):
            self.connector_scheduler.manager.copies_ended(metadata.copies)

    def take_events(self) -> Iterable[Any]:
        """Return the KV events of the primary and the tiers, for vLLM's own publisher."""
        events: list[Any] = self.connector_scheduler.manager.kv_events()
        return events

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Record that a step begins on this rank, and begin its loads; background pinning pauses for its launches.

        vLLM calls this before it launches the model, and ``start_load_kv`` after it, unless a load is synchronous. A
        load copies after what was launched before it: begun there it would wait for this step, too.
        """
        self._note_step(computes=getattr(connector_metadata, "computes", True))
        self._begin_loads(connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    @never_raises(lambda: None)
    def _note_step(self, *, computes: bool) -> None:
        self.connector_worker.worker.note_step(computes=computes)

    @never_raises(lambda: None)
    def _begin_loads(self, metadata: Any) -> None:
        worker = self.connector_worker.worker
        for job_id, job in metadata.load_jobs.items():
            worker.begin_load(job_id, job.src_spec, job.dst_spec)
        worker.continue_loads(getattr(metadata, "parts", ()))

    def build_connector_worker_meta(self) -> Any:
        """Return vLLM's report of this worker, with ours."""
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        return WorkerReport(meta.completed_jobs, meta.transfer_stats, self._take_report())

    @never_raises(CopyReport)
    def _take_report(self) -> CopyReport:
        report: CopyReport = self.connector_worker.worker.take_report()
        return report

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what has ended, and which loads of it failed."""
        results = super().get_transfer_results(finished_req_ids)
        self._add_failed_loads(results)
        return results

    @never_raises(lambda: None)
    def _add_failed_loads(self, results: Any) -> None:
        results.failed_recving |= self.connector_worker.worker.take_failed_loads()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that pipelined loads have ended without: vLLM computes them."""
        return set(super().get_block_ids_with_load_errors()) | self._missing_blocks()

    @never_raises(set)
    def _missing_blocks(self) -> set[int]:
        missing: set[int] = self.connector_worker.worker.take_missing_blocks()
        return missing


def _no_kind(*_arguments: object) -> None:
    """Stand for vLLM's classes of figures where only their names are wanted."""


def _name_spec(vllm_config: Any) -> None:
    """Make vLLM's factory find kvtiers' spec; ConfigError if the config names another."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    given = extra.setdefault("spec_name", SPEC_NAME)
    if given != SPEC_NAME:
        raise ConfigError(
            f"kv_connector_extra_config: spec_name is {given!r}, but {CONNECTOR_NAME} has a spec of its own: "
            "leave spec_name out, or use kv_connector OffloadingConnector"
        )


def _choose_chunk(vllm_config: Any, kv_cache_config: Any) -> None:
    """Make ``blocks_per_chunk`` a number for vLLM, where its config has "auto" or says nothing of it."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if extra.get("blocks_per_chunk", "auto") == "auto" and "block_size" not in extra:
        world_size = int(getattr(getattr(vllm_config, "parallel_config", None), "world_size", 1))
        interval = getattr(getattr(vllm_config, "cache_config", None), "prefix_cache_retention_interval", None)
        extra["blocks_per_chunk"] = auto_blocks_per_chunk(kv_cache_config, world_size, interval)


def _with_checkpoints(config: Any) -> Any:
    """Return vLLM's config of what it offers with the interval of checkpoints; its own prefix cache stays as it is."""
    chunks = [(group.kv_cache_spec, group.tokens_per_chunk) for group in config.kv_group_configs]
    return config._replace(retention_interval=checkpoint_interval(config.retention_interval, chunks))


def _needs(config: Any) -> dict[int, tuple[int, int]]:
    """Return by vLLM's number of a group how many tokens before a load's end, and chunks behind it, vLLM looks up."""
    needs = {}
    for group in config.kv_group_configs:
        window, spec = 0, group.kv_cache_spec
        if group.sliding_window_size_in_chunks is not None:
            window = (group.sliding_window_size_in_chunks - 1) * group.tokens_per_chunk + 1
            read = getattr(spec, "sliding_window", 0) or 0
            window = max(window, read - 1 + (getattr(spec, "extra_retained_tokens", 0) or 0))
        needs[int(group.group_idx)] = window, int(bool(getattr(group, "is_eagle_group", False)))
    return needs


def _last_token(scheduler: Any, status: Any, tokens: int, computed: int) -> int:
    """Return how many of a request's tokens vLLM would load at most: with windows one is left to compute."""
    groups = scheduler.config.kv_group_configs
    most = getattr(status, "max_load_tokens", None)
    end: int = tokens if most is None else min(tokens, computed + most)
    if any(group.sliding_window_size_in_chunks is not None for group in groups):
        end -= 1
        align = getattr(scheduler, "_mamba_align_size", None)
        end -= end % align if align else 0
    if most is not None:
        end -= end % math.lcm(*(group.tokens_per_chunk for group in groups))
    return end


def _is_windowed(group: Any) -> bool:
    """Return whether a group of vLLM's has sliding windows, which vLLM also says of aligned states."""
    return group.sliding_window_size_in_chunks is not None and not _has_states(group)


def _has_states(group: Any) -> bool:
    """Return whether a group of vLLM's has aligned states, whose blocks it hands over one by one."""
    return bool(getattr(group, "requires_cow_source", False))


def _window_blocks(scheduler: Any) -> "WindowBlocks | None":
    """Return how to see which blocks vLLM has for a request's windows; None where a chunk of these is one block."""
    places = {
        int(group.group_idx): place
        for place, group in enumerate(scheduler.config.kv_group_configs)
        if _is_windowed(group)
    }
    per_chunk = int(scheduler.config.blocks_per_chunk)
    if per_chunk == 1 or not places:
        return None

    def blocks(request_id: str, group: int, chunk: int) -> Sequence[int] | None:
        if (place := places.get(group)) is None:
            return None
        request = scheduler._req_status[request_id]  # noqa: SLF001 -- vLLM shows it to no connector
        found: list[int] = request.group_states[place].block_ids
        return found[chunk * per_chunk : (chunk + 1) * per_chunk]

    return blocks


def _refuse_multi_connector() -> None:
    """Refuse to be one of several connectors: the results of copies would not travel with vLLM's own report."""
    above = engine_being_built().vllm_config
    if above is not None and above.kv_transfer_config.kv_connector != CONNECTOR_NAME:
        raise StartError(
            f"{CONNECTOR_NAME} does not run under {above.kv_transfer_config.kv_connector}; "
            "make it the only kv_connector, or use kvtiers' tiers under vLLM's own tiering"
        )
