"""Rows for promotions: when they are reserved, for whom, how many, and when they are released again."""

import pytest

from kvtiers.tiering.jobs import TieringOptions

from .harness import HIT, MISS, PENDING, RETRY, ROW_BYTES, Bench, chain

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 8)


def loads(bench, name="a"):
    return [list(job.keys) for job in bench.tier[name].loads]


def test_one_batch_a_tier_and_request_cut_into_jobs_of_bounded_size():
    options = TieringOptions(load_wait=0.1, one_tier=1.0, all_tiers=1.0, job_bytes=3 * ROW_BYTES)
    bench = Bench(rows=32, options=options)
    bench.tier["a"].put(KEYS + chain("m", 2))
    bench.lookup(KEYS, bench.request())
    bench.lookup(chain("m", 2), bench.request())
    bench.step()
    assert loads(bench) == [KEYS[:3], KEYS[3:6], KEYS[6:], chain("m", 2)]


def test_nothing_beyond_the_shortest_run_is_loaded():
    bench = Bench(options=WIDE, tokens_per_chunk=(16, 32))
    other = chain("k", 4, group=1)
    bench.tier["a"].put(KEYS + other[:2])
    assert bench.reach([KEYS, other], bench.request()) == (0, 64, False)
    bench.step()
    assert [sorted(keys) for keys in loads(bench)] == [sorted(KEYS[:4] + other[:2])]
    assert bench.primary.find(KEYS[4:]) == [MISS] * 4
    assert bench.figures("a")["pinned_rows"] == 6


def test_a_chunk_that_begins_before_the_end_of_a_load_belongs_to_it():
    """The chunks of a group may be longer than the step in which loads end."""
    bench = Bench(options=WIDE, tokens_per_chunk=(16, 64))
    other = chain("k", 2, group=1)
    bench.tier["a"].put(KEYS[:7] + other)
    assert bench.reach([KEYS, other], bench.request(), step=16) == (0, 112, False)
    bench.step()
    assert [sorted(keys) for keys in loads(bench)] == [sorted(KEYS[:7] + other)]


def test_what_a_request_that_ends_had_reserved_is_dropped_or_handed_on():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS)
    first, second = bench.request(), bench.request()
    bench.lookup(KEYS, first)
    bench.lookup(KEYS[:3], second)
    bench.manager.on_request_finished(first)
    assert bench.primary.find(KEYS) == [PENDING] * 3 + [MISS] * 5
    bench.step()
    assert loads(bench) == [KEYS[:3]]
    assert bench.tier["a"].loads[0].context is second
    bench.step()
    assert bench.load(KEYS[:3], second)


def test_nothing_is_handed_on_to_a_request_that_has_ended_too():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS)
    first, second = bench.request(), bench.request()
    bench.lookup(KEYS, first)
    bench.lookup(KEYS, second)
    bench.manager.on_request_finished(second)
    bench.manager.on_request_finished(first)
    bench.step()
    assert not loads(bench)
    assert bench.primary.free_rows == bench.rows


def test_nothing_is_fetched_for_a_request_that_ends_in_its_first_step():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.manager.on_request_finished(ctx)
    assert not bench.manager.has_pending_work()
    bench.step()
    assert not loads(bench)
    assert bench.primary.free_rows == bench.rows
    assert bench.figures("a")["pinned_rows"] == bench.figures("a")["loading_chunks"] == 0


def test_a_reset_drops_what_was_reserved_and_no_tier_ever_hears_of_it():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    assert bench.manager.has_pending_work()
    bench.manager.reset_cache()
    assert bench.primary.free_rows == bench.rows
    assert bench.figures("a")["pinned_rows"] == 0
    bench.step()
    assert not loads(bench)


# -- budgets


def test_a_tenth_of_the_rows_is_left_to_stores():
    bench = Bench(rows=20, options=WIDE)
    keys = chain("many", 40)
    bench.tier["a"].put(keys)
    assert bench.lookup(keys, bench.request()) == (0, 18, False)
    assert bench.primary.free_rows == 2
    assert bench.figures("a")["dropped_promotions"] == 22
    assert bench.begin_store(chain("mine", 2)) is not None


def test_chunks_of_which_none_gets_a_row_are_counted_too():
    bench = Bench(rows=20, options=WIDE)
    keys = chain("many", 4)
    bench.tier["a"].put(keys)
    assert bench.begin_store(chain("mine", 18)) is not None
    assert bench.lookup(keys, bench.request()) == (0, 0, False)
    assert bench.figures("a")["dropped_promotions"] == 4


