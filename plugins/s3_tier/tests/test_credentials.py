"""Who asks: keys, files, profiles, roles; the same for both clients."""

from datetime import UTC, datetime, timedelta

import pytest
from s3_servers import ACCESS_KEY, SECRET_KEY

from kvtiers.api import ConfigError
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.testing.proxy import Proxy
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection
from kvtiers_s3.store import S3Store, open_client

CLIENTS = ["obstore", "boto3"]


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """Let this machine have none of its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bare(radosgw, ceph_bucket):
    """Return a function that gives options on Ceph's gateway without any credentials."""

    def make(**options):
        where = {"endpoint": radosgw.endpoint, "bucket": ceph_bucket, "prefix": "credentials"}
        return S3Config(**{"type": "s3", **where, **options})

    return make


def works(config):
    store = S3Store(config)
    try:
        return store.exists(["absent"]) == [False]
    finally:
        store.close()


def signed_by(proxy):
    return {request.headers["authorization"].partition("Credential=")[2].partition("/")[0] for request in proxy.log}


def test_no_credentials_are_one_clear_line(bare):
    with pytest.raises(ConfigError, match="no credentials were found; give access_key and secret_key, a profile"):
        S3Store(bare())


@pytest.mark.parametrize("client", CLIENTS)
def test_the_usual_chain_finds_them(bare, monkeypatch, client):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert works(bare(client=client))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_profile_has_keys_and_a_region(bare, tmp_path, client):
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[kv]\n{keys}")
    (tmp_path / "config").write_text("[profile kv]\nregion = eu-west-3\n")
    config = bare(client=client, profile="kv")
    assert works(config)
    assert Connection(config, Requests(0, 0)).region == "eu-west-3"


def test_a_profile_that_there_is_not(bare):
    with pytest.raises(ConfigError, match="absent-profile"):
        S3Store(bare(profile="absent-profile"))


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_in_the_options_come_before_the_environment(bare, monkeypatch, client):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ABSENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert works(bare(client=client, access_key=ACCESS_KEY, secret_key=SECRET_KEY))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_session_token_goes_with_each_request(empty, client):
    proxy, make = empty
    works(make(client=client, access_key="TEMPORARY", secret_key="S", session_token="the-token"))
    assert {request.headers["x-amz-security-token"] for request in proxy.log} == {"the-token"}
    assert signed_by(proxy) == {"TEMPORARY"}


@pytest.fixture
def empty():
    """A server that has nothing and takes every client, and a function that gives options on it."""
    with Proxy() as proxy:
        yield proxy, lambda **options: S3Config(type="s3", bucket="some-bucket", endpoint=proxy.endpoint, **options)


def test_boto3_reads_keys_in_a_file_again_for_each_request(empty, tmp_path):
    proxy, make = empty
    file = tmp_path / "key"
    file.write_text("FIRST")
    store = S3Store(make(client="boto3", access_key={"file": str(file)}, secret_key="S"))
    file.write_text("SECOND")
    store.exists(["a"])
    store.close()
    assert signed_by(proxy) == {"FIRST", "SECOND"}


def test_obstore_gets_keys_for_a_minute(empty, tmp_path):
    _, make = empty
    file = tmp_path / "key"
    file.write_text("FIRST")
    connection = Connection(make(access_key={"file": str(file)}, secret_key="S"), Requests(0, 0))
    first = connection._issue_credentials()
    file.write_text("SECOND")
    second = connection._issue_credentials()
    assert (first["access_key_id"], second["access_key_id"]) == ("FIRST", "SECOND")
    # It asks again when five minutes are left.
    assert timedelta(minutes=5) < second["expires_at"] - datetime.now(UTC) <= timedelta(minutes=6)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_role_is_assumed_and_its_keys_are_used(moto, moto_bucket, client):
    role = "arn:aws:iam::123456789012:role/kv"
    keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
    port = int(moto.rpartition(":")[2])
    with Proxy(port) as proxy, Proxy(port) as sts:
        options = {"endpoint": proxy.endpoint, "sts_endpoint": sts.endpoint, "role": role, "role_external_id": "kv-7"}
        assert works(S3Config(type="s3", bucket=moto_bucket, client=client, **options, **keys))
        [signer] = signed_by(proxy)
        assert signer != ACCESS_KEY
        assert all("x-amz-security-token" in request.headers for request in proxy.log)
        [asked] = sts.posted
        assert b"Action=AssumeRole&" in asked
        assert b"ExternalId=kv-7" in asked


