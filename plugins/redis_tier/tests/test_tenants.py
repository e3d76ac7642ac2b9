"""Tenants over Redis and over a Cluster: quotas, ``store du`` and ``store prune``."""

import uuid

import pytest
from tests.tenant_scenes import TenantTests


class TestTenants(TenantTests):
    @pytest.fixture(params=["single", "shared_cluster"])
    def servers(self, request):
        server = request.getfixturevalue(request.param)
        return [server] if request.param == "single" else server.masters

    @pytest.fixture
    def tier(self, servers):
        topology = "single" if len(servers) == 1 else "cluster"
        return {"type": "redis", "url": servers[0].url, "topology": topology, "prefix": uuid.uuid4().hex}

    @pytest.fixture
    def bytes_of(self, servers, tier):
        def count(tenant):
            pattern = f"{tier['prefix']}*/t-{tenant}/*"
            return sum(server.call("STRLEN", key) for server in servers for key in server.call("KEYS", pattern))

        return count
