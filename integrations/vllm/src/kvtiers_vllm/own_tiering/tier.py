"""A kvtiers tier as one of vLLM's own secondary tiers: the class that vLLM calls, in its scheduler's process.

vLLM defines the methods and their arguments; this module only translates. Nothing here raises into an engine's
step: an exception is logged and counted, and the call returns a safe answer: a chunk is a miss, a job has failed.
"""

import logging
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version

from kvtiers.api import ConfigError
from kvtiers.api import LookupResult as Answer
from kvtiers.api.keys import with_tenant, without_tenant
from kvtiers.status import troubles_from_the_start
from kvtiers_vllm.compat import follow_core
from kvtiers_vllm.engine import engine_being_built
from kvtiers_vllm.life import FirstReport
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.own_tiering.build import begin_start_line, open_tier
from kvtiers_vllm.own_tiering.locked_tier import prompt_keys
from kvtiers_vllm.own_tiering.metrics import COUNTERS, GAUGES, TierFigures, open_status, tier_definitions
from kvtiers_vllm.own_tiering.options import load_tier_options
from kvtiers_vllm.own_tiering.tier_names import PREFIX, tier_names
from kvtiers_vllm.releases import release_of
from kvtiers_vllm.request_field import tenant_param
from kvtiers_vllm.start_problems import logged_first

if TYPE_CHECKING:
    from kvtiers.start_line import StartLine

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError:
    release_of(vllm_version)  # one that is not supported is refused by its name, not by that of what it lacks
    raise

__all__ = ["KvtiersTier"]

_log = logging.getLogger("kvtiers.vllm")

_RELEASE = release_of(vllm_version)
_ANSWERS = {Answer.MISS: LookupResult.MISS, Answer.HIT: LookupResult.HIT, Answer.RETRY: LookupResult.RETRY}


def _locality(tier_type: str, name: str) -> Locality:
    """Return vLLM's value of this name; ValueError, as of vLLM's own tiers, in one line if there is none."""
    try:
        return Locality(name)
    except ValueError:
        known = " or ".join(repr(each.value) for each in Locality)
        raise ValueError(f"{tier_type}: locality: {name!r} is no Locality of vLLM's; expected {known}") from None


_running: weakref.WeakKeyDictionary["KvtiersTier", Any] = weakref.WeakKeyDictionary()
"""The open tiers of this process, each with its engine's offloading config."""


