"""The store over a bucket: the tests that S3, Google Cloud Storage and Azure share.

A subclass gives its ``differences`` and the fixtures ``config``, which makes the options of a tier, under one prefix;
``between``, a proxy before the server, with ``config(**through(between))`` for the options of a tier behind it;
``objects``, which writes (``put``) and reads (``get``) an object as another program does; and ``doomed``: the name of a
bucket, and a function that deletes it.
"""

import contextlib
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from libraries.objectstore.tests.differences import Suite

from kvtiers.api import TierUnavailable
from kvtiers.testing.guarded import GuardedMemory
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError
from kvtiers_objectstore.store import ObjectStore
from kvtiers_objectstore.testing.proxy import Fault, refusal

__all__ = ["PAGE", "BucketTests", "OpenedStores", "RestartTests", "StoreTests", "read", "value"]

PAGE = 4096
LIST_PAGE = 1000  # names in an answer; Azure's has 5,000


def value(byte: int, nbytes: int = PAGE) -> memoryview:
    """Return a page-aligned value with the same bytes."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[:] = bytes([byte]) * nbytes
    return memory


def read(store: ObjectStore, name: str, nbytes: int = PAGE) -> bytes | None:
    """Return a value, or None."""
    back = memoryview(bytearray(nbytes))
    return bytes(back) if store.read_into(name, back) == nbytes else None


def in_parts(request: Any) -> bool:
    """Return whether a request writes a part of a value."""
    return request.method == "PUT" and ("partNumber=" in request.path or "comp=block&" in request.path)


class OpenedStores(Suite):
    """Stores that are closed at a test's end."""

    @pytest.fixture
    def opened(self):
        """Return a function that opens a store."""
        stores = []

        def open_store(config, **more):
            stores.append(self.differences.store_class(config, **more))
            return stores[-1]

        yield open_store
        for store in stores:
            store.close()


