"""The conformance kit against every topology: real servers, each with what sets it apart."""

from contextlib import contextmanager
from functools import partial

import pytest
from redis_servers import Server

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.store import RedisStore


def opener(url: str, **options):
    # The kit connects 64 threads at once, on machines that have other things to do.
    return partial(RedisStore, RedisConfig(type="redis", url=url, connect_timeout="30s", **options))


@pytest.fixture(scope="module")
def own_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("own")).start()
    yield server
    server.stop()


class TestRedisStoreOverTcp(ChunkStoreTests):
    store_class = RedisStore

    @pytest.fixture
    def open_store(self, own_server):
        return opener(own_server.url)

    @pytest.fixture
    def break_backend(self, own_server):
        @contextmanager
        def stopped(_store):
            own_server.stop()
            yield
            own_server.start()

        return stopped


class OverAnotherWay(ChunkStoreTests):
    """The kit but for its killed writers: what a server does with half a command, it does over every way to it."""

    test_a_writer_killed_in_the_middle_leaves_no_half_value = None
    test_a_killed_writer_does_not_hinder_the_next_one = None


class TestRedisStoreOverUnixSocketInOneByteWindows(ChunkStoreTests):
    store_class = RedisStore

    @pytest.fixture
    def open_store(self, single):
        where = {"database": 3, "prefix": "a*b[?]:"}
        return opener(f"unix://{single.socket}", **where, window=1, ttl="1h", refresh_ttl=True)


class TestRedisStoreOnValkey(ChunkStoreTests):
    store_class = RedisStore

    @pytest.fixture
    def open_store(self, valkey_server):
        return opener(valkey_server.url, ttl="1h", refresh_ttl=True)


class TestRedisStoreInACluster(ChunkStoreTests):
    store_class = RedisStore

    @pytest.fixture
    def open_store(self, shared_cluster):
        return opener(shared_cluster.url, topology="cluster")


class TestRedisStoreBehindSentinels(OverAnotherWay):
    store_class = RedisStore

    @pytest.fixture
    def open_store(self, shared_sentinels):
        return opener(shared_sentinels.url, topology="sentinel", master=shared_sentinels.name)


class TestRedisStoreOverTlsAsARestrictedUser(OverAnotherWay):
    store_class = RedisStore

    @pytest.fixture
    def open_store(self, tls_server):
        tls = tls_server.tls
        return opener(
            tls_server.url,
            username="kv",
            password="tier-secret",
            tls_ca=tls.ca,
            tls_cert=tls.cert,
            tls_key=tls.key,
            prefix="kv:",
        )


class TestRedisStoreOnAFullServerThatEvicts(OverAnotherWay):
    """What has a ``ttl`` makes room for each of the kit's values, which have none and stay."""

    store_class = RedisStore

    @pytest.fixture
    def open_store(self, full_server):
        return opener(full_server.url)

    def test_there_is_no_room(self, open_store, full_server):
        def evicted() -> int:
            return full_server.info("stats")["evicted_keys"]

        before, store, some = evicted(), open_store(), [f"ns/{number}" for number in range(200)]
        try:
            assert any(evicted() > before for name in some if not store.write(name, memoryview(bytes(1 << 20))))
        finally:
            store.delete(some)
            store.close()


class TestRedisPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, single):
        return {"type": "redis", "url": single.url, "ttl": "1h", "window": "1MiB"}
