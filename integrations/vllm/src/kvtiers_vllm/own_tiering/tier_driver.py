"""The driver of one kvtiers tier under vLLM's manager: its jobs and deadlines, its requests' waits, its shutdown.

vLLM's manager looks up key by key, step by step, and frees a job's rows when the job's result is reported: so a
result is reported only when nothing can touch the rows any more, also that of a job which is given up. A load that has
taken ``load_wait`` is made to release its rows, which it can at once where values are read into bounce buffers, and is
reported then, even if its calls still run. Which prompts are loaded is decided in ``prompts.py``. The rest is decided
at each lookup:

===============================  ==================================================================
a lookup is                      when
===============================  ==================================================================
MISS                             the tier is off, or its breaker open; the request is left out, lost
                                 this chunk before, or has waited ``lookup_wait`` for an answer, or
                                 ``load_wait`` for loads; computing its prompt is sooner
RETRY                            the probe is in flight
HIT                              the tier has it: vLLM submits the load at the end of its step
===============================  ==================================================================

The whole stack's ledger (``kvtiers.tiering.jobs``) owns rows of a primary, their pin budget and job ids. Here rows and
ids are vLLM's: the driver is this mode's ledger, and an engine has the one or the other.

Runs on the engine's thread; ``ask_ahead`` (``locked_tier.py``) and ``leave_out`` on any. Nothing raises.
"""

import math
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtiers.api import JobResult, LookupResult, OffloadKey, TransferJob, group_of
from kvtiers.metrics import TierMetrics
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.secondary.tier_jobs import JobFailed, JobReleased, JobStarted, good_keys, moved
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.prefill_price import PrefillPrice
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext
from kvtiers_vllm.own_tiering.idle_backoff import IdleBackoff
from kvtiers_vllm.own_tiering.locked_tier import LockedTier
from kvtiers_vllm.own_tiering.prompts import PrefillRate, Prompt, Prompts

__all__ = ["TierDriver"]

_SCAN_SECONDS = 0.05  # how often deadlines are looked at
_DRAIN_POLL_SECONDS = 0.002
_STEP_SECONDS = 0.001  # from a step's end to the next one's begin, at least, if anything is computed


