"""What the master lists: whose names, of what length, and that a listing is no use of a value."""

import http.server
import json
import threading
import tracemalloc
from contextlib import contextmanager

import pytest

from kvtiers.api import ConfigError, StoreEntry, TierUnavailable
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_mooncake.listing import list_values


def config(**options):
    return MooncakeConfig(**{"type": "mooncake", "master": "127.0.0.1", **options})


def test_names_and_lengths_are_listed_in_as_many_calls_as_it_takes(shared_master, open_store):
    store = open_store(shared_master.address, master_http=shared_master.http)
    expected = {f"ns/{'x' * 200}/{number}": 4096 + number for number in range(300)}
    for name, length in expected.items():
        store.write(name, memoryview(bytes(length)))
    assert {entry.name: entry.nbytes for entry in store.list("ns/xxx")} == expected
    assert {entry.modified for entry in store.list("ns/xxx")} == {None}
    store.delete(list(expected))
    assert not list(store.list("ns/xxx"))


def test_a_listing_is_no_use_so_that_what_was_listed_can_be_removed_and_evicted(shared_master, open_store):
    store = open_store(shared_master.address, master_http=shared_master.http)
    store.write("ns/unused/1", memoryview(bytes(4096)))
    assert list(store.list("ns/unused/")) == [StoreEntry("ns/unused/1", 4096)]
    store.delete(["ns/unused/1"])
    assert store.stats()["removed_in_use"] == 0
    store.write("ns/unused/2", memoryview(bytes(4096)))
    store.read_into("ns/unused/2", memoryview(bytearray(4096)))
    store.delete(["ns/unused/2"])
    assert store.stats()["removed_in_use"] == 1, "as a read is"


def test_what_other_users_of_the_pool_have_there_is_left_out(shared_master, open_store):
    store = open_store(shared_master.address, master_http=shared_master.http)
    for name in ("ns/others/1,ns/others/2", "ns/others/Tensor", "ns/others/a\nns/others/b", "ns/others/%41"):
        assert store._client.put(name, bytes(4096)) == 0
    store.write("ns/others/ours", memoryview(bytes(4096)))
    names = {entry.name for entry in store.list("ns/others/")}
    assert names == {"ns/others/ours"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"master": "etcd://10.0.0.1:2379"}, "a listing needs 'master_http': HOST:PORT"),
        ({"tenant": "team-a"}, "'tenant: team-a': the master lists the values of its tenant 'default' alone"),
    ],
)
def test_a_master_that_cannot_be_asked_is_named(options, expected):
    with pytest.raises(ConfigError, match=expected):
        list(list_values(config(**options), ""))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests with ``self.answer(path)``: status, body, and what it says that the body's length is."""

    def do_GET(self):
        status, body, length = self.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def web_server(status: int, body: bytes, length: int | None = None):
    """Answer every request with this. ``length``: what it says that the answer has."""

    class Same(Handler):
        def answer(self, _path):
            return status, body, len(body) if length is None else length

    return serving(Same)


@contextmanager
def serving(handler):
    """Serve HTTP with this class; yield the address."""
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, b"{}", r"status 503 \(Service Unavailable\) for /get_all_keys"),
        (404, b"", r"status 404 \(Not Found\) for /get_all_keys"),
        (200, b"ns/a\n", "its answer to /batch_query_keys has no lengths"),
        (200, b"1\n", "its answer to /batch_query_keys has no lengths"),
    ],
)
def test_what_is_no_serving_master_is_one_line(status, body, why):
    with web_server(status, body) as address, pytest.raises(TierUnavailable, match=why) as refusal:
        list(list_values(config(master_http=address), ""))
    assert f"http://{address}, which lists values" in str(refusal.value)
    assert "--metrics_port" in str(refusal.value)


def test_a_list_of_names_that_ends_too_early_is_no_shorter_list():
    """As of a master that is killed meanwhile: by a part of the names a tenant would have more room than it has."""
    with web_server(200, b"others/1\n", length=1000) as address, pytest.raises(TierUnavailable, match="ends too early"):
        list(list_values(config(master_http=address), "ns/"))


class ClosesIdleConnections(Handler):
    """A master with 600 values that closes each connection behind an answer, and does not announce it."""

    protocol_version = "HTTP/1.1"
    names = tuple(f"ns/{number}" for number in range(600))
    connections: list[list[str]]
    answered = 1_000_000  # as many connections: to those after them it answers nothing

    def setup(self):
        super().setup()
        self.connections.append([])

    def do_GET(self):
        self.close_connection = True
        self.connections[-1].append(self.path.partition("?")[0])
        if len(self.connections) <= self.answered:
            super().do_GET()

    def answer(self, path):
        where, _, names = path.partition("?keys=")
        if where == "/get_all_keys":
            body = "\n".join([*self.names, ""])
        else:
            body = json.dumps({"data": {name: {"values": [{"size_": 4096}]} for name in names.split(",")}})
        return 200, body.encode(), len(body)


def test_a_listing_goes_on_over_a_fresh_connection_where_the_master_has_closed_an_idle_one():
    handler = type("Master", (ClosesIdleConnections,), {"connections": []})
    with serving(handler) as address:
        listed = [entry.name for entry in list_values(config(master_http=address), "ns/")]
    assert listed == list(handler.names)
    assert handler.connections == [["/get_all_keys"], *[["/batch_query_keys"]] * 3]


def test_a_master_that_closes_the_fresh_connection_as_well_is_not_asked_again():
    handler = type("Master", (ClosesIdleConnections,), {"connections": [], "answered": 1})
    with serving(handler) as address, pytest.raises(TierUnavailable, match="without response"):
        list(list_values(config(master_http=address), "ns/"))
    assert len(handler.connections) == 2
    handler = type("Master", (ClosesIdleConnections,), {"connections": [], "answered": 0})
    with serving(handler) as address, pytest.raises(TierUnavailable, match="without response"):
        list(list_values(config(master_http=address), "ns/"))
    assert len(handler.connections) == 1, "the first connection was fresh"


def test_names_of_others_in_the_pool_take_no_memory():
    body = b"".join(b"others/%060d\n" % number for number in range(100_000))
    with web_server(200, body) as address:
        tracemalloc.start()
        try:
            assert list(list_values(config(master_http=address), "ns/")) == []
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < len(body) // 4


def test_a_server_that_is_not_there_is_one_line(shared_master, open_store):
    with web_server(200, b"") as address:
        pass
    store = open_store(shared_master.address, master_http=address)
    with pytest.raises(TierUnavailable, match=r"does not answer as expected: .*refused; set 'master_http' to where"):
        list(store.list("ns/"))
    store.write("ns/all-the-same", memoryview(bytes(4096)))
    assert list(store.exists(["ns/all-the-same"])) == [True]
