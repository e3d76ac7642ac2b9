"""The store itself: parts, conditions, what is asked of the server, what is counted."""

import contextlib
import gc
import os
import ssl
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from s3_servers import client_of

from kvtiers.api import NotKept, make_offload_key
from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.value_run import ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers.testing.guarded import GuardedMemory
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError, ObjectStoreThrottledError
from kvtiers_objectstore.testing.proxy import Fault, Proxy, refusal
from kvtiers_s3.plugin import FIGURES
from kvtiers_s3.store import S3Store

PAGE = 4096
MIB = 1 << 20
PART = 5 * MIB
CLIENTS = ["obstore", "boto3"]


@pytest.fixture
def opened():
    """Return a function that opens a store, closed at the end."""
    stores = []

    def open_store(config, **more) -> S3Store:
        stores.append(S3Store(config, **more))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture
def between(radosgw):
    with Proxy(int(radosgw.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def read(store, name, nbytes):
    back = memoryview(bytearray(nbytes))
    return bytes(back) if store.read_into(name, back) == nbytes else None


def head(config, name):
    client = client_of(config.endpoint)
    return client.head_object(Bucket=config.bucket, Key=f"{config.prefix}/{name}", ChecksumMode="ENABLED")


def uploads(config):
    client = client_of(config.endpoint)
    return client.list_multipart_uploads(Bucket=config.bucket, Prefix=config.prefix).get("Uploads", [])


# -- what comes of a value, small or large


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("pages", [16, 256])
@pytest.mark.parametrize("change", [1, PAGE, MIB])
def test_a_longer_object_leaves_the_row_as_it_was(opened, config, client, pages, change):
    store, nbytes = opened(config(client=client)), pages * PAGE
    options = config()
    key = f"{options.prefix}/a/b"
    client_of(options.endpoint).put_object(Bucket=options.bucket, Key=key, Body=bytes(nbytes + change))
    row = bytearray(b"\xdb") * nbytes
    assert not store.read_into("a/b", memoryview(row))
    assert row == bytearray(b"\xdb") * nbytes


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("pages", [16, 256])
@pytest.mark.parametrize("fault", [Fault(cut=5000), Fault(cut=50_000, reset=True), Fault(drip=0.1)])
def test_a_body_that_does_not_come_whole_is_a_failure_and_its_row_is_released(
    opened, config, between, value, client, pages, fault
):
    store = opened(config(client=client, endpoint=between.endpoint, timeout="2s"))
    store.write("a/b", value(5, pages))
    row = memoryview(bytearray(pages * PAGE))
    between.script = lambda request: fault if request.method == "GET" else None
    with pytest.raises(ObjectStoreBusyError):
        store.read_into("a/b", row)
    row.release()  # BufferError if it is still in use
    between.script = lambda _request: None
    assert read(store, "a/b", pages * PAGE) == bytes([5]) * pages * PAGE


@pytest.mark.parametrize("client", CLIENTS)
def test_a_body_whose_pieces_come_late_is_given_up_in_time(opened, config, between, value, client):
    store = opened(config(client=client, endpoint=between.endpoint, timeout="4s"))
    store.write("a/b", value(5, 1))
    between.script = lambda request: Fault(drip=3.8) if request.method == "GET" else None
    begin = time.monotonic()
    with pytest.raises(ObjectStoreBusyError, match="Timeout"):
        read(store, "a/b", PAGE)
    assert time.monotonic() - begin < 7.4  # that is before the third piece


# -- values in parts


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("extra", [PAGE, PART, PART + PAGE])
def test_a_value_larger_than_a_part_moves_in_parts_both_ways(opened, config, between, value, client, extra):
    store = opened(config(client=client, endpoint=between.endpoint, part_size=PART))
    source = value(3, (PART + extra) // PAGE)
    source[PART] = 77
    store.write("a/b", source)
    assert read(store, "a/b", len(source)) == bytes(source)
    parts = -(-len(source) // PART)
    assert between.methods().count("PUT") == parts
    ranges = [request.headers["range"] for request in between.log if "range" in request.headers]
    assert len(ranges) == parts
    assert uploads(config()) == []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("change", [-PAGE, PAGE, -PART, PART])
def test_a_large_object_of_another_size_is_a_miss_or_has_its_length(opened, config, value, client, change):
    store = opened(config(client=client, part_size=PART))
    source = value(3, (2 * PART + PAGE) // PAGE)
    store.write("a/b", source)
    poison = b"\xdb" * (len(source) + change)
    row = bytearray(poison)
    found = store.read_into("a/b", memoryview(row))
    assert found == (len(source) if change > 0 else 0)
    assert row == (bytes(source) + poison[len(source) :] if change > 0 else poison)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_sends_all_where_a_part_was_asked_for_is_a_failure(opened, config, between, value, client):
    store = opened(config(client=client, endpoint=between.endpoint, part_size=PART))
    pages = 2 * PART // PAGE
    store.write("a/b", value(1, pages))
    whole = Fault(b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Sun, 01 Nov 2026 00:00:00 GMT\r\n"
                  b"Content-Length: %d\r\n\r\n" % (2 * PART) + bytes(2 * PART))  # fmt: skip
    between.script = lambda request: whole if "range" in request.headers else None
    with pytest.raises(ObjectStoreError, match="NoLength: the answer does not say"):
        read(store, "a/b", 2 * PART)
    assert store.stats()["failed_requests"] == 2
    gc.collect()  # a connection that is not closed is an error of this test
    between.script = lambda _request: None
    assert read(store, "a/b", 2 * PART) == bytes([1]) * 2 * PART


def test_a_part_of_an_object_whose_length_is_not_said_is_a_failure(opened, config, between, value):
    store = opened(config(client="boto3", endpoint=between.endpoint, part_size=PART))
    store.write("a/b", value(1, 2 * PART // PAGE))
    unknown = Fault(b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-%d/*\r\n"
                    b"Content-Length: %d\r\n\r\n" % (PART - 1, PART) + bytes(PART))  # fmt: skip
    between.script = lambda request: unknown if "range" in request.headers else None
    with pytest.raises(ObjectStoreError, match="NoLength: the answer does not say"):
        read(store, "a/b", 2 * PART)
    assert store.stats()["failed_requests"] == 2


@pytest.mark.parametrize("client", CLIENTS)
def test_the_parts_of_a_value_are_read_at_the_same_time(opened, config, between, value, client):
    store = opened(config(client=client, endpoint=between.endpoint, part_size=PART))
    store.write("a/b", value(1, 2 * PART // PAGE))
    second, ranges, waited = threading.Event(), [], []

    def hold_until_two_are_there(request):
        ranges.append(request.headers["range"])
        if len(ranges) == 2:
            second.set()
        waited.append(second.wait(9))  # the request's own time is 10 s

    between.script = hold_until_two_are_there
    assert read(store, "a/b", 2 * PART) == bytes([1]) * 2 * PART
    assert waited == [True, True], "the second part was not asked for before the first one had come"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_large_object_that_is_replaced_while_it_is_read_is_read_again(opened, config, between, value, client):
    options = config(client=client, endpoint=between.endpoint, part_size=PART, connections=1)
    store = opened(options)
    name, pages = "a/b", 2 * PART // PAGE
    store.write(name, value(1, pages))
    other = opened(config(client=client, part_size=PART))

    def replace(request):
        if request.headers.get("range", "").startswith(f"bytes={PART}-"):
            other.write(name, value(2, pages))

    between.script = replace
    with pytest.raises(ObjectStoreBusyError, match="Replaced"):
        read(store, name, 2 * PART)
    between.script = lambda _request: None
    assert read(store, name, 2 * PART) == bytes([2]) * 2 * PART


@pytest.mark.parametrize("fails", ["partNumber=2", "uploadId="])
def test_an_upload_that_fails_is_aborted(opened, config, between, value, fails):
    store = opened(config(endpoint=between.endpoint, part_size=PART))
    fault = Fault(refusal(500, "InternalError"))
    between.script = lambda r: fault if r.method in {"PUT", "POST"} and fails in r.path else None
    with pytest.raises(ObjectStoreBusyError):
        store.write("a/b", value(1, 3 * PART // PAGE))
    between.script = lambda _request: None
    assert uploads(config()) == []
    assert store.exists(["a/b"]) == [False]


def test_uploads_that_a_killed_process_left_are_aborted_when_they_are_old(opened, config):
    options = config(part_size=PART)
    client = client_of(options.endpoint)
    where = {"Bucket": options.bucket, "Key": f"{options.prefix}/a/b"}
    client.create_multipart_upload(**where)
    elsewhere = client.create_multipart_upload(Bucket=options.bucket, Key="elsewhere")
    store = opened(options, value_bytes=2 * PART)  # it looks for old ones at its start
    store.close()
    assert len(uploads(options)) == 1, "an upload that may be in flight was aborted"
    store = opened(options)
    store._parts.start_clean_up(f"{options.prefix}/", timedelta(seconds=-60))
    store.close()
    assert uploads(options) == []
    client.abort_multipart_upload(Bucket=options.bucket, Key="elsewhere", UploadId=elsewhere["UploadId"])


def test_looking_for_old_uploads_is_not_worth_an_error(opened, config, between):
    between.script = lambda r: Fault(refusal(403, "AccessDenied")) if "uploads" in r.path else None
    opened(config(endpoint=between.endpoint, part_size=PART), value_bytes=2 * PART).close()
    assert any("?uploads" in request.path for request in between.log)


# -- conditions and attributes


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("pages", [1, PART // PAGE + 1])
def test_a_conditional_put_leaves_what_is_there_unless_it_is_of_another_length(opened, config, value, client, pages):
    store = opened(config(client=client, conditional_put=True, part_size=PART))
    nbytes = pages * PAGE
    store.write("a/b", value(1, pages))
    store.write("a/b", value(2, pages))
    assert read(store, "a/b", nbytes) == bytes([1]) * nbytes
    store.write("a/b", value(3, pages + 1))
    assert read(store, "a/b", nbytes + PAGE) == bytes([3]) * (nbytes + PAGE)
    assert uploads(config()) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_value_of_the_right_length_that_is_not_ours_is_replaced_by_the_next_store(opened, moto_config, value, client):
    config = moto_config(client=client, conditional_put=True)
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


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (412, "PreconditionFailed"), (403, "AccessDenied")])
def test_a_value_that_is_refused_before_it_is_sent_is_released(opened, config, between, client, status, code):
    store = opened(config(client=client, endpoint=between.endpoint, conditional_put=True))
    fault = Fault(refusal(status, code), early=True, first_byte=0.1)
    between.script = lambda r: fault if r.method == "PUT" else None
    row = GuardedMemory().row(bytes(8 * MIB))
    for _ in range(3):
        with contextlib.suppress(ObjectStoreError):
            store.write("a/b", row.source())
        assert not row.is_kept()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("pages", [1, PART // PAGE + 1])
def test_objects_get_the_storage_class_and_the_encryption_that_are_wanted(opened, moto_config, value, client, pages):
    options = {"storage_class": "STANDARD_IA", "encryption": "sse-kms", "kms_key": "alias/some-key"}
    config = moto_config(client=client, part_size=PART, **options)
    opened(config).write("a/b", value(1, pages))
    found = head(config, "a/b")
    assert found["StorageClass"] == "STANDARD_IA"
    assert found["ServerSideEncryption"] == "aws:kms"
    assert found["SSEKMSKeyId"] == "alias/some-key"
    config = moto_config(client=client, encryption="sse-s3", part_size=PART)
    opened(config).write("a/b", value(1, pages))
    assert head(config, "a/b")["ServerSideEncryption"] == "AES256"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("checksums", "sent"), [("always", True), ("when_required", False)])
def test_checksums_are_sent_if_they_are_wanted(opened, moto, moto_bucket, moto_config, value, client, checksums, sent):
    with Proxy(int(moto.rpartition(":")[2])) as proxy:
        store = opened(moto_config(client=client, endpoint=proxy.endpoint, checksums=checksums))
        store.write("a/b", value(1, 3))
        [put] = [request for request in proxy.log if request.method == "PUT"]
        checksum = [name for name in put.headers if name.startswith(("x-amz-checksum", "x-amz-trailer"))]
        assert bool(checksum) is sent
        assert read(store, "a/b", 3 * PAGE) == bytes([1]) * 3 * PAGE


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize("over_tls", [True, False])
def test_the_payload_is_signed_if_it_is_to_be(opened, config, between, value, tmp_path, client, unsigned, over_tls):
    options = {"client": client, "unsigned_payload": unsigned}
    if over_tls:
        authority = trustme.CA()
        between.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(between.tls)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        options["ca_file"] = tmp_path / "ca.pem"
    store = opened(config(endpoint=between.endpoint, **options))
    store.write("a/b", value(1, 3))
    [put] = [request for request in between.log if request.method == "PUT"]
    assert (put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD") is unsigned
    assert read(store, "a/b", 3 * PAGE) == bytes([1]) * 3 * PAGE


@pytest.mark.parametrize("client", CLIENTS)
def test_a_quota_that_is_used_up_is_a_full_store(opened, config, between, value, client):
    store = opened(config(client=client, endpoint=between.endpoint))
    between.script = lambda r: Fault(refusal(403, "QuotaExceeded")) if r.method == "PUT" else None
    with pytest.raises(NotKept, match="QuotaExceeded"):
        store.write("a/b", value(1))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_read_only_store_writes_nothing(opened, config, value, client):
    store = opened(config(client=client), read_only=True)
    with pytest.raises(PermissionError, match="read-only"):
        store.write("a/b", value(1))
    with pytest.raises(PermissionError, match="read-only"):
        store.delete(["a/b"])
    assert store.exists(["a/b"]) == [False]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_bucket_that_is_gone_is_a_failure_and_not_a_miss(opened, config, between, client):
    store = opened(config(client=client, endpoint=between.endpoint))
    between.script = lambda r: Fault(refusal(404, "NoSuchBucket")) if r.method == "GET" else None
    with pytest.raises(ObjectStoreError, match="NoSuchBucket: there is no such bucket"):
        read(store, "a/b", PAGE)


# -- many values


def test_a_thousand_values_are_listed_and_deleted_in_pages(opened, config, between, value):
    store = opened(config(endpoint=between.endpoint))
    names = [f"model/{number:04}" for number in range(1203)]
    _write_all(opened(config()), names, value(1))
    between.log.clear()
    entries = {entry.name: entry for entry in store.list("model/")}
    assert sorted(entries) == names
    assert {entry.nbytes for entry in entries.values()} == {PAGE}
    now = datetime.now(UTC).timestamp()
    assert all(abs(now - entry.modified) < 600 for entry in entries.values())
    assert len(between.log) == 2
    between.log.clear()
    store.delete(names)
    assert between.methods() == ["POST", "POST"]
    assert list(store.list("")) == []


def _write_all(store, names, source):
    threads = [
        threading.Thread(target=lambda some: [store.write(name, source) for name in some], args=(names[i::8],))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("code", ["NotImplemented", "MissingContentMD5"])
def test_values_are_deleted_one_by_one_where_the_server_cannot_do_more(opened, config, between, value, code):
    store = opened(config(endpoint=between.endpoint))
    for name in ("a", "b", "c"):
        store.write(name, value(1))
    status = 501 if code == "NotImplemented" else 400
    between.script = lambda r: Fault(refusal(status, code)) if r.method == "POST" else None
    store.delete(["a", "c", "absent"])
    assert store.exists(["a", "b", "c"]) == [False, True, False]


def test_another_tiers_prefix_is_another_world(opened, config, value):
    one, other = opened(config(prefix="one/x")), opened(config(prefix="one/y"))
    one.write("a", value(1))
    assert other.exists(["a"]) == [False]
    assert [entry.name for entry in one.list("")] == ["a"]
    assert list(other.list("")) == []
    one.delete(["a"])


# -- figures


@pytest.mark.parametrize("client", CLIENTS)
def test_every_request_is_counted_by_its_kind_and_priced(opened, config, between, value, client):
    store = opened(config(client=client, endpoint=between.endpoint, part_size=PART, put_price=5, get_price=0.5))
    store.write("a", value(1, 2))
    store.write("large", value(1, PART // PAGE + 1))
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


@pytest.mark.parametrize("client", CLIENTS)
def test_failed_and_throttled_requests_are_counted(opened, config, between, client):
    store = opened(config(client=client, endpoint=between.endpoint))
    for status, code in ((503, "SlowDown"), (429, "TooManyRequests"), (403, "AccessDenied"), (500, "InternalError")):
        fault = Fault(refusal(status, code))
        between.script = lambda _request, fault=fault: fault
        with pytest.raises(ObjectStoreError, match=code):
            read(store, "a", PAGE)
    assert store.stats()["throttled_requests"] == 2
    assert store.stats()["failed_requests"] == 4


@pytest.mark.parametrize("client", CLIENTS)
def test_what_boto3_does_on_the_bucket_is_counted_when_it_fails(opened, config, between, value, client):
    store = opened(config(client=client, endpoint=between.endpoint, part_size=PART))
    between.script = lambda request: None if request.method == "HEAD" else Fault(refusal(503, "SlowDown"))
    with pytest.raises(ObjectStoreThrottledError):
        store.write("a", value(1, 2 * PART // PAGE))
    with pytest.raises(ObjectStoreThrottledError):
        list(store.list(""))
    assert store.stats()["throttled_requests"] == 2


# obstore takes the answer to a single put for one that says that there is a value, and looks at that.
@pytest.mark.parametrize(("client", "length"), [("boto3", PAGE), ("boto3", 2 * PART), ("obstore", 2 * PART)])
def test_a_conditional_put_that_collides_with_another_may_be_made_again(opened, config, between, value, client, length):
    store = opened(config(client=client, endpoint=between.endpoint, conditional_put=True, part_size=PART))
    last = {PAGE: "PUT", 2 * PART: "POST"}[length]

    def script(request):
        is_last = request.method == last and not request.path.endswith("uploads")
        return Fault(refusal(409, "ConditionalRequestConflict")) if is_last else None

    between.script = script
    with pytest.raises(ObjectStoreBusyError, match="409 ConditionalRequestConflict"):
        store.write("a", value(1, length // PAGE))
