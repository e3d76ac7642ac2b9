"""Tests of what a third-rung tier promises: its chunks, its rows, one result for each job, and a clean end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtiers.api import LookupResult, SecondaryTierManager, TierContext
from kvtiers.api.declared import class_problems
from kvtiers.testing.applies import applies_to
from kvtiers.testing.backend import require_backend
from kvtiers.testing.guarded import POISON, same_bytes
from kvtiers.testing.running import call_within, descriptors_left_since, open_descriptors, threads_left_since
from kvtiers.testing.secondary_tier.call_watch import CallWatch
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys

__all__ = ["ChunkTests", "EngineThreadTests", "LifeTests", "ResultTests", "RowTests", "TierTestBase"]

_TURNS = 25  # calls of each method that are watched: one of them, on a busy machine, is not kept waiting by others

OpenTier = Callable[[TierContext], SecondaryTierManager]


class TierTestBase:
    """The author's side: ``max_chunks``, ``patience`` and the fixture ``open_tier``."""

    max_chunks: ClassVar[int | None] = None
    patience: ClassVar[float] = 30.0

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """Return a function that opens a tier from its context; the author's subclass overrides this."""
        raise pytest.UsageError(
            f"{type(self).__name__}: define a fixture 'open_tier' that returns a function which opens your tier from "
            "a TierContext"
        )

    @pytest.fixture(autouse=True)
    def _backend(self, open_tier: OpenTier) -> None:
        require_backend(type(self), [("open_tier(context)", lambda: self._try(open_tier), True)])

    @pytest.fixture
    def engine(self, open_tier: OpenTier) -> Iterator[SmallEngine]:
        """Open one tier over a region of 64 rows, for a test on the engine's thread."""
        engine = SmallEngine(open_tier, patience=self.patience)
        yield engine
        # Draining and closing have tests of their own; here a failure would only blame the wrong one.
        with suppress(Exception):
            engine.close()

    def _try(self, open_tier: OpenTier) -> None:
        engine = SmallEngine(open_tier, patience=self.patience)
        with suppress(AssertionError):  # whatever it answers: there are tests for that
            engine.present(new_keys(1))
        with suppress(Exception):
            engine.close()


class ChunkTests(TierTestBase):
    """Stores, lookups, loads."""

    def test_chunks_come_back_as_they_were_stored(self, engine: SmallEngine) -> None:
        keys = new_keys(5)
        from_rows, into_rows = [7, 3, 40, 0, 63], [20, 8, 1, 50, 33]
        contents = [engine.fill(row, row) for row in from_rows]
        [stored] = engine.finish(engine.store(keys, from_rows))
        assert stored.success, "a store into an empty tier failed"
        assert engine.present(keys) == [True] * 5
        [loaded] = engine.finish(engine.load(keys, into_rows))
        assert loaded.success, "a load of chunks that were just stored failed"
        for row, content in zip(into_rows, contents, strict=True):
            same_bytes(engine.value_in(row), content, f"the chunk that was loaded into row {row}")

    def test_an_unknown_chunk_is_a_miss(self, engine: SmallEngine) -> None:
        known, unknown = new_keys(2)
        assert engine.present([unknown]) == [False]
        engine.fill(0, 1)
        engine.finish(engine.store([known], [0]))
        assert engine.present([unknown, known]) == [False, True]

    def test_lookup_many_answers_in_order_and_may_end_at_a_miss(self, engine: SmallEngine) -> None:
        keys = new_keys(6)
        stored = [0, 1, 2, 4]
        for index in stored:
            engine.fill(index, index)
        engine.finish(engine.store([keys[index] for index in stored], stored))
        expected = engine.present(keys)
        assert expected == [index in stored for index in range(6)]
        answers = list(engine.tier.lookup_many(keys, engine.request))
        assert len(answers) <= len(keys)
        if len(answers) < len(keys):
            assert answers, "lookup_many gave no answer at all"
            assert answers[-1] is not LookupResult.HIT, "the answers ended after a HIT; they end only after a MISS"
        for answer, there in zip(answers, expected, strict=False):
            assert answer in {LookupResult.RETRY, LookupResult.HIT if there else LookupResult.MISS}
        assert list(engine.tier.lookup_many([], engine.request)) == []

    def test_a_load_claims_no_chunk_that_is_absent(self, engine: SmallEngine) -> None:
        keys = new_keys(4)
        contents = [engine.fill(row, row) for row in range(4)]
        engine.finish(engine.store([keys[0], keys[3]], [0, 3]))
        [result] = engine.finish(engine.load(keys, [10, 11, 12, 13]))
        assert not result.success, "a load of four chunks, two of them absent, was reported as a success"
        for key in result.successful_keys or ():
            index = keys.index(key)
            assert index in {0, 3}, "successful_keys has a chunk that the tier never had"
            same_bytes(engine.value_in(10 + index), contents[index], "a chunk that landed beside absent ones")

    def test_a_request_may_come_and_go(self, engine: SmallEngine) -> None:
        assert isinstance(engine.tier.on_new_request(engine.request), bool)
        [key] = new_keys(1)
        engine.fill(0, 1)
        job = engine.store([key], [0])
        engine.tier.on_request_finished(engine.request)  # its transfer may still run
        engine.finish(job)
        assert isinstance(engine.tier.has_pending_work(), bool)
        assert engine.tier.is_available() is True


