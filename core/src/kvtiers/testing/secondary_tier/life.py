"""Tests of a tier's end: the threads on which it is drained and closed, and what it leaves behind."""

import threading

from kvtiers.api import SecondaryTierManager
from kvtiers.testing.running import descriptors_left_since, open_descriptors, threads_left_since
from kvtiers.testing.secondary_tier.base import OpenTier, TierTestBase
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys

__all__ = ["LifeTests"]


class LifeTests(TierTestBase):
    """From open to close."""

    def test_the_calls_around_a_drain_come_on_one_other_thread_and_close_on_another(self, engine: SmallEngine) -> None:
        keys = new_keys(3)
        for row in range(3):
            engine.fill(row, row)
        engine.finish(engine.store(keys[:1], [0]))
        engine.store(keys[1:2], [1])
        engine.load(keys[:1], [8])
        engine.end(keys[2:], [2])
        engine.close()

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
