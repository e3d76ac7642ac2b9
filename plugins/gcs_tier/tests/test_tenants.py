"""Tenants over fake-gcs-server: quotas, ``store du`` and ``store prune``."""

import pytest
from tests.tenant_scenes import TenantTests

from kvtiers_gcs.store import GcsStore


class TestTenants(TenantTests):
    @pytest.fixture
    def options(self, config):
        return config()

    @pytest.fixture
    def tier(self, options):
        where = {"endpoint": options.endpoint, "bucket": options.bucket, "prefix": options.prefix}
        return {"type": "gcs", "anonymous": True, **where}

    @pytest.fixture
    def bytes_of(self, options):
        store = GcsStore(options)
        yield lambda tenant: sum(entry.nbytes for entry in store.list("") if f"/t-{tenant}/" in entry.name)
        store.close()