class KvtiersTier(SecondaryTierManager):
    """One tier; ``options`` are those that the tier has in YAML.

    ``enable_kv_events`` and ``locality`` are vLLM's, with the meaning that they have for its own tiers: whether stores
    are announced in vLLM's KV events, and from where it looks local. As there, nothing is announced that leaves.
    """

    medium = Medium.STORAGE

    @logged_first()
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        detector = {"backpressure_detector": backpressure_detector} if _RELEASE.takes_detector else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        self.bugs = BugCount(tier_type)
        config, settings = load_tier_options(tier_type, options, offloading_spec.extra_config)
        self._prompt_only = bool(offloading_spec.extra_config.get("offload_prompt_only", True))
        _RELEASE.require_computed(prompt_only=self._prompt_only)
        self.locality = None if locality is None else _locality(tier_type, locality)
        self.events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self.events = []
        elif enable_kv_events:
            _log.warning("%s: enable_kv_events has no effect: vLLM's kv_events_config enables none", tier_type)
        self._store_job_keys: dict[int, list[bytes]] = {}
        """vLLM's keys of the stores whose results are to be announced."""
        self._drain_seconds = settings.drain
        self._offloading, engine = offloading_spec.config, engine_being_built()
        core = follow_core(engine, vllm_version)
        with troubles_from_the_start([config.tier_name]) as troubles:
            opened = open_tier(config, settings, self._offloading, primary_kv_view, engine, core, vllm_version)
        self._driver = opened.driver
        self._tenants = settings.tenant_rule()
        self._stores_nothing = False
        self._core = core  # compat keeps no other reference to it
        core.request_arrived.append(self._arrived)
        self._figures = TierFigures(opened, OffloadingConnectorStats, types=(tier_type.removeprefix(PREFIX),))
        self._first_report = FirstReport(opened.driver.has_spoken) if getattr(engine, "is_alone", False) else None
        self._status = open_status(opened, troubles, f"vLLM {vllm_version}")
        self._end: threading.Thread | None = None
        self.opened = opened
        self.start_line: StartLine | None = None
        _running[self] = self._offloading
        mine = self._of_this_engine()
        if len(mine) >= len(tier_names(offloading_spec.extra_config)):  # vLLM makes one after another: the last one
            try:
                self.start_line = begin_start_line([tier.opened for tier in mine])
            except RuntimeError:  # no thread can be started
                self.shutdown()
                raise

    # -- requests

    @never_raises(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> Any:
        """Record a request; the tier wants newly computed chunks only."""
        params = req_context.kv_transfer_params
        left_out = self._tenants.of(tenant_param(params)) is None
        self._driver.request_started(req_context.req_id, params, left_out=left_out)
        return RequestOffloadingContext()

    @never_raises(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request."""
        self._driver.request_finished(req_context.req_id)

    @never_raises(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether the tier has a chunk."""
        tenant = self._tenant_of(req_context)
        if tenant is None:
            return LookupResult.MISS
        return _ANSWERS[self._driver.lookup(with_tenant(key, tenant), req_context.req_id)]

    @never_raises(lambda: None)
    def _arrived(self, request: Any) -> None:
        """Probe for a request before vLLM looks it up; if its keys may be another's, exclude it. On any thread."""
        if _RELEASE.spoils_cache(request):
            self._stop_storing()
        is_right = _RELEASE.offloads_rightly(request, prompt_only=self._prompt_only)
        is_out = not is_right or (request.cache_salt and not _RELEASE.tags_salt)
        if is_out:
            self._driver.leave_out(request.request_id, request)
        self._driver.expect(request)
        if is_out:
            return
        tenant = self._tenant_of(request)
        if tenant is not None and (keys := prompt_keys(self._offloading, request)):
            self._driver.announce([with_tenant(key, tenant) for key in keys] if tenant else keys)

    def _stop_storing(self) -> None:
        """Store nothing from now on: a tier does not see which blocks come from vLLM's own prefix cache."""
        if not self._stores_nothing:
            self._stores_nothing = True
            _log.warning(
                "%s: a session with streaming input has come, of which this release of vLLM may keep KV under the hash "
                "of other tokens: this engine stores nothing more; vLLM 0.32 and later ones do not keep it",
                self.opened.name,
            )

    def _tenant_of(self, named: Any) -> str | None:
        """Return the tenant of a request, by vLLM's context of it or by the request itself; None: it may use no tier.

        Read again in each call: vLLM submits stores of requests that are over.
        """
        try:
            return self._tenants.named(tenant_param(getattr(named, "kv_transfer_params", None)))
        except ConfigError:  # said when it was announced
            return None

    # -- jobs

    def submit_store(self, job_metadata: Any, **_more: Any) -> None:
        """Start to copy rows into the tier."""
        self._submit(job_metadata, is_promotion=False)

    def submit_load(self, job_metadata: Any, **_more: Any) -> None:
        """Start to fill rows from the tier."""
        self._submit(job_metadata, is_promotion=True)

    def _submit(self, job: Any, *, is_promotion: bool) -> None:
        try:
            rows: Any = getattr(job, _RELEASE.rows_attribute)
            keys: Collection[bytes] = job.keys
            context = job.req_context
            ends = getattr(context, "get_offload_key_position", lambda _key: None)  # not in every release
            tenant = self._tenant_of(context)
            if (tenant is None or self._stores_nothing) and not is_promotion:
                self._driver.skip(job.job_id)
                return
            if self.events is not None and not is_promotion:
                self._store_job_keys[job.job_id] = list(keys)
            if tenant:
                keys, shown = [with_tenant(key, tenant) for key in keys], ends
                ends = lambda key: shown(without_tenant(key))  # noqa: E731 -- vLLM's own is one, too
            self._driver.submit(job.job_id, keys, rows.tolist(), context.req_id, is_promotion=is_promotion, ends=ends)
        except Exception:  # noqa: BLE001 -- see never_raises; vLLM's request and rows wait for the job's result
            self.bugs.note("submit_load" if is_promotion else "submit_store")
            self._driver.refuse(job.job_id)

    @never_raises(tuple)
    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the results that have come."""
        return [self._result(result) for result in self._driver.finished()]

    @never_raises(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return the announcements since the last call."""
        if not self.events:
            return ()
        taken, self.events = self.events, []
        return taken

    @never_raises(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Send what the step has collected."""
        self._driver.end_step(context.new_req_ids, context.preempted_req_ids)

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Return whether vLLM must go on stepping: its figures lack the tier's state, and the engine is not ending."""
        wanted = self._first_report is not None and self._first_report.is_due()
        return wanted and not self._core.is_ending()

    @never_raises(lambda: None)
    def drain_jobs(self) -> None:
        """Wait until the tier can touch no row any more."""
        self._driver.drain()

    @never_raises(lambda: None)
    def shutdown(self) -> None:
        """Close within a bound, and release vLLM's memory.

        vLLM ends its tiers one after another. Closing the first one starts closing all: they share one bound.
        """
        mine = self._of_this_engine()
        for tier in mine:
            if tier.start_line is not None:
                tier.start_line.close()
        for tier in mine:
            tier.begin_end()
        if self._end is not None:
            self._end.join()

    def _of_this_engine(self) -> "list[KvtiersTier]":
        return [tier for tier, offloading in list(_running.items()) if offloading is self._offloading]

    def begin_end(self) -> None:
        """Start to close on a thread; in this call if no thread can be started, as while the interpreter ends."""
        del _running[self]
        end = threading.Thread(target=self._close, name="kvtiers-end", daemon=True)
        try:
            end.start()
        except RuntimeError:
            self._close()
        else:
            self._end = end

    @never_raises(lambda: None)
    def _close(self) -> None:
        try:
            self._status.close()
        finally:
            self._driver.close(self._drain_seconds)

    # -- figures

    @classmethod
    def build_metric_definitions(cls, tier_config: dict[str, Any]) -> dict[str, Any]:
        """Return the definitions of a tier's figures; a label distinguishes tiers. ``tier_config``: its options."""
        named = tier_config.get("type")
        types = (str(named).removeprefix(PREFIX),) if named else None
        return tier_definitions(OffloadingCounterMetadata, OffloadingGaugeMetadata, COUNTERS, GAUGES, types)

    @never_raises(lambda: None)
    def get_stats(self) -> Any:
        """Return the figures that have changed since the last report; None if it was made just before."""
        report = self._figures()
        if report is not None and self._first_report is not None:
            self._first_report.given()
        return report

    # -- inside

    def _result(self, result: Any) -> Any:
        stored = self._store_job_keys.pop(result.job_id, None)
        if stored and result.success and self.events is not None:
            self.events.append(OffloadingEvent(stored, self.medium, removed=False, locality=self.locality))
        good = result.successful_keys
        if good is not None and self._tenants.is_on:
            good = [without_tenant(key) for key in good]
        moved = {"transfer_bytes": result.nbytes} if _RELEASE.reports_bytes else {}
        return JobResult(
            result.job_id,
            result.success,
            successful_keys=good,
            transfer_time=result.seconds,
            **moved,
        )