def test_chunks_that_get_no_row_are_counted_once_a_request_however_often_it_asks():
    bench = Bench(rows=40, options=TieringOptions(load_wait=60.0))
    keys = chain("many", 100)
    bench.tier["a"].put(keys)
    ctx = bench.request()
    for _ in range(8):
        bench.lookup(keys, ctx)
        bench.step()
    assert bench.lookup(keys, ctx) == (40, 0, False)
    assert bench.figures("a")["dropped_promotions"] == 90, "all but those that got one of the 10 rows at once"
    bench.lookup(keys, bench.request())
    assert bench.figures("a")["dropped_promotions"] == 90 + 60


@pytest.mark.parametrize("free", [0, 3])
def test_chunks_that_get_no_row_are_counted_for_the_tier_that_has_them(free):
    bench = Bench(rows=40, tiers={"a": {}, "b": {}}, options=WIDE)
    keys = chain("many", 8)
    bench.tier["a"].put(keys[:5])
    bench.tier["b"].put(keys[5:])
    assert bench.begin_store(chain("mine", 36 - free)) is not None
    assert bench.lookup(keys, bench.request()) == (0, free, False)
    assert [bench.figures(name)["dropped_promotions"] for name in "ab"] == [5 - free, 3]


def test_chunks_that_get_no_row_are_counted_for_each_tier_that_has_them():
    bench = Bench(rows=40, tiers={"a": {}, "b": {}}, options=TieringOptions(load_wait=60.0))
    keys = chain("many", 50)
    for tier in bench.tier.values():
        tier.put(keys)
    assert bench.lookup(keys, bench.request()) == (0, 20, False)
    assert [bench.figures(name)["dropped_promotions"] for name in "ab"] == [40, 30]


def test_one_tier_pins_a_quarter_of_the_rows_and_all_tiers_a_half_at_most():
    names = ["a", "b", "c"]
    bench = Bench(rows=40, tiers={name: {} for name in names}, options=TieringOptions(load_wait=0.1), hold=True)
    for name in names:
        bench.tier[name].put(chain(name, 30))
    hits = [bench.lookup(chain(name, 30), bench.request()).__getitem__(1) for name in names]
    assert hits == [10, 10, 0]
    bench.step()
    assert [bench.figures(name)["pinned_rows"] for name in names] == hits


def test_one_lookup_keeps_to_the_budgets_too():
    names = ["a", "b", "c"]
    bench = Bench(rows=40, tiers={name: {} for name in names}, options=TieringOptions(load_wait=0.1), hold=True)
    keys = chain("k", 30)
    for number, name in enumerate(names):
        bench.tier[name].put(keys[10 * number : 10 * number + 10])
    assert bench.lookup(keys, bench.request()) == (0, 20, False)


def test_each_budget_has_one_row_at_least():
    bench = Bench(rows=2, options=TieringOptions(load_wait=0.1))
    bench.tier["a"].put(KEYS)
    assert bench.lookup(KEYS, bench.request()) == (0, 1, False)


def test_a_tier_at_its_budget_is_passed_by_and_that_is_counted():
    bench = Bench(rows=16, tiers={"a": {}, "b": {}}, options=TieringOptions(load_wait=0.1), hold=True)
    bench.tier["a"].put(KEYS + chain("x", 4))
    bench.tier["b"].put(chain("x", 2))
    assert bench.lookup(chain("x", 4), bench.request()) == (0, 4, False)
    assert bench.lookup(KEYS, bench.request()) == (0, 0, False)
    assert bench.figures("a")["budget_misses"] == 1
    bench.step()
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(KEYS, bench.request()) == (0, 4, False)


def test_another_tier_serves_what_one_at_its_budget_may_not():
    bench = Bench(rows=16, tiers={"a": {}, "b": {}}, options=TieringOptions(load_wait=0.1), hold=True)
    for tier in bench.tier.values():
        tier.put(KEYS)
    assert bench.lookup(KEYS, bench.request()) == (0, 8, False)
    bench.step()
    assert loads(bench, "a") == [KEYS[:4]]
    assert loads(bench, "b") == [KEYS[4:]]


