"""Tenants over a real pool: quotas, ``store du`` and ``store prune``."""

import json
import urllib.request

import pytest
from tests.tenant_scenes import TenantTests


class TestTenants(TenantTests):
    io = "process"  # the client library may end its process

    @pytest.fixture
    def tier(self, master, contribute):
        contribute()
        return {"type": "mooncake", "master": master.address, "master_http": master.http}

    @pytest.fixture
    def bytes_of(self, master):
        def get(path):
            with urllib.request.urlopen(f"http://{master.http}{path}") as answer:
                return answer.read().decode()

        def count(tenant):
            names = [name for name in get("/get_all_keys").split() if f"/t-{tenant}/" in name]
            values = json.loads(get(f"/batch_query_keys?keys={','.join(names)}"))["data"] if names else {}
            return sum(place["size_"] for value in values.values() for place in value["values"] or ())

        return count
