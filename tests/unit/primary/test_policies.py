"""What every eviction policy promises, the built-in ones as the examples; and how a policy is found by its name."""

import os
import tracemalloc
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.primary.eviction import ARCPolicy, EvictionPolicy, LRUPolicy, make_policy, policy_class
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers_policies.turn_hazard import TurnHazardPolicy

POLICIES = [LRUPolicy, ARCPolicy, TurnHazardPolicy]


def names(text):
    return [letter.encode() * 5 for letter in text]


def text_of(keys):
    return b"".join(key[:1] for key in keys).decode()


def store(policy, text, request_id):
    policy.access(names(text), request_id, names(text))
    policy.mark_evictable(names(text))


@pytest.fixture(params=POLICIES, ids=lambda policy: policy.__name__)
def policy(request):
    return request.param(capacity=100)


def test_a_new_chunk_is_not_evictable_before_it_is_marked(policy):
    policy.access(names("ab"), "r", names("ab"))
    assert policy.evict(1) is None
    policy.mark_evictable(names("a"))
    assert policy.evict(2) is None
    assert policy.evict(1) == names("a")


def test_what_a_request_uses_is_not_among_what_it_does_not_use(policy):
    store(policy, "abcd", "old")
    store(policy, "efgh", "r")
    policy.access(names("bc"), "r")
    unused = policy.evict_unused(8, "r")
    assert set(unused) <= set(names("ad"))
    assert policy.evict_unused(1, "no request") == []
    assert sorted(unused + policy.evict(8 - len(unused))) == names("abcdefgh")


def test_the_tail_of_a_prefix_goes_before_its_head(policy):
    store(policy, "abcdef", "r")
    policy.request_finished("r")
    assert text_of(policy.coldest()) == "fedcba"
    assert text_of(policy.evict(4)) == "fedc"


def test_what_others_use_leaves_for_a_request_also_if_that_is_hotter_than_its_own_bucket():
    lru = LRUPolicy()
    store(lru, "abcd", "old")
    store(lru, "efgh", "r")
    lru.access(names("bc"), "r")
    store(lru, "ij", "new")
    assert text_of(lru.evict_unused(1, "r")) == "d"
    assert text_of(lru.coldest()) == "acbhgfeji"
    assert text_of(lru.evict_unused(2, "r")) == "aj"
    assert text_of(lru.evict_unused(5, "r")) == "i"
    assert lru.evict_unused(5, "r") == []
    assert text_of(lru.coldest()) == "cbhgfe"


def test_what_a_request_uses_is_spared_also_where_an_older_one_has_brought_it_back():
    lru = LRUPolicy()
    store(lru, "a", "old")
    store(lru, "xy", "r")
    lru.remove(names("x"))
    store(lru, "xb", "old")
    assert text_of(lru.evict_unused(5, "r")) == "b"
    assert text_of(lru.coldest()) == "xay"


calls = st.tuples(
    st.sampled_from(["store", "store", *["use"] * 4, *["end"] * 3, "remove", "pin", "unpin", "evict", "unused"]),
    st.lists(st.sampled_from(names("abcdefgh")), min_size=1, max_size=5, unique=True).map(sorted),
    st.sampled_from("rst"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LRUPolicy, ARCPolicy])
@settings(deadline=None, max_examples=300)
@given(history=st.lists(calls, min_size=8, max_size=30), count=st.integers(1, 6))
def test_no_history_lets_a_request_lose_what_it_uses(kind, history, count):
    policy, used, ready, pinned = kind(capacity=20), {}, set(), set()

    def check(count, request):
        own, order = used.get(request, set()), list(policy.coldest())
        leading = list(takewhile(lambda key: key not in own, order))
        victims = policy.evict_unused(count, request)
        assert own.isdisjoint(victims)
        assert len(victims) <= count
        if own:
            assert set(leading[:count]) <= set(victims), "what evict would take"
            assert list(policy.coldest()) == [key for key in order if key not in victims] or kind is ARCPolicy
        ready.difference_update(victims)

    for call, keys, request in history:
        here = [key for key in keys if key in ready or key in pinned]
        idle = [key for key in keys if key in ready]
        if call == "store":
            new = [key for key in keys if key not in here]
            policy.on_store_miss(new, request)
            policy.access(keys, request, new)
            policy.mark_evictable(new)
            ready.update(new)
            used.setdefault(request, set()).update(keys)
        elif call == "use" and here:
            policy.access(here, request)
            used.setdefault(request, set()).update(here)
        elif call == "end":
            policy.request_finished(request)
            used.pop(request, None)
        elif call == "remove" and idle:
            policy.remove(idle)
            ready.difference_update(idle)
        elif call == "pin" and idle:
            policy.mark_pinned(idle)
            ready.difference_update(idle)
            pinned.update(idle)
        elif call == "unpin" and (back := [key for key in keys if key in pinned]):
            policy.mark_evictable(back)
            pinned.difference_update(back)
            ready.update(back)
        elif call == "evict":
            ready.difference_update(policy.evict(min(len(keys), len(ready))))
        elif call == "unused":
            check(len(keys), request)
    for request in "rst":
        check(count, request)
    assert set(policy.coldest()) == ready


