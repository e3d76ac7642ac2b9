"""Who asks: service accounts, workload identities, a machine's own, with tokens from a server of these tests."""

import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from gcs_servers import TOKEN
from libraries.objectstore.tests.checks import check, refused

from kvtiers.api import ConfigError, TierUnavailable
from kvtiers_gcs.store import GcsStore


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """Let this machine have none of its own."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="module")
def private_key():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*form).decode()


@pytest.fixture
def service_account(private_key, token_server):
    """The text of a service account's key file."""
    where = {"token_uri": f"{token_server.endpoint}/token", "project_id": "p", "private_key_id": "k"}
    who = {"client_email": "kv@p.iam.gserviceaccount.com", "client_id": "1", "private_key": private_key}
    return json.dumps({"type": "service_account", **who, **where})


def works(config):
    store = GcsStore(config)
    try:
        return store.exists(["absent"]) == [False]
    finally:
        store.close()


def signed_by(proxy):
    return {request.headers["authorization"] for request in proxy.log}


def test_a_service_accounts_key_file_is_exchanged_for_a_token(config, between, token_server, service_account, tmp_path):
    file = tmp_path / "key.json"
    file.write_text(service_account)
    assert works(config(endpoint=between.endpoint, credentials_file=file))
    assert signed_by(between) == {f"Bearer {TOKEN}"}
    [(path, _, body)] = token_server.asked[:1]
    assert path == "/token"
    assert "assertion=" in body


@pytest.mark.parametrize(("seconds", "requested"), [(240, 1), (200, 2)])
def test_a_token_is_used_until_it_has_less_than_some_minutes_left(
    config, token_server, service_account, seconds, requested
):
    token = json.dumps({"access_token": TOKEN, "expires_in": seconds}).encode()
    token_server.answer = lambda _path: (200, token)
    store = GcsStore(config(credentials=service_account))
    store.exists(["absent"])  # obstore asks for another one at most every 100 ms
    store.close()
    assert len(token_server.asked) == requested


def test_the_text_of_a_key_may_be_in_the_environment_and_is_never_printed(
    config, token_server, service_account, monkeypatch
):
    monkeypatch.setenv("THE_KEY", service_account)
    options = config(credentials="${THE_KEY}")
    assert works(options)
    assert "PRIVATE KEY" not in repr(options)


def test_googles_own_variable_names_a_file(config, token_server, service_account, tmp_path, monkeypatch):
    file = tmp_path / "key.json"
    file.write_text(service_account)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    # What obstore would take of its own accord does not count.
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "another")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert works(config().model_copy(update={"anonymous": False}))
    assert len(token_server.asked) >= 1


def test_a_workload_identitys_file_is_exchanged_for_a_token(config, between, token_server, tmp_path):
    (tmp_path / "subject").write_text("of-the-pod")
    file = tmp_path / "workload.json"
    who = {"audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q"}
    what = {"subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": f"{token_server.endpoint}/sts"}
    source = {"credential_source": {"file": str(tmp_path / "subject")}}
    file.write_text(json.dumps({"type": "external_account", **who, **what, **source}))
    assert works(config(endpoint=between.endpoint, credentials_file=file))
    assert signed_by(between) == {f"Bearer {TOKEN}"}
    [(path, _, body)] = token_server.asked[:1]
    assert path == "/sts"
    assert "subject_token=of-the-pod" in body


def test_a_machines_or_pods_own_service_account_is_used(config, between, token_server, monkeypatch):
    monkeypatch.delenv("NO_GCE_CHECK")
    host = token_server.endpoint.removeprefix("http://")
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    monkeypatch.setenv("GCE_METADATA_IP", host)
    options = config(endpoint=between.endpoint).model_copy(update={"anonymous": False})
    assert [finding for finding in check(options) if finding.level == "error"] == []
    assert f"Bearer {TOKEN}" in signed_by(between)
    assert any(path.endswith("/token") or "/token?" in path for path, _, _ in token_server.asked)


def test_no_credentials_are_one_clear_line(config):
    with pytest.raises(
        ConfigError, match=r"credentials cannot be obtained: .*; give credentials_file, run 'gcloud auth"
    ):
        GcsStore(config().model_copy(update={"anonymous": False}))


def test_a_token_that_is_not_taken(config, token_server, service_account):
    token_server.answer = lambda _path: (200, b'{"access_token": "another", "expires_in": 3600}')
    said = refused(GcsStore, config(credentials=service_account))
    assert "401 AuthenticationRequired: the token is not taken; check credentials_file" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Invalid JWT: Token must be in a reasonable timeframe. Check your iat and exp values", "clock is wrong"),
        ("Invalid JWT Signature.", "the key is not known any more"),
    ],
)
def test_a_key_that_is_refused_is_named_with_its_cure(config, token_server, service_account, answer, said):
    body = json.dumps({"error": "invalid_grant", "error_description": answer}).encode()
    token_server.answer = lambda _path: (400, body)
    with pytest.raises(ConfigError, match=f"credentials cannot be obtained: .*{said}"):
        GcsStore(config(credentials=service_account))


def test_a_token_server_that_does_not_answer_may_be_asked_again(config, token_server, service_account, private_key):
    gone = json.loads(service_account) | {"token_uri": "http://127.0.0.1:1/token"}
    with pytest.raises(TierUnavailable, match="no token can be obtained"):
        GcsStore(config(credentials=json.dumps(gone)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not JSON", "the credentials are not JSON"),
        ("{}", "credentials cannot be obtained"),
        ('{"type": "x"}', "cannot be obtained"),
    ],
)
def test_credentials_that_are_none_are_one_clear_line(config, text, said):
    with pytest.raises(ConfigError, match=said) as raised:
        GcsStore(config(credentials=text))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_one_clear_line(config, tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json"):
        GcsStore(config(credentials_file=tmp_path / "absent.json"))
