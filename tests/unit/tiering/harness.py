"""What the tests of tiering work with: a clock, an engine, real rows, and tiers under the control of the test.

Every chunk has its own bytes, made from its key and the weights' version, in the rows as in the tiers.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from kvtiers.api import JobResult, LookupResult, group_of, make_offload_key
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.engine_side import Watchers
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import PromptGroup, RequestContext

ROW_BYTES = 16
HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY


def chain(name, length, group=0):
    """The keys of a prefix: each one's hash stands for the whole way to it."""
    return [make_offload_key(f"{name}{place:04}".encode(), group) for place in range(length)]


def payload(key, version=""):
    return hashlib.blake2b(key + version.encode(), digest_size=ROW_BYTES).digest()


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Engine:
    """The engine's side: all ranks are there, unless a test says otherwise."""

    def __init__(self):
        self.all_joined = True
        self.dma = False
        self.version = ""
        self.on_new_weights = []
        self.own = {}
        self.closed = []

    def ready(self):
        return self.all_joined

    def take_lost_ranks(self):
        return ()

    def dma_may_run(self):
        return self.dma

    def wait_ready(self, timeout):
        self.waited = timeout

    def new_weights(self, version):
        self.version = version
        for notify in self.on_new_weights:
            notify(version)

    def fingerprint(self):
        return self.version

    def tier_stats(self, name):
        figures = self.own.get(name, {})
        if isinstance(figures, Exception):
            raise figures
        return figures

    def close_tiers(self, timeout):
        self.closed.append(("tiers", timeout))

    def close_region(self):
        self.closed.append("region")


class Heard:
    """Keeps the events that it is given."""

    def __init__(self):
        self.events = []

    def take(self, changes):
        self.events += changes

    def cleared(self):
        self.events.clear()

    def close(self, timeout):
        pass


@dataclass(eq=False)
class Submitted:
    """A job that the tier has and has not ended; ``version``: of the weights when it was submitted."""

    job: object
    version: str
    rows: list


