"""Shares of tenants in the primary: whatever is stored, promoted and pinned, none takes another below its share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.api import LookupResult, make_offload_key
from kvtiers.primary.eviction import (
    BUILT_IN,
    ARCPolicy,
    EvictionPolicy,
    LRUPolicy,
    TenantShares,
    make_policy,
)
from kvtiers.primary.eviction.tenant import Request, Tenant
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers_policies.forecast import WithForecast
from kvtiers_policies.turn_hazard import TurnHazardPolicy

TENANTS = ["", "blue", "red", "green"]  # green has no share: it is one of the rest
POLICIES = [*BUILT_IN, "turn-hazard"]


def keys_of(tenant, *numbers):
    return [make_offload_key(b"hash" + bytes([number]), 0, tenant) for number in numbers]


EVERY = {tenant: keys_of(tenant, *range(14)) for tenant in TENANTS}


def primary_of(rows, policy, shares, **more):
    return CPUPrimaryTier(rows, 0, memoryview(b""), policy=policy, shares=shares, **more)


def resident(primary, tenant):
    return sum(found is not LookupResult.MISS for found in primary.find(EVERY[tenant]))


class Shares(RuleBasedStateMachine):
    """Any calls of the primary. ``leases``: how to end each of those in flight."""

    tenants = st.sampled_from(TENANTS)
    numbers = st.lists(st.integers(0, 13), min_size=1, max_size=6, unique=True)
    requests = st.sampled_from(["a", "b", "c", ""])

    @initialize(
        rows=st.integers(1, 20),
        policy=st.sampled_from(POLICIES),
        blue=st.sampled_from([0.1, 0.3, 0.5]),
        red=st.sampled_from([0.0, 0.2, 0.5]),
        protected=st.sampled_from([0.0, 0.4]),
        forecast=st.booleans(),
        kept=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, rows, policy, blue, red, protected, forecast, kept):
        self.rows, self.now = rows, 0.0
        self.shares = {"blue": blue, "red": red}
        self.primary = primary_of(
            rows,
            policy,
            self.shares,
            protected_share=protected,
            protect_seconds=5.0,
            kept_share=kept,
            clock=lambda: self.now,
        )
        if forecast:
            self.primary.forecast_reuse(set(), WithForecast)
        self.leases = []
        self.used = {}  # by running request

    def kept(self, tenant):
        return int(self.shares.get(tenant, 0.0) * self.rows)

    def count(self):
        return {tenant: resident(self.primary, tenant) for tenant in TENANTS}

    def checked(self, actors, call):
        """Make a call for these tenants; no other one may be taken below its share by it."""
        before = self.count()
        result = call()
        for tenant, number in self.count().items():
            if tenant not in actors:
                assert number >= min(before[tenant], self.kept(tenant)), (tenant, before, self.count())
        return result

    def take(self, tenant, allocation, complete):
        if allocation is None:
            return
        assert len(allocation.keys) == len(allocation.rows)
        assert set(allocation.keys) <= {key for one in tenant for key in EVERY[one]}
        if allocation.rows:
            self.leases.append((complete, allocation.rows))

    @rule(tenant=tenants, numbers=numbers, request=requests)
    def store(self, tenant, numbers, request):
        keys = keys_of(tenant, *numbers)
        missing = self.primary.find(keys).count(LookupResult.MISS)
        is_idle = not self.leases and not self.primary.protected_rows
        must_fit = is_idle and self.count()[tenant] + missing <= self.kept(tenant)
        own = self.used.setdefault(request, set()) if request else set()
        must_stay = [key for key in own if key in EVERY[tenant] and self.primary.lookup(key) is not LookupResult.MISS]
        allocation = self.checked({tenant}, lambda: self.primary.prepare_store(keys, request))
        assert LookupResult.MISS not in self.primary.find(must_stay), "a request evicts nothing that it uses"
        own.update(key for key in keys if allocation and self.primary.lookup(key) is not LookupResult.MISS)
        if must_fit:
            assert allocation is not None
            assert len(allocation.keys) == missing, "below its share a tenant always gets rows"
        self.take({tenant}, allocation, self.primary.complete_store)

    @rule(tenant=tenants, other=tenants, numbers=numbers)
    def store_of_two(self, tenant, other, numbers):
        keys = list(dict.fromkeys(keys_of(tenant, *numbers) + keys_of(other, *numbers[:3])))
        before = self.count()
        allocation = self.checked({tenant, other}, lambda: self.primary.prepare_store(keys, "lazy"))
        for one, number in self.count().items():
            assert number >= min(before[one], self.kept(one)), "not even one of the two"
        self.take({tenant, other}, allocation, self.primary.complete_store)

    @rule(tenant=tenants, numbers=numbers, request=requests, reserve=st.integers(0, 3))
    def promote(self, tenant, numbers, request, reserve):
        keys = keys_of(tenant, *numbers)
        allocation = self.checked(
            {tenant}, lambda: self.primary.prepare_write(keys, request, reserve_rows=reserve, max_rows=None)
        )
        self.take({tenant}, allocation, self.primary.complete_write)

    @rule(tenant=tenants, numbers=numbers, request=requests)
    def load(self, tenant, numbers, request):
        rows = self.primary.prepare_load(keys_of(tenant, *numbers), request)
        if rows is not None:
            self.used.setdefault(request, set()).update(keys_of(tenant, *numbers))
            self.leases.append((lambda rows, _success: self.primary.complete_load(rows), rows))

    @rule(which=st.integers(0, 5), success=st.booleans())
    def end(self, which, success):
        if which < len(self.leases):
            complete, rows = self.leases.pop(which)
            complete(rows, success)

    @rule()
    def end_all(self):
        while self.leases:
            complete, rows = self.leases.pop()
            complete(rows, True)

    @rule(request=requests)
    def ask_what_makes_no_room(self, request):
        shares = self.primary._chunks._shares
        tenants = shares._all if shares._for is None else [shares._for]
        used = shares.used_by(request)
        assert shares.spared(request, ()) == sum(len(tenant.evictable & set(used)) for tenant in tenants)

    @rule(request=requests)
    def finish(self, request):
        self.primary.on_request_finished(request)
        self.used.pop(request, None)

    @rule(tenant=tenants, numbers=numbers)
    def touch(self, tenant, numbers):
        self.checked(set(), lambda: self.primary.touch(keys_of(tenant, *numbers)))

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.checked(set(), lambda: self.primary.release_expired(self.now))

    @rule(tenant=tenants, numbers=numbers, high=st.booleans(), seconds=st.sampled_from([0.5, 2.0, 9.0]))
    def keep(self, tenant, numbers, high, seconds):
        self.checked(set(), lambda: self.primary.keep(keys_of(tenant, *numbers), seconds, high=high))

    @rule(request=st.sampled_from(["a", "b", "c"]))
    def be_of_low_priority(self, request):
        self.primary.brings_low(request)

    @rule(tenant=tenants)
    def forget(self, tenant):
        self.checked({tenant}, lambda: self.primary.forget(EVERY[tenant]))

    @rule()
    def reset(self):
        self.primary.reset_cache()
        self.used.clear()

    @invariant()
    def the_policies_have_what_is_resident(self):
        coldest = self.primary.coldest(99, clean=True)
        assert len(set(coldest)) == len(coldest) == self.primary.evictable
        shares = self.primary._chunks._shares
        assert shares.resident_of("blue") == resident(self.primary, "blue")
        assert shares.resident_of("red") == resident(self.primary, "red") if self.shares["red"] else True
        assert self.primary.misuse == 0


TestShares = Shares.TestCase
TestShares.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_floods_evicts_itself_and_never_the_share_of_another(policy):
    primary = primary_of(100, policy, {"blue": 0.2})
    blue = [make_offload_key(b"b%d" % number, 0, "blue") for number in range(30)]
    primary.complete_store(primary.prepare_store(blue, "b").rows, True)
    primary.on_request_finished("b")
    for number in range(50):
        keys = [make_offload_key(b"%d %d" % (number, place), 0) for place in range(10)]
        if allocation := primary.prepare_store(keys, "r"):
            primary.complete_store(allocation.rows, True)
        primary.on_request_finished("r")
    assert primary.find(blue).count(LookupResult.HIT) >= 20
    assert primary.find(blue[:20]) == [LookupResult.HIT] * 20, "its own tail has left first"


def test_rows_above_the_shares_are_divided_evenly_among_those_who_ask():
    primary = primary_of(100, "lru", {"blue": 0.2, "red": 0.1})
    for number in range(60):
        for tenant in ("blue", "red", ""):
            keys = [make_offload_key(b"%d %d" % (number, place), 0, tenant) for place in range(5)]
            primary.complete_store(primary.prepare_store(keys, f"{tenant}{number}").rows, True)
            primary.on_request_finished(f"{tenant}{number}")
    shares = primary._chunks._shares
    counts = [shares.resident_of(tenant) for tenant in ("blue", "red", "green")]
    assert sum(counts) == 100
    assert all(abs(count - kept - 70 / 3) <= 5 for count, kept in zip(counts, (20, 10, 0), strict=True)), counts


def test_an_unused_share_is_used_by_others_until_its_tenant_wants_it():
    primary = primary_of(10, "lru", {"blue": 0.5})
    primary.complete_store(primary.prepare_store(keys_of("", *range(10)), "r").rows, True)
    primary.on_request_finished("r")
    assert primary.chunks == 10
    allocation = primary.prepare_store(keys_of("blue", *range(5)), "b")
    assert len(allocation.evicted) == 5
    primary.complete_store(allocation.rows, True)
    primary.on_request_finished("b")
    assert primary.prepare_store(keys_of("", 10, 11, 12, 13), "r").evicted == keys_of("", 4, 3, 2, 1), "its own"


def store_in_steps(primary, keys, request, step=8):
    """Store a prompt as a scheduler does: where there is no room for all of a step, its first half; then no more."""
    for start in range(0, len(keys), step):
        wanted = part = keys[start : start + step]
        while part and (allocation := primary.prepare_store(part, request)) is None:
            part = part[: len(part) // 2]
        if part:
            primary.complete_store(allocation.rows, True)
        if len(part) < len(wanted):
            return False
    return True


def flooded(policy):
    """Return a primary of 40 rows that red, whose share is half of them, and old chunks of others fill."""
    primary = primary_of(40, policy, {"blue": 0.2, "red": 0.5})
    for tenant, rows in (("red", 20), ("green", 12), ("blue", 8)):
        store_in_steps(primary, keys_of(tenant, *range(rows)), f"old {tenant}")
        primary.on_request_finished(f"old {tenant}")
    return primary


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tenant", ["blue", "green"])
def test_a_prompt_that_is_stored_in_several_steps_keeps_its_head(policy, tenant):
    primary = flooded(policy)
    prompt = keys_of(tenant, *range(100, 150))
    took_all = store_in_steps(primary, prompt, "long")
    rows = {"blue": 20, "green": 12}[tenant]  # what blue had before is not taken for another
    run, _ = primary.resident_run(prompt)
    assert run == primary.find(prompt).count(LookupResult.HIT), "none behind a gap"
    if policy == "turn-hazard":  # which finds some of it not worth a row
        assert run <= rows
    else:
        assert (run, took_all) == (rows, False), "there is no room for all of it"
    assert resident(primary, "red") == 14, "of the 20, the first 14 have their numbers"
    assert primary.misuse == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_begins_with_a_hit_keeps_that_in_its_later_steps(policy):
    primary = flooded(policy)
    prompt = keys_of("blue", *range(8), *range(100, 150))
    primary.complete_load(primary.prepare_load(prompt[:8], "long"))
    store_in_steps(primary, prompt[8:], "long")
    run, _ = primary.resident_run(prompt)
    assert run == primary.find(prompt).count(LookupResult.HIT)
    assert run == 20 if policy != "turn-hazard" else 8 <= run <= 20, "turn-hazard may find some of it not worth a row"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_goes_on_to_the_tiers_when_it_has_filled_what_its_tenant_may_have(policy):
    primary = flooded(policy)
    primary.store_everything()
    prompt = keys_of("blue", *range(100, 150))
    assert store_in_steps(primary, prompt, "long") is True, "each chunk had a row, from where a tier takes it"
    assert primary.resident_run(prompt)[0] >= 20 - 8, "only what the last step takes is missing at the end"


def store(primary, keys, request):
    """Store chunks for a request that ends then; return what has left for them."""
    allocation = primary.prepare_store(keys, request)
    primary.complete_store(allocation.rows, True)
    primary.on_request_finished(request)
    return allocation.evicted


@pytest.mark.parametrize("policy", POLICIES)
def test_hints_say_which_of_a_tenant_s_chunks_leave_and_not_how_many(policy):
    """Blue and red have 10 of 20 rows each: what blue keeps stays, what it has brought of low priority goes first."""

    def left(hints):
        primary = primary_of(20, policy, {"blue": 0.3, "red": 0.3}, kept_share=1.0, clock=lambda: 0.0)
        if hints:
            primary.brings_low("low")
        store(primary, keys_of("blue", *range(4)), "b")
        store(primary, keys_of("red", *range(10)), "r")
        store(primary, keys_of("blue", *range(4, 10)), "low")
        if hints:
            primary.keep(keys_of("blue", *range(4)), 60.0)
            primary.keep(keys_of("red", *range(3)), 60.0, high=True)
        return primary, store(primary, keys_of("green", *range(4)), "g")

    (_, without), (primary, evicted) = left(hints=False), left(hints=True)
    for tenant in ("blue", "red"):
        counts = [sum(key in EVERY[tenant] for key in gone) for gone in (without, evicted)]
        assert counts == [2, 2], "both are equally far above their shares, whatever they hint"
    assert [key for key in evicted if key in EVERY["blue"]] == keys_of("blue", 9, 8), "the tail of low priority"
    assert primary.figures()["kept_rows"] == 7
    assert store(primary, keys_of("blue", *range(10, 14)), "b2")
    assert primary.resident_run(keys_of("blue", *range(4))) == (4, 0)
    assert primary.resident_run(keys_of("red", *range(3))) == (3, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_tenant_keeps_costs_no_other_one_a_row(policy):
    primary = primary_of(20, policy, {"blue": 0.5, "red": 0.2}, kept_share=1.0, clock=lambda: 0.0)
    store(primary, keys_of("blue", *range(10)), "b")
    store(primary, keys_of("red", *range(10)), "r")
    primary.keep(EVERY["blue"], 60.0, high=True)
    primary.keep(EVERY["red"], 60.0)
    assert primary.figures()["kept_rows"] == 10 + 4, "of each in a part as large as its share"
    assert len(store(primary, keys_of("blue", 10, 11), "b")) == 2
    assert (resident(primary, "blue"), resident(primary, "red")) == (12, 8), "red was further above its share"
    assert set(store(primary, keys_of("red", 10, 11, 12, 13), "r")) <= set(EVERY["red"]) | set(EVERY["blue"])
    assert resident(primary, "blue") >= 10, "its share"


@pytest.mark.parametrize("policy", POLICIES)
def test_where_a_tenant_keeps_all_it_has_its_stores_take_of_that(policy):
    primary = primary_of(10, policy, {"blue": 0.8, "red": 0.2}, kept_share=1.0, clock=lambda: 0.0)
    primary.store_everything()
    store(primary, keys_of("red", 0, 1), "r")
    store(primary, keys_of("blue", *range(8)), "b")
    primary.keep(keys_of("blue", *range(8)), 60.0)
    assert len(store(primary, keys_of("blue", 8, 9, 10), "b2")) == 3
    assert (resident(primary, "blue"), resident(primary, "red")) == (8, 2)
    assert primary.figures()["kept_given_up"] == 3


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_request_that_is_refused_again_costs_what_has_changed_since(policy):
    counted = []

    class Counting(set):
        def intersection(self, *others):
            counted.append(len(self))
            return super().intersection(*others)

    primary = primary_of(60, policy, {"blue": 0.9})
    assert not store_in_steps(primary, keys_of("blue", *range(100)), "long", step=3)
    blue = primary._chunks._shares._of[b"blue"]
    assert len(blue.evictable) == 60
    blue.evictable = Counting(blue.evictable)
    for number in range(100, 120):
        assert primary.prepare_store(keys_of("blue", number), "long") is None
        primary.complete_load(primary.prepare_load(keys_of("blue", 0, 1), "other"))
    assert counted == []


def test_what_a_request_uses_is_counted_again_when_too_much_has_changed():
    tenant, request, keys = Tenant(make_policy("lru", 9), 0, 0), Request(), keys_of("", *range(200))
    request.use(keys[:50])
    for number in range(60):
        tenant.add(keys)
        request.use(keys[50 + number : 51 + number])
        if number % 20 == 0:
            assert tenant.count_of(request) == 51 + number
        tenant.discard(keys[:100])
        if number % 15 == 0:
            assert tenant.count_of(request) == max(0, number - 49)
        tenant.discard(keys[100:])
    assert len(tenant._changes) < 60, "no more of them are kept than it costs to count again"


def test_a_request_that_is_not_asked_again_is_not_counted_at_each_use():
    tenant, request, keys = Tenant(make_policy("lru", 9), 0, 0), Request(), keys_of("", *range(200))
    request.use(keys[:150])
    tenant.add(keys)
    assert tenant.count_of(request) == 150
    for key in keys[:66]:
        tenant.discard([key])
        request.use([keys[150]])
    assert request.tenant is tenant, "each use has counted the one change before it"
    for key in keys[66:132]:
        tenant.discard([key])
    request.use([keys[151]])
    assert request.tenant is None
    assert tenant.count_of(request) == 152 - 132


class WithoutSearch(LRUPolicy):
    """One that finds nothing for ``evict_unused``, as by default."""

    evict_unused = EvictionPolicy.evict_unused


class Raises(WithoutSearch):
    """One whose evictions fail, as a third party's may."""

    def evict(self, count):
        raise RuntimeError("a bug")


