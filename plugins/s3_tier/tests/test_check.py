"""What ``kvtiers check`` says of a server that does not do what it should: one line, with what to do about it."""

from functools import partial

import pytest
from libraries.objectstore.tests.checks import CheckTests, check_here, the_error
from plugins.s3_tier.tests.differences import CLIENTS, S3
from s3_servers import client_of, new_bucket

from kvtiers.testing.ports import free_port
from kvtiers_objectstore.testing.proxy import Fault, refusal
from kvtiers_s3.store import S3Store

MIB = 1 << 20


def warnings(findings):
    return [f"{finding.text}. Fix: {finding.fix}" for finding in findings if finding.level == "warning"]


class TestS3Check(CheckTests):
    differences = S3

    @pytest.fixture(params=CLIENTS)
    def config(self, request, config):
        return partial(config, client=request.param)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_healthy_bucket_has_no_error(config, client):
    found = check_here(config(client=client))
    assert [finding for finding in found if finding.level == "error"] == []
    assert any(f"region us-east-1, path addressing, values by {client}" in finding.text for finding in found)


# -- what the server itself refuses


@pytest.mark.parametrize("client", CLIENTS)
def test_a_wrong_access_key(config, client):
    text = the_error(config(client=client, access_key="ABSENT"))
    assert "403 InvalidAccessKeyId: the server has no such access key; check access_key" in text


@pytest.mark.parametrize("client", CLIENTS)
def test_a_wrong_secret_key(config, client):
    text = the_error(config(client=client, secret_key="not-this-one"))
    assert "403 SignatureDoesNotMatch: the secret key does not belong to the access key" in text
    assert "not-this-one" not in text


@pytest.mark.parametrize("client", CLIENTS)
def test_no_permission(radosgw, config, client):
    keys = {"access_key": f"GUEST{client}", "secret_key": "GUESTKEY"}
    user = [f"--uid=guest-{client}", f"--display-name={client}", f"--access-key={keys['access_key']}"]
    radosgw.admin("user", "create", *user, "--secret-key=GUESTKEY")
    text = the_error(config(client=client, **keys))
    assert "403 AccessDenied: not allowed; grant s3:GetObject" in text


# -- what a script makes it say


def said_of(config, proxy, script, **options) -> str:
    proxy.script = script
    return the_error(config(endpoint=proxy.endpoint, **options))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("status", "code"), [(400, "AuthorizationHeaderMalformed"), (301, "PermanentRedirect")])
def test_a_wrong_region_is_named_with_the_right_one(config, between, client, status, code):
    answer = refusal(status, code, "x-amz-bucket-region: eu-west-1\r\n")
    text = said_of(config, between, lambda _: Fault(answer), client=client)
    assert code in text
    assert "set 'region' to the bucket's region (it says 'eu-west-1')" in text


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("code", ["PermanentRedirect", "TemporaryRedirect", ""])
@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_that_names_no_region_is_not_followed(config, between, client, status, code):
    text = said_of(config, between, lambda _: Fault(refusal(status, code)), client=client)
    assert "Redirect: the bucket is in another region; set 'region' to the bucket's region" in text
    assert len(between.log) <= 2


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(cut=1000), "CutOff"),
        (Fault(cut=1000, reset=True), "CutOff"),
        (Fault(drip=0.1), "Timeout"),
    ],
    ids=["truncated", "reset", "drips"],
)
def test_a_body_that_fails(config, between, client, fault, expected):
    def script(request):
        return fault if request.method == "GET" and "_check/" in request.path else None

    between.script = script
    found = check_here(config(client=client, endpoint=between.endpoint, timeout="2s"), 64 << 10)
    errors = [finding.text for finding in found if finding.level == "error"]
    assert "reading the probe value back" in errors[0]
    assert expected in errors[0]


