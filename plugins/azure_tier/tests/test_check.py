"""What ``kvtiers check`` and the commands say of Azure: one line, with what to do about it."""

import json
from datetime import timedelta

import pytest
from azure_servers import account_sas
from libraries.objectstore.tests.checks import CheckTests, EnvironmentTests, check_here, refused, the_error
from libraries.objectstore.tests.commands import BucketTenantTests, CommandTests, run
from plugins.azure_tier.tests.differences import AZURE, WRONG_KEY

from kvtiers_azure.store import AzureStore
from kvtiers_objectstore.testing.proxy import Fault, refusal


class TestAzureCheck(CheckTests, EnvironmentTests):
    differences = AZURE

    def test_a_wrong_key(self, config):
        said = the_error(config(account_key=WRONG_KEY))
        assert "403 AuthorizationFailure: not allowed" in said
        assert "check account_key, sas or connection_string" in said
        assert WRONG_KEY not in said

    def test_a_signature_that_is_over(self, config):
        assert "403 Auth" in the_error(config(sas=account_sas(valid=timedelta(hours=-1))))

    def test_a_signature_that_may_not_write(self, config):
        errors = [f.text for f in check_here(config(sas=account_sas("rl"))) if f.level == "error"]
        assert any("403 AuthorizationPermissionMismatch: not allowed; grant the role" in text for text in errors)


# -- identities, whose tokens are given out by a server of this test


def principal(config, authority, **more):
    who = {"tenant": "some-tenant", "client_id": "some-client", "client_secret": "canary-secret"}
    return config(identity="service-principal", authority=authority, **who, **more)


def test_a_service_principals_token_is_used(config, between, through, token_server):
    between.script = lambda _: Fault(refusal(404, "BlobNotFound"))
    store = AzureStore(principal(config, token_server.endpoint, **through(between)))
    store.close()
    assert {request.headers["authorization"] for request in between.log} == {"Bearer the-token"}
    [(path, _, body)] = token_server.asked
    assert "/some-tenant/oauth2/v2.0/token" in path
    assert "client_secret=canary-secret" in body


def test_a_workloads_token_is_used(config, between, through, token_server, tmp_path, monkeypatch):
    between.script = lambda _: Fault(refusal(404, "BlobNotFound"))
    (tmp_path / "token").write_text("of-the-pod")
    monkeypatch.setenv("AZURE_CLIENT_ID", "of-the-environment")
    monkeypatch.setenv("AZURE_TENANT_ID", "of-the-environment")
    who = {"identity": "workload", "token_file": tmp_path / "token", "client_id": "c", "tenant": "t"}
    AzureStore(config(authority=token_server.endpoint, **who, **through(between))).close()
    [(path, _, body)] = token_server.asked
    assert path.startswith("/t/")
    assert "client_assertion=of-the-pod" in body
    assert "client_id=c&" in body


def test_a_managed_identitys_token_is_used(config, between, through, token_server, monkeypatch):
    between.script = lambda _: Fault(refusal(404, "BlobNotFound"))
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{token_server.endpoint}/metadata/identity/oauth2/token")
    AzureStore(config(identity="managed", client_id="of-the-machine", **through(between))).close()
    [(path, _, _)] = token_server.asked
    assert "resource=https%3A%2F%2Fstorage.azure.com" in path
    assert "client_id=of-the-machine" in path
    assert {request.headers["authorization"] for request in between.log} == {"Bearer the-token"}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, "Credentials: no token is given for this identity; check tenant, client_id, client_secret and the clock"),
        (503, "NoToken: no answer from the service that gives out tokens; check identity and authority"),
    ],
)
def test_a_token_that_is_refused_is_named(config, between, through, token_server, status, expected):
    token_server.answer = lambda _path: (status, b'{"error": "invalid_client"}')
    said = refused(AzureStore, principal(config, token_server.endpoint, **through(between)))
    assert expected in said
    assert "canary" not in said


# -- commands


class TestAzureCommands(CommandTests):
    differences = AZURE


class TestAzureTenants(BucketTenantTests):
    differences = AZURE


def test_the_rule_is_printed_and_what_to_do_with_it_is_said_beside_it():
    done = run("kvtiers-azure", "lifecycle", "--days", "14", "--prefix", "/llama/", "--container", "kv-cache")
    [rule] = json.loads(done.stdout)["rules"]
    assert rule["definition"]["filters"] == {"blobTypes": ["blockBlob"], "prefixMatch": ["kv-cache/llama/"]}
    assert rule["definition"]["actions"]["baseBlob"] == {"delete": {"daysAfterModificationGreaterThan": 14}}
    assert "nothing was set. Azure replaces all rules of an account at once" in done.stderr
    assert "--container" in run("kvtiers-azure", "lifecycle", "--days", "14", status=2).stderr