def two_tenants(make, hints=0):
    """Return shares of 40 rows: red has 20, and blue too, of "old"; a request "r" of blue has used two of these."""
    shares = TenantShares(40, {"blue": 0.25, "red": 0.25}, make, hints)
    for tenant in ("red", "blue"):
        keys = keys_of(tenant, *range(20))
        shares.access(keys, "old", keys)
        shares.mark_evictable(keys)
    shares.request_finished("old")
    shares.access(keys_of("blue", 0, 19), "r")
    shares.on_store_miss(keys_of("blue", 99), "r")
    return shares


@pytest.mark.parametrize("make", [LRUPolicy, WithoutSearch, ARCPolicy, TurnHazardPolicy])
def test_a_tenant_s_own_chunks_make_room_before_others_whatever_its_policy_finds(make):
    shares = two_tenants(lambda: make(40))
    if make is TurnHazardPolicy:
        shares.access(keys_of("blue", *range(20)), "another")  # which it spares, too, for as long as there are others
    evicted = shares.evict_unused(4, "r")  # blue has as many above its share as red, and asks
    assert len(evicted) == 4
    assert set(evicted) <= set(keys_of("blue", *range(1, 19)))


def test_a_policy_whose_evictions_fail_has_room_made_by_its_order():
    shares = two_tenants(lambda: Raises(40))
    assert shares.evict_unused(4, "r") == keys_of("blue", 18, 17, 16, 15)
    assert set(shares.coldest()) == {*keys_of("red", *range(20)), *keys_of("blue", *range(15), 19)}