class StoreTests(OpenedStores):
    """Values: what moves them."""

    @property
    def part(self) -> int:
        """Bytes of a part."""
        return self.differences.part

    # -- what comes of a value, small or large

    @pytest.mark.parametrize(("pages", "change"), [(16, 1), (16, PAGE), (256, 1 << 20)])
    def test_a_longer_object_leaves_the_row_as_it_was(self, opened, config, objects, pages, change):
        store, nbytes = opened(config()), pages * PAGE
        objects.put(f"{config().prefix}/a/b", bytes(nbytes + change))
        row = bytearray(b"\xdb") * nbytes
        assert not store.read_into("a/b", memoryview(row))
        assert row == bytearray(b"\xdb") * nbytes

    @pytest.mark.parametrize("fault", [Fault(cut=5000), Fault(cut=50_000, reset=True), Fault(drip=0.1)])
    def test_a_body_that_does_not_come_whole_is_a_failure_and_its_row_is_released(
        self, opened, config, between, through, fault
    ):
        store = opened(config(**through(between), timeout="3s"))
        store.write("a/b", value(5, 64 * PAGE))
        row = memoryview(bytearray(64 * PAGE))
        between.script = lambda request: fault if request.method == "GET" else None
        with pytest.raises(ObjectStoreBusyError):
            store.read_into("a/b", row)
        row.release()  # BufferError if it is still in use
        between.script = lambda _request: None
        assert read(store, "a/b", 64 * PAGE) == bytes([5]) * 64 * PAGE

    def test_a_value_larger_than_a_part_moves_in_parts_both_ways(self, opened, config, between, through):
        store = opened(config(**through(between), part_size=self.part))
        source = value(3, 2 * self.part + PAGE)
        source[self.part] = 77
        store.write("a/b", source)
        assert read(store, "a/b", len(source)) == bytes(source)
        assert sum(map(in_parts, between.log)) == 3
        assert len([request for request in between.log if "range" in request.headers]) == 3
        figures = store.stats()
        assert (figures["put_requests"], figures["written_bytes"]) == (3, len(source))

    @pytest.mark.parametrize(("parts", "pages"), [(0, -1), (0, 1), (-1, 0), (1, 0)])
    def test_a_large_object_of_another_size_is_a_miss_or_has_its_length(self, opened, config, parts, pages):
        store, change = opened(config(part_size=self.part)), parts * self.part + pages * PAGE
        source = value(3, 2 * self.part + PAGE)
        store.write("a/b", source)
        poison = b"\xdb" * (len(source) + change)
        row = bytearray(poison)
        found = store.read_into("a/b", memoryview(row))
        assert found == (len(source) if change > 0 else 0)
        assert row == (bytes(source) + poison[len(source) :] if change > 0 else poison)

    @pytest.mark.parametrize("method", ["GET", "PUT"])
    def test_the_parts_of_a_value_are_moved_at_the_same_time(self, opened, config, between, through, method):
        store = opened(config(**through(between), part_size=self.part, timeout="30s"))
        source = value(1, 2 * self.part)
        if method == "GET":
            store.write("a/b", source)
        second, parts, waited = threading.Event(), [], []

        def hold_until_two_are_there(request):
            if in_parts(request) or (request.method == "GET" and "range" in request.headers):
                parts.append(request.path)
                if len(parts) == 2:
                    second.set()
                waited.append(second.wait(25))  # the request's own time is 30 s

        between.script = hold_until_two_are_there
        if method == "PUT":
            store.write("a/b", source)
        else:
            assert read(store, "a/b", len(source)) == bytes(source)
        assert waited == [True, True], "the second part was not asked for before the first one had come"

    def test_a_large_object_that_is_replaced_while_it_is_read_is_read_again(self, opened, config, between, through):
        store = opened(config(**through(between), part_size=self.part, connections=1))
        nbytes = 2 * self.part
        store.write("a/b", value(1, nbytes))
        other = opened(config(part_size=self.part))

        def replace(request):
            if request.headers.get("range", "").startswith(f"bytes={self.part}-"):
                other.write("a/b", value(2, nbytes))

        between.script = replace
        with pytest.raises(ObjectStoreBusyError, match="Replaced"):
            read(store, "a/b", nbytes)
        between.script = lambda _request: None
        assert read(store, "a/b", nbytes) == bytes([2]) * nbytes

    @pytest.mark.parametrize("last", [False, True], ids=["a part", "the request that ends it"])
    def test_an_upload_that_fails_leaves_nothing_that_looks_like_a_value(self, opened, config, between, through, last):
        store = opened(config(**through(between), part_size=self.part))
        fault = Fault(refusal(500, "InternalError"))

        def script(request):
            is_last = "comp=blocklist" in request.path or (request.method == "POST" and "uploadId=" in request.path)
            return fault if (is_last if last else in_parts(request)) else None

        between.script = script
        source = GuardedMemory().row(bytes(3 * self.part))
        with pytest.raises(ObjectStoreBusyError):
            store.write("a/b", source.source())
        assert not source.is_kept()
        between.script = lambda _request: None
        assert store.exists(["a/b"]) == [False]
        assert list(store.list("")) == []

    @pytest.mark.parametrize(
        ("status", "code"), [(503, "SlowDown"), (412, "PreconditionFailed"), (403, "AccessDenied")]
    )
    def test_a_value_that_is_refused_before_it_is_sent_is_released(
        self, opened, config, between, through, status, code
    ):
        store = opened(config(**through(between), conditional_put=True))
        fault = Fault(refusal(status, code), early=True, first_byte=0.1)
        between.script = lambda request: fault if request.method == "PUT" else None
        row = GuardedMemory().row(bytes(8 << 20))
        for _ in range(3):
            with contextlib.suppress(ObjectStoreError):
                store.write("a/b", row.source())
            assert not row.is_kept()

    # -- conditions

    @pytest.mark.parametrize("large", [False, True])
    def test_a_conditional_put_leaves_what_is_there_unless_it_is_of_another_length(self, opened, config, large):
        store = opened(config(conditional_put=True, part_size=self.part))
        nbytes = self.part + PAGE if large else PAGE
        store.write("a/b", value(1, nbytes))
        store.write("a/b", value(2, nbytes))
        assert read(store, "a/b", nbytes) == bytes([1]) * nbytes
        store.write("a/b", value(3, nbytes + PAGE))
        assert read(store, "a/b", nbytes + PAGE) == bytes([3]) * (nbytes + PAGE)

    # -- figures

    def test_every_request_is_counted_by_its_kind_and_priced(self, opened, config, between, through):
        store = opened(config(**through(between), put_price=5, get_price=0.5))
        store.write("a", value(1, 2 * PAGE))
        read(store, "a", 2 * PAGE)
        store.exists(["a", "b"])
        list(store.list(""))
        store.delete(["a"])
        figures = store.stats()
        expected = {"get": 2, "list": 1, "head": 2, "put": 1, "post": 0, "delete": 1}
        assert {kind: figures[f"{kind}_requests"] for kind in expected} == expected
        assert sum(expected.values()) == len(between.log)
        assert (figures["read_bytes"], figures["written_bytes"]) == (2 * PAGE, 2 * PAGE)
        assert figures["request_dollars"] == pytest.approx((1 + 1) * 0.005 + 4 * 0.0005)

    def test_failed_and_throttled_requests_are_counted(self, opened, config, between, through):
        store = opened(config(**through(between)))
        for status, code in (
            (503, "SlowDown"),
            (429, "TooManyRequests"),
            (403, "AccessDenied"),
            (500, "InternalError"),
        ):
            fault = Fault(refusal(status, code, "Retry-After: 1\r\n"))
            between.script = lambda _request, fault=fault: fault
            with pytest.raises(ObjectStoreError, match=code):
                read(store, "a")
        assert store.stats()["throttled_requests"] == 2
        assert store.stats()["failed_requests"] == 4

    def test_a_body_whose_pieces_come_late_is_given_up_in_time(self, opened, config, between, through):
        store = opened(config(**through(between), timeout="6s"))
        store.write("a/b", value(5))
        between.script = lambda request: Fault(drip=5.6) if request.method == "GET" else None
        begin = time.monotonic()
        with pytest.raises(ObjectStoreBusyError, match="Timeout"):
            read(store, "a/b")
        assert time.monotonic() - begin < 11  # that is before the third piece


