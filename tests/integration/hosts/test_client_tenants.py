"""A client's tenants over real tier hosts: each finds its own values alone, and their removal is proven."""

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtiers import ModelIdentity, open_client
from kvtiers.api import ConfigError
from kvtiers.cli.main import cli

LENGTH = 1000
IDENTITY = ModelIdentity("test/model", weights="w1")
TENANTS = ["", "blue", "blues", "red"]
KEYS = [number.to_bytes(8, "big") for number in range(6)]


def config(path, **tenants):
    return {
        "version": 1,
        "namespace": "prod",
        "primary": {"capacity": "1MiB"},
        "start_wait": "60s",
        "secondary": [{"type": "fs", "name": "disk", "path": str(path), "capacity": "1GiB", "min_free": 0}],
        **tenants,
    }


def value(key, tenant):
    return np.frombuffer((key + tenant.encode()).ljust(LENGTH, b"."), np.uint8)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def client(disk):
    with open_client(config(disk, tenants={}), IDENTITY, LENGTH) as opened:
        yield opened


calls = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "exists"]), st.sampled_from(TENANTS), st.sampled_from(KEYS)),
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls)
def test_no_tenant_finds_changes_or_removes_what_is_anothers(client, calls):
    for tenant in TENANTS:
        client.delete(KEYS, tenant=tenant)
    held = set()
    for call, tenant, key in calls:
        match call:
            case "put":
                assert client.put([key], [value(key, tenant)], tenant=tenant).stored == [True]
                held.add((tenant, key))
            case "get":
                view = np.zeros(LENGTH, np.uint8)
                found = client.get_into([key], [view], tenant=tenant)
                assert found == [(tenant, key) in held]
                assert bytes(view) == (bytes(value(key, tenant)) if found[0] else bytes(LENGTH))
            case "delete":
                assert client.delete([key], tenant=tenant) == [True]
                held.discard((tenant, key))
            case "exists":
                assert client.exists([key], tenant=tenant) == [(tenant, key) in held]
                assert client.exists_prefix([key], tenant=tenant) == ((tenant, key) in held)


def test_a_tenants_values_have_its_segment_and_their_removal_is_proven(client, disk, tmp_path):
    for tenant in TENANTS:
        client.delete(KEYS, tenant=tenant)
        assert all(client.put(KEYS, [value(key, tenant) for key in KEYS], tenant=tenant).stored)
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump(config(disk, tenants={})))

    def store(*arguments):
        done = CliRunner().invoke(cli, ["store", *arguments, "--config", str(file)])
        assert done.exit_code == 0, done.output
        return done.stdout

    listed = store("ls", "disk", "--tenant", "blue")
    assert listed.count(" prod/t-blue/test-model-") == len(KEYS) == len(listed.splitlines()) - 1
    assert "proof: listed again: 0 values; read again: 0 of 6 values" in store(
        "prune", "disk", "--tenant", "blue", "--verify"
    )
    with open_client(config(disk, tenants={}), IDENTITY, LENGTH, tenant="blue") as blue:
        assert blue.exists(KEYS) == [False] * 6
        assert blue.exists(KEYS, tenant="red") == [True] * 6
    assert "t-blue " not in store("du", "disk", "--by", "tenant")


@pytest.mark.parametrize("tenant", ["Blue", "../blue", "b" * 58, "\u00fc"])
def test_what_can_be_no_tenant_is_refused_and_touches_nothing(client, tenant, caplog):
    refused = client.stats()["refused_values"]
    result = client.put(KEYS, [value(key, "") for key in KEYS], tenant=tenant)
    assert (result.stored, result.error) == ([False] * 6, "some values were refused; see the log")
    assert client.get_into(KEYS, [np.zeros(LENGTH, np.uint8) for _ in KEYS], tenant=tenant) == [False] * 6
    assert client.exists(KEYS, tenant=tenant) == client.delete(KEYS, tenant=tenant) == [False] * 6
    assert client.exists_prefix(KEYS, tenant=tenant) == 0
    assert client.stats()["refused_values"] == refused + 30
    assert client.stats()["failed_calls"] == 0


@pytest.mark.parametrize(
    ("tenants", "line"),
    [
        (None, "tenant 'blue' is named, but the config has no 'tenants'; add 'tenants: {}'"),
        ({"unknown": False, "named": {"red": {}}}, "tenant 'blue' is not among 'tenants.named'"),
    ],
)
def test_a_client_of_a_tenant_that_may_not_be_is_not_opened(tmp_path, tenants, line):
    with pytest.raises(ConfigError, match=line):
        open_client(config(tmp_path, tenants=tenants), IDENTITY, LENGTH, tenant="blue")


def test_a_call_without_a_tenant_is_refused_where_one_is_required(tmp_path):
    with open_client(config(tmp_path, tenants={"required": True}), IDENTITY, LENGTH) as client:
        assert client.put(KEYS[:1], [value(KEYS[0], "")]).stored == [False]
        assert client.put(KEYS[:1], [value(KEYS[0], "")], tenant="blue").stored == [True]