class RowTests(TierTestBase):
    """Whose memory it is."""

    def test_a_store_changes_nothing_in_the_region(self, engine: SmallEngine) -> None:
        for row in range(0, 12, 2):
            engine.fill(row, row)
        before = engine.rows.copy()
        engine.finish(engine.store(new_keys(6), range(0, 12, 2)))
        engine.finish_all()
        changed = np.flatnonzero((engine.rows != before).any(axis=1))
        assert not len(changed), f"a store changed the rows {changed.tolist()}; it only reads them"

    def test_a_load_changes_its_own_values_alone(self, engine: SmallEngine) -> None:
        keys = new_keys(3)
        contents = [engine.fill(row, row) for row in range(3)]
        engine.finish(engine.store(keys, [0, 1, 2]))
        engine.rows[:] = POISON
        rows = [10, 63, 30]
        engine.finish(engine.load(keys, rows))
        engine.finish_all()
        expected = np.full_like(engine.rows, POISON)
        for row, content in zip(rows, contents, strict=True):
            expected[row, : len(content)] = np.frombuffer(content, np.uint8)
        changed = np.flatnonzero((engine.rows != expected).any(axis=1))
        assert not len(changed), (
            f"after a load of {len(contents[0])} bytes each into the rows {rows} the bytes of the rows "
            f"{changed.tolist()} are not what they should be"
        )

    def test_a_store_has_copied_its_rows_when_it_is_reported(self, engine: SmallEngine) -> None:
        keys = new_keys(4)
        contents = [engine.fill(row, row) for row in range(4)]
        engine.finish(engine.store(keys, range(4)))
        engine.rows[:] = POISON  # the rows are other chunks' now
        [loaded] = engine.finish(engine.load(keys, range(8, 12)))
        assert loaded.success
        for row, content in enumerate(contents, start=8):
            same_bytes(engine.value_in(row), content, "a chunk whose row was reused after its store was reported")

    def test_no_row_is_touched_after_the_result(self, engine: SmallEngine) -> None:
        keys = new_keys(8)
        for row in range(8):
            engine.fill(row, row)
        engine.finish(engine.store(keys, range(8)))
        for row in range(16, 24):
            engine.finish(engine.load([keys[row - 16]], [row]))
            engine.rows[row] = POISON
        absent = engine.load([keys[0], *new_keys(1)], [30, 31])
        engine.finish(absent)  # also of a job that failed
        engine.rows[30:32] = POISON
        engine.finish_all()
        engine.close()
        touched = np.flatnonzero((engine.rows[16:] != POISON).any(axis=1)) + 16
        assert not len(touched), f"the rows {touched.tolist()} were written after the results of their jobs"


def _is_bounded(tests: type[TierTestBase]) -> bool:
    return tests.max_chunks is not None


def _can_be_held(tests: Any) -> bool:
    return hasattr(tests, "hold")


