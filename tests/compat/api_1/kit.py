"""The conformance kit on the frozen tiers, as their author would have run it; ``../test_old_plugins.py`` runs this file."""

from functools import partial

import pytest
from kvtiers_frozen.example_tier import ExampleSecondaryTier
from kvtiers_frozen.memory_store import MemoryStore

from kvtiers.testing import ChunkStoreTests, SecondaryTierTests, TierPluginTests


class TestFrozenStore(ChunkStoreTests):
    store_class = MemoryStore
    persistent = False

    @pytest.fixture
    def open_store(self):
        return partial(MemoryStore, capacity=1 << 28)


class TestFrozenPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self):
        return {"type": "frozen", "capacity": "1GiB"}


class TestFrozenTier(SecondaryTierTests):
    max_chunks = 32

    @pytest.fixture
    def open_tier(self):
        return partial(ExampleSecondaryTier, max_blocks=32)

    @pytest.fixture
    def hold(self):
        return ExampleSecondaryTier.hold


class TestFrozenTierPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self):
        return {"type": "frozen-async", "max_blocks": 32}
