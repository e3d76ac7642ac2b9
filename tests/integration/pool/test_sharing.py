"""Engines of one pool at random: loads, stores, resets that overlap, each byte compared and each row accounted for."""

import math
import random
import time

import numpy as np
import pytest
from tests.pool_rig import LAYOUT, KeeperThread, PoolEngine, chain, wait_until

STEPS = 6000
PARTS = 3


class Sharer(PoolEngine):
    """An engine with loads and stores under way."""

    def __init__(self, path, **more):
        super().__init__(path, **more)
        self._loads, self._stores = [], []
        self.borrowed = 0

    def step(self, chance):
        """Do one thing that a manager does."""
        tier, keys, request = self.tier, chain(chance.randrange(6), chance.randrange(5, 25)), f"r{chance.randrange(5)}"
        what = chance.random()
        tier.poll()
        if what < 0.01:
            tier.reset_cache()
        elif what < 0.03:
            tier.forget(keys)
        elif what < 0.06:
            tier.release_expired(math.inf if chance.random() < 0.3 else time.monotonic())
        elif what < 0.2:
            tier.find(keys)
        elif what < 0.5:
            self._begin_load(keys[: tier.ready_run(keys)], request)
        elif (what < 0.72 and self._loads) or len(self._loads) > 6:
            self._end_load(*self._loads.pop(chance.randrange(len(self._loads))))
        elif what < 0.9:
            is_store = chance.random() < 0.6
            self._begin_store(
                tier.prepare_store(keys, request) if is_store else tier.prepare_write(keys, request, reserve_rows=3)
            )
        elif self._stores:
            self._end_store(self._stores.pop(chance.randrange(len(self._stores))), success=chance.random() < 0.9)
        if chance.random() < 0.02:
            tier.on_request_finished(request)

    def _begin_load(self, keys, request):
        if rows := self.tier.prepare_load(keys, request) or []:
            self.compare(keys, rows)
            self._loads.append((keys, rows))
            self.borrowed += sum(row not in self.loan.own for row in rows)

    def _end_load(self, keys, rows):
        self.compare(keys, rows)
        self.tier.complete_load(rows)

    def _begin_store(self, allocation):
        if allocation is not None and allocation.rows:
            assert all(row in self.loan.own for row in allocation.rows)
            self.fill(allocation.keys[:1], allocation.rows[:1])
            self._stores.append(allocation)

    def _end_store(self, allocation, *, success):
        self.fill(allocation.keys, allocation.rows)
        self.tier.complete_store(allocation.rows, success)

    def audit(self):
        """Compare what the row table says of all rows with what it has counted, and with the pins."""
        table, own = self.tier._rows, self.loan.own
        bound = [(row, state, table._key_of[row]) for row, state in enumerate(table.state) if state != -2]
        foreign = {row for row, _, _ in bound if row not in own}
        assert foreign == self.tier._borrowed.keys() == set(np.flatnonzero(self.loan._plane._my_pins).tolist())
        assert not [row for row in table._freed if row not in own]
        assert len(bound) - len(foreign) + table.free + table.closed + table.retired == table.num_rows
        kinds = {
            "pending": [state == -1 and key is not None for _, state, key in bound],
            "idle": [state == 0 for _, state, _ in bound],
            "pinned": [state > 0 and key is not None for _, state, key in bound],
            "quarantined": [key is None for _, _, key in bound],
        }
        assert {kind: sum(rows) for kind, rows in kinds.items()} == {kind: getattr(table, kind) for kind in kinds}
        assert self.tier.misuse == 0

    def finish(self):
        """End all loads and stores."""
        for keys, rows in self._loads:
            self._end_load(keys, rows)
        for allocation in self._stores:
            self._end_store(allocation, success=True)


@pytest.fixture
def keeper(tmp_path):
    return KeeperThread(tmp_path / "pool.sock", 80 * PARTS * LAYOUT.row_stride, parts=PARTS)


def settle(engines):
    """Wait until each engine knows what the others have stored, as it would between two requests."""
    for engine in engines:
        wait_until(engine.is_published, "it is not published")
    for engine in engines:
        index, neighbours = engine.loan._index, engine.loan._neighbours
        wait_until(lambda seen=neighbours, index=index: seen._followed.changes == index.changes, "it is not followed")


@pytest.mark.parametrize("policy", ["lru", "arc", "turn-hazard"])
def test_engines_that_share_a_pool_load_right_bytes_and_lose_no_row(keeper, policy):
    engines, chance = [Sharer(keeper.path, policy=policy) for _ in range(PARTS)], random.Random(policy)
    for number in range(STEPS):
        engine = chance.choice(engines)
        engine.step(chance)
        if number % 20 == 0:
            engine.audit()
        if number % 50 == 0:
            settle(engines)
    for engine in engines:
        engine.finish()
    for engine in engines:
        engine.await_checks([])
        engine.tier.release_expired(math.inf)
    assert sum(engine.borrowed for engine in engines) > 300, "next to nothing was shared"
    for engine in engines:
        engine.tier.release_expired(math.inf)
        engine.audit()
        engine.close()
