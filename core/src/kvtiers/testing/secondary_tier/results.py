"""Tests of results: every job has exactly one, also if it fails."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kvtiers.api import SecondaryTierManager
from kvtiers.api.declared import class_problems
from kvtiers.testing.applies import applies_to
from kvtiers.testing.guarded import same_bytes
from kvtiers.testing.running import call_within
from kvtiers.testing.secondary_tier.base import TierTestBase
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys

__all__ = ["ResultTests"]


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
        assert all(result.success for result in engine.finish(*stores))
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

        def step() -> None:
            engine.fill(1, 2)
            engine.store([new], [1])
            engine.load([stored], [2])
            engine.tier.lookup(new, engine.request)
            engine.step()

        with hold(engine.tier):
            where = call_within(self.patience / 3, step)
        assert not where, f"a call on the engine's thread waited for the backend, which was held meanwhile{where}"
        engine.finish_all()
        same_bytes(engine.value_in(2), content, "the chunk that was loaded while the backend was held")
