from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers_azure.store import AzureStore


class TestAzureOnAzurite(ChunkStoreTests):
    store_class = AzureStore

    @pytest.fixture
    def open_store(self, config):
        return partial(AzureStore, config())


class TestAzureInPartsOnAzurite(ChunkStoreTests):
    """The larger values of the kit are moved in parts, and those of its killed writers."""

    store_class = AzureStore

    @pytest.fixture
    def open_store(self, config):
        return partial(AzureStore, config(part_size="1MiB"))


class TestAzurePlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, empty_server):
        where = {"account": "devstoreaccount1", "container": "kv-cache", "prefix": "team/kv", "endpoint": empty_server}
        return {"type": "azure", "account_key": "a2V5", **where}