def test_a_policy_that_refuses_what_it_could_evict_gets_no_part_of_a_prompt_stored(monkeypatch):
    class Refuses(LRUPolicy):
        def evict(self, count):
            return None

    monkeypatch.setattr("kvtiers.primary.tier.make_policy", lambda *_, **__: Refuses(4))
    primary = CPUPrimaryTier(4, 0, memoryview(b""), policy="lru", protected_share=0.0)
    for text in ("c", "ab", "d"):
        primary.complete_store(primary.prepare_store(names(text), text).rows, True)
        primary.on_request_finished(text)
        if text != "d":  # so that a is in a bucket hotter than that of r, in front of b
            primary.complete_load(primary.prepare_load(names(text[-1]), "r"))
    with pytest.raises(AssertionError, match="fewer than it could"):
        primary._chunks.allocate(names("cbxy"), "r", None, 0, lambda: 0.0, used=2)


def test_a_prefix_stored_in_pieces_is_one_prefix(policy):
    for piece in ("ab", "cd", "e"):
        store(policy, piece, "r")
        store(policy, piece.upper(), "other")
    assert text_of(policy.coldest()) == "edcbaEDCBA"


def test_chunks_that_become_ready_out_of_order_leave_tail_first(policy):
    policy.access(names("abcd"), "r", names("abcd"))
    for key in names("cbda"):
        policy.mark_evictable([key])
    assert text_of(policy.evict(3)) == "dcb"


def test_a_promoted_tail_and_the_head_that_was_there_are_one_prefix(policy):
    store(policy, "abc", "first")
    policy.request_finished("first")
    policy.access(names("de"), "second", names("de"))
    policy.mark_evictable(names("de"))
    policy.access(names("abcde"), "second")
    policy.request_finished("second")
    assert text_of(policy.coldest()) == "edcba"


def test_the_request_that_ended_last_is_the_hottest(policy):
    for request_id in "abc":
        store(policy, request_id, request_id)
    for request_id in "bca":
        policy.request_finished(request_id)
    assert text_of(policy.coldest()) == "bca"
    assert text_of(policy.evict(1) + policy.evict(2)) == "bca"


def test_a_request_that_retries_counts_once(policy):
    store(policy, "ab", "first")
    store(policy, "cd", "second")
    for _ in range(3):
        policy.access(names("ab"), "first")
    assert text_of(policy.coldest()) == "badc"


def test_a_pin_and_its_end_leave_the_order_as_it_was(policy):
    store(policy, "abc", "first")
    store(policy, "def", "second")
    before = list(policy.coldest())
    for text in ("c", "ab", "acdf", "fedcba"):
        policy.mark_pinned(names(text))
        assert not set(names(text)) & set(policy.coldest())
        policy.mark_evictable(names(text))
        assert list(policy.coldest()) == before


@pytest.mark.parametrize("policy", [LRUPolicy, ARCPolicy], indirect=True)
def test_the_key_touched_first_leaves_last(policy):
    store(policy, "xyz", "r")
    policy.request_finished("r")
    policy.access(names("yxz"), "")
    assert text_of(policy.coldest()) == "zxy"


def test_eviction_is_all_or_nothing(policy):
    store(policy, "abc", "r")
    policy.mark_pinned(names("b"))
    before = list(policy.coldest())
    assert policy.evict(3) is None
    assert list(policy.coldest()) == before
    assert policy.evict(0) == []
    assert text_of(policy.evict(2)) == "ca"


def test_looking_at_the_coldest_changes_nothing(policy):
    store(policy, "abc", "first")
    store(policy, "de", "second")
    assert text_of(next(policy.coldest()) for _ in range(3)) == "ccc"
    assert text_of(policy.evict(5)) == "cbaed"


def test_a_removed_chunk_may_come_back(policy):
    policy.access(names("ab"), "r", names("ab"))
    policy.remove(names("b"))
    policy.mark_evictable(names("a"))
    policy.access(names("b"), "r", names("b"))
    policy.mark_evictable(names("b"))
    policy.request_finished("r")
    assert text_of(policy.evict(2)) == "ba"


def test_the_end_of_a_request_whose_chunks_are_gone_is_harmless(policy):
    store(policy, "ab", "r")
    policy.evict(2)
    policy.request_finished("r")
    policy.request_finished("never heard of")
    assert list(policy.coldest()) == []


