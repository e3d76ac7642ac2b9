from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers_gcs.store import GcsStore


class TestGcsOnFakeGcsServer(ChunkStoreTests):
    """The largest value of the kit is moved in parts."""

    store_class = GcsStore

    @pytest.fixture
    def open_store(self, config):
        return partial(GcsStore, config(part_size="5MiB"))


class TestGcsPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, empty_server):
        return {"type": "gcs", "bucket": "kv-cache", "prefix": "team/kv", "endpoint": empty_server, "anonymous": True}
