"""What goes down to which tier, and when."""

import pytest

from kvtiers.tiering.jobs import TieringOptions

from .harness import HIT, MISS, Bench, chain, payload

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 8)


def stores(bench, name="a"):
    return [list(job.keys) for job in bench.tier[name].stores]


def test_a_stored_chunk_goes_to_every_tier_and_its_bytes_with_it():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    bench.store(KEYS[:3])
    for tier in bench.tier.values():
        assert [tier.values["", key] for key in KEYS[:3]] == [payload(key) for key in KEYS[:3]]
    assert bench.figures("a")["stored_chunks"] == 3
    assert bench.figures("a")["stored_bytes"] == 3 * 16


def test_a_store_that_failed_on_the_gpu_goes_nowhere():
    bench = Bench(options=WIDE)
    plan = bench.begin_store(KEYS[:3])
    bench.manager.complete_store(plan, success=False)
    bench.settle()
    assert not stores(bench)
    assert bench.primary.free_rows == bench.rows
    assert bench.figures()["failed_gpu_stores"] == 3


def test_nothing_goes_down_before_the_copy_has_ended():
    bench = Bench(options=WIDE)
    plan = bench.begin_store(KEYS[:3])
    bench.step()
    assert not stores(bench)
    bench.manager.complete_store(plan)
    assert stores(bench) == [KEYS[:3]]


def test_a_row_stays_until_the_slowest_tier_has_read_it():
    bench = Bench(rows=4, tiers={"a": {}, "b": {}}, options=TieringOptions(one_tier=1.0, all_tiers=2.0), hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:4]))
    bench.tier["a"].end_all()
    bench.step()
    assert bench.manager.prepare_store(chain("x", 1), bench.request()) is None
    bench.tier["b"].end_all()
    bench.step()
    assert bench.begin_store(chain("x", 4)) is not None


def test_what_came_from_a_tier_is_not_sent_on_to_the_others():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    bench.tier["b"].put(KEYS[:3])
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.settle()
    assert bench.load(KEYS[:3], ctx)
    bench.settle()
    assert not stores(bench, "a")


def test_a_tier_that_is_read_only_is_never_written():
    options = [{"read_only": True, "admission": admission} for admission in ("all", "second_access", "on_eviction")]
    bench = Bench(rows=8, tiers=dict(zip("abc", options, strict=True)), options=WIDE)
    for tier in bench.tier.values():
        tier.wants_whole = True
    for number in range(4):
        ctx = bench.request()
        bench.store(chain(f"n{number}", 6), ctx)
        bench.store(chain(f"n{number}", 6), ctx)
        assert bench.load(chain(f"n{number}", 6), ctx)
        bench.settle()
    assert [stores(bench, name) for name in "abc"] == [[], [], []]


def test_what_would_break_a_budget_is_dropped_from_the_tail_and_counted():
    bench = Bench(rows=16, options=TieringOptions(), hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS))
    assert stores(bench) == [KEYS[:4]]
    bench.manager.complete_store(bench.begin_store(chain("x", 2)))
    assert len(stores(bench)) == 1
    assert bench.figures("a")["dropped_cascades"] == 4 + 2


def test_chunks_of_several_groups_are_stored_together_or_not_at_all():
    """A prompt of a hybrid model is not found without its windows, which are last: 4 rows may be pinned of 6."""
    bench = Bench(rows=16, tokens_per_chunk=(16, 16), windows=(None, 2), options=TieringOptions(), hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS[:4] + chain("n", 2, group=1)))
    assert not stores(bench)
    assert bench.figures("a")["dropped_cascades"] == 6
    both = chain("x", 2) + chain("x", 2, group=1)
    bench.manager.complete_store(bench.begin_store(both))
    assert stores(bench) == [both]


def test_all_tiers_together_keep_to_their_budget():
    bench = Bench(rows=40, tiers={name: {} for name in "abc"}, options=TieringOptions(), hold=True)
    bench.manager.complete_store(bench.begin_store(chain("n", 10)))
    assert [bench.figures(name)["pinned_rows"] for name in "abc"] == [10, 10, 0]


def test_a_tier_that_is_not_available_gets_nothing_and_that_is_counted():
    bench = Bench(options=WIDE)
    bench.tier["a"].available = False
    bench.store(KEYS[:3])
    assert not stores(bench)
    assert bench.figures("a")["dropped_cascades"] == 3
    bench.tier["a"].available = True
    bench.store(chain("x", 2))
    assert stores(bench) == [chain("x", 2)]


def test_a_store_that_failed_in_part_is_counted_and_frees_its_rows():
    bench = Bench(rows=8, options=WIDE, hold=True)
    bench.manager.complete_store(bench.begin_store(KEYS))
    bench.tier["a"].end(1, landed=KEYS[:5])
    bench.settle()
    assert bench.figures("a")["stored_chunks"] == 5
    assert bench.figures("a")["failed_stores"] == 3
    assert bench.figures("a")["pinned_rows"] == 0
    assert bench.primary.evictable == 8