def test_after_clear_nothing_is_known_and_requests_go_on(policy):
    store(policy, "ab", "r")
    policy.clear()
    assert policy.evict(1) is None
    store(policy, "ab", "r")
    policy.request_finished("r")
    assert text_of(policy.evict(2)) == "ba"


def test_what_is_remembered_of_past_requests_does_not_grow(policy):
    def requests(count):
        for number in range(count):
            policy.access(names("abc"), f"request {number}")
            policy.request_finished(f"request {number}")

    store(policy, "abc", "first")
    requests(300)
    tracemalloc.start()
    try:
        requests(3000)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 3000 * 16


class CountedKey(bytes):
    """A key that counts how often any dictionary or set has looked at it."""

    looks = 0

    def __hash__(self):
        CountedKey.looks += 1
        return super().__hash__()

    __eq__ = bytes.__eq__


def looks_during(work):
    CountedKey.looks = 0
    work()
    return CountedKey.looks


def test_pinned_chunks_cost_an_eviction_nothing(policy):
    pinned = [CountedKey(os.urandom(36)) for _ in range(5000)]
    policy.access(pinned, "pinned", pinned)
    policy.mark_evictable(pinned)
    evictable = [CountedKey(os.urandom(36)) for _ in range(10)]
    policy.access(evictable, "evictable", evictable)
    policy.mark_evictable(evictable)
    policy.mark_pinned(pinned)
    assert looks_during(lambda: policy.evict(5)) <= 5 * 4


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_chunk_costs_the_same_look_ups_however_many_are_resident(name):
    def life(resident):
        tier = CPUPrimaryTier(resident, 0, memoryview(b""), policy=name)
        for number in range(resident // 20):
            batch(tier, str(number))
        return looks_during(lambda: [batch(tier, f"more {number}") for number in range(20)])

    def batch(tier, request_id):
        keys = [CountedKey(os.urandom(36)) for _ in range(20)]
        allocation = tier.prepare_store(keys, request_id)
        tier.complete_store(allocation.rows, success=True)
        tier.complete_load(tier.prepare_load(keys, request_id))
        tier.touch(keys)
        tier.on_request_finished(request_id)

    assert life(20_000) <= life(200)


FOREIGN = """
from kvtiers.primary.eviction import EvictionPolicy, LRUPolicy

class Mine(LRUPolicy):
    pass

class Half(EvictionPolicy):
    def access(self, keys, request_id, new=()): ...
    def clear(self): ...

class Greedy(LRUPolicy):
    def __init__(self, capacity):
        raise MemoryError(f"no room\\nfor {capacity}")

class Stranger: ...
"""


@pytest.fixture
def foreign(distributions):
    entries = "".join(f"{name.lower()} = MODULE:{name}\n" for name in ("Mine", "Half", "Greedy", "Stranger", "Absent"))
    distributions.install("kvtiers-mine", f"[kvtiers.eviction]\n{entries}", source=FOREIGN)


def refusal(name):
    with pytest.raises(ConfigError) as caught:
        make_policy(name, 10)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_the_built_in_policies_have_names():
    assert policy_class("lru") is LRUPolicy
    assert policy_class("arc") is ARCPolicy
    assert policy_class("turn-hazard") is TurnHazardPolicy
    assert make_policy("arc", 7).capacity == 7


def test_a_policy_gets_the_clock_of_its_primary_and_stores_all_that_is_offered_unless_it_says_otherwise(foreign):
    made = make_policy("mine", 3, clock=lambda: 7.0)
    assert made.clock() == 7.0
    assert made.worth_storing(names("abcd"), "r") == 4


def test_an_installed_policy_is_found_by_its_entry_point(foreign):
    tier = CPUPrimaryTier(4, 0, memoryview(b""), policy="mine")
    assert tier.prepare_store(names("abcd"), "r") is not None
    assert isinstance(make_policy("mine", 3), EvictionPolicy)


def test_an_unknown_policy_is_refused_with_the_nearest_name(foreign):
    assert refusal("lur") == (
        "unknown eviction policy 'lur'. Did you mean 'lru'? "
        "Eviction policies: absent, arc, greedy, half, lru, mine, stranger, turn-hazard."
    )


def test_what_is_no_policy_is_refused(foreign):
    assert "expected a subclass of EvictionPolicy" in refusal("stranger")


def test_a_policy_with_methods_missing_is_refused_with_their_names(foreign):
    expected = "Half does not define coldest, evict, mark_evictable, mark_pinned, remove, request_finished"
    assert expected in refusal("half")


def test_a_policy_that_cannot_be_imported_or_made_is_refused_in_one_line(foreign):
    assert "cannot be imported" in refusal("absent")
    assert refusal("greedy") == "eviction policy 'greedy' cannot be made for 10 rows: MemoryError: no room for 10"
