"""The store itself, on fake-gcs-server: what all tiers by obstore promise, and what is Google's own."""

import pytest
from gcs_servers import FakeGcs, delete_bucket, new_bucket
from objectstore_stores import StoreTests, read, value

from kvtiers.api import TierUnavailable
from kvtiers_gcs.config import GcsConfig
from kvtiers_gcs.store import GcsStore
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError
from kvtiers_objectstore.testing.proxy import Fault, refusal


class TestGcsStore(StoreTests):
    store_class = GcsStore
    part = 5 << 20
    deletes_many = False

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

    def test_a_bucket_that_is_gone_is_a_failure_and_not_a_miss(self, opened, fake_gcs, config):
        bucket = new_bucket(fake_gcs.endpoint)
        store = opened(config(bucket=bucket))
        store.write("a", value(1))
        delete_bucket(fake_gcs.endpoint, bucket)
        for work in (
            lambda: read(store, "a"),
            lambda: store.write("b", value(1)),
            lambda: store.delete(["a"]),
            lambda: list(store.list("")),
        ):
            with pytest.raises(ObjectStoreError, match="404 NoSuchBucket: there is no such bucket here"):
                work()

    def test_a_server_that_is_killed_and_comes_back_has_what_it_had(self, opened):
        with FakeGcs(keeps=True) as server:
            config = GcsConfig(type="gcs", bucket=new_bucket(server.endpoint), endpoint=server.endpoint, anonymous=True)
            store = opened(config)
            store.write("a", value(7))
            server.stop()
            with pytest.raises(ObjectStoreBusyError, match=r"NoConnection|CutOff"):
                read(store, "a")
            with pytest.raises(TierUnavailable, match="NoConnection: no server answers there; check endpoint"):
                GcsStore(config)
            server.start()
            assert read(store, "a") == bytes([7]) * 4096


def test_another_program_sees_what_is_written_and_its_writes_are_seen(config, objects):
    options = config()
    store = GcsStore(options)
    store.write("a", value(3))
    assert objects.get(f"{options.prefix}/a") == bytes([3]) * 4096
    objects.put(f"{options.prefix}/b", bytes([4]) * 4096)
    assert read(store, "b") == bytes([4]) * 4096
    store.close()