class BucketTests(OpenedStores):
    """The rest of what is done with a bucket: objects of others, lists, deletes."""

    def test_a_read_only_store_writes_nothing(self, opened, config):
        store = opened(config(), read_only=True)
        with pytest.raises(PermissionError, match="read-only"):
            store.write("a/b", value(1))
        with pytest.raises(PermissionError, match="read-only"):
            store.delete(["a/b"])
        assert store.exists(["a/b"]) == [False]

    def test_many_values_are_listed_and_deleted_in_pages(self, opened, config, between, through):
        store = opened(config(**through(between)))
        names = [f"model/{number:04}" for number in range(self.differences.values)]
        writer = opened(config())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: writer.write(name, value(1)), names))
        between.log.clear()
        entries = {entry.name: entry for entry in store.list("model/")}
        assert sorted(entries) == names
        assert {entry.nbytes for entry in entries.values()} == {PAGE}
        now = datetime.now(UTC).timestamp()
        assert all(abs(now - entry.modified) < 600 for entry in entries.values())
        assert len(between.log) == -(-len(names) // LIST_PAGE)
        between.log.clear()
        store.delete(names[:-2])
        batch = self.differences.delete_batch
        assert between.methods() == ["POST" if batch > 1 else "DELETE"] * -(-(len(names) - 2) // batch)
        store.delete([*names[-2:], "model/absent"])
        assert list(store.list("")) == []

    def test_a_listing_is_of_names_that_start_so_and_not_of_folders(self, opened, config):
        store = opened(config())
        for name in ("model-1/a", "model-12/a", "other/a"):
            store.write(name, value(1))
        assert sorted(entry.name for entry in store.list("model-1")) == ["model-1/a", "model-12/a"]
        assert sorted(entry.name for entry in store.list("model-1/")) == ["model-1/a"]

    def test_another_tiers_prefix_is_another_world(self, opened, config):
        one, other = opened(config(prefix="one/x")), opened(config(prefix="one/y"))
        one.write("a", value(1))
        assert other.exists(["a"]) == [False]
        assert [entry.name for entry in one.list("")] == ["a"]
        assert list(other.list("")) == []
        one.delete(["a"])

    def test_a_delete_that_is_refused_is_a_failure(self, opened, config, between, through):
        store = opened(config(**through(between)))
        store.write("a", value(1))
        between.script = lambda request: (
            Fault(refusal(403, "AccessDenied")) if request.method in {"DELETE", "POST"} else None
        )
        for names in (["a"], ["a", "b"]):
            with pytest.raises(ObjectStoreError, match=r"DELETE .*403 AccessDenied"):
                store.delete(names)
        between.script = lambda _request: None
        assert store.exists(["a"]) == [True]

    def test_a_bucket_that_is_gone_is_a_failure_and_not_a_miss(self, opened, config, doomed):
        name, delete = doomed
        store = opened(config(**{self.differences.bucket: name}))
        store.write("a", value(1))
        delete()
        said = f"404 {self.differences.no_bucket}: there is no such {self.differences.bucket} here"
        for work in (
            lambda: read(store, "a"),
            lambda: store.write("b", value(1)),
            lambda: store.delete(["a"]),
            lambda: list(store.list("")),
        ):
            with pytest.raises(ObjectStoreError, match=said):
                work()

    def test_another_program_sees_what_is_written_and_its_writes_are_seen(self, opened, config, objects):
        options = config()
        store = opened(options)
        store.write("a", value(3))
        assert objects.get(f"{options.prefix}/a") == bytes([3]) * PAGE
        objects.put(f"{options.prefix}/b", bytes([4]) * PAGE)
        assert read(store, "b") == bytes([4]) * PAGE


class RestartTests(OpenedStores):
    """A server that keeps what it has: fixture ``keeping``, the server and the options of a tier on it."""

    def test_a_server_that_is_killed_and_comes_back_has_what_it_had(self, opened, keeping):
        server, config = keeping
        store = opened(config)
        store.write("a", value(7))
        server.stop()
        with pytest.raises(ObjectStoreBusyError, match=r"NoConnection|CutOff"):
            read(store, "a")
        with pytest.raises(TierUnavailable, match="NoConnection: no server answers there; check endpoint"):
            opened(config)
        server.start()
        assert read(store, "a") == bytes([7]) * PAGE
