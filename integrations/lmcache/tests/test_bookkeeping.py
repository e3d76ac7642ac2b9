"""Locks, deletion, lists and usage: what LMCache's eviction, quotas and administration see of the adapter."""

import time

import pytest

from .conftest import config_of
from .parts import Layout, keys_of

NBYTES = 2 * 4 * 16 * 128 * 2


def test_a_locked_key_is_not_deleted(serve):
    server = serve()
    keys = keys_of(3)
    stored = server.store(keys)
    assert server.lookup(keys[:2]) == [True, True]
    assert server.lookup(keys[:1]) == [True]
    server.adapter.delete(keys)
    assert server.events.deleted == keys[2:]
    server.adapter.submit_unlock(keys[:2])
    server.adapter.delete(keys)
    assert server.events.deleted == [keys[2], keys[1]]
    assert server.adapter.report_status()["locked_keys"] == 1
    assert server.fetch(keys) == [stored[0], None, None]
    server.adapter.submit_unlock(keys[:1])
    server.adapter.delete(keys)
    assert server.fetch(keys) == [None] * 3
    assert server.adapter.report_status()["locked_keys"] == 0


def test_a_key_that_is_not_found_is_not_locked(serve):
    server = serve()
    assert server.lookup(keys_of(3)) == [False] * 3
    assert server.adapter.report_status()["locked_keys"] == 0
    server.adapter.submit_unlock(keys_of(3))
    assert server.adapter.report_status()["locked_keys"] == 0


def test_a_key_twice_in_a_lookup_has_two_locks(serve):
    server = serve()
    (key,) = keys_of(1)
    server.store([key])
    assert server.lookup([key, key]) == [True, True]
    server.adapter.submit_unlock([key])
    server.adapter.delete([key])
    assert not server.events.deleted
    server.adapter.submit_unlock([key])
    server.adapter.delete([key])
    assert server.events.deleted == [key]


@pytest.mark.parametrize("tier", ["fs", "redis"], indirect=True)
def test_deletion_removes_what_another_server_has_stored(serve, tier):
    """Of each kind of objects of the model that this server has seen: an ObjectKey does not say which."""
    config = config_of(tier)
    first, second = serve(config=config), serve(config=config)
    first.store(keys_of(2))
    assert second.lookup(keys_of(3)) == [True, True, False]
    second.adapter.submit_unlock(keys_of(2))
    second.adapter.delete(keys_of(3))
    assert second.fetch(keys_of(3)) == [None] * 3
    assert serve(config=config).fetch(keys_of(3)) == [None] * 3


def test_usage_counts_each_value_once_by_its_salt(serve):
    server = serve(capacity="1MiB")
    assert server.adapter.supports_global_eviction
    server.store(keys_of(3))
    server.store(keys_of(2, cache_salt="tenant"))
    server.store(keys_of(3))
    usage = server.adapter.get_usage()
    assert usage.total_bytes_used == 5 * NBYTES
    assert dict(usage.bytes_by_cache_salt) == {"": 3 * NBYTES, "tenant": 2 * NBYTES}
    assert usage.usage_fraction == 5 * NBYTES / (1 << 20)
    server.adapter.delete([*keys_of(2), *keys_of(2, cache_salt="tenant"), *keys_of(1, cache_salt="no such")])
    usage = server.adapter.get_usage()
    assert usage.total_bytes_used == NBYTES
    assert dict(usage.bytes_by_cache_salt) == {"": NBYTES}
    assert len(server.events.stored) == 5
    assert len(server.events.deleted) == 4


def test_a_key_with_values_of_two_kinds_counts_both_and_loses_both(serve):
    """The engine was started again with another layout, and LMCache's server was not."""
    server = serve(kv_dtype="x")
    server.store(keys_of(1))
    server.layout = Layout((1, 2, 16, 32))
    server.store(keys_of(1))
    assert server.adapter.get_usage().total_bytes_used == NBYTES + 2048
    server.adapter.delete(keys_of(1))
    assert server.adapter.get_usage().total_bytes_used == 0
    assert server.fetch(keys_of(1)) == [None]
    server.layout = Layout()
    assert server.fetch(keys_of(1)) == [None]


def test_without_a_capacity_lmcaches_global_eviction_is_off(serve):
    server = serve()
    server.store(keys_of(1))
    assert not server.adapter.supports_global_eviction
    assert server.adapter.get_usage().usage_fraction == -1.0


def test_accesses_are_reported(serve):
    server = serve()
    server.store(keys_of(2))
    server.fetch(keys_of(3))
    assert server.events.accessed == keys_of(2)


def test_a_value_that_its_tier_has_evicted_is_counted_no_more(serve):
    """The oldest values go when a tier is full; LMCache would count them for ever."""
    server = serve(config=config_of({"type": "memory", "capacity": "150KiB", "exists_ttl": "1ms"}))
    for place in range(8):
        server.store(keys_of(1, first=place))
    until = time.monotonic() + 60
    while sum(there := server.lookup(keys_of(8))) > 4:  # what was found is believed for a while
        server.adapter.submit_unlock([key for key, is_there in zip(keys_of(8), there, strict=True) if is_there])
        assert time.monotonic() < until
    assert there[-1]
    assert server.adapter.get_usage().total_bytes_used == sum(there) * NBYTES
    assert len(server.events.deleted) == 8 - sum(there)


def test_keys_are_listed_page_by_page(serve):
    server = serve()
    keys = keys_of(7)
    server.store(keys)
    server.store(keys_of(2, model_name="test/other", cache_salt="tenant"))

    def pages(size, model=None):
        found, cursor = [], None
        while True:
            page = server.adapter.list_l2_keys(model_name=model, page_size=size, cursor=cursor)
            assert len(page.entries) <= size
            found += page.entries
            if (cursor := page.next_page_token) is None:
                return found

    for size in (1, 3, 7, 500):
        assert [entry.key.to_object_key() for entry in pages(size, "test/model")] == keys
        assert len(pages(size)) == 9
    assert {entry.size_bytes for entry in pages(500)} == {NBYTES}
    first = server.adapter.list_l2_keys(page_size=4)
    server.adapter.delete(keys[:2])
    following = server.adapter.list_l2_keys(page_size=4, cursor=first.next_page_token)
    assert [entry.key.to_object_key() for entry in following.entries][:3] == keys[4:7]
    for wrong in ({"page_size": 0}, {"cursor": "x"}, {"cursor": "-1"}):
        with pytest.raises(ValueError, match=r"page_size|cursor"):
            server.adapter.list_l2_keys(**wrong)


def test_the_status_is_plain_data(serve):
    import json

    server = serve()
    server.store(keys_of(2))
    status = json.loads(json.dumps(server.adapter.report_status()))
    assert status["is_healthy"]
    assert status["stored_keys"] == 2
    assert status["clients"][0]["stored_values"] == 2
    assert status["clients"][0]["tiers"]["fs"]["transfers"]["stored_chunks"] == 2
    server.close()
    assert not server.adapter.report_status()["is_healthy"]
