"""The ledger of vLLM's jobs in one tier: each job's deadline, its request's wait for loads, and its one result.

vLLM frees a job's rows when the job's result is reported: so a result is reported only when nothing can touch the rows
any more, also that of a job which has failed. A load that has taken ``load_wait`` is made to release its rows, which it
does at once where values are read into bounce buffers, and is reported then, even if its calls still run.

The whole stack's ledger (``kvtiers.tiering.jobs``) owns rows of a primary, their pin budget and job ids. Here rows and
ids are vLLM's, and an engine has the one ledger or the other.

Runs on the engine's thread. Nothing raises.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import JobResult, OffloadKey, TransferJob, group_of
from kvtiers.secondary.tier_jobs import JobFailed, JobReleased, JobStarted, good_keys, moved
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import RequestContext
from kvtiers_vllm.own_tiering.locked_tier import LockedTier
from kvtiers_vllm.own_tiering.prompts import Prompt, Prompts

__all__ = ["Ends", "JobLedger", "Request", "Running"]

_SCAN_SECONDS = 0.05  # how often deadlines are looked at
Ends = Callable[[OffloadKey], int | None]
"""Returns the token of its prompt at which a chunk ends; None: vLLM does not say it."""


@dataclass(slots=True, eq=False)
class Request:
    """The state of a request until it is preempted: its prompt, and which chunks are misses for it."""

    context: RequestContext
    prompt: Prompt
    left_out: bool = False
    lost: set[OffloadKey] = field(default_factory=set)
    landed: dict[OffloadKey, int | None] = field(default_factory=dict)
    """The chunks that were loaded for it and are not counted yet, and where they end in its prompt."""
    landed_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Running:
    """A job of vLLM's that is not reported yet, ids its own. ``ticket``: of a load, in the tier's rate."""

    job: TransferJob
    request: "Request"
    submitted: float
    ends: Ends
    ticket: int = 0
    started: float | None = None
    failed_in_use: bool = False
    released: bool = False


class JobLedger:
    """The jobs of ``tier``, which stands in ``slot``. ``prompts``: how long a request waits for a load.

    ``tokens_per_chunk[g]``: tokens of a chunk of group g.
    ``drops_stores``: stores that have not ended are dropped, and none begins.
    """

    def __init__(
        self,
        slot: TierSlot,
        tier: LockedTier,
        prompts: Prompts,
        tokens_per_chunk: Sequence[int],
        drops_stores: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.metrics = slot.metrics
        self._slot = slot
        self._tier = tier
        self._prompts = prompts
        self._tokens_per_chunk = tokens_per_chunk
        self._drops_stores = drops_stores
        self._clock = clock
        self.jobs: dict[int, Running] = {}
        """Those without a result, by vLLM's id."""
        self._late: dict[int, Running] = {}
        self._results: list[JobResult] = []
        self._next_scan = 0.0
        self._provenance = Provenance([slot])
        self.loaded_tokens = 0
        """Tokens whose KV was loaded from the tier."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self._results)

    def submit(
        self,
        job_id: int,
        keys: tuple[OffloadKey, ...],
        rows: Sequence[int],
        request: Request,
        *,
        is_promotion: bool,
        ends: Ends,
    ) -> None:
        """Submit a job to the tier; its one result always comes by ``take_results``."""
        now = self._clock()
        job = TransferJob(job_id, keys, memoryview(array("i", rows)), is_promotion, request.context)
        ticket = 0
        if is_promotion:
            self._prompts.load_begins(request.prompt, len(keys), self.extent(keys)[0])
            ticket = self._slot.rate.begins(now)
        running = self.jobs[job_id] = Running(job, request, now, ends, ticket)
        self.metrics.running_jobs += 1
        usable = self._slot.available() and (is_promotion or not self._drops_stores())
        self.metrics.dropped_cascades += len(job.keys) if not usable and not is_promotion else 0
        if not usable or not self._tier.submit(job):
            self._finish(running, JobResult(job_id, success=False))

    def report(self, job_id: int, *, success: bool) -> None:
        """Report a job that was not submitted; one that was has a result of its own."""
        if job_id not in self.jobs:
            self._results.append(JobResult(job_id, success=success))

    def take_results(self) -> list[JobResult]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Report all jobs without a result as failed."""
        for running in list(self.jobs.values()):
            self._finish(running, JobResult(running.job.job_id, success=False))

    def extent(self, keys: Sequence[OffloadKey], ends: Ends = lambda _key: None, before: int = 0) -> tuple[int, float]:
        """Return how many tokens' KV these chunks hold, and how many tokens are before each of those on average.

        Of a hybrid model they are those of the group with the most. ``before``: tokens before the first one, for
        releases of vLLM that do not say where a chunk ends.
        """
        counts = Counter(map(group_of, keys)) if len(self._tokens_per_chunk) > 1 else {0: len(keys)}
        sizes = [(counts.get(group, 0) * tokens, group) for group, tokens in enumerate(self._tokens_per_chunk)]
        tokens, group = max(sizes, default=(0, 0))
        mine = keys if len(counts) < 2 else [key for key in keys if group_of(key) == group]
        known = [end for end in map(ends, mine) if end is not None]
        if not known:
            return tokens, before + tokens / 2
        return tokens, sum(known) / len(known) - self._tokens_per_chunk[group] / 2

    def poll(self) -> None:
        """Handle what the tier has reported, and the deadlines of jobs and waits."""
        released: list[int] = []
        results: list[JobResult] = []
        for event in self._tier.poll():
            if isinstance(event, JobStarted):
                if (started := self.jobs.get(event.job_id)) is not None and started.started is None:
                    started.started = self._clock()
            elif isinstance(event, JobFailed):
                if (failed := self.jobs.get(event.job_id)) is not None:
                    self._give_up(failed, abandon=False)
            elif isinstance(event, JobReleased):
                released.append(event.job_id)
            else:
                results.append(event)
        self._take_results(results)
        self._release_late(released)
        if self._drops_stores():
            self._tier.drop([job_id for job_id, running in self.jobs.items() if not running.job.is_promotion])
        now = self._clock()
        if (self.jobs or self._late) and now >= self._next_scan:
            self._next_scan = now + _SCAN_SECONDS
            self._expire(now)

    def _take_results(self, results: Sequence[JobResult]) -> None:
        for result in results:
            if (late := self._late.pop(result.job_id, None)) is not None:
                self._load_measured(late, result)
            if (ended := self.jobs.get(result.job_id)) is not None:
                self._finish(ended, result)
        if results:
            self._slot.rate.look_ends(self._clock())

    def _load_measured(self, running: Running, result: JobResult) -> None:
        """Record the tier's speed from a load, also if its request no longer waited for it."""
        good = good_keys(running.job, result)
        seconds = moved(result)[1] if good else 0.0
        self._slot.rate.ends(running.ticket, len(good), seconds, self._clock())

    def _release_late(self, released: Sequence[int]) -> None:
        """Make loads past their requests' wait budget release their rows; report those that have."""
        for job_id in released:
            if (running := self.jobs.get(job_id)) is not None:
                self._late[job_id] = running
                self._finish(running, JobResult(job_id, success=False))
        for running in self.jobs.values():
            prompt = running.request.prompt
            is_waited_for = running.job.is_promotion and not (running.released or running.failed_in_use)
            if is_waited_for and self._prompts.wait_is_over(prompt):
                running.released = True
                if prompt.state.is_overtaken:
                    self.metrics.recomputed_cheaper += len(running.job.keys)
                else:
                    self.metrics.wait_expired += len(running.job.keys)
                self._tier.release(running.job.job_id)

    def _expire(self, now: float) -> None:
        for running in (*self.jobs.values(), *self._late.values()):
            begun = running.submitted if running.started is None else running.started
            if now - begun > self._slot.options.deadline and not running.failed_in_use:
                self.metrics.expired_jobs += 1
                self._give_up(running, abandon=True)

    def _give_up(self, running: Running, *, abandon: bool) -> None:
        """Mark a job as failed with its rows in use: vLLM gets the result when they are released."""
        if running.failed_in_use:
            return
        running.failed_in_use = True
        if running.job.is_promotion:  # at least that slow: it must not look fast to the next request
            now = self._clock()
            self._slot.rate.drop(running.ticket)
            self._slot.rate.add(len(running.job.keys), now - running.submitted, now)
        self.metrics.quarantined_rows += len(running.job.keys) if running.job.job_id in self.jobs else 0
        if abandon:
            self._tier.abandon(running.job.job_id)

    def _finish(self, running: Running, result: JobResult) -> None:
        job, metrics = running.job, self.metrics
        del self.jobs[job.job_id]
        metrics.running_jobs -= 1
        if running.failed_in_use:
            metrics.quarantined_rows -= len(job.keys)
        good = good_keys(job, result)
        nbytes, seconds = moved(result)
        if job.is_promotion:
            self._prompts.load_ends(running.request.prompt, len(job.keys))
            if job.job_id not in self._late:
                self._load_measured(running, result)
            metrics.loaded_chunks += len(good)
            metrics.loaded_bytes += nbytes
            metrics.load_seconds += seconds
            self._count_loaded(running, good, seconds)
            self._provenance.read(self._slot, good)
            self._note_lost(running.request, job, good)
        else:
            metrics.stored_chunks += len(good)
            metrics.stored_bytes += nbytes
            metrics.store_seconds += seconds
            metrics.failed_stores += len(job.keys) - len(good)
            self._provenance.written(self._slot, good, nbytes)
        complete = len(good) == len(job.keys)
        partly = None if complete or not job.is_promotion else good
        self._results.append(JobResult(job.job_id, complete, partly, nbytes, seconds))

    def _count_loaded(self, running: Running, good: Sequence[OffloadKey], seconds: float) -> None:
        if good:
            request, before = running.request, running.request.prompt.loaded
            self.metrics.loads += 1
            request.landed.update((key, running.ends(key)) for key in good)
            request.landed_seconds += seconds
            request.prompt.loaded = self.extent(list(request.landed))[0]
            self.loaded_tokens += request.prompt.loaded - before

    def used(self, request: Request) -> None:
        """Count what the loads of a request have saved, which is begun now: all of them at once, and once.

        Those of windows and states save no tokens of their own, but take time.
        """
        landed, seconds = request.landed, request.landed_seconds
        request.landed, request.landed_seconds = {}, 0.0
        if landed:
            tokens, position = self.extent(list(landed), landed.get, request.prompt.before)
            computing = self._prompts.waits.cost.seconds(tokens, position)
            if computing is not None:
                self._slot.count_saved(computing, self._slot.seconds_of(len(landed), seconds))

    def _note_lost(self, request: Request, job: TransferJob, good: Sequence[OffloadKey]) -> None:
        """Make a chunk whose load failed a miss for its request, which would retry for ever otherwise."""
        lost = set(job.keys).difference(good)
        self.metrics.failed_loads += len(lost)
        request.lost |= lost
