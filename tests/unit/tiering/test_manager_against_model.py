"""The manager over real rows, a primary and faulty tiers, against a model: whatever happens, the invariants hold.

The model has who may touch which row, and what bytes each readable chunk must have. It has nothing of recency,
budgets' fairness or speed.
"""

import itertools
import logging
from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.api import JobResult
from kvtiers.tiering.command_queue import Command
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import LATE
from kvtiers.types import PromptGroup, RequestContext

from .harness import HIT, MISS, PENDING, RETRY, ROW_BYTES, Bench, chain, payload

DOCUMENTS = [chain(name, 7) for name in "abc"]
WINDOWS = [chain(name, 7, group=1) for name in "abc"]
KEYS = [key for document in (*DOCUMENTS, *WINDOWS) for key in document]
GARBAGE = b"\xdd" * ROW_BYTES
STEP_SECONDS = 0.01
LOOKUP_WAIT, LOAD_WAIT = 0.02, 0.1
METHODS = [
    "lookup_many",
    "submit_store",
    "submit_load",
    "is_available",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "get_finished_jobs",
    "get_started_jobs",
    "get_failed_jobs",
    "abandon_job",
    "has_pending_work",
]

tier_options = st.fixed_dictionaries(
    {
        "admission": st.sampled_from(["all", "all", "second_access", "on_eviction", "expected-reuse"]),
        "read_only": st.sampled_from([False, False, False, True]),
    }
)
pieces = st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 7))


class Hits(NamedTuple):
    """An answer about one group, in chunks."""

    ready: int
    pending: int
    unresolved: bool

    @property
    def chunks(self):
        return self.ready + self.pending


