from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers.testing.chunk_store.methods import BufferTests, ConcurrencyTests, ValueTests
from kvtiers_azure.store import AzureStore

# The server runs beside the tests: where both processors are busy, 64 requests at once take it more than 10 s.
PATIENT = {"timeout": "60s", "connect_timeout": "60s", "deadline": "60s"}


class TestAzureOnAzurite(ValueTests, BufferTests, ConcurrencyTests):
    """The tests of what a value holds, of which the larger ones are moved whole here, and in parts below."""

    store_class = AzureStore
    patience = 70.0

    @pytest.fixture
    def open_store(self, config):
        return partial(AzureStore, config(**PATIENT))


class TestAzureInPartsOnAzurite(ChunkStoreTests):
    """The larger values of the kit are moved in parts, and those of its killed writers."""

    store_class = AzureStore
    patience = 70.0

    @pytest.fixture
    def open_store(self, config):
        return partial(AzureStore, config(part_size="1MiB", **PATIENT))


class TestAzurePlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, empty_server):
        where = {"account": "devstoreaccount1", "container": "kv-cache", "prefix": "team/kv", "endpoint": empty_server}
        return {"type": "azure", "account_key": "a2V5", **where}