# -- second access


def second_access(remembered=1_000_000, **more):
    tiers = {"a": {"admission": "second_access", "remembered": remembered}, **more}
    return Bench(rows=32, tiers=tiers, options=WIDE)


def test_second_access_stores_a_chunk_when_it_is_read_and_only_once():
    bench = second_access()
    bench.store(KEYS[:4])
    assert not stores(bench)
    for _ in range(3):
        bench.load(KEYS[:2], bench.request())
        bench.settle()
    assert stores(bench) == [KEYS[:2]]


def test_second_access_stores_a_chunk_that_is_computed_again():
    bench = second_access()
    bench.store(KEYS[:4])
    bench.forget()
    bench.store(KEYS[:3])
    assert stores(bench) == [KEYS[:3]]
    bench.forget()
    bench.store(KEYS[:3])
    assert stores(bench) == [KEYS[:3]] * 2, "the tier did not have it, or else it would not have been computed"


def test_second_access_does_not_send_back_what_the_tier_brought():
    bench = second_access()
    bench.tier["a"].put(KEYS[:4])
    for _ in range(2):
        ctx = bench.request()
        bench.lookup(KEYS, ctx)
        bench.settle()
        assert bench.load(KEYS[:4], ctx)
        bench.settle()
    assert not stores(bench)


@pytest.mark.parametrize("trouble", ["refused", "failed", "overdue", "no room"])
def test_second_access_sends_again_what_did_not_get_there(trouble):
    bench = second_access()
    bench.store(KEYS[:4])
    tier = bench.tier["a"]
    if trouble == "refused":
        tier.raises = {"submit_store"}
    elif trouble in {"failed", "overdue"}:
        tier.hold = True
    else:
        tier.available = False
    bench.load(KEYS[:4], bench.request())
    if trouble == "failed":
        tier.end(min(tier.held), landed=[])
    if trouble == "overdue":
        bench.step()
        bench.step(31.0)
    bench.settle()
    tier.raises, tier.hold, tier.available = set(), False, True
    bench.load(KEYS[:4], bench.request())
    bench.settle()
    assert tier.has(KEYS[:4]) == [True] * 4


def test_second_access_forgets_what_was_sent_when_the_weights_change():
    bench = second_access()
    bench.store(KEYS[:2])
    bench.load(KEYS[:2], bench.request())
    bench.settle()
    bench.manager.set_weights_version("new")
    bench.store(KEYS[:2])
    assert len(stores(bench)) == 1
    bench.load(KEYS[:2], bench.request())
    bench.settle()
    assert bench.tier["a"].has(KEYS[:2]) == [True, True]


def test_what_second_access_remembers_is_bounded():
    bench = second_access(remembered=100)
    for number in range(50):
        bench.store(chain(f"n{number:02}", 8))
    assert not stores(bench)
    for number in reversed(range(50)):
        bench.forget()
        bench.store(chain(f"n{number:02}", 8))
    sent = {key for keys in stores(bench) for key in keys}
    assert 50 < len(sent) <= 100
    every = [key for number in range(50) for key in chain(f"n{number:02}", 8)]
    assert sent == {*every[-len(sent) :]}, "the oldest are forgotten first"


# -- on eviction


def on_eviction(rows=40, **more):
    return Bench(rows=rows, tiers={"a": {"admission": "on_eviction"}, **more}, options=WIDE)


def test_on_eviction_works_ahead_so_that_what_leaves_has_been_stored():
    bench = on_eviction()
    for number in range(30):
        bench.store(chain(f"n{number:02}", 2))
        for _ in range(3):
            bench.step()
    evicted = [key for number in range(30) for key in chain(f"n{number:02}", 2)]
    evicted = [key for key in evicted if bench.primary.lookup(key) is MISS]
    assert len(evicted) == 20
    assert bench.tier["a"].has(evicted) == [True] * 20
    assert bench.figures()["dropped_dirty"] == 0
    assert len(bench.tier["a"].values) <= 20 + 2 + 2, "no more than is needed soon"
    sent = [key for keys in stores(bench) for key in keys]
    assert len(sent) == len(set(sent)), "what is clean is not sent again"


def test_on_eviction_goes_on_step_by_step_where_a_budget_keeps_its_steps_short():
    options = TieringOptions(one_tier=0.02, all_tiers=1.0)
    bench = Bench(rows=100, tiers={"a": {"admission": "on_eviction"}}, options=options)
    bench.manager.complete_store(bench.begin_store(chain("n", 100)))
    for _ in range(10):
        bench.step()
    assert [len(keys) for keys in stores(bench)] == [2, 2, 1]


def test_a_promotion_that_makes_a_dirty_chunk_leave_counts_it_too():
    bench = on_eviction(rows=10)
    bench.tier["a"].raises = {"submit_store"}
    bench.store(chain("dirty", 10))
    bench.tier["a"].put(KEYS)
    assert bench.lookup(KEYS, bench.request()) == (0, 8, False)
    assert bench.figures()["dropped_dirty"] == 8