@dataclass(slots=True, eq=False)
class _Running:
    """A job of vLLM's that is not reported yet, ids its own. ``ticket``: of a load, in the tier's rate."""

    job: TransferJob
    request: "_Request"
    submitted: float
    ticket: int = 0
    started: float | None = None
    failed_in_use: bool = False
    released: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    """The state of a request: since when it waits, and which chunks are misses for it.

    ``loads``: in flight, since ``loads_since``; ``loads_waited``: seconds in which those before were; ``loads_over``:
    when it has waited enough for those in flight.
    """

    context: RequestContext
    prompt: Prompt
    waits_since: float | None = None
    loads: int = 0
    loads_since: float = 0.0
    loads_waited: float = 0.0
    loads_over: float = math.inf
    left_out: bool = False
    lost: set[OffloadKey] = field(default_factory=set)


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
        self._lookup_wait = lookup_wait
        self._prompts = Prompts(slot, PrefillCost(prior), tokens_per_chunk, lookup_wait, load_wait, clock)
        self._late: dict[int, _Running] = {}
        self._close = close
        self._tokens_per_chunk = tokens_per_chunk
        self._clock = clock
        self._price = PrefillPrice()
        self._prefill = PrefillRate(self._prompts.cost, self._price)
        self._jobs: dict[int, _Running] = {}
        self._requests: dict[str, _Request] = {}
        self._to_leave_out: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        """By id, requests that ``request_started`` may still announce; others expire with their object."""
        self._results: list[JobResult] = []
        self._next_scan = 0.0
        self._closed = False
        self._provenance = Provenance([slot])
        self.loaded_tokens = 0
        """Tokens whose KV was loaded from the tier."""
        self.left_out_requests = 0
        """Requests that found nothing and stored nothing, as ``leave_out`` says."""

    @property
    def metrics(self) -> TierMetrics:
        """The counts of what happened between the engine and the tier."""
        return self._slot.metrics

    def own_stats(self) -> dict[str, float]:
        """Return the tier's own figures."""
        tier = self._slot.tier
        return self._slot.own_stats(lambda _name: tier.stats() if isinstance(tier, ChunkStoreTier) else {})

    def has_spoken(self) -> bool:
        """Return whether the tier is open, or has logged why it is not. Any thread."""
        return self._slot.has_spoken()

    # -- requests

    def request_started(self, request_id: str, params: Mapping[str, object] | None) -> None:
        """Record a request."""
        request = self._requests[request_id] = self._new_request(request_id, params or {})
        self.left_out_requests += request.left_out
        self._prompts.came(request.prompt)

    def leave_out(self, request_id: str, request: object) -> None:
        """Exclude a request that arrives: it finds nothing in the tier and stores nothing. Any thread.

        ``request``: an object that lives until ``request_started`` announces the request, or never will.
        """
        self._to_leave_out[request_id] = request

    def expect(self, request_id: str, prompt_tokens: int) -> None:
        """Record the prompt length of a request that arrives. Any thread."""
        self._prompts.expect(request_id, prompt_tokens)

    def request_finished(self, request_id: str) -> None:
        """Forget a request."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._prompts.taken_up(request.prompt)
        self._to_leave_out.pop(request_id, None)
        self._prefill.finished(request_id)

    def lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Return whether the tier has this chunk."""
        self._begin()
        request = self._request(request_id)
        if key in request.lost or request.left_out or not self._slot.available():
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
        now = self._clock()
        if request.waits_since is None:
            request.waits_since = now
        if now - request.waits_since < self._lookup_wait:
            return LookupResult.RETRY
        request.lost.add(key)
        self.metrics.wait_expired += 1
        return LookupResult.MISS

    def ask_ahead(self, keys: Sequence[OffloadKey]) -> None:
        """Probe for a prefix that will be looked up soon; not while the engine calls the tier. Any thread."""
        self._tier.ask_ahead(keys)

    # -- jobs

    def submit(
        self, job_id: int, keys: Iterable[OffloadKey], rows: Sequence[int], request_id: str, *, is_promotion: bool
    ) -> None:
        """Submit a job to the tier; its one result always comes by ``finished``."""
        keys = tuple(keys)
        request, now = self._request(request_id), self._clock()
        if not is_promotion:
            self._prefill.computed(request_id, self._tokens(keys), request.prompt.before)
        if not is_promotion and (self._slot.options.read_only or request.left_out):
            self._results.append(JobResult(job_id, success=True))  # intended: it must not count as a failure
            return
        job = TransferJob(job_id, keys, memoryview(array("i", rows)), is_promotion, request.context)
        ticket = self._load_begins(request, keys, now) if is_promotion else 0
        running = self._jobs[job_id] = _Running(job, request, now, ticket)
        self.metrics.running_jobs += 1
        self.metrics.loading_chunks += len(job.keys) if is_promotion else 0
        usable = self._slot.available() and (is_promotion or not self._drops_stores())
        self.metrics.dropped_cascades += len(job.keys) if not usable and not is_promotion else 0
        if not usable or not self._tier.submit(job):
            self._finish(running, JobResult(job_id, success=False))

    def refuse(self, job_id: int) -> None:
        """Report a job that could not be submitted as failed; one that was submitted has a result of its own."""
        if job_id not in self._jobs:
            self._results.append(JobResult(job_id, success=False))

    def finished(self) -> list[JobResult]:
        """Return the results since the last call; vLLM asks for them first in each step."""
        self._begin()
        self._poll()
        results, self._results = self._results, []
        return results

    def end_step(self, new_requests: Iterable[str] = ()) -> None:
        """Send what the step has collected; where nothing is computed while loads run, leave them some time.

        ``new_requests``: those that are computed for the first time in it.
        """
        self._tier.end_step()
        now = self._clock()
        self._slot.watch_speed(now)
        new_requests = list(new_requests)
        for request_id in new_requests:
            if (request := self._requests.get(request_id)) is not None:
                self._prompts.computes(request.prompt)
        self._prompts.end_step()
        self._prefill.step_ended(new_requests, now)
        computed = (self._began if self._began is not None else now) - self._ended >= _STEP_SECONDS
        self._backoff.step(idle=not computed and self.metrics.loading_chunks > 0)
        self._began, self._ended = None, self._clock()

    def has_jobs(self) -> bool:
        """Return whether a job has no result yet."""
        return bool(self._jobs or self._results)

    def drain(self) -> None:
        """Wait until the tier can touch no row any more: every job ends by itself or at its deadline."""
        self._tier.end_step()
        self._poll()
        while self._jobs:
            time.sleep(_DRAIN_POLL_SECONDS)
            self._poll()
            self._tier.end_step()

    def close(self, timeout: float) -> None:
        """Drain the tier within this many seconds, and close it. Jobs without a result are reported failed."""
        if self._closed:
            return
        self._closed = True
        until = self._clock() + timeout
        self._tier.drain(timeout)
        self._poll()
        self._tier.leave()
        self._close(max(0.0, until - self._clock()))
        for running in list(self._jobs.values()):
            self._finish(running, JobResult(running.job.job_id, success=False))

    # -- inside

    def _begin(self) -> None:
        """Record that a step begins, with the first call of it."""
        if self._began is None:
            self._began, self._began_idle = self._clock(), self._is_idle()

    def _rest_for_answer(self, keys: Sequence[OffloadKey]) -> bool:
        """Send the probe, and pause for the answer; False if this step has paused long enough."""
        self._tier.ask_ahead(keys)
        if not self._backoff.for_answer():
            return False
        self._poll()
        return True

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        return request if request is not None else self._new_request(request_id, {})

    def _new_request(self, request_id: str, params: Mapping[str, object]) -> _Request:
        context, prompt = RequestContext(request_id, params), self._prompts.new(request_id)
        return _Request(context, prompt, left_out=request_id in self._to_leave_out)

    def _tokens(self, keys: Sequence[OffloadKey]) -> int:
        """Return the tokens whose KV these chunks hold: of a hybrid model, those of the group with the most."""
        groups = Counter(map(group_of, keys)) if len(self._tokens_per_chunk) > 1 else {0: len(keys)}
        return max((groups.get(group, 0) * tokens for group, tokens in enumerate(self._tokens_per_chunk)), default=0)

    def _poll(self) -> None:
        released: list[int] = []
        results: list[JobResult] = []
        for event in self._tier.poll():
            if isinstance(event, JobStarted):
                if (started := self._jobs.get(event.job_id)) is not None and started.started is None:
                    started.started = self._clock()
            elif isinstance(event, JobFailed):
                if (failed := self._jobs.get(event.job_id)) is not None:
                    self._give_up(failed, abandon=False)
            elif isinstance(event, JobReleased):
                released.append(event.job_id)
            else:
                results.append(event)
        self._take_results(results)
        self._release_late(released)
        if self._drops_stores():
            self._tier.drop([job_id for job_id, running in self._jobs.items() if not running.job.is_promotion])
        now = self._clock()
        if (self._jobs or self._late) and now >= self._next_scan:
            self._next_scan = now + _SCAN_SECONDS
            self._expire(now)

    def _take_results(self, results: Sequence[JobResult]) -> None:
        for result in results:
            if (late := self._late.pop(result.job_id, None)) is not None:
                self._load_measured(late, result)
            if (ended := self._jobs.get(result.job_id)) is not None:
                self._finish(ended, result)
        if results:
            self._slot.rate.look_ends(self._clock())

    def _drops_stores(self) -> bool:
        """Return whether the engine has been ending for longer than it waits for stores."""
        if self._drop_at is None and self._is_ending():
            self._drop_at = self._clock() + self._drain
        return self._drop_at is not None and self._clock() >= self._drop_at

    def _load_begins(self, request: _Request, keys: Sequence[OffloadKey], now: float) -> int:
        """Record a load, and until when its request waits; return the load's ticket.

        Between loads it does not wait: vLLM may compute it, preempt it, and load it again much later.
        """
        if not request.loads:
            request.loads_since = now
        request.loads += 1
        wait = self._prompts.loads(request.prompt, self._tokens(keys))
        request.loads_over = request.loads_since + wait - request.loads_waited
        return self._slot.rate.begins(now)

    def _load_ended(self, request: _Request) -> None:
        request.loads -= 1
        if not request.loads:
            request.loads_waited += self._clock() - request.loads_since

    def _load_measured(self, running: _Running, result: JobResult) -> None:
        """Record the tier's speed from a load, also if its request no longer waited for it."""
        good = good_keys(running.job, result)
        seconds = moved(result)[1] if good else 0.0
        self._slot.rate.ends(running.ticket, len(good), seconds, self._clock())

    def _release_late(self, released: Sequence[int]) -> None:
        """Make loads past their requests' wait budget release their rows; report those that have."""
        for job_id in released:
            if (running := self._jobs.get(job_id)) is not None:
                self._late[job_id] = running
                self._finish(running, JobResult(job_id, success=False))
        now = self._clock() if self._jobs else 0.0
        for running in self._jobs.values():
            is_over = running.job.is_promotion and now >= running.request.loads_over
            if is_over and not (running.released or running.failed_in_use):
                running.released = True
                self.metrics.wait_expired += len(running.job.keys)
                self._tier.release(running.job.job_id)

    def _expire(self, now: float) -> None:
        for running in (*self._jobs.values(), *self._late.values()):
            begun = running.submitted if running.started is None else running.started
            if now - begun > self._slot.options.deadline and not running.failed_in_use:
                self.metrics.expired_jobs += 1
                self._give_up(running, abandon=True)

    def _give_up(self, running: _Running, *, abandon: bool) -> None:
        """Mark a job as failed with its rows in use: vLLM gets the result when they are released."""
        if running.failed_in_use:
            return
        running.failed_in_use = True
        if running.job.is_promotion:  # at least that slow: it must not look fast to the next request
            now = self._clock()
            self._slot.rate.drop(running.ticket)
            self._slot.rate.add(len(running.job.keys), now - running.submitted, now)
        self.metrics.quarantined_rows += len(running.job.keys) if running.job.job_id in self._jobs else 0
        if abandon:
            self._tier.abandon(running.job.job_id)

    def _finish(self, running: _Running, result: JobResult) -> None:
        job, metrics = running.job, self.metrics
        del self._jobs[job.job_id]
        metrics.running_jobs -= 1
        if running.failed_in_use:
            metrics.quarantined_rows -= len(job.keys)
        good = good_keys(job, result)
        nbytes, seconds = moved(result)
        if job.is_promotion:
            self._load_ended(running.request)
            if job.job_id not in self._late:
                self._load_measured(running, result)
            metrics.loading_chunks -= len(job.keys)
            metrics.loaded_chunks += len(good)
            metrics.loaded_bytes += nbytes
            metrics.load_seconds += seconds
            self._count_loaded(running.request, good, seconds)
            self._provenance.read(self._slot, good)
            self._note_lost(job, good)
        else:
            metrics.stored_chunks += len(good)
            metrics.stored_bytes += nbytes
            metrics.store_seconds += seconds
            metrics.failed_stores += len(job.keys) - len(good)
            self._provenance.written(self._slot, good, nbytes)
        complete = len(good) == len(job.keys)
        partly = None if complete or not job.is_promotion else good
        self._results.append(JobResult(job.job_id, complete, partly, nbytes, seconds))

    def _count_loaded(self, request: _Request, good: Sequence[OffloadKey], seconds: float) -> None:
        if good:
            tokens = self._tokens(good)
            self.metrics.loads += 1
            self.loaded_tokens += tokens
            # What vLLM's own prefix cache had of the prompt is not seen here: then it is further in, and dearer.
            computing = self._price.seconds(tokens, request.prompt.loaded + tokens / 2)
            request.prompt.loaded += tokens
            if computing is not None:
                self._slot.count_saved(len(good), computing, seconds)

    def _note_lost(self, job: TransferJob, good: Sequence[OffloadKey]) -> None:
        """Make a chunk whose load failed a miss for its request, which would retry for ever otherwise."""
        lost = set(job.keys).difference(good)
        self.metrics.failed_loads += len(lost)
        request = self._requests.get(job.context.request_id)
        if request is not None:
            request.lost |= lost
