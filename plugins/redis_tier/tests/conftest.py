"""Servers and values for the tests of the ``redis`` tier."""

import importlib.util
import mmap
import sys
import uuid
from pathlib import Path

import pytest

from kvtiers_redis.config import RedisConfig
from kvtiers_redis.store import RedisStore

PAGE = 4096


def _load(name):
    """Import a module of this folder as ``redis_NAME``, so that tests can import it by that name."""
    spec = importlib.util.spec_from_file_location(f"redis_{name}", Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


servers = _load("servers")
_load("scripted")
_load("traffic")
_load("hosted")
_load("links")


class Tier:
    """Opens stores on one backend, and closes them."""

    def __init__(self) -> None:
        self._stores: list[RedisStore] = []

    def open(self, url: str, *, read_only: bool = False, **options) -> RedisStore:
        config = RedisConfig(type="redis", url=url, **{"connect_timeout": "20s", **options})
        self._stores.append(RedisStore(config, read_only=read_only))
        return self._stores[-1]

    def close(self) -> None:
        while self._stores:
            self._stores.pop().close()


@pytest.fixture
def tier():
    tier = Tier()
    yield tier
    tier.close()


@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """A server that all tests share which leave it as it was."""
    server = servers.Server(tmp_path_factory.mktemp("single")).start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory):
    server = servers.Server(tmp_path_factory.mktemp("valkey"), binary=servers.valkey()).start()
    yield server
    server.stop()


# Not allkeys-*, which may evict the kit's own values, nor noeviction, which takes none of them: the kit reads back all
# that it writes. Those are in test_store.py. Which of the others' values the server evicts is its own affair.
@pytest.fixture(scope="session")
def full_server(tmp_path_factory):
    """A server without room, except what others' values have that it may evict."""
    server = servers.Server(tmp_path_factory.mktemp("full"), "--maxmemory-policy", "volatile-lru").start()
    with server.client() as client, client.pipeline() as pipe:
        for number in range(4096):
            pipe.set(f"other:{number}", bytes(32768), ex=3600)
        pipe.execute()
        client.config_set("maxmemory", client.info("memory")["used_memory"])
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory):
    cluster = servers.Cluster(tmp_path_factory.mktemp("cluster")).start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def shared_sentinels(tmp_path_factory):
    sentinels = servers.Sentinels(tmp_path_factory.mktemp("sentinels")).start()
    yield sentinels
    sentinels.stop()


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    server = servers.Server(folder / "server", tls=servers.Tls(folder / "ca", ask_clients=True)).start()
    yield server
    server.stop()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a server, Cluster or Sentinels of the test's own, stopped at its end."""
    started = []

    def start_one(kind=servers.Server, *options, **more):
        started.append(kind(tmp_path / f"server{len(started)}", *options, **more))
        return started[-1].start()

    yield start_one
    for one in started:
        if isinstance(one, servers.Server):
            one.kill()  # one that cannot save does not stop
        else:
            one.stop()


@pytest.fixture
def value():
    """Return a function that gives a value of so many pages, each with the same bytes."""

    def make(byte: int, pages: int = 1) -> memoryview:
        memory = memoryview(mmap.mmap(-1, pages * PAGE))
        memory[:] = bytes([byte]) * len(memory)
        return memory

    return make


@pytest.fixture
def names():
    """Return a function that gives so many new names of the usual shape."""

    def make(count: int, namespace: str = "ns") -> list[str]:
        return [f"{namespace}/model-0123456789abcdef01234567/{uuid.uuid4().hex}00000000" for _ in range(count)]

    return make


@pytest.fixture
def read():
    """Return a function that reads a value of so many pages, or None."""

    def read_one(store, name: str, pages: int = 1) -> bytes | None:
        back = memoryview(bytearray(pages * PAGE))
        return bytes(back) if store.read_into(name, back) == len(back) else None

    return read_one
