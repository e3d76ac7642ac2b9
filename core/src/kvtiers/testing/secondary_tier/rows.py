"""Tests of row ownership: a tier touches the rows of its jobs, between submit and result, and nothing else."""

import numpy as np

from kvtiers.testing.guarded import POISON, same_bytes
from kvtiers.testing.secondary_tier.base import TierTestBase
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys

__all__ = ["RowTests"]


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
