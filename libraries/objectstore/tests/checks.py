"""``kvtiers check`` of a bucket: the tests that S3, Google Cloud Storage and Azure share.

A subclass gives its ``differences`` and the fixtures ``config``, ``between`` and ``through``, as in ``stores``.
"""

import os
import ssl

import pytest
import trustme
from libraries.objectstore.tests.stores import OpenedStores

from kvtiers.api import ConfigError, Finding, TierUnavailable
from kvtiers.cli.check.check_tier import task_of, try_tiers
from kvtiers.cli.check.trial_process import run_trial
from kvtiers_objectstore.testing.proxy import Fault, Proxy, refusal

__all__ = ["CheckTests", "EnvironmentTests", "check", "check_here", "refused", "the_error"]


def check(config, value_bytes=1 << 18):
    """Return the findings of a trial process."""
    [trial] = try_tiers([config], "ns", value_bytes, 60.0)
    return trial.findings


def check_here(config, value_bytes=1 << 18):
    """Return the findings of the same trial in this process: to start one takes a second, most trials take less."""
    messages = []
    run_trial(task_of(config, "ns", value_bytes), messages.append)
    return [Finding(**message) for message in messages if "level" in message]


def the_error(config) -> str:
    """Return the one error of the check; it is one line, and says what to do."""
    [error] = [finding for finding in check_here(config) if finding.level == "error"]
    assert "\n" not in error.text
    assert error.fix
    return error.text


def refused(store_class, config) -> str:
    """Return what opening the store raises, which is what the check says; without a process for it."""
    with pytest.raises((ConfigError, TierUnavailable)) as raised:
        store_class(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def forget_proxies(monkeypatch):
    """Have the environment name no proxy."""
    for name in [name for name in os.environ if name.upper().endswith("_PROXY")]:
        monkeypatch.delenv(name)


class CheckTests(OpenedStores):
    """What the service itself says, or the way to it."""

    def test_a_healthy_bucket_has_no_error_and_a_check_leaves_nothing(self, config, opened):
        found = check(config())
        assert [finding for finding in found if finding.level == "error"] == []
        client = getattr(config(), "client", "obstore")
        assert any(f"values by {client}" in finding.text for finding in found)
        assert any("is read in" in finding.text for finding in found)
        assert list(opened(config()).list("")) == []

    @pytest.mark.parametrize(
        ("fault", "timeout", "expected"),
        [
            (Fault(cut=0, reset=True), "30s", "CutOff: the connection ended in the middle of an answer"),
            (Fault(first_byte=9.0), "1s", "Timeout: no answer in time"),
            (Fault(refusal(500, "InternalError")), "30s", "500 InternalError"),
        ],
        ids=["reset", "slow", "500"],
    )
    def test_a_connection_that_fails_at_the_start(self, config, between, through, fault, timeout, expected):
        between.script = lambda _: fault
        assert expected in the_error(config(**through(between), timeout=timeout))

    def test_an_endpoint_without_an_address(self, config):
        assert "NoAddress" in the_error(config(endpoint="http://nowhere.invalid"))

    def test_no_tls_where_it_is_expected(self, config):
        endpoint = config().endpoint.replace("http:", "https:")
        assert "NotTls: the server does not speak TLS there" in the_error(config(endpoint=endpoint))

    def test_a_private_authority_has_to_be_given(self, config, between, through, tmp_path):
        authority = trustme.CA()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(tls)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        with Proxy(between.upstream, tls=tls) as proxy:
            said = the_error(config(**through(proxy)))
            assert "Certificate: the server's certificate is not trusted; give its authority's certificate" in said
            assert "Certificate: " in the_error(config(**through(proxy), ca_file=tmp_path / "other.pem"))
            found = check_here(config(**through(proxy), ca_file=tmp_path / "ca.pem"))
        assert [finding for finding in found if finding.level == "error"] == []

    @pytest.mark.parametrize("method", ["PUT", "LIST", "DELETE"])
    def test_a_right_that_is_missing_is_named(self, config, between, through, method):
        def is_meant(request):
            if method == "LIST":
                return request.method == "GET" and ("comp=list" in request.path or "list-type=" in request.path)
            return request.method == method or (method == "DELETE" and request.method == "POST")

        between.script = lambda request: Fault(refusal(403, "AccessDenied")) if is_meant(request) else None
        errors = [finding.text for finding in check_here(config(**through(between))) if finding.level == "error"]
        assert any(f"{method} " in text and "403 AccessDenied: not allowed; grant" in text for text in errors), errors

    def test_a_missing_bucket(self, config):
        bucket = self.differences.bucket
        said = the_error(config(**{bucket: "there-is-none"}))
        assert f"{bucket} 'there-is-none'" in said
        assert f"404 {self.differences.no_bucket}: there is no such {bucket} here; check {bucket}" in said

    def test_a_refusal_is_named_with_its_cure(self, config, between, through, cure):
        answer = refusal(cure.status, cure.code, "Retry-After: 1\r\n", cure.message)
        between.script = lambda _: Fault(answer)
        assert cure.said in refused(self.differences.store_class, config(**through(between)))


class EnvironmentTests:
    """What the environment says of proxies and certificates. S3's tests look closer, at two clients."""

    @pytest.mark.parametrize(("status", "code"), [(403, "ProxyRefused"), (407, "ProxyCredentials"), (502, "")])
    def test_what_a_proxy_answers_is_named_as_the_proxys(self, config, monkeypatch, status, code):
        forget_proxies(monkeypatch)
        answer = f"HTTP/1.1 {status} No\r\nContent-Length: 6\r\n\r\n<html>".encode()
        with Proxy(script=lambda _: Fault(answer)) as refusing:
            monkeypatch.setenv("HTTP_PROXY", refusing.endpoint)
            said = the_error(config())
            assert said.endswith(f"(through the proxy {refusing.endpoint})")
        assert f"{status} {code}" in said
        assert "grant" not in said

    def test_all_requests_go_past_a_proxy_where_no_proxy_names_the_endpoints_network(self, config, monkeypatch):
        forget_proxies(monkeypatch)
        with Proxy() as proxy:
            monkeypatch.setenv("ALL_PROXY", proxy.endpoint)
            monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,127.0.0.0/8")
            found = check_here(config())
            assert proxy.log == []
        assert [finding.text for finding in found if finding.level == "error"] == []
        assert any("without a proxy" in finding.text for finding in found)

    def test_a_machine_without_any_certificates_is_told_so_in_one_line(self, config, monkeypatch, tmp_path):
        for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        said = the_error(config())
        assert "no authorities' certificates are on this machine" in said
        assert "install the package ca-certificates, or name a file of them in SSL_CERT_FILE" in said
