"""Quotas in ``memory-async``: no tenant has more than its own, and none loses a chunk for another's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import LookupResult, TenantRoom, TierContext, TransferJob, make_offload_key
from kvtiers_example.example_tier import ExampleSecondaryTier

STRIDE, NBYTES, ROWS = 8192, 4096, 8
TENANTS = ("blue", "red", "green", "")
QUOTAS = {"blue": 4 * NBYTES, "red": 2 * NBYTES + 1, "": None, "green": None}
MOST = {"blue": 4, "red": 2}


def key_of(tenant, number):
    return make_offload_key(bytes([number]) * 32, 0, tenant)


class Request:
    request_id = "r"
    params = {}  # noqa: RUF012 -- as the engine gives it


class Bench:
    """A tier with quotas over eight rows, and what it holds."""

    def __init__(self, max_blocks, quota_of=QUOTAS.get):
        region = memoryview(bytearray(ROWS * STRIDE))
        context = TierContext("t", NBYTES, "ns", read_only=False, region=region, row_stride=STRIDE)
        self.tier = ExampleSecondaryTier(context, max_blocks=max_blocks, simulate_async=False)
        self.tier.set_quotas(quota_of)
        self.jobs = 0

    def move(self, keys, *, is_promotion=False):
        """Store or load these; return the one result."""
        self.jobs += 1
        rows = memoryview(bytearray(4 * len(keys))).cast("i")
        job = TransferJob(self.jobs, keys, rows, is_promotion, Request())
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        [result] = self.tier.get_finished_jobs()
        return result

    def held(self, tenant, numbers=range(60)):
        """Return the numbers of the chunks of a tenant that are held."""
        answers = {number: self.tier.lookup(key_of(tenant, number), Request()) for number in numbers}
        return {number for number, answer in answers.items() if answer is LookupResult.HIT}


jobs = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.lists(st.integers(0, 20), max_size=8, unique=True), st.booleans()),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(jobs, st.sampled_from([8, 12, 1000]))
def test_no_tenant_has_more_than_its_quota_and_no_other_loses_a_chunk_for_it(jobs, max_blocks):
    bench = Bench(max_blocks)
    for tenant, numbers, is_promotion in jobs:
        before = {other: bench.held(other, range(21)) for other in TENANTS}
        result = bench.move([key_of(tenant, number) for number in numbers], is_promotion=is_promotion)
        after = {other: bench.held(other, range(21)) for other in TENANTS}
        assert all(len(after[limited]) <= most for limited, most in MOST.items())
        assert sum(map(len, after.values())) <= max_blocks
        if max_blocks == 1000 or is_promotion:  # else some may have gone since the tier was full
            assert all(after[other] == before[other] for other in TENANTS if other != tenant)
        if is_promotion:
            assert after == before
            continue
        kept = {key_of(tenant, number) for number in numbers if number in after[tenant]}
        assert kept == (set(result.successful_keys) if result.successful_keys is not None else kept)
        assert result.success == (len(kept) == len(numbers)), "what is reported as stored is there"
        if max_blocks == 1000 and tenant in MOST:
            assert len(kept) >= min(len(numbers), MOST[tenant]), "room is made as far as there can be some"
    for tenant in MOST:
        assert bench.tier._room.used(tenant) == len(bench.held(tenant)) * NBYTES, "what is counted is what is held"


def test_a_tenant_that_has_no_room_loses_its_oldest_chunks_a_tenth_of_its_quota_at_a_time():
    bench = Bench(1000, {"blue": 20 * NBYTES}.get)
    for number in range(20):
        bench.move([key_of("blue", number)])
    bench.move([key_of("blue", 0)], is_promotion=True)  # being used keeps it no longer, as in a store
    bench.move([key_of("blue", 20)])
    assert bench.held("blue") == {*range(2, 21)}
    bench.move([key_of("blue", 21)])
    assert bench.held("blue") == {*range(2, 22)}
    assert bench.tier.stats() == {"dropped_quota": 0, "quota_deleted": 2}


def test_of_a_prompt_larger_than_its_tenants_quota_the_head_is_kept_and_the_rest_declined():
    bench = Bench(1000)
    bench.move([key_of("blue", 50), key_of("blue", 51)])
    keys = [key_of("blue", number) for number in range(7)]
    result = bench.move(keys)
    assert not result.success
    assert set(result.successful_keys) == set(keys[:4])
    assert bench.held("blue") == {0, 1, 2, 3}
    assert bench.tier.stats() == {"dropped_quota": 3, "quota_deleted": 2}


def test_a_quota_below_one_chunk_has_room_for_none_and_is_no_error():
    bench = Bench(1000, lambda tenant: NBYTES - 1 if tenant else None)
    result = bench.move([key_of("blue", 1)])
    assert (result.success, set(result.successful_keys)) == (False, set())
    assert bench.move([key_of("", 1)]).success


def test_once_a_tenant_has_no_room_for_a_store_the_rest_of_it_is_declined_without_a_look(monkeypatch):
    """Each look is one at all that the tenant has, on the engine's thread."""
    bench, take = Bench(1000), TenantRoom.take
    looked_for = []

    def counts(room, key, spared):
        looked_for.append(key)
        return take(room, key, spared)

    monkeypatch.setattr(TenantRoom, "take", counts)
    keys = [key_of("blue", number) for number in range(8)]
    assert set(bench.move(keys).successful_keys) == set(keys[:4])
    assert looked_for == keys[:5]
    assert bench.tier.stats()["dropped_quota"] == 4
    assert bench.move([key_of("blue", 20)]).success, "the next store makes room again"


@pytest.mark.parametrize("key", [key_of("red", 1), key_of("", 1)])
def test_a_chunk_that_was_never_counted_may_leave(key):
    room = TenantRoom(QUOTAS.get, NBYTES)
    room.leave(key)
    assert room.used("red") == 0