def test_one_hung_tier_keeps_the_others_at_work():
    bench = Bench(rows=16, tiers={"hung": {}, "fine": {}}, options=TieringOptions(load_wait=0.1))
    bench.tier["hung"].hold = True
    bench.tier["hung"].put(chain("lost", 8))
    bench.lookup(chain("lost", 8), bench.request())
    bench.step()
    bench.step(31.0)
    assert bench.figures("hung")["quarantined_rows"] == 4
    bench.store(KEYS[:3])
    assert bench.tier["fine"].has(KEYS[:3]) == [True] * 3
    bench.forget()
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 3, False)
    bench.step()
    assert bench.load(KEYS[:3], ctx)


# -- how they end


def test_of_a_load_that_failed_in_part_exactly_the_failed_chunks_are_gone():
    bench = Bench(options=WIDE, hold=True)
    bench.tier["a"].put(KEYS[:5])
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    bench.tier["a"].end(1, landed=[KEYS[0], KEYS[1], KEYS[3]])
    bench.step()
    assert bench.primary.find(KEYS[:5]) == [HIT, HIT, MISS, HIT, MISS]
    assert bench.load(KEYS[:2], ctx)
    assert bench.figures("a")["failed_loads"] == 2
    assert bench.figures("a")["loaded_chunks"] == 3
    assert bench.primary.free_rows == bench.rows - 3


def test_keys_that_a_result_names_count_more_than_its_success():
    bench = Bench(options=WIDE, hold=True)
    bench.tier["a"].put(KEYS[:3])
    bench.lookup(KEYS, bench.request())
    bench.step()
    bench.tier["a"].end(1, landed=KEYS[:1], success=True)
    bench.step()
    assert bench.primary.find(KEYS[:3]) == [HIT, MISS, MISS]


def test_a_chunk_that_a_tier_could_not_bring_is_asked_of_the_next_one_and_never_of_that_one_again():
    bench = Bench(tiers={"broken": {}, "sound": {}}, options=WIDE, hold=True)
    for tier in bench.tier.values():
        tier.put(KEYS[:3])
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    bench.tier["broken"].end(1, landed=KEYS[:1])
    bench.step()
    assert bench.lookup(KEYS, ctx) == (1, 2, False)
    bench.step()
    assert loads(bench, "sound") == [KEYS[1:3]]
    bench.tier["sound"].end(2, landed=[])
    bench.step()
    assert bench.lookup(KEYS, ctx) == (1, 0, False)
    assert bench.lookup(KEYS, bench.request()) == (1, 2, False), "another request may try"


def test_a_lost_chunk_is_a_miss_though_the_tier_has_no_answer_about_the_next_one():
    bench = Bench(options=WIDE)
    tier = bench.tier["a"]
    tier.raises = {"submit_load"}
    tier.lookup_many = lambda keys, context: [HIT if key == KEYS[0] else RETRY for key in keys]
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 1, True)
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)


def test_a_tier_that_says_hit_and_never_loads_does_not_hold_a_request():
    bench = Bench(options=TieringOptions(lookup_wait=60, load_wait=60, one_tier=1.0, all_tiers=1.0))
    bench.tier["a"].answer = HIT
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert len(bench.tier["a"].loads) == 1


@pytest.mark.parametrize("seconds", [0.0, 9.0])
def test_a_chunk_that_has_landed_is_there_when_the_request_that_waits_for_it_comes(seconds):
    bench = Bench(rows=10, options=WIDE, tiers={"a": {"read_only": True}})
    bench.tier["a"].put(KEYS[:4])
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    bench.step(seconds)
    for number in range(5):
        bench.store(chain(f"store{number}", 6))
    assert bench.load(KEYS[:4], ctx)


def test_a_promoted_chunk_without_a_reader_is_like_any_other_after_a_while():
    bench = Bench(rows=10, options=WIDE)
    bench.tier["a"].put(KEYS[:4])
    bench.lookup(KEYS, bench.request())
    bench.settle()
    assert (bench.primary.protected_rows, bench.primary.evictable) == (4, 0)
    bench.step(10.0)
    assert (bench.primary.protected_rows, bench.primary.evictable) == (0, 4)


def test_it_is_not_kept_for_ever():
    bench = Bench(rows=10, options=WIDE, tiers={"a": {"read_only": True}})
    bench.tier["a"].put(KEYS[:4])
    bench.lookup(KEYS, bench.request())
    bench.step()
    bench.step(10.0)
    bench.step(10.1)
    bench.store(chain("store", 10))
    assert bench.primary.find(KEYS[:4]) == [MISS] * 4
