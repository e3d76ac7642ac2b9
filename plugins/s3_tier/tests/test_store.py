"""The store itself, by both clients: what all object stores promise, and what is S3's own."""

import gc
import os
import ssl
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import trustme
from libraries.objectstore.tests.stores import PAGE, OpenedStores, StoreTests, read, value
from plugins.s3_tier.tests.differences import CLIENTS, S3
from s3_servers import client_of, uploads

from kvtiers.api import NotKept, make_offload_key
from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.value_run import ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError, ObjectStoreThrottledError
from kvtiers_objectstore.testing.proxy import Fault, Proxy, refusal
from kvtiers_s3.plugin import FIGURES

PART = S3.part


@pytest.fixture(params=CLIENTS)
def config(request, config):
    """Return the function that gives the options of a tier on Ceph's gateway, by each client."""
    return partial(config, client=request.param)


@pytest.fixture(params=CLIENTS)
def moto_config(request, moto_config):
    """Return the same on moto's server."""
    return partial(moto_config, client=request.param)


def head(config, name):
    client = client_of(config.endpoint)
    return client.head_object(Bucket=config.bucket, Key=f"{config.prefix}/{name}", ChecksumMode="ENABLED")


class TestS3Store(StoreTests):
    differences = S3

    @pytest.fixture(autouse=True)
    def no_upload_is_left(self, config):
        yield
        assert uploads(config()) == []

    def test_every_request_is_counted_by_its_kind_and_priced(self, opened, config, between):
        store = opened(config(endpoint=between.endpoint, part_size=PART, put_price=5, get_price=0.5))
        store.write("a", value(1, 2 * PAGE))
        store.write("large", value(1, PART + PAGE))
        read(store, "a", 2 * PAGE)
        store.exists(["a", "b"])
        list(store.list(""))
        store.delete(["a"])
        store.delete(["large", "b"])
        figures = store.stats()
        assert set(figures) == set(FIGURES)
        sent = between.methods()
        gets = sent.count("GET") - 1
        expected = {"get": gets, "list": 1, "head": 2, "put": 3, "post": 3, "delete": 1}
        assert {kind: figures[f"{kind}_requests"] for kind in expected} == expected
        assert sum(expected.values()) == len(sent)
        assert figures["read_bytes"] == 2 * PAGE
        assert figures["written_bytes"] == 3 * PAGE + PART
        assert figures["request_dollars"] == pytest.approx((3 + 3 + 1) * 0.005 + (gets + 2) * 0.0005)


