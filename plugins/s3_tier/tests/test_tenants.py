"""Tenants over Ceph's gateway: quotas, ``store du`` and ``store prune``."""

import pytest
from s3_servers import ACCESS_KEY, SECRET_KEY, client_of
from tests.tenant_scenes import TenantTests


class TestTenants(TenantTests):
    @pytest.fixture
    def tier(self, config):
        options = config()
        where = {"endpoint": options.endpoint, "bucket": options.bucket, "prefix": options.prefix}
        return {"type": "s3", "region": "us-east-1", "access_key": ACCESS_KEY, "secret_key": SECRET_KEY, **where}

    @pytest.fixture
    def bytes_of(self, tier):
        client = client_of(tier["endpoint"])

        def count(tenant):
            listed = client.list_objects_v2(Bucket=tier["bucket"], Prefix=tier["prefix"]).get("Contents", [])
            return sum(entry["Size"] for entry in listed if f"/t-{tenant}/" in entry["Key"])

        return count
