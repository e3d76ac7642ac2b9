"""What ``kvtiers check`` and the commands say of Azure: one line, with what to do about it."""

import base64
import json
from datetime import timedelta

import pytest
from azure_servers import ACCOUNT, ACCOUNT_KEY, account_sas
from objectstore_checks import CheckTests, check_here, refused, the_error
from objectstore_commands import CommandTests, run, write_file

from kvtiers_azure.store import AzureStore
from kvtiers_objectstore.testing.proxy import Fault, refusal

WRONG_KEY = base64.b64encode(b"not the key").decode()


@pytest.fixture
def opened():
    stores = []

    def open_store(config):
        stores.append(AzureStore(config))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


class TestAzureCheck(CheckTests):
    def test_a_wrong_key(self, config):
        said = the_error(config(account_key=WRONG_KEY))
        assert "403 AuthorizationFailure: not allowed" in said
        assert "check account_key, sas or connection_string" in said
        assert WRONG_KEY not in said

    def test_a_missing_container(self, config):
        said = the_error(config(container="there-is-none"))
        assert "container 'there-is-none'" in said
        assert "404 ContainerNotFound: there is no such container here; check container, account and endpoint" in said

    def test_a_signature_that_is_over(self, config):
        assert "403 Auth" in the_error(config(sas=account_sas(valid=timedelta(hours=-1))))

    def test_a_signature_that_may_not_write(self, config):
        errors = [f.text for f in check_here(config(sas=account_sas("rl"))) if f.level == "error"]
        assert any("403 AuthorizationPermissionMismatch: not allowed; grant the role" in text for text in errors)

    @pytest.mark.parametrize(
        ("status", "code", "message", "expected"),
        [
            (403, "AuthenticationFailed", "Make sure the value ...", "the key or signature is not this account's"),
            (
                403,
                "AuthenticationFailed",
                "Request date header too old: x",
                "this machine's clock is wrong; run an NTP",
            ),
            (403, "AuthenticationFailed", "Signature not valid in the specified time frame", "issue another one"),
            (403, "AuthenticationFailed", "Signature did not match.", "the key is not this account's"),
            (403, "KeyBasedAuthenticationNotPermitted", "", "the account takes no keys; set 'identity'"),
            (403, "AuthorizationPermissionMismatch", "", "grant the role 'Storage Blob Data Contributor'"),
            (403, "", "", "403 AccessDenied: not allowed; grant the role"),
            (401, "", "", "the token is not taken; check identity"),
            (503, "ServerBusy", "", "too many requests for this account; lower rate limits"),
            (429, "TooManyRequests", "", "429 TooManyRequests"),
            (403, "AccountIsDisabled", "", "the account is disabled"),
        ],
    )
    def test_a_refusal_is_named_with_its_cure(self, config, between, through, status, code, message, expected):
        answer = refusal(status, code, "Retry-After: 1\r\n").replace(b">no<", f">{message}<".encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        first = head.split(b"Content-Length")[0]
        answer = first + b"Content-Length: %d\r\n\r\n" % len(body) + body
        between.script = lambda _: Fault(answer)
        assert expected in refused(AzureStore, config(**through(between)))


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
    store_class = AzureStore

    @pytest.fixture
    def tier(self):
        def options_in_a_file(config):
            where = {"endpoint": config.endpoint, "container": config.container, "prefix": config.prefix}
            return {"type": "azure", "account": ACCOUNT, "account_key": ACCOUNT_KEY, **where}

        return options_in_a_file

    def test_a_check_of_a_file_says_what_is_wrong_and_hides_secrets(self, config, tier, tmp_path):
        file = tmp_path / "tiers.yaml"
        write_file(file, {**tier(config()), "account_key": WRONG_KEY})
        said = run("kvtiers", "check", file, status=1).stdout
        assert "check account_key, sas or connection_string" in " ".join(said.split())
        assert WRONG_KEY not in said


def test_the_rule_is_printed_and_what_to_do_with_it_is_said_beside_it():
    done = run("kvtiers-azure", "lifecycle", "--days", "14", "--prefix", "/llama/", "--container", "kv-cache")
    [rule] = json.loads(done.stdout)["rules"]
    assert rule["definition"]["filters"] == {"blobTypes": ["blockBlob"], "prefixMatch": ["kv-cache/llama/"]}
    assert rule["definition"]["actions"]["baseBlob"] == {"delete": {"daysAfterModificationGreaterThan": 14}}
    assert "nothing was set. Azure replaces all rules of an account at once" in done.stderr
    assert "--container" in run("kvtiers-azure", "lifecycle", "--days", "14", status=2).stderr