class TestS3(OpenedStores):
    differences = S3

    def test_a_server_that_sends_all_where_a_part_was_asked_for_is_a_failure(self, opened, config, between):
        store = opened(config(endpoint=between.endpoint, part_size=PART))
        store.write("a/b", value(1, 2 * PART))
        whole = Fault(b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Sun, 01 Nov 2026 00:00:00 GMT\r\n"
                      b"Content-Length: %d\r\n\r\n" % (2 * PART) + bytes(2 * PART))  # fmt: skip
        between.script = lambda request: whole if "range" in request.headers else None
        with pytest.raises(ObjectStoreError, match="NoLength: the answer does not say"):
            read(store, "a/b", 2 * PART)
        assert store.stats()["failed_requests"] == 2
        gc.collect()  # a connection that is not closed is an error of this test
        between.script = lambda _request: None
        assert read(store, "a/b", 2 * PART) == bytes([1]) * 2 * PART

    @pytest.mark.parametrize("config", ["boto3"], indirect=True)
    def test_a_part_of_an_object_whose_length_is_not_said_is_a_failure(self, opened, config, between):
        store = opened(config(endpoint=between.endpoint, part_size=PART))
        store.write("a/b", value(1, 2 * PART))
        unknown = Fault(b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-%d/*\r\n"
                        b"Content-Length: %d\r\n\r\n" % (PART - 1, PART) + bytes(PART))  # fmt: skip
        between.script = lambda request: unknown if "range" in request.headers else None
        with pytest.raises(ObjectStoreError, match="NoLength: the answer does not say"):
            read(store, "a/b", 2 * PART)
        assert store.stats()["failed_requests"] == 2

    def test_a_value_of_the_right_length_that_is_not_ours_is_replaced_by_the_next_store(self, opened, moto_config):
        config = moto_config(conditional_put=True)
        key, rows = make_offload_key(os.urandom(32), 0), value(7)
        names = StorageNames("ns/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
        views = ValueViews(rows, PAGE)
        mover = ValueMover(opened(config), views, MoverOptions([(4000, PAGE)]), threading.Event())
        run = ValueRun(names, [key], [0], time.monotonic() + 60)
        assert list(mover.store(run).statuses) == [Status.DONE]
        where = {"Bucket": config.bucket, "Key": f"{config.prefix}/{names.name(key)}"}
        foreign = bytearray(client_of(config.endpoint).get_object(**where)["Body"].read())
        foreign[PAGE - 64 + 32] ^= 1  # of another layout
        client_of(config.endpoint).put_object(**where, Body=bytes(foreign))
        assert list(mover.load(run).statuses) == [Status.MISSING]
        assert list(mover.store(replace(run, overwrites=b"\1")).statuses) == [Status.DONE]
        assert list(mover.load(run).statuses) == [Status.DONE]

    @pytest.mark.parametrize("nbytes", [PAGE, PART + PAGE])
    def test_objects_get_the_storage_class_and_the_encryption_that_are_wanted(self, opened, moto_config, nbytes):
        options = {"storage_class": "STANDARD_IA", "encryption": "sse-kms", "kms_key": "alias/some-key"}
        config = moto_config(part_size=PART, **options)
        opened(config).write("a/b", value(1, nbytes))
        found = head(config, "a/b")
        assert found["StorageClass"] == "STANDARD_IA"
        assert found["ServerSideEncryption"] == "aws:kms"
        assert found["SSEKMSKeyId"] == "alias/some-key"
        config = moto_config(encryption="sse-s3", part_size=PART)
        opened(config).write("a/b", value(1, nbytes))
        assert head(config, "a/b")["ServerSideEncryption"] == "AES256"

    @pytest.mark.parametrize(("checksums", "sent"), [("always", True), ("when_required", False)])
    def test_checksums_are_sent_if_they_are_wanted(self, opened, moto, moto_bucket, moto_config, checksums, sent):
        with Proxy(int(moto.rpartition(":")[2])) as proxy:
            store = opened(moto_config(endpoint=proxy.endpoint, checksums=checksums))
            store.write("a/b", value(1, 3 * PAGE))
            [put] = [request for request in proxy.log if request.method == "PUT"]
            checksum = [name for name in put.headers if name.startswith(("x-amz-checksum", "x-amz-trailer"))]
            assert bool(checksum) is sent
            assert read(store, "a/b", 3 * PAGE) == bytes([1]) * 3 * PAGE

    @pytest.mark.parametrize("unsigned", [True, False])
    @pytest.mark.parametrize("over_tls", [True, False])
    def test_the_payload_is_signed_if_it_is_to_be(self, opened, config, between, tmp_path, unsigned, over_tls):
        options = {"unsigned_payload": unsigned}
        if over_tls:
            authority = trustme.CA()
            between.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("127.0.0.1").configure_cert(between.tls)
            authority.cert_pem.write_to_path(tmp_path / "ca.pem")
            options["ca_file"] = tmp_path / "ca.pem"
        store = opened(config(endpoint=between.endpoint, **options))
        store.write("a/b", value(1, 3 * PAGE))
        [put] = [request for request in between.log if request.method == "PUT"]
        assert (put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD") is unsigned
        assert read(store, "a/b", 3 * PAGE) == bytes([1]) * 3 * PAGE

    def test_a_quota_that_is_used_up_is_a_full_store(self, opened, config, between):
        store = opened(config(endpoint=between.endpoint))
        between.script = lambda r: Fault(refusal(403, "QuotaExceeded")) if r.method == "PUT" else None
        with pytest.raises(NotKept, match="QuotaExceeded"):
            store.write("a/b", value(1))

    def test_what_boto3_does_on_the_bucket_is_counted_when_it_fails(self, opened, config, between):
        store = opened(config(endpoint=between.endpoint, part_size=PART))
        between.script = lambda request: None if request.method == "HEAD" else Fault(refusal(503, "SlowDown"))
        with pytest.raises(ObjectStoreThrottledError):
            store.write("a", value(1, 2 * PART))
        with pytest.raises(ObjectStoreThrottledError):
            list(store.list(""))
        assert store.stats()["throttled_requests"] == 2

    # obstore takes the answer to a single put for one that says that there is a value, and looks at that.
    @pytest.mark.parametrize(
        ("config", "length"), [("boto3", PAGE), ("boto3", 2 * PART), ("obstore", 2 * PART)], indirect=["config"]
    )
    def test_a_conditional_put_that_collides_with_another_may_be_made_again(self, opened, config, between, length):
        store = opened(config(endpoint=between.endpoint, conditional_put=True, part_size=PART))
        last = {PAGE: "PUT", 2 * PART: "POST"}[length]

        def script(request):
            is_last = request.method == last and not request.path.endswith("uploads")
            return Fault(refusal(409, "ConditionalRequestConflict")) if is_last else None

        between.script = script
        with pytest.raises(ObjectStoreBusyError, match="409 ConditionalRequestConflict"):
            store.write("a", value(1, length))
