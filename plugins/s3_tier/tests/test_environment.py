"""What the environment asks for means the same to both clients: proxies, private authorities, AWS's other endpoints."""

import os
import ssl
from urllib.parse import urlsplit

import boto3
import obstore
import pytest
import trustme
from botocore.config import Config
from libraries.objectstore.tests.checks import check_here, refused, the_error
from plugins.s3_tier.tests.differences import CLIENTS

from kvtiers.testing.ports import free_port
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.testing.proxy import Fault, Proxy, refusal
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection
from kvtiers_s3.store import S3Store


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Return a function that sets variables in an environment that says nothing of proxies, certificates or AWS."""
    for name in list(os.environ):
        if name.upper().endswith("_PROXY") or name.startswith(("AWS_", "SSL_CERT_")) or name == "REQUESTS_CA_BUNDLE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def set_all(**variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, str(text))

    return set_all


@pytest.fixture
def proxy():
    """A proxy that the environment may name: it records, and passes on nothing but tunnels."""
    with Proxy() as between:
        yield between


@pytest.fixture
def tls(moto, tmp_path):
    """moto's server by TLS, with a certificate of an authority of its own, in the file ``ca.pem``."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with Proxy(int(moto.rpartition(":")[2]), tls=context) as server:
        yield server


def ways(config, proxy):
    """Return, for values and for lists, how often the proxy was asked, and the answer."""
    connection = Connection(config, Requests(0, 0))
    found = []
    try:
        calls = [
            lambda: list(obstore.list(connection.obstore())),
            lambda: connection.boto3_client(attempts=1).list_objects_v2(Bucket=config.bucket),
        ]
        for call in calls:
            proxy.log.clear()
            try:
                call()
                said = "ok"
            except Exception as error:  # noqa: BLE001 -- what either client raises
                said = "not trusted" if "certificate" in str(error).lower() else "failed"
            found.append((len(proxy.log), said))
    finally:
        connection.close()
    return found


# -- proxies


@pytest.mark.parametrize(
    ("variables", "goes_through"),
    [
        ({"HTTP_PROXY": "PROXY"}, True),
        ({"http_proxy": "PROXY"}, True),
        ({"HTTP_PROXY": "HOST_AND_PORT"}, True),
        ({"ALL_PROXY": "PROXY"}, True),
        ({"HTTPS_PROXY": "PROXY"}, False),
        ({"HTTP_PROXY": ""}, False),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "127.0.0.1"}, False),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "example.com, 127.0.0.0/8"}, False),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "10.0.0.0/8"}, True),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "*"}, False),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "example.com,*"}, False),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "127.0.0.1:PORT"}, False),
        ({"HTTP_PROXY": "PROXY", "NO_PROXY": "127.0.0.1:1"}, True),
        ({"ALL_PROXY": "PROXY", "no_proxy": "127.0.0.1"}, False),
    ],
)
def test_values_and_lists_go_the_same_way_whatever_the_environment_names(
    moto, moto_config, environment, proxy, variables, goes_through
):
    host_and_port, port = proxy.endpoint.partition("://")[2], moto.rpartition(":")[2]
    named = {"PROXY": proxy.endpoint, "HOST_AND_PORT": host_and_port}
    environment(**{name: named.get(text, text.replace("PORT", port)) for name, text in variables.items()})
    answer = "failed" if goes_through else "ok"  # the proxy answers that there is no bucket
    assert ways(moto_config(), proxy) == [(int(goes_through), answer)] * 2


def test_an_endpoint_by_name_is_kept_from_the_proxy_by_its_domain(moto, moto_config, environment, proxy):
    named = moto.replace("127.0.0.1", "localhost")
    environment(ALL_PROXY=proxy.endpoint, NO_PROXY=".example.com,localhost")
    assert ways(moto_config(endpoint=named), proxy) == [(0, "ok")] * 2
    environment(NO_PROXY=".example.com")
    assert [asked for asked, _ in ways(moto_config(endpoint=named), proxy)] == [1, 1]


def test_a_bucket_in_the_hosts_name_is_what_no_proxy_is_compared_with(environment, proxy):
    where = {"type": "s3", "bucket": "kvs", "access_key": "A", "secret_key": "S", "addressing": "virtual"}
    config = S3Config(**where, endpoint="http://store.invalid", region="us-east-1")
    environment(HTTP_PROXY=proxy.endpoint, NO_PROXY="kvs.store.invalid")
    assert ways(config, proxy) == [(0, "failed")] * 2
    environment(NO_PROXY="other.store.invalid")
    assert ways(config, proxy) == [(1, "failed")] * 2


def test_a_tunnel_is_asked_for_by_both_clients_and_what_the_proxy_wants_to_know_is_given(
    tls, moto_config, environment, proxy, tmp_path
):
    environment(HTTPS_PROXY=proxy.endpoint.replace("//", "//kv:se%40cret@"), AWS_CA_BUNDLE=tmp_path / "ca.pem")
    config = moto_config(endpoint=tls.endpoint)
    assert ways(config, proxy) == [(1, "ok")] * 2
    proxy.log.clear()
    found = check_here(config)
    assert {request.headers["proxy-authorization"] for request in proxy.log} == {"Basic a3Y6c2VAY3JldA=="}
    assert [finding.text for finding in found if finding.level == "error"] == []
    [way] = [finding.text for finding in found if "through the proxy" in finding.text]
    assert way.endswith(f"through the proxy {proxy.endpoint}; trusts {tmp_path}/ca.pem (AWS_CA_BUNDLE)")
    assert not any("cret" in finding.text for finding in found)