def test_a_role_that_cannot_be_assumed_is_one_clear_line(empty):
    _, make = empty
    nowhere = {"role": "arn:aws:iam::123456789012:role/kv", "sts_endpoint": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"credentials cannot be obtained: .*127\.0\.0\.1:1"):
        S3Store(make(**nowhere, access_key="A", secret_key="S"))


# -- where the bucket is


def addressed(proxy):
    return {(request.headers["host"].partition(":")[0], request.path.split("/")[1]) for request in proxy.log}


@pytest.mark.parametrize("client", CLIENTS)
def test_an_endpoint_is_addressed_by_path(empty, client):
    proxy, make = empty
    works(make(client=client, access_key="A", secret_key="S", prefix="kv"))
    assert addressed(proxy) == {("127.0.0.1", "some-bucket")}


@pytest.mark.parametrize("client", CLIENTS)
def test_virtual_addressing_puts_the_bucket_into_the_hosts_name(empty, monkeypatch, client):
    proxy, make = empty
    monkeypatch.setenv("http_proxy", proxy.endpoint)  # so that the name needs no address
    monkeypatch.delenv("no_proxy", raising=False)
    config = make(client=client, access_key="A", secret_key="S", prefix="kv", addressing="virtual")
    works(config.model_copy(update={"endpoint": "http://s3.test"}))
    assert {request.headers["host"] for request in proxy.log} == {"some-bucket.s3.test"}
    assert {request.path.partition("/kv/")[0] for request in proxy.log} == {"http://some-bucket.s3.test"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"bucket": "with.a.dot"}, False),
        ({"addressing": "path"}, False),
        ({"endpoint": "http://127.0.0.1:1"}, False),
    ],
)
def test_aws_is_addressed_by_host_unless_its_certificate_would_not_fit(options, expected):
    keys = {"access_key": "A", "secret_key": "S"}
    config = S3Config(**{"type": "s3", "bucket": "some-bucket", **keys, **options})
    assert Connection(config, Requests(0, 0)).is_virtual is expected


def test_the_endpoint_of_the_environment_is_used(empty, monkeypatch):
    proxy, _ = empty
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    works(S3Config(type="s3", bucket="some-bucket", access_key="A", secret_key="S"))
    assert addressed(proxy) == {("127.0.0.1", "some-bucket")}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("environment", ["", "http://127.0.0.1:1"], ids=["empty", "another"])
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_the_endpoint_of_the_options_comes_before_the_environment(empty, monkeypatch, client, name, environment):
    proxy, make = empty
    monkeypatch.setenv(name, environment)
    store = S3Store(make(client=client, access_key="A", secret_key="S"))
    assert not store.read_into("absent", memoryview(bytearray(8)))
    with pytest.raises(ObjectStoreError, match="404 NoSuchKey"):
        list(store.list(""))
    store.close()
    assert any("list-type=2" in request.path for request in proxy.log)
    assert any("absent" in request.path for request in proxy.log)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_endpoint_of_a_profile_is_used_by_both_clients(empty, tmp_path, client):
    proxy, _ = empty
    (tmp_path / "config").write_text(f"[profile kv]\nendpoint_url = {proxy.endpoint}/\n")
    (tmp_path / "credentials").write_text("[kv]\naws_access_key_id = A\naws_secret_access_key = S\n")
    store = S3Store(S3Config(type="s3", bucket="some-bucket", client=client, profile="kv"))
    assert not store.read_into("absent", memoryview(bytearray(8)))
    store.close()
    assert any(request.path.endswith("absent") for request in proxy.log)


@pytest.mark.parametrize(
    ("region", "endpoint"),
    [
        ("eu-west-1", "https://kvs.s3.eu-west-1.amazonaws.com"),
        ("cn-north-1", "https://kvs.s3.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_without_an_endpoint_obstore_means_aws_whatever_the_environment_says(monkeypatch, region, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    config = S3Config(type="s3", bucket="kvs", region=region, access_key="A", secret_key="S")
    assert Connection(config, Requests(0, 0)).obstore().config["endpoint_url_s3"] == endpoint


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_whose_file_is_gone_are_said_and_not_asked_for_again(empty, tmp_path, client):
    _, make = empty
    file = tmp_path / "key"
    file.write_text("FIRST")
    connection = Connection(make(client=client, access_key={"file": str(file)}, secret_key="S"), Requests(0, 0))
    file.unlink()
    with pytest.raises(ObjectStoreError, match=str(file)) as raised:
        open_client(connection).size("a")
    assert not isinstance(raised.value, ObjectStoreBusyError)
    connection.close()
