"""The driver of one kvtiers tier under vLLM's manager: its requests, their lookups, its steps, its shutdown.

vLLM's manager looks up key by key, step by step. Which prompts are loaded is decided in ``prompts.py``, when a job has
its result in ``job_ledger.py``. The rest is decided at each lookup:

===============================  ==================================================================
a lookup is                      when
===============================  ==================================================================
MISS                             the tier is off, or its breaker open; the request is left out, lost
                                 this chunk before, or has waited long enough for an answer, or for
                                 loads; computing its prompt is sooner
RETRY                            the probe is in flight
HIT                              the tier has it: vLLM submits the load at the end of its step
===============================  ==================================================================

Runs on the engine's thread; ``announce``, ``tend`` (``locked_tier.py``) and ``leave_out`` on any. Nothing raises.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvtiers.api import JobResult, LookupResult, OffloadKey
from kvtiers.metrics import TierMetrics
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext
from kvtiers_vllm.own_tiering.idle_backoff import IdleBackoff
from kvtiers_vllm.own_tiering.job_ledger import Ends, JobLedger, Request
from kvtiers_vllm.own_tiering.locked_tier import LockedTier
from kvtiers_vllm.own_tiering.prompts import PrefillRate, Prompts
from kvtiers_vllm.request_field import NEED_OWN_PRIMARY, RequestField

__all__ = ["TierDriver"]

_DRAIN_POLL_SECONDS = 0.002
_IDLE_SECONDS = 1.0
_STEP_SECONDS = 0.001  # from a step's end to the next one's begin, at least, if anything is computed


class TierDriver:
    """Drives ``slot``. ``lookup_wait``, ``load_wait``: seconds that a request waits for answers and for loads, in all.

    A ``load_wait`` of None: as long as computing would take, which the engine itself shows (``PrefillRate``), and a
    tenth; until it has shown it, by ``prior`` seconds a token, and ``lookup_wait`` at least.
    ``tokens_per_chunk[g]``: tokens whose KV a chunk of group g holds. ``is_idle``: nothing but new requests can be
    computed now; asked when a step begins. ``is_ending``: the engine goes on only for the work that there is; after
    ``drain`` seconds of that, stores which have not ended are dropped.
    """

    def __init__(
        self,
        slot: TierSlot,
        lookup_wait: float,
        close: Callable[[float], None],
        tokens_per_chunk: Sequence[int] = (),
        load_wait: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        is_idle: Callable[[], bool] = lambda: False,
        is_ending: Callable[[], bool] = lambda: False,
        drain: float = 10.0,
        prior: float = 0.0,
    ) -> None:
        self._slot = slot
        self._tier = LockedTier(slot)
        self._is_idle = is_idle
        self._is_ending = is_ending
        self._drain = drain
        self._drop_at: float | None = None  # known once the engine ends
        self._backoff = IdleBackoff(clock, sleep)
        self._began: float | None = None  # a step, with its first question
        self._began_idle = False
        self._ended = 0.0  # the one before
        options = TieringOptions(lookup_wait, load_wait, prior_seconds_per_token=prior)
        self._prompts = Prompts(slot, options, tokens_per_chunk, clock)
        self._waits = self._prompts.waits
        self._close = close
        self._clock = clock
        self._prefill = PrefillRate(self._waits.cost)
        self._ledger = JobLedger(slot, self._tier, self._prompts, tokens_per_chunk, self._drops_stores, clock)
        self._requests: dict[str, Request] = {}
        self._field = RequestField(NEED_OWN_PRIMARY, "under vLLM's own tiering the primary is vLLM's")
        self._to_leave_out: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        """By id, requests that ``request_started`` may still announce; others expire with their object."""
        self._closed = False
        self.left_out_requests = 0
        """Requests that found nothing and stored nothing, as ``leave_out`` says."""

    @property
    def metrics(self) -> TierMetrics:
        """The counts of what happened between the engine and the tier."""
        return self._slot.metrics

    @property
    def loaded_tokens(self) -> int:
        """The tokens whose KV was loaded from the tier."""
        return self._ledger.loaded_tokens

    def own_stats(self) -> dict[str, float]:
        """Return the tier's own figures."""
        tier = self._slot.tier
        return self._slot.own_stats(lambda _name: tier.stats() if isinstance(tier, ChunkStoreTier) else {})

    def has_spoken(self) -> bool:
        """Return whether the tier is open, or has logged why it is not. Any thread."""
        return self._slot.has_spoken()

    # -- requests

    def request_started(self, request_id: str, params: Mapping[str, object] | None, *, left_out: bool = False) -> None:
        """Record a request. ``left_out``: it finds nothing in the tier and stores nothing."""
        request = self._requests[request_id] = self._new_request(request_id, self._field.params(params))
        request.left_out |= left_out
        self.left_out_requests += request.left_out
        self._waits.came(request.prompt.state)

    def leave_out(self, request_id: str, request: object) -> None:
        """Exclude a request that arrives: it finds nothing in the tier and stores nothing. Any thread.

        ``request``: an object that lives until ``request_started`` announces the request, or never will.
        """
        self._to_leave_out[request_id] = request

    def expect(self, request: Any) -> None:
        """Record a request of vLLM's that arrives, or an input that vLLM adds to one of the same id. Any thread."""
        self._prompts.expect(request)

    def request_finished(self, request_id: str) -> None:
        """Forget a request."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._waits.taken_up(request.prompt.state)
        self._to_leave_out.pop(request_id, None)
        self._prefill.finished(request_id)

    def lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Return whether the tier has this chunk."""
        self._begin()
        request = self._request(request_id)
        if key in request.lost or request.left_out or request.prompt.state.load_over or not self._slot.available():
            return LookupResult.MISS
        hits, unresolved = self._tier.ask(key, request.context)
        while unresolved and self._began_idle and self._rest_for_answer([key]):
            hits, unresolved = self._tier.ask(key, request.context)
        if hits:
            if self._prompts.loads_chunk(request.prompt, key):
                return LookupResult.HIT
            self.metrics.recomputed_cheaper += 1
            return LookupResult.MISS
        if not unresolved:
            return LookupResult.MISS
        if not self._prompts.answer_over(request.prompt):
            return LookupResult.RETRY
        request.lost.add(key)
        self.metrics.wait_expired += 1
        return LookupResult.MISS

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Probe for a prefix that will be looked up soon; not while the engine calls the tier. Any thread."""
        self._tier.announce(keys)

    # -- jobs

    def submit(
        self,
        job_id: int,
        keys: Iterable[OffloadKey],
        rows: Sequence[int],
        request_id: str,
        *,
        is_promotion: bool,
        ends: Ends = lambda _key: None,
    ) -> None:
        """Submit a job to the tier; its one result always comes by ``finished``.

        ``ends``: the token of the prompt at which a chunk ends.
        """
        keys = tuple(keys)
        request = self._request(request_id)
        if not is_promotion:
            self._prefill.computed(request_id, *self._ledger.extent(keys, ends, request.prompt.before))
        if not is_promotion and (self._slot.options.read_only or request.left_out):
            self.skip(job_id)
            return
        self._ledger.submit(job_id, keys, rows, request, is_promotion=is_promotion, ends=ends)

    def skip(self, job_id: int) -> None:
        """Report a store that is not to be made, as ended: it must not count as a failure."""
        self._ledger.report(job_id, success=True)

    def refuse(self, job_id: int) -> None:
        """Report a job that could not be submitted as failed; one that was submitted has a result of its own."""
        self._ledger.report(job_id, success=False)

    def finished(self) -> list[JobResult]:
        """Return the results since the last call; vLLM asks for them first in each step."""
        self._begin()
        self._ledger.poll()
        return self._ledger.take_results()

    def end_step(self, new_requests: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        """Send what the step has collected; where nothing is computed while loads run, leave them some time.

        ``new_requests``: those of which an input is computed for the first time in it. ``preempted``: those that have
        lost their blocks; vLLM does not say when it computes them again.
        """
        self._tier.end_step()
        now = self._clock()
        self._slot.watch_speed(now)
        new_requests = list(new_requests)
        for request_id in new_requests:
            if (request := self._requests.get(request_id)) is not None:
                self._ledger.used(request)
                self._prompts.computes(request.prompt)
        for request_id in preempted:
            if (request := self._requests.get(request_id)) is not None:
                prompt = self._prompts.preempted(request.prompt)
                self._requests[request_id] = Request(request.context, prompt, request.left_out)
        self._prompts.end_step()
        self._prefill.step_ended(new_requests, now)
        computed = (self._began if self._began is not None else now) - self._ended >= _STEP_SECONDS
        self._backoff.step(idle=not computed and self.metrics.loading_chunks > 0)
        self._began, self._ended = None, self._clock()

    def tend(self) -> None:
        """Look after the tier if no step has ended for a second, so that an idle engine has it back. Any thread."""
        if (now := self._clock()) - self._ended >= _IDLE_SECONDS and not self._closed:
            self._tier.tend(now)

    def has_jobs(self) -> bool:
        """Return whether a job has no result yet."""
        return bool(self._ledger)

    def drain(self) -> None:
        """Wait until the tier can touch no row any more: every job ends by itself or at its deadline."""
        self._tier.end_step()
        self._ledger.poll()
        while self._ledger.jobs:
            time.sleep(_DRAIN_POLL_SECONDS)
            self._ledger.poll()
            self._tier.end_step()

    def close(self, timeout: float) -> None:
        """Drain the tier within this many seconds, and close it. Jobs without a result are reported failed."""
        if self._closed:
            return
        self._closed = True
        until = self._clock() + timeout
        self._tier.drain(timeout)
        self._ledger.poll()
        self._tier.leave()
        self._close(max(0.0, until - self._clock()))
        self._ledger.close()

    # -- inside

    def _begin(self) -> None:
        """Record that a step begins, with the first call of it."""
        if self._began is None:
            self._began, self._began_idle = self._clock(), self._is_idle()

    def _rest_for_answer(self, keys: Sequence[OffloadKey]) -> bool:
        """Send the probe, and pause for the answer; False if this step has paused long enough."""
        self._tier.announce(keys)
        if not self._backoff.for_answer():
            return False
        self._ledger.poll()
        return True

    def _request(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        return request if request is not None else self._new_request(request_id, {})

    def _new_request(self, request_id: str, params: Mapping[str, object]) -> Request:
        context = RequestContext(request_id, params)
        return Request(context, self._prompts.new(context), left_out=request_id in self._to_leave_out)

    def _drops_stores(self) -> bool:
        """Return whether the engine has been ending for longer than it waits for stores."""
        if self._drop_at is None and self._is_ending():
            self._drop_at = self._clock() + self._drain
        return self._drop_at is not None and self._clock() >= self._drop_at