def test_a_store_behind_a_shared_prefix_with_a_window_pins_none_of_what_its_request_uses(monkeypatch):
    """Group 1 is a window: what another running request left of it lies between chunks that this one uses."""

    def keys(numbers, group):
        return [make_offload_key(b"%d" % number, group, "blue") for number in numbers]

    primary = primary_of(400, "lru", {"blue": 0.9})

    def store(number, request_id):
        plan = primary.prepare_store([*keys([number], 0), *keys([number], 1)], request_id)
        primary.complete_store(plan.rows, True)
        return plan.evicted

    store(0, "other")
    primary.complete_load(primary.prepare_load(keys([0], 0), "r"))  # it begins before the other one ends
    for number in range(1, 200):
        store(number, "other")
    primary.on_request_finished("other")
    primary.complete_load(primary.prepare_load([*keys(range(200), 0), *keys(range(196, 200), 1)], "r"))
    pinned, pin = [], LRUPolicy.mark_pinned

    def counts(policy, given):
        pinned.extend(given)
        pin(policy, given)

    monkeypatch.setattr(LRUPolicy, "mark_pinned", counts)
    evicted = [key for number in range(200, 250) for key in store(number, "r")]
    assert evicted == keys(range(195, 95, -1), 1), "the window's tail first, and nothing that the request uses"
    assert pinned == evicted