class ResultTests(TierTestBase):
    """Jobs of every kind."""

    def test_every_public_method_is_the_contract_s(self, engine: SmallEngine) -> None:
        problems = class_problems(type(engine.tier))
        assert not problems, "; ".join(problems)

    def test_an_empty_job_yields_exactly_one_result(self, engine: SmallEngine) -> None:
        engine.finish(engine.store([], []), engine.load([], []))
        engine.finish_all()

    def test_a_store_of_present_chunks_yields_exactly_one_result(self, engine: SmallEngine) -> None:
        keys = new_keys(3)
        contents = [engine.fill(row, row) for row in range(3)]
        engine.finish(engine.store(keys, [0, 1, 2]))
        [again] = engine.finish(engine.store(keys, [0, 1, 2]))
        assert again.success, "a store of chunks that are all present failed"
        engine.finish_all()
        engine.finish(engine.load(keys, [3, 4, 5]))
        for row, content in enumerate(contents, start=3):
            same_bytes(engine.value_in(row), content, "a chunk that was stored twice")

    def test_two_jobs_may_store_the_same_chunk_at_once(self, engine: SmallEngine) -> None:
        keys = new_keys(3)
        contents = [engine.fill(row, row) for row in range(3)]
        for row in range(3):
            engine.fill(10 + row, row)  # equal keys have equal bytes, in whatever rows
        engine.finish(engine.store(keys, [0, 1, 2]), engine.store(keys[1:], [11, 12]))
        engine.finish_all()
        engine.finish(engine.load(keys, [20, 21, 22]))
        for row, content in enumerate(contents, start=20):
            same_bytes(engine.value_in(row), content, "a chunk that two jobs stored at once")

    @applies_to(_is_bounded)
    def test_a_store_that_cannot_fit_yields_exactly_one_result(self, engine: SmallEngine) -> None:
        assert self.max_chunks is not None
        keys = new_keys(self.max_chunks + 1)
        [result] = engine.finish(engine.store(keys, [index % 64 for index in range(len(keys))]))
        assert not result.success, f"{len(keys)} chunks were stored in a tier that holds {self.max_chunks}"
        engine.finish_all()

    @applies_to(_is_bounded)
    def test_a_store_never_pushes_out_chunks_of_its_own(self, engine: SmallEngine) -> None:
        assert self.max_chunks is not None
        for first in (0, 5):
            keys = new_keys(self.max_chunks)
            some, rest = keys[:first], keys[first:]
            if some:  # stored before, then the oldest when the others come
                engine.finish(engine.store(some, range(first)))
                engine.finish(*[engine.store([key], [0]) for key in new_keys(self.max_chunks - first)])
            [result] = engine.finish(engine.store(some + rest, [index % 64 for index in range(len(keys))]))
            assert result.success, f"a store of {len(keys)} chunks failed; max_chunks is {self.max_chunks}"
            assert all(engine.present(keys)), "a store that succeeded pushed out chunks of its own job"

    def test_a_load_of_absent_chunks_yields_exactly_one_result(self, engine: SmallEngine) -> None:
        [result] = engine.finish(engine.load(new_keys(3), [0, 1, 2]))
        assert not result.success
        assert not result.successful_keys
        engine.finish_all()

    def test_many_jobs_in_flight_yield_one_result_each(self, engine: SmallEngine) -> None:
        keys = new_keys(16)
        contents = [engine.fill(row, row) for row in range(16)]
        stores = [engine.store([keys[i], keys[i + 1]], [i, i + 1]) for i in range(0, 16, 2)]
        failed = [result for result in engine.finish(*stores) if not result.success]
        assert not failed, f"{len(failed)} of 8 stores in flight at the same time failed; the tier's log says why"
        loads = [engine.load([keys[i]], [20 + i]) for i in range(16)]
        loads += [engine.load(new_keys(1), [50]) for _ in range(4)]
        assert [result.success for result in engine.finish(*loads)] == [True] * 16 + [False] * 4
        engine.finish_all()
        for i, content in enumerate(contents):
            same_bytes(engine.value_in(20 + i), content, f"chunk {i} of 16 in flight")

    def test_drain_brings_every_job_to_its_result(self, engine: SmallEngine) -> None:
        keys = new_keys(8)
        for row in range(8):
            engine.fill(row, row)
            engine.store([keys[row]], [row])
        engine.load(keys, range(20, 28))
        engine.drain()

    def test_an_abandoned_job_still_yields_its_result(self, engine: SmallEngine) -> None:
        keys = new_keys(2)
        engine.fill(0, 1)
        for job in (engine.store(keys[:1], [0]), engine.load(keys[1:], [1])):
            engine.tier.abandon_job(job)
        engine.finish_all()

    @applies_to(_can_be_held)
    def test_submit_returns_while_the_backend_is_held(
        self, engine: SmallEngine, hold: Callable[[SecondaryTierManager], AbstractContextManager[object]]
    ) -> None:
        stored, new = new_keys(2)
        content = engine.fill(0, 1)
        engine.finish(engine.store([stored], [0]))

        loads: list[int] = []

        def step() -> None:
            engine.fill(1, 2)
            engine.store([new], [1])
            loads.append(engine.load([stored], [2]))
            engine.tier.lookup(new, engine.request)
            engine.step()

        with hold(engine.tier):
            where = call_within(self.patience / 3, step)
        assert not where, f"a call on the engine's thread waited for the backend, which was held meanwhile{where}"
        engine.finish_all()
        assert engine.finish(*loads)[0].success, "a load in flight beside a store failed; the tier's log says why"
        same_bytes(engine.value_in(2), content, "the chunk that was loaded while the backend was held")


