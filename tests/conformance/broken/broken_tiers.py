"""Tiers of the third rung that each break one promise, beside the tests of the kit that must catch them.

Not collected by itself: ``test_broken_tiers.py`` runs pytest on this file and compares.
"""

import asyncio
import os
import socket
import threading
import time
from collections import OrderedDict

import pytest

from kvtiers.api import JobResult, LookupResult, SecondaryTierManager, SupportsQuotas
from kvtiers.testing import SecondaryTierTests
from kvtiers_example.example_tier import ExampleSecondaryTier

CAUGHT_BY: dict[str, tuple[set[str], set[str]]] = {}
CHUNKS = 16
FORGETS = {"patience": 0.2}
"""For a tier that reports at once or never: in many tests, one that never comes is waited for."""


def caught_by(*tests, by_chance=(), **attributes):
    """Make a test class for the tier, and note which tests of the kit must fail for it, and which others may."""

    def make(tier_class):
        CAUGHT_BY[tier_class.__name__] = set(tests), set(by_chance)

        @pytest.fixture
        def open_tier(self):
            return tier_class

        name = f"Test{tier_class.__name__}"
        body = {"open_tier": open_tier, "max_chunks": CHUNKS, "patience": 10.0}
        body["keeps_quotas"] = issubclass(tier_class, SupportsQuotas)
        globals()[name] = type(name, (SecondaryTierTests,), body | attributes)
        return tier_class

    return make


class Simple(SecondaryTierManager):
    """At most 16 chunks, copied within the submit and reported in the next step; keeps every promise."""

    def __init__(self, context):
        self.region, self.stride, self.nbytes = context.region, context.row_stride, context.value_bytes
        self.chunks = OrderedDict()
        self.finished = []

    def row(self, chunk_id):
        return self.region[chunk_id * self.stride : chunk_id * self.stride + self.nbytes]

    def lookup(self, key, context):
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job):
        fits = len(job.keys) <= CHUNKS
        if fits:
            for key, chunk_id in zip(job.keys, job.chunk_ids, strict=True):
                self.keep(key, bytes(self.row(chunk_id)))
            self.evict(job.keys)
        self.finished.append(JobResult(job.job_id, fits))

    def keep(self, key, value):
        self.chunks[key] = value
        self.chunks.move_to_end(key)

    def evict(self, own):
        while len(self.chunks) > CHUNKS:
            self.chunks.popitem(last=False)

    def submit_load(self, job):
        landed = [key for key in job.keys if key in self.chunks]
        for key, chunk_id in zip(job.keys, job.chunk_ids, strict=True):
            if key in self.chunks:
                self.row(chunk_id)[:] = self.chunks[key]
        success = len(landed) == len(job.keys)
        self.finished.append(JobResult(job.job_id, success, None if success else landed))

    def get_finished_jobs(self):
        finished, self.finished = self.finished, []
        return finished

    def drain(self, timeout):
        return True


@caught_by()
class HealthySimple(Simple):
    pass


@caught_by()
class HealthyUntilItsDrain(Simple):
    """Of no use after its drain but for results, as the contract allows."""

    is_drained = False

    def _check_use(self):
        assert not self.is_drained, "used after its drain, which only a shutdown may call"

    def submit_store(self, job):
        self._check_use()
        super().submit_store(job)

    def submit_load(self, job):
        self._check_use()
        super().submit_load(job)

    def lookup(self, key, context):
        self._check_use()
        return super().lookup(key, context)

    def on_schedule_end(self):
        self._check_use()

    def drain(self, timeout):
        self._check_use()
        self.is_drained = True
        return True


@caught_by("test_every_public_method_is_the_contract_s")
class MisspellsAHook(Simple):
    def abandoned_job(self, job_id):
        """Never called."""


@pytest.fixture
def _hold(self):
    return lambda tier: tier.hold()


@caught_by(hold=_hold)
class HealthyAsync(ExampleSecondaryTier):
    def __init__(self, context):
        super().__init__(context, max_blocks=CHUNKS)


# Chunks.


@caught_by(
    "test_chunks_come_back_as_they_were_stored",
    "test_a_load_changes_its_own_values_alone",
    "test_a_store_has_copied_its_rows_when_it_is_reported",
    "test_a_load_claims_no_chunk_that_is_absent",
    "test_many_jobs_in_flight_yield_one_result_each",
    "test_a_store_of_present_chunks_yields_exactly_one_result",
    "test_two_jobs_may_store_the_same_chunk_at_once",
)
class CutsChunks(Simple):
    def keep(self, key, value):
        super().keep(key, value[:-64] + bytes(64))