def test_what_was_pinned_for_an_eviction_can_leave_again_though_the_policy_raises(monkeypatch):
    primary = primary_of(10, "lru", None)
    primary.complete_store(primary.prepare_store(keys_of("", *range(10)), "old").rows, True)
    monkeypatch.setattr(LRUPolicy, "evict", Raises.evict)
    with pytest.raises(RuntimeError, match="a bug"):
        primary.prepare_store(keys_of("", 0, 1, 20), "r")
    monkeypatch.undo()
    assert len(primary.coldest(99)) == 10, "also those that were to be spared"


def test_what_a_request_uses_does_not_leave_first_when_one_of_low_priority_has_brought_it_back():
    shares = two_tenants(lambda: LRUPolicy(40))
    (_, blue, _) = shares.all_kept
    shares.mark_pinned(keys_of("blue", 0))
    shares.remove(keys_of("blue", 0))
    blue.brings_low("low")
    back = keys_of("blue", 20, 0)
    shares.access(back, "low", back)
    shares.mark_evictable(back)
    shares.request_finished("low")
    shares.on_store_miss(keys_of("blue", 99), "r")
    assert shares.evict_unused(1, "r") == keys_of("blue", 20)
    assert set(shares.evict_unused(10, "r")).isdisjoint(back)


def test_no_hint_ends_for_a_request_that_uses_its_chunk():
    shares = two_tenants(lambda: LRUPolicy(40), hints=100)
    (_, blue, _) = shares.all_kept
    shares.mark_pinned(keys_of("blue", *range(20)))
    shares.keep(keys_of("blue", 0, 19), 60.0, high=False)
    shares.keep(keys_of("blue", *range(1, 19)), 60.0, high=False)
    shares.mark_evictable(keys_of("blue", *range(20)))
    assert blue.held == 20
    assert shares.evict_unused(2, "r") == keys_of("blue", 18, 17)
    assert (blue.held, blue.given_up) == (18, 2)