class ManagerAgainstModel(RuleBasedStateMachine):
    tiers = st.integers(0, 1)
    some = st.integers(0, 5)
    """Which of the requests, plans or jobs that there are now."""

    @initialize(
        rows=st.integers(1, 40),
        options=st.tuples(tier_options, tier_options),
        load_wait=st.sampled_from([LOAD_WAIT, None]),
        policy=st.sampled_from(["lru", "arc", "turn-hazard"]),
        starts=st.tuples(st.booleans(), st.booleans()),
        job_rows=st.sampled_from([2, 1000]),
    )
    def begin(self, rows, options, load_wait, policy, starts, job_rows):
        self.bench = Bench(
            rows=rows,
            tiers=dict(zip("xy", options, strict=True)),
            tokens_per_chunk=(16, 32),
            options=TieringOptions(lookup_wait=LOOKUP_WAIT, load_wait=load_wait, job_bytes=job_rows * ROW_BYTES),
            policy=policy,
            hold=True,
        )
        Bench.all.clear()
        self.manager, self.primary = self.bench.manager, self.bench.primary
        self.tier = list(self.bench.tier.values())
        for tier, reports in zip(self.tier, starts, strict=True):
            tier.reports_starts = reports
        self.names = itertools.count()
        self.versions = itertools.count(1)
        self.open_requests = []
        self.all_requests = []
        self.open_stores, self.open_loads = [], []
        self.orphaned_stores, self.orphaned_loads = [], []
        self.misuse = 0
        self.lied = set()
        self.seen_jobs = [0, 0]

    # -- requests

    @rule(allowed=st.sampled_from([None, None, [], ["x"], ["Y", 7], [3]]), whole=st.sampled_from([0, 0, 1]))
    def new_request(self, allowed, whole):
        self.open_request(allowed, whole)

    def open_request(self, allowed=None, whole=0):
        self.tier[0].wants_whole = bool(whole)
        ctx = RequestContext(f"r{next(self.names)}", {} if allowed is None else {"kv_load_tiers": allowed})
        self.manager.on_new_request(ctx)
        self.open_requests.append(ctx)
        self.all_requests.append(ctx)
        return ctx

    def request(self, index):
        if not self.open_requests:
            self.open_request()
        return self.open_requests[index % len(self.open_requests)]

    @rule(index=some, late=st.booleans())
    def finish_request(self, index, late):
        if self.open_requests:
            ctx = self.open_requests.pop(index % len(self.open_requests))
            self.manager.on_request_finished(ctx)
            if late:
                assert self.manager.prepare_store(KEYS[:1], ctx) is None
                self.misuse += self.manager._ready

    @rule(index=some)
    def preempt_request(self, index):
        self.manager.on_request_preempted(self.request(index))

    # -- lookups

    @rule(index=some, piece=pieces)
    def reach_of_one_group(self, index, piece):
        ctx = self.request(index)
        document, first, count = piece
        keys = DOCUMENTS[document][first : first + count]
        self.check_hits(keys, self.look(keys, ctx))

    def look(self, keys, ctx):
        return Hits(*self.bench.lookup(keys, ctx))

    @rule(index=some, piece=pieces)
    def lookup_groups(self, index, piece):
        """Two groups, the other one with a window of a chunk."""
        ctx = self.request(index)
        document, first, count = piece
        keys, window = (chains[document][first : first + count] for chains in (DOCUMENTS, WINDOWS))
        reach = self.manager.reach([PromptGroup(keys), PromptGroup(window, 32)], ctx, 0, 16 * len(keys) // 32 * 32)
        assert reach.tokens % 32 == 0
        end = reach.tokens // 32
        needed = [*keys[: 2 * end], *window[max(0, end - 1) : end]]
        found = self.primary.find(needed)
        assert reach.unresolved or MISS not in found
        assert reach.unresolved or (PENDING in found) == (reach.pending > 0)
        if end and not reach.waits:
            assert self.take_load(needed, ctx) is not None

    def check_hits(self, keys, hits):
        assert hits.ready >= 0
        assert hits.pending >= 0
        if hits.unresolved:
            return
        found = self.primary.find(keys[: hits.chunks])
        assert found.count(HIT) == hits.ready
        assert found.count(PENDING) == hits.pending
        assert hits.chunks <= len(keys)

    @rule(index=some, piece=pieces)
    def ask_to_the_end(self, index, piece):
        """However the tiers behave, a request's lookups come to an end: each step, once a clock tick."""
        ctx = self.request(index)
        document, first, count = piece
        keys = DOCUMENTS[document][first : first + count]
        queued = self.manager._waits.gpu.ahead  # tokens, of what lookups have left to be computed
        # In line for rows, and then for loads: as long each as computing it behind the others takes, and a tenth.
        longest = 2 * LATE * (queued + 16 * 7) * 0.001 if self.bench.options.load_wait is None else LOAD_WAIT
        for _ in range(int((LOOKUP_WAIT + max(longest, LOOKUP_WAIT)) / STEP_SECONDS) + 3):
            hits = self.look(keys, ctx)
            self.check_hits(keys, hits)
            if not hits.pending and not hits.unresolved:
                assert hits.ready == 0 or self.take_load(keys[: hits.ready], ctx) is not None
                return
            self.step(STEP_SECONDS, 100)
        raise AssertionError(f"{hits} after all that time")

    # -- stores

    @rule(index=some, piece=pieces, groups=st.integers(1, 2))
    def prepare_store(self, index, piece, groups):
        ctx = self.request(index)
        document, first, count = piece
        keys = [key for chains in (DOCUMENTS, WINDOWS)[:groups] for key in chains[document][first : first + count]]
        plan = self.manager.prepare_store(keys, ctx)
        if plan is None:
            return
        rows = plan.chunk_ids.tolist()
        self.claim(rows)
        for row in rows:
            self.bench.row(row)[:] = GARBAGE  # the copy is in flight
        self.open_stores.append((plan, self.bench.engine.version, rows))

    @rule(index=some, success=st.sampled_from([True, True, True, False]), twice=st.sampled_from([False, False, True]))
    def complete_store(self, index, success, twice):
        if not self.open_stores:
            return
        store = plan, version, rows = self.open_stores[index % len(self.open_stores)]
        success = success and not self.bench.engine.dma
        if success:
            for key, row in zip(plan.keys, rows, strict=True):
                self.bench.row(row)[:] = payload(key, version)
        self.open_stores.remove(store)
        self.manager.complete_store(plan, success)
        if not success and self.bench.engine.dma:
            self.orphaned_stores.append(store)
        if twice:
            self.manager.complete_store(plan, success)
            self.misuse += 1

    @rule(piece=pieces)
    def serve(self, piece):
        """A whole request, whose workers and tiers are quick."""
        document, _, count = piece
        ctx = self.open_request()
        self.ask_to_the_end(-1, (document, 0, count))
        self.prepare_store(-1, (document, 0, count), 2)
        while self.open_stores:
            self.complete_store(-1, success=True, twice=False)
        while self.open_loads:
            self.complete_load(-1, success=True)
        self.open_requests.remove(ctx)
        self.manager.on_request_finished(ctx)
        self.end_all_jobs()

    @rule()
    def end_all_jobs(self):
        for number, tier in enumerate(self.tier):
            for held in list(tier.held.values()):
                self.finish_job(number, held.job, set(held.job.keys))
        self.step(STEP_SECONDS, 0)

    # -- loads

    @rule(index=some, piece=pieces)
    def prepare_load(self, index, piece):
        document, first, count = piece
        self.take_load(DOCUMENTS[document][first : first + count], self.request(index))

    def take_load(self, keys, ctx):
        plan = self.manager.prepare_load(keys, ctx)
        readable = all(found is HIT for found in self.primary.find(keys))
        assert readable or plan is None
        if plan is None:
            return None
        load = (plan, self.bench.engine.version, plan.chunk_ids.tolist())
        self.open_loads.append(load)
        self.check_load(load)
        return load

    def check_load(self, load):
        plan, version, rows = load
        for key, row in zip(plan.keys, rows, strict=True):
            assert bytes(self.bench.row(row)) == payload(key, version), "a pinned row changed"

    @rule(index=some, success=st.sampled_from([True, True, False]))
    def complete_load(self, index, success):
        if not self.open_loads:
            return
        load = self.open_loads.pop(index % len(self.open_loads))
        self.manager.complete_load(load[0], success)
        if not success and self.bench.engine.dma:
            self.orphaned_loads.append(load)

    @rule(piece=pieces)
    def touch(self, piece):
        self.manager.touch(DOCUMENTS[piece[0]][piece[1] :])

    # -- steps and time

    @rule(seconds=st.sampled_from([0.0, STEP_SECONDS, 0.05, 5.0, 31.0]), tokens=st.sampled_from([0, 100]))
    def step(self, seconds, tokens):
        self.bench.step(seconds, prefill_tokens=tokens, prefill_seconds=tokens * 0.001)

    # -- tiers

    def some_job(self, tier, index):
        held = list(self.tier[tier].held.values())
        return held[index % len(held)].job if held else None

    @rule(tier=tiers, index=some, share=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]))
    def end_job(self, tier, index, share):
        job = self.some_job(tier, index)
        if job is not None:
            self.finish_job(tier, job, set(job.keys[: round(share * len(job.keys))]))

    def finish_job(self, tier, job, landed):
        held = self.tier[tier].held[job.job_id]
        if not job.is_promotion:
            for key, row in zip(job.keys, held.rows, strict=True):
                assert bytes(self.bench.row(row)) == payload(key, held.version), "a row changed under a cascade"
        self.tier[tier].end(job.job_id, landed)

    @rule(tier=tiers, index=some)
    def start_job(self, tier, index):
        job = self.some_job(tier, index)
        if job is not None:
            self.tier[tier].started.append(job.job_id)

    def say_that_a_job_failed(self, tier, index):
        job = self.some_job(tier, index)
        if job is not None:
            self.tier[tier].failed.append(job.job_id)

    @rule(tier=tiers, index=some)
    def scribble(self, tier, index):
        """A tier writes into the rows of a promotion that it has not reported, whatever was reported of it."""
        job = self.some_job(tier, index)
        if job is not None and job.is_promotion:
            for row in self.tier[tier].held[job.job_id].rows:
                self.bench.row(row)[:] = GARBAGE

    @rule(tier=tiers, piece=pieces)
    def another_engine_stores(self, tier, piece):
        for chains in (DOCUMENTS, WINDOWS):
            self.tier[tier].put(chains[piece[0]][piece[1] : piece[1] + piece[2]])

    @rule(tier=tiers, piece=pieces)
    def a_tier_loses_chunks(self, tier, piece):
        for key in DOCUMENTS[piece[0]][piece[1] :]:
            self.tier[tier].values.pop((self.tier[tier].version, key), None)

    @rule(tier=tiers, answer=st.sampled_from([None, None, None, RETRY, HIT, MISS, PENDING, "yes"]))
    def answer(self, tier, answer):
        self.tier[tier].answer = answer

    @rule(tier=tiers, available=st.booleans())
    def be_available(self, tier, available):
        self.tier[tier].available = available

    @rule(
        tier=tiers,
        methods=st.sets(
            st.sampled_from(METHODS),
            max_size=2,
        ),
    )
    def raise_from(self, tier, methods):
        self.tier[tier].raises = methods

    def lie(self, tier, lie, index):
        """Rare, since a tier that lied is out of use."""
        job = self.some_job(tier, index)
        if self.lied or job is None:
            return
        faulty = self.tier[tier]
        if lie == "unknown":
            faulty.finished.append(JobResult(10_000_000, success=True))
        elif lie == "nonsense":
            faulty.finished.append("done")
        else:
            foreign = [next(key for key in KEYS if key not in job.keys)]
            if lie == "foreign":
                faulty.finished.append(JobResult(job.job_id, success=False, successful_keys=foreign))
            else:
                self.finish_job(tier, job, set(job.keys))
                faulty.finished.append(faulty.finished[-1])
        faulty.raises = faulty.raises - {"get_finished_jobs"}
        self.lied.add(tier)
        self.step(0.0, 0)  # this one may have looked before
        self.step(0.0, 0)
        assert self.bench.slots[tier].retired
        assert self.bench.slots[tier].metrics.refused_results == 1

    # -- an operator's commands

    @rule(tier=tiers, to=st.sampled_from(["on", "off", "read-only"]))
    def switch(self, tier, to):
        name = self.bench.slots[tier].name
        self.command(partial(self.manager.tier_commands.switch, name, to))

    @rule(what=st.sampled_from(["drain", "clear"]))
    def drain_or_clear(self, what):
        self.command(self.manager.chunk_commands.drain() if what == "drain" else self.manager.chunk_commands.clear)

    def command(self, work):
        """Done by one of the next steps, also by one that is in the midst of lookups."""
        assert self.manager.commands.post(Command(work)) or len(self.manager.commands.waiting) == 64
        self.manager.look_again()

    # -- resets, weights, ranks

    def reset_cache(self):
        self.manager.reset_cache()
        assert self.primary.find(KEYS).count(MISS) == len(KEYS)

    def set_weights_version(self):
        self.manager.set_weights_version(f"v{next(self.versions)}")
        assert self.primary.find(KEYS).count(MISS) == len(KEYS)

    def lose_a_rank(self):
        self.bench.engine.dma, self.bench.engine.all_joined = True, False

    def the_lost_rank_is_gone_and_another_joins(self):
        self.bench.engine.dma, self.bench.engine.all_joined = False, True
        self.orphaned_stores.clear()
        self.orphaned_loads.clear()
        self.step(0.0, 0)

    def a_lost_rank_scribbles(self):
        """What it had to write may still be written; what it had to read must not change."""
        for _, _, rows in (*self.open_stores, *self.orphaned_stores):
            for row in rows:
                self.bench.row(row)[:] = GARBAGE

    @rule(
        trouble=st.sampled_from(["reset", "weights", "rank lost", "rank gone", "scribbles", "job fails", "lie"]),
        tier=tiers,
        index=some,
        lie=st.sampled_from(["unknown", "twice", "foreign", "nonsense"]),
    )
    def trouble(self, trouble, tier, index, lie):
        match trouble:
            case "reset":
                self.reset_cache()
            case "weights":
                self.set_weights_version()
            case "rank lost":
                self.lose_a_rank()
            case "rank gone":
                self.the_lost_rank_is_gone_and_another_joins()
            case "scribbles":
                self.a_lost_rank_scribbles()
            case "job fails":
                self.say_that_a_job_failed(tier, index)
            case "lie":
                self.lie(tier, lie, index)

    # -- what must hold

    def touched_rows(self):
        """Rows that may still be written into, once for each of them."""
        rows = [row for _, _, rows in (*self.open_stores, *self.orphaned_stores) for row in rows]
        for tier in self.tier:
            rows += [row for held in tier.held.values() if held.job.is_promotion for row in held.rows]
        return rows

    def read_rows(self):
        rows = {row for _, _, rows in (*self.open_loads, *self.orphaned_loads) for row in rows}
        for tier in self.tier:
            rows |= {row for held in tier.held.values() if not held.job.is_promotion for row in held.rows}
        return rows

    def claim(self, rows):
        assert len(set(rows)) == len(rows)
        assert not set(rows) & set(self.touched_rows()), "a row in two hands"
        assert not set(rows) & self.read_rows(), "a row that is being read was given away"

    @invariant()
    def every_readable_chunk_has_its_own_bytes(self):
        row_of = self.primary._chunks.row_of
        assert len(set(row_of.values())) == len(row_of)
        version = self.bench.engine.version
        for key, found in zip(KEYS, self.primary.find(KEYS), strict=True):
            if found is HIT:
                assert bytes(self.bench.row(row_of[key])) == payload(key, version), f"wrong bytes of {key!r}"

    @invariant()
    def rows_that_are_read_do_not_change(self):
        for load in (*self.open_loads, *self.orphaned_loads):
            self.check_load(load)

    @invariant()
    def jobs_are_new_and_their_rows_are_theirs(self):
        row_of = self.primary._chunks.row_of
        for number, tier in enumerate(self.tier):
            ids = [job.job_id for job in tier.submitted]
            assert ids == sorted(set(ids))
            for job in tier.submitted[self.seen_jobs[number] :]:
                held, running = tier.held.get(job.job_id), self.manager._jobs.ledger.jobs.get(job.job_id)
                if held is None or running is None or running.failed_in_use or running.generation < self.generation():
                    continue
                assert [row_of.get(key) for key in job.keys] == held.rows
                if job.is_promotion:
                    assert all(found is PENDING for found in self.primary.find(job.keys))
                    others = Counter(self.touched_rows())
                    assert all(others[row] == 1 for row in held.rows), "a row in two hands"
                    assert not set(held.rows) & self.read_rows()
                else:
                    assert all(found is HIT for found in self.primary.find(job.keys))
            self.seen_jobs[number] = len(tier.submitted)

    def generation(self):
        return self.manager._jobs._generation

    @invariant()
    def all_counts_are_right(self):
        rows, table = self.primary._rows, self.manager._jobs
        assert rows.free + rows.pending + rows.idle + rows.pinned + rows.quarantined == rows.num_rows
        assert rows.misuse == 0
        assert table.running >= 0
        running = list(table.ledger.jobs.values())
        for slot in self.bench.slots:
            metrics = slot.metrics
            mine = [job for job in running if job.slot is slot]
            reserved = [batch for batch in self.manager._promotions._batches.values() if batch.slot is slot]
            assert metrics.pinned_rows == sum(len(job.rows) for job in mine) + sum(len(b.rows) for b in reserved)
            assert all(each.reserved.rows == len(each.rows) for each in (*mine, *reserved))
            assert metrics.running_jobs == sum(not job.failed_in_use for job in mine)
            assert metrics.quarantined_rows == sum(len(job.rows) for job in mine if job.failed_in_use)
            assert metrics.loading_chunks == sum(
                len(job.rows) for job in mine if job.job.is_promotion and not job.failed_in_use
            ) + sum(len(batch.rows) for batch in reserved)
            assert metrics.pinned_rows <= max(1, rows.num_rows // 4)
            assert metrics.unread_bytes >= 0
        budget = self.manager._cascades._budget
        assert budget.held == sum(slot.metrics.pinned_rows for slot in self.bench.slots)
        assert budget.held <= max(1, rows.num_rows // 2)
        assert self.manager._metrics.misuse == self.misuse

    @invariant()
    def no_tier_is_asked_what_none_may_be_asked(self):
        assert not self.bench.violations()

    @invariant()
    def origins_are_of_chunks_that_are_here(self):
        assert self.manager._provenance._tier_of.keys() <= self.primary._chunks.row_of.keys()

    def teardown(self):
        """Let everything come to rest: all rows but those of a lying tier's jobs are to be had again."""
        if not hasattr(self, "bench"):
            return
        for tier in self.tier:
            tier.raises, tier.available = set(), True
        self.the_lost_rank_is_gone_and_another_joins()
        while self.open_stores:
            self.complete_store(0, success=True, twice=False)
        while self.open_loads:
            self.complete_load(0, success=True)
        for ctx in self.open_requests:
            self.manager.on_request_finished(ctx)
        for _ in range(6):
            self.end_all_jobs()
        self.step(60.0, 0)
        self.step(0.0, 0)
        assert not self.manager.has_pending_work()
        lost = sum(slot.metrics.pinned_rows for slot in self.bench.slots if slot.retired)
        assert sum(slot.metrics.pinned_rows for slot in self.bench.slots) == lost
        rows = self.primary._rows
        assert self.primary.protected_rows == 0
        held = set()
        for slot in self.bench.slots:
            held |= {row for job in self.manager._jobs.ledger.jobs.values() if job.slot is slot for row in job.rows}
        assert self.primary.free_rows + self.primary.evictable == rows.num_rows - len(held)
        for number, tier in enumerate(self.tier):
            if not self.bench.slots[number].retired:
                for ctx in self.all_requests:
                    assert tier.notified[ctx] == 1, "the end of a request is notified once"
            else:
                assert max(tier.notified.values(), default=0) <= 1
        self.all_counts_are_right()


ManagerAgainstModel.TestCase.settings = settings(
    max_examples=2 * settings.default.max_examples, stateful_step_count=60, deadline=None
)
TestManagerAgainstModel = ManagerAgainstModel.TestCase


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "kvtiers.tiering")


def test_a_request_that_waits_for_rows_and_asks_about_other_chunks_gets_an_answer_of_its_own():
    """Found by the machine above: as many chunks, from another one on."""
    takes_all = {"admission": "all", "read_only": False}
    machine = ManagerAgainstModel()
    try:
        machine.begin(
            rows=2, options=(takes_all, takes_all), load_wait=None, policy="lru", starts=(False, False), job_rows=2
        )
        machine.answer(answer=HIT, tier=0)
        machine.lookup_groups(index=0, piece=(0, 0, 2))
        machine.lookup_groups(index=0, piece=(0, 1, 2))
    finally:
        machine.teardown()