@pytest.mark.parametrize("client", CLIENTS)
def test_an_object_of_another_size_than_was_written(config, between, client):
    """Another writer uses the same names."""
    options = config(client=client, endpoint=between.endpoint)
    elsewhere = client_of(config().endpoint)

    def script(request):
        if request.method == "GET" and "/_check/" in request.path:
            key = request.path.split("/", 2)[2]
            elsewhere.put_object(Bucket=options.bucket, Key=key, Body=b"short")

    between.script = script
    errors = [finding.text for finding in check_here(options) if finding.level == "error"]
    assert "the value just written cannot be read back: absent, or of another length" in errors[0]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_port_at_which_no_server_listens(config, client):
    port = free_port()
    text = the_error(config(client=client, endpoint=f"http://127.0.0.1:{port}"))
    assert "NoConnection: no server answers there; check endpoint" in text


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read: No such file"), ("x", "has no certificate")])
def test_a_file_without_certificates(config, tmp_path, content, said):
    if content:
        (tmp_path / "ca.pem").write_text(content)
    assert said in the_error(config(ca_file=tmp_path / "ca.pem"))


# -- what the bucket is set to


def test_a_bucket_without_rules_gets_a_warning_with_the_command(config):
    found = warnings(check_here(config(prefix="team/llama")))
    assert any(
        "the bucket grows for ever. Fix: 'kvtiers-s3 lifecycle --days N --prefix team/llama'" in w for w in found
    )
    assert any("no lifecycle rule aborts uploads that a killed process left" in w for w in found)


def test_the_rule_that_the_command_prints_is_the_one_that_is_wanted(config, radosgw, capsys, monkeypatch):
    import json
    import sys

    from kvtiers_s3.cli import main

    monkeypatch.setattr(sys, "argv", ["kvtiers-s3", "lifecycle", "--days", "9", "--prefix", "team/llama"])
    main()
    printed = json.loads(capsys.readouterr().out)
    bucket = new_bucket(radosgw.endpoint)
    client_of(radosgw.endpoint).put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=printed)
    found = check_here(config(bucket=bucket, prefix="team/llama"))
    assert not any("lifecycle" in text for text in warnings(found))
    texts = [finding.text for finding in found]
    assert "values are removed 9 days after they were written" in texts
    assert "uploads that never ended are aborted after 1 days" in texts
    found = warnings(check_here(config(bucket=bucket, prefix="team/other")))
    assert any("grows for ever" in warning for warning in found)


def test_uploads_in_flight_are_reported(config):
    options = config()
    client = client_of(options.endpoint)
    where = {"Bucket": options.bucket, "Key": f"{options.prefix}/a"}
    upload = client.create_multipart_upload(**where)["UploadId"]
    assert any(finding.text.startswith("1 uploads in flight, or left") for finding in check_here(options))
    client.abort_multipart_upload(**where, UploadId=upload)


def test_versions_are_warned_of(config, radosgw):
    bucket = new_bucket(radosgw.endpoint)
    client = client_of(radosgw.endpoint)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    assert any("the bucket keeps versions" in warning for warning in warnings(check_here(config(bucket=bucket))))


def test_what_may_not_be_looked_at_is_a_warning(config, between):
    between.script = lambda r: Fault(refusal(403, "AccessDenied")) if "?lifecycle" in r.path else None
    found = warnings(check_here(config(endpoint=between.endpoint)))
    assert any("GET of the bucket's lifecycle rules: 403 AccessDenied" in warning for warning in found)


# -- what a request costs


def test_small_values_far_away_are_warned_of_and_large_ones_are_not(config, between):
    between.script = lambda _request: Fault(first_byte=0.03)
    between.bytes_per_second = 100e6
    store = S3Store(config(endpoint=between.endpoint))
    try:
        [small] = warnings(f for f in store.diagnose(64 << 10) if "is read in" in f.text)
        assert "of it the request itself: more requests than bytes are paid for. Fix: raise blocks_per_chunk" in small
        [large] = [finding for finding in store.diagnose(8 * MIB) if "is read in" in finding.text]
        assert large.level == "ok"
    finally:
        store.close()