@caught_by("test_an_unknown_chunk_is_a_miss", "test_lookup_many_answers_in_order_and_may_end_at_a_miss")
class HitsAlways(Simple):
    def lookup(self, key, context):
        return LookupResult.HIT


@caught_by("test_lookup_many_answers_in_order_and_may_end_at_a_miss")
class AnswersAPrefixBackwards(Simple):
    def lookup_many(self, keys, context):
        return [self.lookup(key, context) for key in reversed(keys)]


@caught_by("test_lookup_many_answers_in_order_and_may_end_at_a_miss")
class AnswersTheFirstTwo(Simple):
    def lookup_many(self, keys, context):
        return [self.lookup(key, context) for key in keys[:2]]


@caught_by(
    "test_a_load_claims_no_chunk_that_is_absent",
    "test_a_load_of_absent_chunks_yields_exactly_one_result",
    "test_many_jobs_in_flight_yield_one_result_each",
)
class ClaimsAbsentChunks(Simple):
    def submit_load(self, job):
        super().submit_load(job)
        self.finished[-1] = JobResult(job.job_id, True)


@caught_by("test_a_load_claims_no_chunk_that_is_absent")
class ClaimsTheFirstChunks(Simple):
    """As a tier that stops at the first absent chunk, but counts it."""

    def submit_load(self, job):
        super().submit_load(job)
        result = self.finished[-1]
        if not result.success and result.successful_keys:
            self.finished[-1] = JobResult(job.job_id, False, job.keys[:2])


@caught_by("test_a_request_may_come_and_go")
class HasNoOpinion(Simple):
    def on_new_request(self, context):
        return None


# Results.


@caught_by("test_an_empty_job_yields_exactly_one_result", **FORGETS)
class ForgetsEmptyJobs(Simple):
    def submit_store(self, job):
        if job.keys:
            super().submit_store(job)


@caught_by(
    "test_a_store_of_present_chunks_yields_exactly_one_result",
    "test_two_jobs_may_store_the_same_chunk_at_once",
    **FORGETS,
)
class ForgetsJobsWithoutWork(Simple):
    def submit_store(self, job):
        if not job.keys or any(key not in self.chunks for key in job.keys):
            super().submit_store(job)


@caught_by("test_a_store_that_cannot_fit_yields_exactly_one_result", **FORGETS)
class ForgetsJobsThatDoNotFit(Simple):
    def submit_store(self, job):
        if len(job.keys) <= CHUNKS:
            super().submit_store(job)


@caught_by("test_a_store_that_cannot_fit_yields_exactly_one_result")
class StoresMoreThanFits(Simple):
    def submit_store(self, job):
        super().submit_store(job)
        self.finished[-1] = JobResult(job.job_id, True)


@caught_by("test_a_store_never_pushes_out_chunks_of_its_own")
class PushesOutItsOwn(Simple):
    """Chunks that are there already are not moved to the end."""

    def keep(self, key, value):
        self.chunks[key] = value
        while len(self.chunks) > CHUNKS:
            self.chunks.popitem(last=False)


@caught_by("test_two_jobs_may_store_the_same_chunk_at_once", **FORGETS)
class ForgetsChunksOnTheirWay(Simple):
    """Drops a chunk that another job is storing from its own job, and with the last one the job."""

    def __init__(self, context):
        super().__init__(context)
        self.on_their_way = set()

    def submit_store(self, job):
        if job.keys and self.on_their_way.issuperset(job.keys):
            return
        self.on_their_way.update(job.keys)
        super().submit_store(job)

    def get_finished_jobs(self):
        self.on_their_way.clear()
        return super().get_finished_jobs()


@caught_by(
    "test_many_jobs_in_flight_yield_one_result_each",
    "test_drain_brings_every_job_to_its_result",
    "test_an_empty_job_yields_exactly_one_result",
    "test_an_abandoned_job_still_yields_its_result",
    "test_two_jobs_may_store_the_same_chunk_at_once",
    "test_a_store_never_pushes_out_chunks_of_its_own",
    **FORGETS,
)
class ReportsTheLastOfAStep(Simple):
    def get_finished_jobs(self):
        return super().get_finished_jobs()[-1:]


@caught_by(
    "test_an_empty_job_yields_exactly_one_result",
    "test_a_store_of_present_chunks_yields_exactly_one_result",
    "test_two_jobs_may_store_the_same_chunk_at_once",
    "test_a_store_that_cannot_fit_yields_exactly_one_result",
    "test_a_load_of_absent_chunks_yields_exactly_one_result",
    "test_many_jobs_in_flight_yield_one_result_each",
    "test_drain_brings_every_job_to_its_result",
    "test_an_abandoned_job_still_yields_its_result",
    "test_a_store_changes_nothing_in_the_region",
    "test_a_load_changes_its_own_values_alone",
    "test_no_row_is_touched_after_the_result",
)
class ReportsTwice(Simple):
    def get_finished_jobs(self):
        return super().get_finished_jobs() * 2


