"""The ``ttl`` of engines that share a server: one whose own differs from the last writer's says so in one line."""

import uuid

import pytest
from tests.unit.test_other_fingerprint import is_open, store
from tests.unit.test_runtime import config, running, step_until

from kvtiers_redis.config import RedisConfig

RECORDS = ("ns/_epoch", "ns/_layout/model")


@pytest.fixture
def start(single, caplog):
    """Start an engine with these options, and return in what it says that its limits differ from the last writer's."""
    prefix = uuid.uuid4().hex

    def run(chunk=None, **options):
        caplog.clear()
        tier = {"type": "redis", "url": single.url, "prefix": prefix, "io": "process", **options}
        with running(config(secondary=[tier])) as engine:
            if chunk is not None:
                store(engine, "redis", chunk)
            step_until(engine[0], lambda: is_open(engine[0], "redis"))
        return [line for line in caplog.messages if "each applies its own" in line]

    return run


def test_a_start_whose_ttl_differs_from_the_last_writers_says_both_in_one_line(start):
    assert start(0, ttl="1h") == []
    assert start(1, ttl="1h") == []
    [line] = start(2, ttl="2d", refresh_ttl=True)
    assert line.startswith("redis: the engine on ")
    assert " UTC has ttl 1h, this engine has ttl 2d, refreshed by reads: each applies its own; " in line
    assert line.endswith("give all engines that share the store the same")
    [line] = start()
    assert "has ttl 2d, refreshed by reads, this engine has ttl not set" in line
    assert start(read_only=True, ttl="1h") == [], "what only reads sets no limit"


def test_a_record_outlives_the_values_that_it_is_about(tier, single, value, read):
    """Else an engine that comes after the ``ttl`` would know of no other, and of no bump."""
    store = tier.open(single.url, prefix="app:", ttl="1h", refresh_ttl=True, set_nx=True)
    with single.client() as redis:
        for name in RECORDS:
            store.write(name, value(1))
            store.write(name, value(2))
            assert read(store, name) == bytes([2]) * 4096
            assert redis.ttl(f"app:{name}") == -1
        store.write("_check/probe", value(1))
        assert redis.ttl("app:_check/probe") > 0
    store.delete([*RECORDS, "_check/probe"])


@pytest.mark.parametrize("refresh_ttl", [True, False])
def test_a_record_that_a_release_before_gave_a_ttl_loses_it_where_reads_refresh_one(
    tier, single, value, read, refresh_ttl
):
    """That release's reads kept it alive, too."""
    store = tier.open(single.url, prefix="old:", ttl="1h", refresh_ttl=refresh_ttl)
    with single.client() as redis:
        for name in RECORDS:
            store.write(name, value(1))
            redis.expire(f"old:{name}", 600)
            assert read(store, name) == bytes([1]) * 4096
            assert (redis.ttl(f"old:{name}") == -1) == refresh_ttl
    store.delete(RECORDS)


def test_a_ttl_is_a_limit_that_all_should_share():
    shared = RedisConfig(type="redis", url="redis://a", ttl="90s", quotas={"b": "1GiB", "*": "1MiB"}).shared_limits
    assert shared == {"ttl": "90s", "quotas": "{*: 1MiB, b: 1GiB}"}
    assert RedisConfig(type="redis", url="redis://a").shared_limits == {}
