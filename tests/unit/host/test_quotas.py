"""Quotas of tenants in a store: what is counted, what is deleted, and that a tenant never has more than its quota."""

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import StoreEntry
from kvtiers.host.quotas import TenantQuotas

QUOTA = 1000


def name_of(tenant, number, model="model"):
    return f"prod/t-{tenant}/{model}-{'0' * 24}/{number:08x}"


class Shelf:
    """A store that lists: names, and when each was written."""

    def __init__(self):
        self.values = {}
        self.written = 0
        self.fails = ""
        self.has_times = True
        self.listed = []
        self.list_takes = lambda: None

    def put(self, name, nbytes):
        self.written += 1
        self.values[name] = (nbytes, self.written)

    def list(self, prefix):
        if self.fails == "list":
            raise OSError("no answer")
        self.listed.append(prefix)
        self.list_takes()
        for name, (nbytes, written) in list(self.values.items()):
            if name.startswith(prefix):
                yield StoreEntry(name, nbytes, float(written) if self.has_times else None)

    def delete(self, names):
        if self.fails == "delete":
            raise OSError("no answer")
        for name in names:
            self.values.pop(name, None)

    def total(self, tenant):
        return sum(nbytes for name, (nbytes, _) in self.values.items() if name.startswith(f"prod/t-{tenant}/"))