def test_a_chunk_that_leaves_before_it_was_stored_is_dropped_and_counted_without_a_wait():
    bench = on_eviction()
    bench.store(chain("first", 40))
    bench.tier["a"].values.clear()
    ctx = bench.request()
    plan = bench.begin_store(chain("second", 40), ctx)
    assert plan is not None
    assert bench.figures()["dropped_dirty"] == 40 - 2  # the two coldest were clean


def test_hot_clean_chunks_do_not_hide_cold_dirty_ones():
    bench = on_eviction()
    bench.store(chain("old", 20))
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.settle()
    assert bench.load(KEYS, ctx)
    bench.manager.on_request_finished(ctx)
    assert bench.primary.clean_rows == 8
    bench.store(chain("more", 12))
    bench.settle()
    assert bench.tier["a"].has(chain("old", 20)[-2:]) == [True, True]


def test_what_was_stored_of_old_weights_does_not_make_the_new_ones_chunk_clean():
    bench = on_eviction(rows=40)
    tier = bench.tier["a"]
    tier.hold = True
    bench.manager.complete_store(bench.begin_store(chain("n", 40)))
    bench.step()
    (old,) = tier.stores
    bench.manager.set_weights_version("new")
    bench.step()
    bench.manager.complete_store(bench.begin_store(list(old.keys)))
    tier.end_all()
    for _ in range(2):  # this one may have looked before
        bench.step()
    assert bench.figures("a")["stored_chunks"] == 2
    assert bench.primary.dirty(old.keys) == list(old.keys), "else it would leave, and no tier had it"


def test_what_a_tier_brought_is_clean():
    bench = on_eviction(rows=10)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.settle()
    assert bench.load(KEYS, ctx)
    bench.manager.on_request_finished(ctx)
    bench.store(chain("x", 10))
    bench.settle()
    assert not [keys for keys in stores(bench) if set(keys) & set(KEYS)]
    assert bench.figures()["dropped_dirty"] == 0


# -- whole requests


def whole(**options):
    bench = Bench(tiers={"a": {}, "w": options}, options=WIDE)
    bench.tier["w"].wants_whole = True
    return bench


@pytest.mark.parametrize("admission", ["all", "second_access", "on_eviction"])
def test_a_tier_that_wants_whole_requests_gets_all_their_chunks_once(admission):
    bench = whole(admission=admission)
    bench.tier["w"].wants_whole = False
    bench.store(KEYS[:3])
    bench.tier["w"].values.clear()
    bench.tier["w"].submitted.clear()
    bench.tier["w"].wants_whole = True
    bench.store(KEYS[:5], bench.request())
    assert sorted(key for keys in stores(bench, "w") for key in keys) == KEYS[:5]
    assert stores(bench, "a") == [KEYS[:3], KEYS[3:5]], "the others get each chunk once"


def test_chunks_that_are_still_being_written_are_parked_and_sent_when_they_are_there():
    bench = whole()
    bench.tier["w"].wants_whole = False
    other = bench.request()
    first = bench.begin_store(KEYS[:2], other)
    bench.tier["w"].wants_whole = True
    ctx = bench.request()
    second = bench.begin_store(KEYS[:4], ctx)
    assert list(second.keys) == KEYS[2:4]
    bench.manager.complete_store(second)
    bench.manager.on_request_finished(ctx)
    bench.step()
    bench.step()
    assert stores(bench, "w") == [KEYS[2:4]]
    assert bench.manager.has_pending_work()
    assert not bench.tier["w"].notified[ctx]
    bench.manager.complete_store(first)
    bench.settle()
    assert KEYS[:2] in stores(bench, "w")
    assert bench.tier["w"].notified[ctx] == 1


@pytest.mark.parametrize("end", ["failed", "reset"])
def test_a_parked_chunk_that_never_comes_is_forgotten(end):
    bench = whole()
    first = bench.begin_store(KEYS[:2], bench.request())
    ctx = bench.request()
    second = bench.begin_store(KEYS[:2], ctx)
    assert list(second.keys) == []
    bench.manager.complete_store(second)
    bench.manager.on_request_finished(ctx)
    if end == "failed":
        bench.manager.complete_store(first, success=False)
    else:
        bench.manager.reset_cache()
    bench.settle()
    assert not stores(bench, "w")
    assert bench.tier["w"].notified[ctx] == 1


def test_a_store_of_nothing_new_still_offers_a_whole_request():
    bench = whole()
    bench.store(KEYS[:3])
    bench.tier["w"].submitted.clear()
    plan = bench.begin_store(KEYS[:3], bench.request())
    assert list(plan.keys) == []
    assert stores(bench, "w") == [KEYS[:3]]
    bench.manager.complete_store(plan)
    assert bench.primary.find(KEYS[:3]) == [HIT] * 3
