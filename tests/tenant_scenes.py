"""Tenants over a real server: their quotas, what each has by the commands, and its removal with proof.

A subclass gives the fixtures ``tier``, the options of a tier on a place of its own as they stand in a file, and
``bytes_of``, which returns the bytes of a tenant's values in it, asked past the tier.
"""

import json
import time
from functools import partialmethod

import numpy as np
import pytest
from click.testing import CliRunner

from kvtiers import ModelIdentity, open_client
from kvtiers.cli.main import cli
from kvtiers.host.quotas import TenantQuotas

VALUE = 4096
LENGTH = VALUE - 64
QUOTA = 8
IDENTITY = ModelIdentity("test/model", weights="w1")


def config(tier, **more):
    tier = {**tier, "name": "tier", **more}
    return {"version": 1, "tenants": {}, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}


def put(client, tenant, numbers):
    values = [np.full(LENGTH, number, np.uint8) for number in numbers]
    return client.put([b"%d" % number for number in numbers], values, tenant=tenant).stored


def found(client, tenant, numbers):
    """Return which of these can be read: every byte of those is right, and none of the others comes."""
    there = set()
    for number in numbers:
        view = np.zeros(LENGTH, np.uint8)
        [is_there] = client.get_into([b"%d" % number], [view], tenant=tenant)
        assert (view == (number if is_there else 0)).all()
        there |= {number} if is_there else set()
    return there


def put_until_taken(client, tenant, number):
    """Store a new value; again and again while there is no room for it."""
    until = time.monotonic() + 60
    while put(client, tenant, [number]) != [True]:
        assert time.monotonic() < until, "no room is made"


class TenantTests:
    """The tests. ``io``: where the tier's I/O runs: ``thread`` is the quicker one, without pauses between counts."""

    io = "thread"

    @pytest.fixture
    def with_quota(self, tier, monkeypatch):
        """The config of an engine whose tenant ``blue`` has a quota."""
        # A busy server's first listing takes more than two seconds.
        patient = partialmethod(TenantQuotas.__init__, pause_seconds=0.0, awaited_seconds=60.0)
        monkeypatch.setattr(TenantQuotas, "__init__", patient)
        return config(tier, quotas={"blue": QUOTA * VALUE}, io=self.io)

    def test_a_tenant_stays_within_its_quota_and_no_other_loses_a_value_for_it(self, tier, with_quota, bytes_of):
        with open_client(config(tier, io=self.io), IDENTITY, LENGTH) as client:
            for tenant, count in (("blue", 12), ("blues", 9), ("", 9)):  # of each more than the quota
                assert all(put(client, tenant, range(1, 1 + count)))
        with open_client(with_quota, IDENTITY, LENGTH) as client:
            for number in range(20, 24):
                put_until_taken(client, "blue", number)
                assert VALUE < bytes_of("blue") <= QUOTA * VALUE
            assert 1 <= len(found(client, "blue", [*range(1, 13), *range(20, 24)])) <= QUOTA
            assert found(client, "blues", range(1, 10)) == found(client, "", range(1, 10)) == set(range(1, 10))
            figures = client.stats()["tiers"]["tier"]
        assert figures["quota_deleted"] > 5
        assert figures["dropped_quota"] > 0
        assert figures["errors"] == figures["breaker_opened"] == figures["seal_failures"] == 0

    def test_two_engines_exceed_it_by_what_the_other_has_written_until_they_count(self, with_quota, bytes_of):
        with (
            open_client(with_quota, IDENTITY, LENGTH) as one,
            open_client(with_quota, IDENTITY, LENGTH) as other,
        ):
            assert put(other, "blue", [11]) == [True]  # it has counted
            assert put(one, "blue", range(1, 7)) == [True] * 6
            assert put(other, "blue", range(12, 17)) == [True] * 5
            assert bytes_of("blue") == 12 * VALUE, "what the other writes is not counted yet"
            for client, numbers in ((one, range(20, 23)), (other, range(30, 33))):
                for number in numbers:  # the third one at the latest needs a count
                    put_until_taken(client, "blue", number)
            assert bytes_of("blue") <= QUOTA * VALUE
            for client in (one, other):  # also what it has written itself, and the other has deleted
                assert 1 <= len(found(client, "blue", range(1, 33))) <= QUOTA

    def test_a_tenants_values_are_counted_and_their_removal_is_proven(self, tier, bytes_of, tmp_path):
        file = tmp_path / "tiers.yaml"
        file.write_text(json.dumps(config(tier)))
        counts = {"blue": 5, "blues": 3, "red": 1}

        def store(*arguments):
            done = CliRunner().invoke(cli, ["store", *arguments, "--config", str(file), "--json"])
            assert done.exit_code == 0, done.output
            return json.loads(done.stdout)

        def counted():
            return {tenant["tenant"]: tenant["values"] for tenant in store("du", "tier", "--by", "tenant")["tenants"]}

        with open_client(config(tier), IDENTITY, LENGTH) as client:
            assert all(all(put(client, tenant, range(1, 1 + count))) for tenant, count in counts.items())
            assert counted() == counts
            proof = store("prune", "tier", "--tenant", "blue", "--verify")["proof"]
            assert proof == {"holds": True, "listed": 0, "asked": 5, "found": 0, "error": ""}
            assert counted() == {"blues": 3, "red": 1}
            assert [bytes_of(tenant) for tenant in counts] == [0, 3 * VALUE, VALUE]
            assert found(client, "blue", range(1, 6)) == set(), "an engine that believes them present has misses"
            assert found(client, "blues", range(1, 6)) == {1, 2, 3}
