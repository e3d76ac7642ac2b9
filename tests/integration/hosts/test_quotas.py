"""Quotas of tenants with real tier hosts and stores: never more than the quota is there, and new values still come."""

import time

import numpy as np
import pytest

from kvtiers import ModelIdentity, open_client

LENGTH = 4096 - 64
VALUE = 4096
IDENTITY = ModelIdentity("test/model", weights="w1")


def config(tier):
    quotas = {"blue": 10 * VALUE, "*": 4 * VALUE}
    tier = {"name": "tier", "quotas": quotas, **tier}
    return {"version": 1, "tenants": {}, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}


KINDS = {"files": {}, "slab": {"layout": "slab"}, "thread": {"io": "thread"}, "compressed": {"compression": "zstd"}}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def tier(request, tmp_path):
    return {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "64MiB", "min_free": 0, **request.param}


def put(client, tenant, number):
    return client.put([b"%d" % number], [np.full(LENGTH, number, np.uint8)], tenant=tenant).stored[0]


def found(client, tenant, numbers):
    """Which of these can be read; every byte is compared."""
    there = set()
    for number in numbers:
        view = np.zeros(LENGTH, np.uint8)
        if client.get_into([b"%d" % number], [view], tenant=tenant) == [True]:
            assert (view == number).all()
            there.add(number)
    return there


def test_a_tenant_stays_within_its_quota_and_still_stores_what_is_new(tier):
    with open_client(config(tier), IDENTITY, LENGTH) as client:
        assert [put(client, "", number) for number in range(20)] == [True] * 20, "no tenant, no quota"
        assert [put(client, "blue", number) for number in range(10)] == [True] * 10
        assert [put(client, "red", number) for number in range(5)] == [True] * 4 + [False]
        until = time.monotonic() + 60
        number = 10
        while number < 12 and time.monotonic() < until:
            number += put(client, "blue", number)
            assert len(found(client, "blue", range(number))) <= 10
        assert number == 12, "room is made by deleting the oldest"
        here = found(client, "blue", range(12))
        assert 11 in here
        assert len(here) <= 10
        assert len(found(client, "", range(20))) == 20, "what is of no tenant stays"
        assert found(client, "red", range(4)), "of another tenant nothing went for blue"
        figures = client.stats()["tiers"]["tier"]
        assert figures["dropped_quota"] > 0
        assert figures["quota_deleted"] > 0
        assert figures["breaker_opened"] == figures["errors"] == figures["dropped_full"] == 0


def test_what_a_tenant_has_from_before_counts(tier):
    with open_client(config(tier), IDENTITY, LENGTH) as client:
        assert all(put(client, "red", number) for number in range(4))
    with open_client(config(tier), IDENTITY, LENGTH) as client:
        assert not put(client, "red", 4)
        assert len(found(client, "red", range(5))) <= 4


def test_a_tier_that_moves_its_rows_by_itself_keeps_them_by_itself():
    tier = {"type": "memory-async", "max_blocks": 1000}
    with open_client(config(tier), IDENTITY, LENGTH) as client:
        assert all(put(client, "", number) for number in range(20))
        assert all(put(client, "red", number) for number in range(4))
        for number in range(15):
            assert put(client, "blue", number), "room is made at once"
            assert found(client, "blue", range(15)) == set(range(max(0, number - 9), number + 1)), "the oldest goes"
        keys, values = [b"%d" % number for number in range(20, 32)], [np.full(LENGTH, 1, np.uint8)] * 12
        assert list(client.put(keys, values, tenant="blue").stored) == [True] * 10 + [False] * 2
        assert len(found(client, "", range(20))) == 20, "what is of no tenant stays"
        assert len(found(client, "red", range(4))) == 4, "of another tenant nothing went for blue"
        assert put(client, "red", 4), "the quota of each other tenant is its own"
        assert found(client, "red", range(5)) == {1, 2, 3, 4}
        until = time.monotonic() + 60
        while (figures := client.stats()["tiers"]["tier"]).get("quota_deleted", 0) < 16:  # read once a second
            assert put(client, "", 0)
            assert time.monotonic() < until
        assert (figures["dropped_quota"], figures["quota_deleted"]) == (2, 5 + 10 + 1)
        assert figures["breaker_opened"] == figures["seal_failures"] == 0


def test_a_store_that_cannot_list_is_out_of_use_with_one_line(faulty, caplog):
    with open_client(config({**faulty(), "name": "tier"}), IDENTITY, LENGTH) as client:
        assert not put(client, "blue", 1)
    assert "cannot list what it holds, so no tenant's quota can be kept in it; leave 'quotas' out" in caplog.text
