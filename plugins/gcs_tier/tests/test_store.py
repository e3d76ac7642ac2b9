"""The store itself, on fake-gcs-server: what all object stores promise, and what is Google's own."""

import socket
import urllib.error

import pytest
from gcs_servers import TOKEN, FakeGcs, new_bucket
from libraries.objectstore.tests.stores import BucketTests, RestartTests, StoreTests, value
from plugins.gcs_tier.tests.differences import GCS

from kvtiers_gcs.config import GcsConfig
from kvtiers_objectstore.failures import ObjectStoreBusyError
from kvtiers_objectstore.testing.proxy import Fault, refusal


class TestGcsStore(StoreTests):
    differences = GCS

    def test_objects_get_the_storage_class_that_is_wanted(self, opened, config, between, through):
        store = opened(config(**through(between), storage_class="NEARLINE", part_size=self.part))
        store.write("a", value(1))
        store.write("large", value(1, self.part + 4096))
        classes = [
            r.headers.get("x-goog-storage-class") for r in between.log if r.method == "PUT" or "uploads" in r.path
        ]
        assert classes.count("NEARLINE") == 2  # of parts, the request that begins them has it

    def test_an_upload_that_fails_is_aborted(self, opened, config, between, through):
        store = opened(config(**through(between), part_size=self.part))
        fault = Fault(refusal(503, "SlowDown"))
        between.script = lambda r: fault if "partNumber=2" in r.path else None
        with pytest.raises(ObjectStoreBusyError):
            store.write("a", value(1, 3 * self.part))
        assert [r.method for r in between.log if "uploadId=" in r.path and "partNumber" not in r.path] == ["DELETE"]


class TestGcsBucket(BucketTests):
    differences = GCS


class TestGcsRestart(RestartTests):
    differences = GCS

    @pytest.fixture
    def keeping(self):
        with FakeGcs(keeps=True) as server:
            where = {"bucket": new_bucket(server.endpoint), "endpoint": server.endpoint}
            yield server, GcsConfig(type="gcs", anonymous=True, **where)


def test_the_gateway_keeps_nothing_of_an_upload_whose_sender_ends_in_the_middle(fake_gcs, bucket, objects):
    """As Google's service does: what a killed writer leaves would else be a half value of the gateway's making."""
    head = f"PUT /{bucket}/half HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fake_gcs.port), 10) as sock:
        sock.sendall(head.encode() + bytes(600))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        objects.get("half")
