"""Tests of chunks: a tier returns the chunks that were stored, and answers for each whether it has it."""

from kvtiers.api import LookupResult
from kvtiers.testing.guarded import same_bytes
from kvtiers.testing.secondary_tier.base import TierTestBase
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys

__all__ = ["ChunkTests"]


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