class Bench:
    """Quotas without their thread: a test says when it counts. No write waits for the first count."""

    def __init__(self, quotas, **more):
        self.now = 0.0
        self.store = Shelf()
        self.forgotten = []
        more = {"awaited_seconds": 0.0, **more}
        self.quotas = TenantQuotas(self.store, quotas, "prod", self.forgotten.extend, "disk", lambda: self.now, **more)

    def count(self):
        """Count who is due; return how many that were."""
        counted = 0
        while any(account.count_at <= self.now for account in self.quotas._accounts.values()):
            if not (due := self.quotas._next()):
                break
            self.quotas._count(due)
            counted += len(due)
        return counted

    def has_room(self, tenant, nbytes):
        """Return whether the tenant has room for so much; it is not used."""
        if not self.quotas.take(tenant, nbytes):
            return False
        self.quotas.settle(tenant, nbytes, may_be_there=False)
        return True

    def list_slowly(self):
        """Let each listing take as long as one of a store that looks at all it has."""

        def take_long():
            self.now += 2

        self.store.list_takes = take_long

    def write(self, tenant, number, nbytes, outcome="stored"):
        """Write a value if there is room; return whether there was."""
        if not self.quotas.take(tenant, nbytes):
            return False
        if outcome != "refused":
            self.store.put(name_of(tenant, number), nbytes)
        self.quotas.settle(tenant, nbytes, may_be_there=outcome != "refused")
        return True


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(["blue", "red", "green", ""]), st.integers(1, 400)),
        st.tuples(st.just("refused"), st.sampled_from(["blue", "red"]), st.integers(1, 400)),
        st.tuples(st.just("evicts"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("count"), st.just(0), st.just(0)),
        st.tuples(st.just("fails"), st.sampled_from(["", "list", "delete"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans())
def test_whatever_is_written_and_evicted_no_tenant_has_more_than_its_quota(steps, is_slow):
    bench = Bench({"blue": QUOTA, "*": QUOTA // 2})
    if is_slow:
        bench.list_slowly()
    limits = {"blue": QUOTA, "red": QUOTA // 2, "green": QUOTA // 2}
    for number, (what, which, nbytes) in enumerate(steps):
        if what in {"write", "refused"}:
            bench.write(which, number, nbytes, what)
        elif what == "evicts" and bench.store.values:
            names = list(bench.store.values)
            del bench.store.values[names[which % len(names)]]
        elif what == "count":
            bench.now += 2
            bench.count()
        elif what == "fails":
            bench.store.fails = which
        for tenant, limit in limits.items():
            assert bench.store.total(tenant) <= limit
    bench.store.fails = ""
    bench.now += 1000
    bench.count()
    for tenant in limits.keys() & {"blue", *(whose for what, whose, _ in steps if what in {"write", "refused"})}:
        room = limits[tenant] - bench.store.total(tenant)
        assert bench.has_room(tenant, room), "what is counted is what is there"
        assert not bench.has_room(tenant, room + 1)


def test_a_tenant_at_its_quota_loses_its_oldest_values_and_stores_new_ones():
    bench = Bench({"blue": QUOTA})
    bench.count()
    assert [bench.write("blue", number, 100) for number in range(11)] == [True] * 10 + [False]
    assert bench.write("red", 0, 10 * QUOTA), "without a quota there is no bound"
    assert bench.count() == 0, "it was counted just now"
    bench.now += 2
    assert bench.count() == 1
    names = [name for name in bench.store.values if "blue" in name]
    assert names == [name_of("blue", number) for number in range(1, 10)]
    assert bench.forgotten == [name_of("blue", 0)]
    assert bench.write("blue", 11, 100)
    assert not bench.write("blue", 12, 100)
    bench.now += 2
    bench.count()
    assert bench.write("blue", 13, 100)
    assert bench.quotas.deleted == 2


def test_what_was_there_before_the_start_counts_and_what_is_too_much_goes_at_once():
    bench = Bench({"*": QUOTA})
    for number in range(15):
        bench.store.put(name_of("blue", number), 100)
    assert not bench.write("blue", 99, 100), "not counted yet"
    bench.count()
    assert bench.store.total("blue") == 900
    assert name_of("blue", 14) in bench.store.values
    assert bench.write("blue", 99, 100)


def test_what_other_engines_write_counts_from_the_next_count_on():
    bench = Bench({"blue": QUOTA})
    bench.count()
    assert bench.write("blue", 0, 100)
    for number in range(1, 20):
        bench.store.put(name_of("blue", number), 100)
    assert bench.count() == 0, "not so soon"
    bench.now += 301
    assert bench.count() == 1
    assert bench.store.total("blue") == 900


def test_values_in_flight_while_it_counts_are_not_missed():
    bench = Bench({"blue": QUOTA})
    bench.count()
    assert bench.quotas.take("blue", 600)  # not in the store yet
    bench.now += 301
    bench.count()
    assert not bench.quotas.take("blue", 600)
    bench.store.put(name_of("blue", 0), 600)
    bench.quotas.settle("blue", 600, may_be_there=True)
    bench.now += 301
    bench.count()
    assert bench.has_room("blue", QUOTA - 600)
    assert not bench.has_room("blue", QUOTA - 599)


def test_a_value_larger_than_the_quota_never_fits_and_empties_nothing():
    bench = Bench({"blue": QUOTA})
    bench.count()
    assert bench.write("blue", 0, 800)
    for _ in range(5):
        assert not bench.write("blue", 1, 2 * QUOTA)
        bench.now += 2
        assert bench.count() == 0
    assert bench.store.total("blue") == 800


def test_a_store_that_fails_has_no_room_for_the_tenant_and_one_line_says_why(caplog):
    bench = Bench({"blue": QUOTA})
    bench.store.fails = "list"
    for number in range(3):
        assert not bench.write("blue", number, 10)
        bench.now += 2
        bench.count()
    lines = [record.getMessage() for record in caplog.records]
    why = "the store cannot be listed: OSError: no answer; what has no room is dropped until it can be counted"
    assert set(lines) == {f"disk: the quota of tenant 'blue': {why}"}
    bench.store.fails = ""
    bench.now += 10
    bench.count()
    assert bench.write("blue", 9, 10)


def test_where_a_store_records_no_times_no_model_of_a_tenant_is_the_one_that_goes():
    bench = Bench({"blue": 10 * QUOTA})
    bench.store.has_times = False
    for number in range(100):
        bench.store.put(name_of("blue", number, f"model-{number % 2}"), 200)
    bench.count()
    left = [number for number in range(100) if name_of("blue", number, f"model-{number % 2}") in bench.store.values]
    assert len(left) == 45, "a tenth below the quota"
    assert 10 < sum(number % 2 for number in left) < 35


def test_what_only_begins_like_a_tenants_values_is_not_the_tenants():
    tenant = f"tech-t-pro-{'0' * 24}"  # of the model "t-tech/t-pro", without a tenant
    bench = Bench({"*": QUOTA})
    for number in range(10):
        bench.store.put(f"prod/t-{tenant}/{number:08x}", 400)
    bench.write(tenant, 1, 10)
    bench.now += 2
    bench.count()
    assert len(bench.store.values) == 10
    assert bench.write(tenant, 1, QUOTA), "all of the quota is there for it"


def test_tenants_share_a_listing_where_a_store_looks_at_all_it_has_for_one():
    bench = Bench({"*": QUOTA})
    bench.list_slowly()
    tenants = [f"u{number}" for number in range(20)]
    for number in range(15):
        for tenant in [*tenants, "other"]:
            bench.store.put(name_of(tenant, number), 100)
    assert not any(bench.write(tenant, 20, 100) for tenant in tenants), "none was counted yet"
    assert bench.count() == 20
    assert bench.store.listed == ["prod/t-u0/", "prod/t-"]
    assert {bench.store.total(tenant) for tenant in tenants} == {900}
    assert all(bench.write(tenant, 20, 100) for tenant in tenants)
    assert bench.store.total("other") == 1500, "one that writes nothing here is not counted"
    assert bench.forgotten[:6] == [name_of("u0", number) for number in range(6)]
    assert bench.forgotten[-6:] == [name_of("u19", number) for number in range(6)], "of each the oldest"


def test_each_tenant_is_listed_alone_where_that_is_quick_or_listing_all_takes_longer():
    bench = Bench({"*": QUOTA})
    for number in range(9):
        bench.write(f"u{number}", 0, 100)
    assert bench.count() == 9
    assert bench.store.listed == [f"prod/t-u{number}/" for number in range(9)]
    bench.quotas._one_takes, bench.quotas._all_take = 1.0, 10.0  # as they were measured
    bench.now += 301
    assert bench.count() == 9
    assert "prod/t-" not in bench.store.listed


def test_a_slow_listing_of_many_values_is_of_the_tenant_alone():
    bench = Bench({"*": QUOTA}, most_oldest=64)
    bench.list_slowly()
    for number in range(2500):
        bench.store.put(name_of("large", number), 1)
    bench.write("large", 2500, 1)
    bench.count()
    assert bench.quotas._all_take == float("inf")


def test_what_one_count_cannot_delete_is_counted_again_soon():
    bench = Bench({"blue": QUOTA}, most_oldest=64)
    for number in range(100):
        bench.store.put(name_of("blue", number), 100)
    bench.count()
    assert bench.store.total("blue") == 3600
    bench.now += 1
    bench.count()
    assert bench.store.total("blue") == 900


def test_a_write_whose_account_is_closed_while_it_waits_for_the_first_count_has_no_room():
    bench = Bench({"*": QUOTA}, awaited_seconds=60.0)
    quotas, taken = bench.quotas, []
    waits = threading.Event()
    wait_for = quotas._changed.wait_for

    def wait(*arguments):
        waits.set()
        return wait_for(*arguments)

    quotas._changed.wait_for = wait
    writer = threading.Thread(target=lambda: taken.append(quotas.take("blue", 100)))
    writer.start()
    assert waits.wait(60)
    with quotas._changed:  # which the writer has left by waiting
        account = quotas._accounts["blue"]
        assert quotas._close_one(), "as another tenant's first write does, where there are too many"
        account.used = 0
        quotas._changed.notify_all()
    writer.join(60)
    assert taken == [False]


def test_no_write_waits_for_a_count_that_comes_too_late():
    bench = Bench({"*": QUOTA, "blue": QUOTA}, awaited_seconds=2.0)
    bench.list_slowly()
    assert bench.quotas._accounts["blue"].awaited_until == 2.0
    bench.now += 2
    assert not bench.write("green", 0, 100)
    assert bench.quotas._accounts["green"].awaited_until == bench.now, "that of another tenant is late already"
    bench.count()
    assert not bench.write("red", 0, 100)
    assert bench.quotas._accounts["red"].awaited_until == bench.now
    bench.count()
    assert bench.write("red", 0, 100)


def test_a_count_that_the_end_interrupts_counts_for_nothing():
    bench = Bench({"blue": QUOTA})
    bench.count()
    assert bench.write("blue", 0, 900)
    bench.store.list_takes = bench.quotas.close
    bench.now += 301
    bench.count()
    assert not bench.write("blue", 1, 900), "what was counted before still holds"


def test_of_more_tenants_than_are_counted_the_one_seen_last_has_room():
    bench = Bench({"*": QUOTA, "blue": QUOTA}, most_tenants=3)
    for number in range(20):
        bench.write(f"u{number}", 0, 10)
        bench.now += 2
        bench.count()
        assert bench.write(f"u{number}", 1, 10)
    assert sorted(bench.quotas._accounts) == ["blue", "u18", "u19"]
    for number in (18, 19):
        assert bench.quotas.take(f"u{number}", 1)
    assert not bench.quotas.take("another", 1), "all have a write in flight, or a quota of their own"


def test_a_store_that_cannot_list_is_refused_in_one_line():
    assert TenantQuotas.problem(Shelf(), {"blue": 1}) == ""
    assert TenantQuotas.problem(object(), {}) == ""
    assert TenantQuotas.problem(object(), {"blue": 1}) == (
        "its store, object, cannot list what it holds, so no tenant's quota can be kept in it; leave 'quotas' out"
    )


def test_the_thread_counts_what_is_short_and_ends_at_once():
    store = Shelf()
    quotas = TenantQuotas(store, {"*": QUOTA}, "prod", lambda names: None, "disk")
    thread = quotas.thread()
    thread.start()
    assert quotas.take("blue", 900), "the first count is waited for"
    quotas.settle("blue", 900, may_be_there=True)
    quotas.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not quotas.take("blue", 900)