@caught_by(
    "test_a_load_of_absent_chunks_yields_exactly_one_result",
    "test_many_jobs_in_flight_yield_one_result_each",
    "test_a_load_claims_no_chunk_that_is_absent",
    "test_no_row_is_touched_after_the_result",
    "test_an_abandoned_job_still_yields_its_result",
    **FORGETS,
)
class ForgetsFailedLoads(Simple):
    def submit_load(self, job):
        super().submit_load(job)
        if not self.finished[-1].success:
            self.finished.pop()


@caught_by("test_drain_brings_every_job_to_its_result")
class DropsJobsOnDrain(Simple):
    """A backend of one job in ten steps, and a drain that throws away what is left."""

    def __init__(self, context):
        super().__init__(context)
        self.steps = 0

    def get_finished_jobs(self):
        self.steps += 1
        return [self.finished.pop(0)] if self.finished and self.steps % 5 == 0 else []

    def drain(self, timeout):
        self.finished.clear()
        return True


@caught_by("test_an_abandoned_job_still_yields_its_result", **FORGETS)
class ForgetsAbandonedJobs(Simple):
    def abandon_job(self, job_id):
        self.finished = [result for result in self.finished if result.job_id != job_id]


@caught_by("test_submit_returns_while_the_backend_is_held", hold=_hold, patience=15.0)
class WaitsForItsBackend(ExampleSecondaryTier):
    def __init__(self, context):
        super().__init__(context, max_blocks=CHUNKS)

    def submit_store(self, job):
        with self._gate:
            super().submit_store(job)


@caught_by(
    "test_many_jobs_in_flight_yield_one_result_each", "test_submit_returns_while_the_backend_is_held", hold=_hold
)
class MovesOneJobAtATime(ExampleSecondaryTier):
    """Over a client whose connection refuses a second call, as one without a pool does."""

    def __init__(self, context):
        super().__init__(context, max_blocks=CHUNKS)

    def _submit(self, move):
        if self._moving:
            self._finished.append(JobResult(move.job.job_id, success=False))
        else:
            super()._submit(move)


# Quotas.

AT_ITS_QUOTA = "test_a_tenant_at_its_quota_loses_its_oldest_chunks_and_no_other_loses_one"
LARGER_THAN_IT = "test_a_store_larger_than_the_quota_keeps_what_has_room_and_declines_the_rest"


class WithQuotas(ExampleSecondaryTier):
    def __init__(self, context):
        super().__init__(context, max_blocks=CHUNKS, simulate_async=False)


@caught_by("test_quotas_that_the_tier_keeps_are_tested", keeps_quotas=False)
class KeepsQuotasUntested(WithQuotas):
    pass


@caught_by("test_chunks_of_a_tenant_with_a_quota_come_back_as_they_were_stored")
class HalvesQuotas(WithQuotas):
    def set_quotas(self, quota_of):
        super().set_quotas(lambda tenant: quota_of(tenant) and quota_of(tenant) // 2)


@caught_by(AT_ITS_QUOTA, LARGER_THAN_IT)
class ForgetsItsQuotas(WithQuotas):
    def set_quotas(self, quota_of):
        pass


@caught_by(AT_ITS_QUOTA)
class EvictsOthersForAQuota(WithQuotas):
    def _keep(self, values):
        before = self._evicted_for_room
        super()._keep(values)
        if self._evicted_for_room > before:
            self._values.popitem(last=False)  # whose ever it is


@caught_by(AT_ITS_QUOTA, LARGER_THAN_IT)
class DeclinesInPlaceOfEvicting(WithQuotas):
    def set_quotas(self, quota_of):
        super().set_quotas(quota_of)
        take = self._room.take
        self._room.take = lambda key, spared: take(key, {*spared, *self._values})


@caught_by(LARGER_THAN_IT)
class ReportsADeclinedStoreAsAnError(WithQuotas):
    def get_finished_jobs(self):
        results = super().get_finished_jobs()
        return [
            result if result.success or not self._declined else JobResult(result.job_id, False) for result in results
        ]


# Rows.


NOT_ON_ITS_THREAD = "test_no_call_on_the_engine_s_thread_sleeps_or_waits"


@caught_by(NOT_ON_ITS_THREAD)
class SleepsInItsLookup(Simple):
    def lookup(self, key, context):
        time.sleep(0.003)
        return super().lookup(key, context)


@caught_by(NOT_ON_ITS_THREAD)
class ReadsAFileInItsPoll(Simple):
    def get_finished_jobs(self):
        with open(__file__, "rb") as file:  # noqa: PTH123
            file.read(1)
        return super().get_finished_jobs()


@caught_by(NOT_ON_ITS_THREAD)
class AsksAServerInItsLookup(Simple):
    """On a connection that is open already, and by a library that waits for the answer."""

    def __init__(self, context):
        super().__init__(context)
        self.client, self.server = socket.socketpair()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while question := self.server.recv(1):
            time.sleep(0.003)
            self.server.send(question)

    def lookup(self, key, context):
        self.client.send(b"?")
        self.client.recv(1)
        return super().lookup(key, context)

    def close(self):
        self.client.close()
        self.thread.join()
        self.server.close()


@caught_by(NOT_ON_ITS_THREAD)
class WaitsForItsLoopInTheSubmit(Simple):
    def __init__(self, context):
        super().__init__(context)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def submit_load(self, job):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.003), self.loop).result()
        super().submit_load(job)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@caught_by("test_a_load_changes_its_own_values_alone")