given_shares = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(given_shares, st.integers(0, 60), st.integers(-1, 4))
def test_what_is_divided_is_what_was_asked_for_and_leaves_all_equally_far_above(tenants, count, which):
    shares = {f"t{number}": 1 / 5 for number in range(len(tenants))}
    policy = TenantShares(200, shares, lambda: make_policy("lru", 200))
    for number, (chunks, pinned) in enumerate(tenants):
        keys = [make_offload_key(b"%d" % place, 0, f"t{number}") for place in range(40 + chunks)]
        policy.access(keys, "r", keys)
        policy.mark_evictable(keys[min(pinned, len(keys)) :])
    own = f"t{which % len(tenants)}" if which >= 0 else "none"
    policy.on_store_miss([make_offload_key(b"new", 0, own)], "r")
    obtainable = policy.obtainable()
    victims = policy.evict(count)
    if count > obtainable:
        assert victims is None
        return
    assert len(victims) == len(set(victims)) == count
    left = [policy.resident_of(f"t{number}") for number in range(len(tenants))]
    for number, (chunks, _) in enumerate(tenants):
        if f"t{number}" != own:
            assert left[number] >= 40
        gave = 40 + chunks - left[number]
        if gave and f"t{number}" != own:
            highest = max(
                (n for m, n in enumerate(left) if f"t{m}" != own and n > 40 and n > tenants[m][1]), default=left[number]
            )
            assert left[number] >= highest - 1, "one that gave is as far above as the others, or they could not give"
