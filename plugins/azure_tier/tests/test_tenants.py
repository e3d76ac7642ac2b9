"""Tenants over Azurite: quotas, ``store du`` and ``store prune``."""

import pytest
from azure_servers import ACCOUNT, ACCOUNT_KEY
from tests.tenant_scenes import TenantTests

from kvtiers_azure.store import AzureStore


class TestTenants(TenantTests):
    @pytest.fixture
    def options(self, config):
        return config()

    @pytest.fixture
    def tier(self, options):
        where = {"endpoint": options.endpoint, "container": options.container, "prefix": options.prefix}
        return {"type": "azure", "account": ACCOUNT, "account_key": ACCOUNT_KEY, **where}

    @pytest.fixture
    def bytes_of(self, options):
        store = AzureStore(options)
        yield lambda tenant: sum(entry.nbytes for entry in store.list("") if f"/t-{tenant}/" in entry.name)
        store.close()
