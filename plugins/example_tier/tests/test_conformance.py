from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, SecondaryTierTests, TierPluginTests
from kvtiers_example.example_tier import ExampleSecondaryTier
from kvtiers_example.memory_store import MemoryStore


class TestMemoryStore(ChunkStoreTests):
    store_class = MemoryStore
    persistent = False

    @pytest.fixture
    def open_store(self):
        return partial(MemoryStore, capacity=1 << 28)


class TestMemoryPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self):
        return {"type": "memory", "capacity": "1GiB"}


class TestExampleSecondaryTier(SecondaryTierTests):
    max_chunks = 32
    keeps_quotas = True

    @pytest.fixture
    def open_tier(self):
        return partial(ExampleSecondaryTier, max_blocks=32)

    @pytest.fixture
    def hold(self):
        return ExampleSecondaryTier.hold


class TestExampleSecondaryTierWithinTheSubmit(SecondaryTierTests):
    max_chunks = 32
    keeps_quotas = True

    @pytest.fixture
    def open_tier(self):
        return partial(ExampleSecondaryTier, max_blocks=32, simulate_async=False)


class TestMemoryAsyncPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self):
        return {"type": "memory-async", "max_blocks": 32}