class FaultyTier(EventTier):
    """Holds real bytes; by default it ends each job within the submit. What goes wrong is up to the test.

    ``hold``: jobs wait in ``held`` until ``end`` is called. ``raises``: names of methods that raise. ``answer``: what
    it says to every lookup, instead of the truth. ``violations``: what it was asked that no tier may be asked; every
    test ends with a look at them, since nothing that a tier raises reaches the engine.
    """

    def __init__(self, view, *, hold=False, reports_starts=False):
        self.view = view
        self.hold = hold
        self.reports_starts = reports_starts
        self.values = {}
        self.held = {}
        self.raises = set()
        self.answer = None
        self.available = True
        self.wants_whole = False
        self.pending_work = False
        self.version = ""
        self.started, self.failed, self.finished = [], [], []
        self.abandoned = []
        self.notified = Counter()
        self.begun, self.over = set(), set()
        self.submitted = []
        self.asked = []
        self.steps = 0
        self.seconds = 0.0
        self.violations = []

    # -- the contract

    def lookup_many(self, keys, context):
        self._called("lookup_many", context)
        self.asked.append(list(keys))
        if self.answer is not None:
            return [self.answer] * len(keys)
        answers = []
        for key in keys:
            there = (self.version, key) in self.values
            answers.append(HIT if there else MISS)
            if not there:
                break
        return answers

    def submit_store(self, job):
        self._submit("submit_store", job)

    def submit_load(self, job):
        self._submit("submit_load", job)

    def get_started_jobs(self):
        self._called("get_started_jobs")
        started, self.started = self.started, []
        return started if self.reports_starts else None

    def get_failed_jobs(self):
        self._called("get_failed_jobs")
        failed, self.failed = self.failed, []
        return failed

    def get_finished_jobs(self):
        self._called("get_finished_jobs")
        finished, self.finished = self.finished, []
        return finished

    def drain(self, timeout):
        for job_id in list(self.held):
            self.end(job_id)
        return True

    def is_available(self):
        self._called("is_available")
        return self.available

    def abandon_job(self, job_id):
        self.abandoned.append(job_id)
        self._called("abandon_job")

    def on_new_request(self, context):
        self._demand(context not in self.begun, "a request that begins twice")
        self.begun.add(context)
        self._called("on_new_request")
        return self.wants_whole

    def on_request_finished(self, context):
        self._demand(context in self.begun - self.over, "the end of a request that this tier does not have")
        self.notified[context] += 1
        self.over.add(context)
        self._called("on_request_finished")

    def on_schedule_end(self):
        self.steps += 1
        self._called("on_schedule_end")

    def has_pending_work(self):
        self._called("has_pending_work")
        return self.pending_work

    # -- the test's hand

    def end(self, job_id, landed=None, *, success=None, keys=None, garbage=True):
        """End a held job: move the chunks in ``landed`` (all, if None) and report what is true, or what is given."""
        held = self.held.pop(job_id)
        job = held.job
        landed = list(job.keys) if landed is None else [key for key in job.keys if key in landed]
        for key, row in zip(job.keys, held.rows, strict=True):
            if job.is_promotion:
                value = self.values.get((held.version, key)) if key in landed else None
                if value is None and key in landed:
                    landed.remove(key)
                if value is not None or garbage:
                    self.row(row)[:] = value or b"\xee" * ROW_BYTES
            elif key in landed:
                self.values[held.version, key] = bytes(self.row(row))
        complete = len(landed) == len(job.keys)
        self.finished.append(
            JobResult(
                job_id,
                complete if success is None else success,
                (None if complete else landed) if keys is None else keys,
                ROW_BYTES * len(landed),
                self.seconds,
            )
        )
        return landed

    def end_all(self):
        for job_id in list(self.held):
            self.end(job_id)

    def put(self, keys):
        """Have these chunks, as if another engine had stored them."""
        self.values.update(((self.version, key), payload(key, self.version)) for key in keys)

    def has(self, keys):
        return [(self.version, key) in self.values for key in keys]

    def row(self, row):
        return self.view[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    @property
    def loads(self):
        return [job for job in self.submitted if job.is_promotion]

    @property
    def stores(self):
        return [job for job in self.submitted if not job.is_promotion]

    def _submit(self, method, job):
        self._called(method, job.context)
        self._demand(len(job.keys) == len(job.chunk_ids) > 0, f"{len(job.keys)} keys, {len(job.chunk_ids)} rows")
        self._demand(job.is_promotion == (method == "submit_load"), f"{method} with the other kind of job")
        self._demand(not self.submitted or job.job_id > self.submitted[-1].job_id, "a job id that does not grow")
        self.submitted.append(job)
        self.held[job.job_id] = Submitted(job, self.version, job.chunk_ids.tolist())
        if not self.hold:
            self.end(job.job_id)

    def _called(self, method, context=None):
        if context is not None and context.request_id:
            self._demand(context not in self.over, f"{method} for a request of whose end this tier was notified")
            self._demand(context in self.begun, f"{method} for a request of which this tier was not notified")
        if method in self.raises:
            raise RuntimeError(f"{method} fails")

    def _demand(self, fulfilled, what):
        if not fulfilled:
            self.violations.append(what)


@dataclass(eq=False)
class Bench:
    """A manager over real rows and faulty tiers. ``tiers``: options of each, by name. ``all``: those of this test.

    ``adopted``: chunks that are in the primary before there is a manager, the oldest first.
    """

    all: ClassVar[list] = []
    rows: int = 16
    tiers: dict = field(default_factory=lambda: {"a": {}})
    tokens_per_chunk: tuple = (16,)
    options: TieringOptions = field(default_factory=lambda: TieringOptions(lookup_wait=0.02, load_wait=0.1))
    policy: str = "lru"
    hold: bool = False
    protected_share: float = 0.4
    record_events: bool = True
    prefix_group: int = 0
    windows: tuple = ()
    watchers: Watchers | None = None
    adopted: tuple = ()

    def __post_init__(self):
        self.clock = Clock()
        self.heard = Heard()
        self.engine = Engine()
        self.view = memoryview(bytearray(self.rows * ROW_BYTES))
        self.primary = CPUPrimaryTier(
            self.rows,
            ROW_BYTES,
            self.view,
            policy=self.policy,
            protected_share=self.protected_share,
            record_events=self.record_events,
            clock=self.clock,
        )
        self.primary._chunks.adopt((([key], [row]) for row, key in enumerate(self.adopted)))
        for row, key in enumerate(self.adopted):
            self.row(row)[:] = payload(key)
        self.tier, self.slots = {}, []
        for index, (name, options) in enumerate(self.tiers.items()):
            tier = self.tier[name] = FaultyTier(self.view, hold=self.hold)
            self.slots.append(TierSlot(index, tier, TierOptions(name, **options)))
            self.engine.on_new_weights.append(lambda version, tier=tier: setattr(tier, "version", version))
        self.manager = TieringManager(
            "test",
            self.primary,
            self.slots,
            self.tokens_per_chunk,
            self.engine,
            self.options,
            self.clock,
            prefix_group=self.prefix_group,
            watchers=self.watchers or Watchers(listener=self.heard if self.record_events else None),
        )
        self._requests = 0
        self.all.append(self)

    def violations(self):
        return [what for tier in self.tier.values() for what in tier.violations]

    # -- an engine's doings, in short

    def request(self, name=None, **params):
        self._requests += 1
        ctx = RequestContext(name or f"r{self._requests}", params)
        self.manager.on_new_request(ctx)
        return ctx

    def step(self, seconds=0.0, **prefill):
        self.clock.now += seconds
        self.manager.on_schedule_end(**prefill)

    def begin_store(self, keys, ctx=None):
        """Lease rows and let the workers write them; None if there is no room."""
        plan = self.manager.prepare_store(keys, ctx or self.request())
        if plan is not None:
            for key, row in zip(plan.keys, plan.chunk_ids.tolist(), strict=True):
                self.row(row)[:] = payload(key, self.engine.version)
        return plan

    def store(self, keys, ctx=None):
        """Store chunks for a request of their own, which ends; steps until nothing is in flight."""
        own = ctx is None
        ctx = ctx or self.request()
        plan = self.begin_store(keys, ctx)
        assert plan is not None, "no room"
        self.manager.complete_store(plan)
        if own:
            self.manager.on_request_finished(ctx)
        self.settle()

    def settle(self, most=20):
        for _ in range(most):
            self.step()
            if not self.manager.has_pending_work():
                self.step()
                return
        raise AssertionError(f"work is still pending after {most} steps")

    def forget(self):
        """Empty the primary, so that only the tiers have chunks."""
        self.manager.reset_cache()
        self.settle()

    def load(self, keys, ctx):
        """Load chunks and compare their bytes; False if they are not readable."""
        plan = self.manager.prepare_load(keys, ctx)
        if plan is None:
            return False
        for key, row in zip(keys, plan.chunk_ids.tolist(), strict=True):
            assert bytes(self.row(row)) == payload(key, self.engine.version), f"wrong bytes of {key!r}"
        self.manager.complete_load(plan)
        return True

    def lookup(self, keys, ctx, first=0):
        """Ask about chunks of one group, the first of which is the prompt's chunk ``first``; answer in chunks."""
        tokens = self.tokens_per_chunk[group_of(keys[0])] if keys else 1
        groups = [PromptGroup([keys[0]] * first + list(keys))] if keys else []
        reach = self.manager.reach(groups, ctx, first * tokens)
        return reach.ready // tokens, reach.pending // tokens, reach.unresolved

    def reach(self, prompt, ctx, **more):
        """Ask about a prompt, ``prompt``: keys by group, with the windows of this bench; answer in tokens."""
        windows = [window or 0 for window in self.windows] or [0] * len(prompt)
        sizes = [self.tokens_per_chunk[group] for group in range(len(prompt))]
        groups = [PromptGroup(keys, window * size) for keys, window, size in zip(prompt, windows, sizes, strict=True)]
        return self.manager.reach(groups, ctx, **more)[:3]

    def row(self, row):
        return self.view[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    # -- figures

    def figures(self, tier=None):
        stats = self.manager.stats()
        return stats["tiers"][tier] if tier else stats["engine"]

    def unused_rows(self):
        """Rows that could be had now: free, or of a chunk that may leave."""
        return self.primary.free_rows + self.primary.evictable + self.primary.protected_rows
