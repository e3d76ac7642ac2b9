"""Hints to keep chunks and of low priority: what leaves later and earlier, for how long, how many, and never a lock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import LookupResult
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers_policies.forecast import WithForecast

POLICIES = ["lru", "arc", "turn-hazard"]


def keys_of(name, count):
    return [f"{name}{place:03}".encode() for place in range(count)]


class Rows:
    """A primary whose stores complete at once."""

    def __init__(self, rows, policy="lru", kept_share=0.5, forecast=False):
        self.now = 100.0
        self.tier = CPUPrimaryTier(
            rows, 0, memoryview(b""), policy=policy, kept_share=kept_share, clock=lambda: self.now
        )
        self.tier.store_everything()
        if forecast:
            self.tier.forecast_reuse((), WithForecast)

    def store(self, keys, request="", *, finish=True):
        """Store chunks for a request; what left for them, None if there is no room."""
        got = self.tier.prepare_store(keys, request)
        if got is None:
            return None
        self.tier.complete_store(got.rows, success=True)
        if finish and request:
            self.tier.on_request_finished(request)
        self.now += 0.01
        return got.evicted

    def has(self, keys):
        return [self.tier.resident_run([key])[0] for key in keys]

    def tick(self, seconds):
        self.now += seconds
        self.tier.release_expired(self.now)

    @property
    def figures(self):
        return self.tier.figures()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_that_is_kept_leaves_later_than_others_until_its_time_is_over(policy):
    rows, system = Rows(16, policy), keys_of("system", 4)
    rows.tier.keep(system, 3600.0)  # a lookup, before the first store
    rows.store(system, "r")
    for number in range(20):
        rows.store(keys_of(f"other{number}-", 4), f"o{number}")
    assert rows.has(system) == [1] * 4
    assert rows.figures["kept_rows"] == 4
    rows.tick(3601.0)
    assert rows.figures["kept_rows"] == 0
    for number in range(20, 30):
        rows.store(keys_of(f"other{number}-", 4), f"o{number}")
    assert rows.has(system) == [0] * 4, "then it is ranked as before"
    assert rows.figures["kept_given_up"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_where_nothing_else_can_leave_kept_chunks_do_those_of_normal_priority_and_tails_first(policy):
    rows = Rows(12, policy, kept_share=1.0)
    normal, high = keys_of("n", 6), keys_of("h", 6)
    rows.store(high, "h")
    rows.store(normal, "n")
    rows.tier.keep(high, 60.0, high=True)
    rows.tier.keep(normal, 60.0)
    assert rows.store(keys_of("a", 4), "a") is not None
    assert (rows.has(normal), rows.has(high)) == ([1, 1, 0, 0, 0, 0], [1] * 6)
    assert (rows.has(normal), rows.has(high)) == ([1, 1, 0, 0, 0, 0], [1] * 6)
    rows.tier.prepare_load(keys_of("a", 4), "b")  # pins them
    assert rows.store(keys_of("b", 6), "b", finish=False) is not None
    assert sum(rows.has(normal)) == 0
    assert rows.has(high) == [1, 1, 0, 0, 0, 0]
    assert rows.figures["kept_given_up"] == 10


def test_hints_keep_no_more_than_their_share_and_what_was_hinted_at_last_stays():
    rows = Rows(16, kept_share=0.25)
    first, second = keys_of("f", 3), keys_of("s", 3)
    rows.store([*first, *second], "r")
    rows.tier.keep(first, 60.0)
    assert rows.figures["kept_rows"] == 3
    rows.tier.keep(second, 60.0)
    assert (rows.figures["kept_rows"], rows.figures["kept_over_share"]) == (4, 2)
    rows.store(keys_of("o", 12), "o")
    assert (rows.has(first), rows.has(second)) == ([1, 0, 0], [1, 1, 1])
    rows.tier.keep(keys_of("long", 1000), 60.0)
    assert rows.figures["kept_over_share"] == 2 + 996 + 4
    rows.store(keys_of("long", 5), "l")
    rows.store(keys_of("o", 12), "o")
    assert rows.has(keys_of("long", 5)) == [1, 1, 1, 1, 0], "four may be kept, and the oldest hints made room"
    none = Rows(16, kept_share=0.0)
    none.store(first, "r")
    none.tier.keep(first, 60.0)
    assert (none.figures["kept_rows"], none.figures["kept_over_share"]) == (0, 3)


def test_a_hint_neither_shortens_nor_weakens_one_that_holds():
    rows = Rows(8, kept_share=1.0)
    keys = keys_of("k", 2)
    rows.store(keys, "r")
    rows.tier.keep(keys, 100.0, high=True)
    rows.tier.keep(keys, 1.0)
    rows.tick(50.0)
    rows.store(keys_of("n", 6), "n")
    rows.tier.keep(keys_of("n", 6), 10.0)
    rows.store(keys_of("x", 6), "x")
    assert rows.has(keys) == [1, 1]
    rows.tick(60.0)
    assert rows.figures["kept_rows"] == 0


@pytest.mark.parametrize("forecast", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_request_of_low_priority_brings_leaves_first_tail_before_head(policy, forecast):
    rows = Rows(12, policy, forecast=forecast)
    normal, low = keys_of("n", 6), keys_of("l", 6)
    rows.store(normal, "n")
    rows.tier.brings_low("l")
    rows.store(low, "l")
    assert rows.tier.coldest(3) == low[:2:-1]
    assert rows.store(keys_of("a", 4), "a") == low[:1:-1]
    assert (rows.has(normal), rows.has(low)) == ([1] * 6, [1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_of_low_priority_that_another_request_uses_is_none_any_more(policy):
    rows = Rows(8, policy)
    low = keys_of("l", 4)
    rows.tier.brings_low("l")
    rows.store(low, "l")
    held = rows.tier.prepare_load(low[:2], "other")
    rows.tier.complete_load(held)
    rows.tier.on_request_finished("other")
    assert rows.store(keys_of("a", 6), "a") == [low[3], low[2]]
    assert rows.has(low) == [1, 1, 0, 0]


def test_a_running_request_of_low_priority_does_not_evict_its_own_chunks():
    rows = Rows(8)
    rows.store(keys_of("n", 4), "n")
    low = keys_of("l", 6)
    rows.tier.brings_low("l")
    rows.store(low[:4], "l", finish=False)
    assert rows.store(low[4:], "l") == [b"n003", b"n002"]
    assert rows.has(low) == [1] * 6


def test_without_hints_nothing_is_asked_and_after_their_end_nothing_is_kept_of_them():
    rows = Rows(8)
    rows.store(keys_of("n", 4), "n")
    kept = rows.tier._kept
    assert not kept.is_active
    rows.tier.keep(keys_of("n", 4), 5.0)
    rows.tier.brings_low("l")
    rows.store(keys_of("l", 2), "l")
    assert kept.is_active
    rows.store(keys_of("o", 4), "o")
    rows.tick(10.0)
    assert not kept.is_active
    assert not (*kept._until[0], *kept._due, *kept._seconds, *kept._low, *kept._first_out)


span = st.tuples(st.integers(0, 11), st.integers(1, 6))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), span, st.sampled_from("abc")),
        st.tuples(st.just("promote"), span, st.sampled_from("abc")),
        st.tuples(st.just("keep"), span, st.sampled_from([1.0, 5.0, 100.0]), st.booleans()),
        st.tuples(st.just("low"), st.sampled_from("abc")),
        st.tuples(st.just("finish"), st.sampled_from("abc")),
        st.tuples(st.just("pin"), st.integers(0, 15)),
        st.tuples(st.just("unpin")),
        st.tuples(st.just("tick"), st.sampled_from([0.5, 2.0])),
    ),
    min_size=10,
    max_size=60,
)
ALL = keys_of("k", 20)


def idle_of(tier):
    """The chunks that are ready and that nothing reads or writes."""
    return {key for key, row in tier._row_of.items() if tier._rows.state[row] == 0}


@settings(deadline=None, max_examples=80)
@given(operations=operations, policy=st.sampled_from(POLICIES), share=st.sampled_from([0.3, 1.0]), more=st.booleans())
def test_no_allocation_fails_because_of_hints_and_none_evicts_a_kept_chunk_before_another(
    operations, policy, share, more
):
    rows = Rows(8, policy, kept_share=share, forecast=more)
    tier, pins = rows.tier, []
    for what, *how in operations:
        if what in {"store", "promote"}:
            (start, length), request = how
            wanted = ALL[start : start + length]
            missing = [key for key, found in zip(wanted, tier.find(wanted), strict=True) if found is LookupResult.MISS]
            idle = idle_of(tier) - set(wanted)
            held = set(tier._kept.iter_held())
            room = tier.free_rows + len(idle)
            if what == "store":
                got = tier.prepare_store(wanted, request)
                assert (got is None) == (len(missing) > room)
            else:
                got = tier.prepare_write(wanted, request, reserve_rows=0)
                assert (0 if got is None else len(got.keys)) == min(len(missing), room)
            if got is not None:
                assert set(got.evicted) <= idle
                if held.intersection(got.evicted):
                    assert not idle - held - set(got.evicted), "a kept chunk left before another"
                tier.complete_store(got.rows, success=True)
        elif what == "keep":
            (start, length), seconds, high = how
            tier.keep(ALL[start : start + length], seconds, high=high)
        elif what == "low":
            tier.brings_low(*how)
        elif what == "finish":
            tier.on_request_finished(*how)
        elif what == "pin" and (found := tier.prepare_load([ALL[how[0]]], "p")):
            pins.append(found)
        elif what == "unpin" and pins:
            tier.complete_load(pins.pop())
        elif what == "tick":
            rows.tick(*how)
        assert tier.evictable == len(idle_of(tier))
        assert tier.figures()["kept_rows"] <= int(share * 8)
        assert set(tier.coldest(99)) == idle_of(tier)