class EngineThreadTests(TierTestBase):
    """The engine's thread, which no call keeps waiting."""

    def test_no_call_on_the_engine_s_thread_sleeps_or_waits(self, engine: SmallEngine) -> None:
        watch = CallWatch()
        with suppress(Exception):  # whatever else is wrong with it: there are tests for that
            for _ in range(_TURNS):
                self._turn(engine, watch)
        troubles = watch.troubles(engine.tier)
        assert not troubles, "\n".join(troubles)

    def _turn(self, engine: SmallEngine, watch: CallWatch) -> None:
        stored, *unknown = new_keys(4)
        engine.fill(0, 1)
        tier, request = engine.tier, engine.request
        watch.call(tier.on_new_request, request)
        watch.call(tier.is_available)
        watch.call(tier.lookup, unknown[0], request)
        watch.call(tier.lookup_many, unknown[1:], request)
        store = engine.new_job([stored], [0], is_promotion=False)
        watch.call(tier.submit_store, store)
        self._finish(engine, watch, store.job_id)
        load = engine.new_job([stored], [1], is_promotion=True)
        watch.call(tier.submit_load, load)
        watch.call(tier.on_request_finished, request)
        self._finish(engine, watch, load.job_id)

    def _finish(self, engine: SmallEngine, watch: CallWatch, job_id: int) -> None:
        engine.finish(job_id)  # so that the tier is idle when the next call is watched
        watch.call(engine.tier.has_pending_work)
        watch.call(engine.tier.on_schedule_end)
        engine.note(watch.call(engine.tier.get_finished_jobs))


class LifeTests(TierTestBase):
    """From open to close."""

    def test_close_ends_all_threads(self, open_tier: OpenTier) -> None:
        self._open_use_close(open_tier)  # what a library starts once, and shares, is there after this
        before = set(threading.enumerate())
        tier = self._open_use_close(open_tier)
        left = threads_left_since(before)
        assert not left, f"after close, {type(tier).__name__} still runs the threads {left}"

    def test_close_closes_all_descriptors(self, open_tier: OpenTier) -> None:
        self._open_use_close(open_tier)
        before = open_descriptors()
        tier = self._open_use_close(open_tier)
        left = descriptors_left_since(before)
        assert not left, f"after close, {type(tier).__name__} still has the descriptors {left}"

    def _open_use_close(self, open_tier: OpenTier) -> SecondaryTierManager:
        # The tier is returned, so that it is close that ends things and not its reference count.
        engine = SmallEngine(open_tier, patience=self.patience)
        [key] = new_keys(1)
        engine.fill(0, 1)
        engine.finish(engine.store([key], [0]))
        engine.finish(engine.load([key], [1]))
        engine.close()
        return engine.tier