def test_a_proxy_that_is_reached_by_tls_is_trusted_by_both_clients(tls, moto_config, environment, tmp_path):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "proxy.pem")
    both = [(tmp_path / name).read_text() for name in ("ca.pem", "proxy.pem")]
    (tmp_path / "both.pem").write_text("".join(both))
    config = moto_config(endpoint=tls.endpoint)
    with Proxy(tls=context) as by_tls:
        environment(ALL_PROXY=by_tls.endpoint, AWS_CA_BUNDLE=tmp_path / "both.pem")
        assert ways(config, by_tls) == [(1, "ok")] * 2
        assert "boto3 does not check the certificate of a proxy" in refused(S3Store, moto_config())
        environment(AWS_CA_BUNDLE=tmp_path / "ca.pem")
        assert [asked for asked, _ in ways(config, by_tls)] == [0, 0]
        for client in CLIENTS:
            assert "Certificate: " in refused(S3Store, moto_config(endpoint=tls.endpoint, client=client))


@pytest.mark.parametrize(
    "proxy_url", ["socks5://kv:secret@127.0.0.1:1080", "http://kv:secret@:3128", "http://127.0.0.1:many", "http://"]
)
def test_a_proxy_that_no_client_can_use_is_refused_in_one_line(moto_config, environment, proxy_url):
    environment(ALL_PROXY=proxy_url)
    said = refused(S3Store, moto_config())
    assert f"names {proxy_url.replace('kv:secret@', '')!r} as the proxy for http://127.0.0.1" in said
    assert "set HTTP_PROXY, HTTPS_PROXY or ALL_PROXY to such a one, or name 127.0.0.1 in NO_PROXY" in said


# -- what a proxy answers is not the bucket's


def answer(status, body=b""):
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("over_tls", [False, True])
@pytest.mark.parametrize(
    ("refused_with", "said", "said_of_a_tunnel"),
    [
        (answer(403), "403 ProxyRefused", "ProxyTunnel"),
        (answer(403, b"<html><body>Denied by policy</body></html>"), "403 ProxyRefused", "ProxyTunnel"),
        (answer(407), "407 ProxyCredentials: a proxy wants credentials", "ProxyCredentials: a proxy wants credentials"),
        (answer(503), "503 SlowDown", "ProxyTunnel"),
    ],
    ids=["403", "403 with a page", "407", "503"],
)
def test_a_refusal_by_the_proxy_is_named_as_the_proxys(
    tls, moto_config, environment, proxy, client, over_tls, refused_with, said, said_of_a_tunnel
):
    proxy.script = lambda _: Fault(refused_with)
    environment(ALL_PROXY=proxy.endpoint.replace("//", "//kv:secret@"))
    text = the_error(moto_config(client=client, **({"endpoint": tls.endpoint} if over_tls else {})))
    assert (said_of_a_tunnel if over_tls else said) in text
    assert text.endswith(f"(through the proxy {proxy.endpoint})")
    assert "grant" not in text
    assert "secret" not in text


