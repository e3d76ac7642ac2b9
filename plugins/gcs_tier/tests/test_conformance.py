from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers_gcs.store import GcsStore

# The server runs beside the tests: where both processors are busy, 64 requests at once take it more than 10 s.
PATIENT = {"timeout": "60s", "connect_timeout": "60s", "deadline": "60s"}


class TestGcsOnFakeGcsServer(ChunkStoreTests):
    """The largest value of the kit is moved in parts."""

    store_class = GcsStore
    patience = 70.0

    @pytest.fixture
    def open_store(self, config):
        return partial(GcsStore, config(part_size="5MiB", **PATIENT))


class TestGcsPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, empty_server):
        return {"type": "gcs", "bucket": "kv-cache", "prefix": "team/kv", "endpoint": empty_server, "anonymous": True}