class LoadsWholeRows(Simple):
    def submit_load(self, job):
        super().submit_load(job)
        for chunk_id in job.chunk_ids:
            end = (chunk_id + 1) * self.stride
            self.region[end - 64 : end] = bytes(64)


@caught_by("test_a_store_changes_nothing_in_the_region", "test_a_store_of_present_chunks_yields_exactly_one_result")
class MarksStoredRows(Simple):
    def submit_store(self, job):
        super().submit_store(job)
        for chunk_id in job.chunk_ids:
            self.row(chunk_id)[-8:] = b"stored!!"


@caught_by("test_a_store_has_copied_its_rows_when_it_is_reported", "test_a_load_changes_its_own_values_alone")
class ReportsBeforeItCopies(Simple):
    """Copies a row when the chunk is first asked for."""

    def submit_store(self, job):
        super().submit_store(job)
        self.chunks.update(
            (key, self.row(row)) for key, row in zip(job.keys, job.chunk_ids, strict=True) if len(job.keys) <= CHUNKS
        )


@caught_by("test_no_row_is_touched_after_the_result")
class WritesOnceMore(Simple):
    """As a tier that sends again what it believes lost."""

    def __init__(self, context):
        super().__init__(context)
        self.late = []

    def submit_load(self, job):
        super().submit_load(job)
        self.late += [
            (self.row(row), self.chunks[key])
            for key, row in zip(job.keys, job.chunk_ids, strict=True)
            if key in self.chunks
        ]

    def on_schedule_end(self):
        if not self.finished:
            for row, value in self.late:
                row[:] = value
            self.late.clear()


# Life.


@caught_by("test_close_ends_all_threads")
class LeavesAThread(Simple):
    def __init__(self, context):
        super().__init__(context)
        self.never = threading.Event()
        threading.Thread(target=self.never.wait, daemon=True).start()


@caught_by("test_close_closes_all_descriptors")
class LeavesADescriptor(Simple):
    def __init__(self, context):
        super().__init__(context)
        self.descriptor = os.open(os.devnull, os.O_RDONLY)


# The end.


class OfOneThread(Simple):
    """As a client that belongs to the thread that first uses it, in the methods that ``check_thread``."""

    def __init__(self, context):
        super().__init__(context)
        self.thread = None

    def lookup(self, key, context):
        self.check_thread()
        return super().lookup(key, context)

    def submit_load(self, job):
        self.check_thread()
        super().submit_load(job)

    def on_schedule_end(self):
        self.check_thread()

    def check_thread(self):
        self.thread = self.thread or threading.get_ident()
        if threading.get_ident() != self.thread:
            raise RuntimeError("not my thread")


@caught_by(
    "test_drain_brings_every_job_to_its_result",
    "test_no_row_is_touched_after_the_result",
    "test_close_ends_all_threads",
    "test_close_closes_all_descriptors",
)
class DrainsOnTheEnginesThreadAlone(OfOneThread):
    def drain(self, timeout):
        self.check_thread()
        return super().drain(timeout)


@caught_by(
    "test_no_row_is_touched_after_the_result",
    "test_close_ends_all_threads",
    "test_close_closes_all_descriptors",
)
class ClosesOnTheEnginesThreadAlone(OfOneThread):
    def close(self):
        self.check_thread()


@caught_by("test_drain_brings_every_job_to_its_result")
class ReportsWhatAStepBrought(Simple):
    """At the end, when no step comes any more, it reports nothing."""

    def __init__(self, context):
        super().__init__(context)
        self.brought = []

    def on_schedule_end(self):
        self.brought += super().get_finished_jobs()

    def get_finished_jobs(self):
        brought, self.brought = self.brought, []
        return brought