@pytest.mark.parametrize("client", CLIENTS)
def test_a_proxy_that_does_not_answer_is_named(moto_config, environment, client):
    port = free_port()
    environment(HTTP_PROXY=f"http://127.0.0.1:{port}")
    text = the_error(moto_config(client=client))
    assert (
        f"NoConnection: no server answers there; check endpoint, and that the server runs (through the proxy http://127.0.0.1:{port})"
        in text
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_what_the_bucket_refuses_through_a_proxy_stays_the_buckets(moto_config, environment, proxy, client):
    proxy.script = lambda _: Fault(refusal(403, "AccessDenied"))
    environment(HTTP_PROXY=proxy.endpoint)
    text = the_error(moto_config(client=client))
    assert "403 AccessDenied: not allowed; grant s3:GetObject" in text
    assert "through the proxy" not in text


# -- trust


@pytest.mark.parametrize("named", ["ca.pem", "other.pem", ""])
@pytest.mark.parametrize("by", ["ca_file", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "profile"])
def test_both_clients_trust_whom_the_options_or_the_environment_name(
    tls, moto_config, environment, proxy, tmp_path, by, named
):
    options = {"endpoint": tls.endpoint}
    file = tmp_path / named
    if named and by == "ca_file":
        options["ca_file"] = file
    elif named and by == "profile":
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {file}\n")
    elif named:
        environment(**{by: file})
    assert ways(moto_config(**options), proxy) == [(0, "ok" if named == "ca.pem" else "not trusted")] * 2


def test_without_a_word_both_clients_trust_the_systems_authorities(
    tls, moto_config, environment, proxy, tmp_path, monkeypatch
):
    # One stands for the system's: obstore finds it by SSL_CERT_FILE alone, boto3 where the route says.
    environment(SSL_CERT_FILE=tmp_path / "ca.pem")
    assert ways(moto_config(endpoint=tls.endpoint), proxy) == [(0, "ok")] * 2
    environment(AWS_CA_BUNDLE=tmp_path / "other.pem")  # the option before the variable, AWS's before the system's
    connection = Connection(moto_config(endpoint=tls.endpoint), Requests(0, 0))
    assert connection.route.named_by == "AWS_CA_BUNDLE"
    connection = Connection(moto_config(endpoint=tls.endpoint, ca_file=tmp_path / "ca.pem"), Requests(0, 0))
    assert connection.route.named_by == "ca_file"


@pytest.mark.parametrize("by", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_certificates_that_cannot_be_read_are_named_with_what_names_them(moto_config, environment, tmp_path, by):
    environment(**{by: tmp_path / "absent.pem"})
    said = refused(S3Store, moto_config(endpoint="https://127.0.0.1:1"))
    assert f"{by} '{tmp_path}/absent.pem' cannot be read: No such file" in said
    if by != "SSL_CERT_FILE":  # without which obstore makes no client
        port = free_port()
        assert "NoConnection" in refused(S3Store, moto_config(endpoint=f"http://127.0.0.1:{port}"))  # nothing to trust


def test_a_folder_of_certificates_is_refused_since_boto3_reads_one_file(moto_config, environment, tmp_path):
    environment(SSL_CERT_DIR=tmp_path)
    said = refused(S3Store, moto_config(endpoint="https://127.0.0.1:1"))
    assert (
        f"SSL_CERT_DIR names the folder '{tmp_path}', and boto3 reads certificates from one file; name a file" in said
    )


def test_a_machine_without_any_certificates_is_told_so_in_one_line(moto_config, environment, tmp_path):
    environment(SSL_CERT_DIR=tmp_path)
    assert "no authorities' certificates are on this machine" in refused(S3Store, moto_config(client="obstore"))
    S3Store(moto_config(client="boto3")).close()  # without TLS it needs none


# -- AWS's own endpoints

FIPS, DUAL_STACK = {"AWS_USE_FIPS_ENDPOINT": "true"}, {"AWS_USE_DUALSTACK_ENDPOINT": "true"}


@pytest.mark.parametrize(
    ("region", "bucket", "profile", "variables"),
    [
        ("us-east-1", "kvs-bucket", "", {}),
        ("us-east-1", "with.dots", "", FIPS),
        ("us-gov-west-1", "kvs-bucket", "", FIPS),
        ("us-gov-west-1", "kvs-bucket", "", DUAL_STACK),
        ("cn-north-1", "kvs-bucket", "", DUAL_STACK),
        ("eu-west-1", "with.dots", "", FIPS | DUAL_STACK),
        ("eu-west-1", "kvs-bucket", "use_fips_endpoint = true", {}),
        ("eu-west-1", "kvs-bucket", "use_fips_endpoint = true", {"AWS_USE_FIPS_ENDPOINT": "false"}),
        ("eu-west-1", "kvs-bucket", "s3 =\n    use_dualstack_endpoint = true", {}),
    ],
)
def test_values_go_to_the_host_that_boto3_finds_for_the_rest(environment, tmp_path, region, bucket, profile, variables):
    (tmp_path / "config").write_text(f"[default]\n{profile}\n")
    environment(**variables)
    keys = {"aws_access_key_id": "A", "aws_secret_access_key": "S", "region_name": region}
    style = "path" if "." in bucket else "virtual"  # "auto" means the old global host where an address is signed
    by_itself = boto3.Session(**keys).client("s3", config=Config(s3={"addressing_style": style}))
    connection = Connection(
        S3Config(type="s3", bucket=bucket, region=region, access_key="A", secret_key="S"), Requests(0, 0)
    )
    values = urlsplit(connection.obstore().config["endpoint_url_s3"]).netloc
    others, wanted = (
        urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})).netloc
        for client in (connection.boto3_client(attempts=1), by_itself)
    )
    assert values == others
    # By itself it still takes the old global host in us-east-1.
    assert values == wanted.replace("s3.amazonaws.com", "s3.us-east-1.amazonaws.com")


def test_fips_and_an_endpoint_that_is_none_of_it_are_refused(moto_config, environment):
    environment(AWS_USE_FIPS_ENDPOINT="true")
    assert "asks for FIPS, and the endpoint 'http://127.0.0.1" in refused(S3Store, moto_config())
    named = moto_config(endpoint="https://s3-fips.us-gov-west-1.amazonaws.com", region="us-gov-west-1")
    connection = Connection(named, Requests(0, 0))
    assert connection.boto3_client(attempts=1).meta.endpoint_url == named.endpoint


def test_a_region_that_aws_does_not_have_is_refused(moto_config):
    config = moto_config(endpoint="", region="moon-1")
    assert "AWS has no endpoint of region 'moon-1'; set 'region', or 'endpoint'" in refused(S3Store, config)
