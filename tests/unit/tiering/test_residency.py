"""How far a prefix is said to be at hand, and who is asked about it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.boundary import BoundarySearch
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import Waits
from kvtiers.types import PromptGroup, RequestContext

from .harness import HIT, MISS, PENDING, RETRY, ROW_BYTES, Bench, chain

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 8)


def test_a_prefix_in_the_primary_is_ready():
    bench = Bench(tiers={})
    bench.store(KEYS[:5])
    assert bench.lookup(KEYS, bench.request()) == (5, 0, False)


def test_what_no_tier_has_is_not_waited_for():
    bench = Bench()
    assert bench.lookup(KEYS, bench.request()) == (0, 0, False)
    assert bench.lookup([], bench.request()) == (0, 0, False)


def test_what_a_tier_has_is_pending_and_fetched_at_the_end_of_the_step():
    bench = Bench(options=WIDE)
    bench.tier["a"].put(KEYS[:5])
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 5, False)
    assert not bench.tier["a"].loads
    bench.step()
    assert [list(job.keys) for job in bench.tier["a"].loads] == [KEYS[:5]]
    assert bench.lookup(KEYS, ctx) == (5, 0, False)
    assert bench.load(KEYS[:5], ctx)


def test_a_chunk_on_its_way_is_fetched_once_for_all_requests():
    bench = Bench(options=WIDE, hold=True)
    bench.tier["a"].put(KEYS[:3])
    first, second = bench.request(), bench.request()
    assert bench.lookup(KEYS, first) == bench.lookup(KEYS, second) == (0, 3, False)
    bench.step()
    assert bench.lookup(KEYS, second) == (0, 3, False)
    bench.step()
    assert len(bench.tier["a"].loads) == 1
    assert bench.tier["a"].loads[0].context is first


def test_tiers_are_asked_in_their_order_and_the_first_hit_serves():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    bench.tier["a"].put(KEYS[:2])
    bench.tier["b"].put(KEYS[:4])
    assert bench.lookup(KEYS, bench.request()) == (0, 4, False)
    bench.step()
    assert [list(job.keys) for job in bench.tier["a"].loads] == [KEYS[:2]]
    assert [list(job.keys) for job in bench.tier["b"].loads] == [KEYS[2:4]]


def test_a_run_goes_on_through_primary_and_tiers_in_any_order():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    bench.tier["a"].answer = bench.tier["b"].answer = MISS
    bench.store([KEYS[0], KEYS[3], KEYS[4], KEYS[6]])
    for tier in bench.tier.values():
        tier.answer = None
        tier.values.clear()
    bench.tier["a"].put([KEYS[1], KEYS[5]])
    bench.tier["b"].put([KEYS[2]])
    assert bench.lookup(KEYS, bench.request()) == (4, 3, False)
    bench.step()
    assert [list(job.keys) for job in bench.tier["a"].loads] == [[KEYS[1], KEYS[5]]]
    assert [list(job.keys) for job in bench.tier["b"].loads] == [[KEYS[2]]]


def test_a_hit_of_a_later_tier_counts_more_than_an_earlier_one_without_an_answer():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    bench.tier["a"].answer = RETRY
    bench.tier["b"].put(KEYS[:2])
    assert bench.lookup(KEYS, bench.request()) == (0, 2, True)
    bench.tier["b"].values.clear()
    assert bench.lookup(chain("other", 3), bench.request()) == (0, 0, True)


def test_the_answers_run_ends_where_a_tier_has_no_answer():
    bench = Bench(options=WIDE)
    tier = bench.tier["a"]
    tier.lookup_many = lambda keys, context: [HIT, HIT, RETRY][: len(keys)]
    # Each question is answered again: HIT, HIT, RETRY.
    assert bench.lookup(KEYS, bench.request()) == (0, len(KEYS), False)
    tier.lookup_many = lambda keys, context: [HIT if key in other[:2] else RETRY for key in keys]
    other = chain("other", 5)
    bench.forget()
    assert bench.lookup(other, bench.request()) == (0, 2, True)


def test_each_tier_is_asked_about_the_whole_rest_first():
    bench = Bench(rows=8, tiers={"a": {}, "b": {}}, options=WIDE)
    bench.store(KEYS[:2])
    for tier in bench.tier.values():
        tier.values.clear()
        tier.asked.clear()
    bench.lookup(KEYS, bench.request())
    assert [tier.asked for tier in bench.tier.values()] == [[KEYS[2:]], [KEYS[2:]]]


def test_a_prefix_that_two_tiers_share_chunk_by_chunk_costs_little_more_than_its_length():
    keys = chain("mixed", 240)
    bench = Bench(rows=512, tiers={"a": {}, "b": {}}, options=WIDE)
    bench.tier["a"].put(keys[::2])
    bench.tier["b"].put(keys[1::2])
    asked = []
    for tier in bench.tier.values():
        tier.lookup_many = lambda questions, context, tier=tier: [
            asked.append(1) or (HIT if found else MISS) for found in tier.has(questions)
        ]
    assert bench.lookup(keys, bench.request()) == (0, 240, False)
    assert len(asked) < 240 * 2 * 64


def test_a_request_loads_only_from_tiers_that_it_may_use_but_always_from_the_primary():
    bench = Bench(tiers={"fast": {}, "slow": {}}, options=WIDE)
    bench.store(KEYS[:1])
    bench.tier["fast"].put(KEYS[:2])
    bench.tier["slow"].put(KEYS[:4])
    assert bench.lookup(KEYS, bench.request(kv_load_tiers=[])) == (1, 0, False)
    assert bench.lookup(KEYS, bench.request(kv_load_tiers=["FAST", 3])) == (1, 1, False)
    assert not bench.tier["slow"].asked
    assert bench.lookup(KEYS, bench.request(kv_load_tiers="slow")) == (1, 3, False)  # no list: no limit
    assert bench.lookup(KEYS, bench.request(kv_load_tiers=[3, None])) == (1, 3, False)  # no name in it: no limit


def test_until_all_ranks_have_joined_nothing_is_found_and_nothing_stored():
    bench = Bench()
    bench.tier["a"].put(KEYS)
    bench.engine.all_joined = False
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.manager.prepare_store(KEYS, ctx) is None
    assert bench.manager.prepare_load(KEYS[:1], ctx) is None
    bench.engine.all_joined = True
    bench.step()
    assert bench.lookup(KEYS[:2], ctx) == (0, 2, False)


def test_a_key_of_a_group_that_there_is_not_raises_nothing():
    bench = Bench(options=WIDE)
    ctx = bench.request()
    groups = [PromptGroup(chain("k", 3, group=7))]
    assert bench.manager.reach(groups, ctx)[:3] == (0, 0, False)
    bench.manager.announce(groups)
    assert bench.figures()["misuse"] == 2


def test_a_long_prefix_is_reserved_over_several_steps_so_that_none_of_them_is_long():
    keys = chain("long", 1500)
    bench = Bench(rows=2048, options=TieringOptions(lookup_wait=0.0, load_wait=10.0, one_tier=0.8, all_tiers=0.8))
    bench.tier["a"].put(keys)
    ctx = bench.request()
    found = []
    for _ in range(5):
        found.append(bench.lookup(keys, ctx))
        bench.step(1.0)
    assert found == [(0, 448, True), (448, 448, True), (896, 448, True), (1344, 156, False), (1500, 0, False)]


def test_what_a_plan_has_used_already_is_not_given_to_the_eviction_policy_again(monkeypatch):
    """Each reservation of a long prefix would take as long as one of all of it."""
    given, prepare = [], CPUPrimaryTier.prepare_write
    monkeypatch.setattr(
        CPUPrimaryTier,
        "prepare_write",
        lambda tier, keys, request_id, **more: (
            given.append((len(keys), more["used"])),
            prepare(tier, keys, request_id, **more),
        )[1],
    )
    keys = chain("long", 1200)
    bench = Bench(rows=2048, options=TieringOptions(lookup_wait=0.0, load_wait=10.0, one_tier=0.8, all_tiers=0.8))
    bench.tier["a"].put(keys)
    ctx = bench.request()
    for _ in range(3):
        bench.lookup(keys, ctx)
        bench.step(1.0)
    assert given == [(448, 0), (896, 448), (1200, 896)]
    bench.manager.reset_cache()
    bench.lookup(keys, ctx)
    assert given[3:] == [(448, 0)], "what is not there any more has to be given rows"


def test_beside_other_prompts_a_long_prefix_is_reserved_at_once_since_the_next_step_may_come_late():
    keys = chain("long", 1500)
    bench = Bench(rows=2048, options=TieringOptions(lookup_wait=0.0, load_wait=10.0, one_tier=0.8, all_tiers=0.8))
    bench.tier["a"].put(keys)
    bench.manager.on_new_request(RequestContext("other"), 8192)
    assert bench.lookup(keys, bench.request()) == (0, 1500, False)


def test_several_full_attention_groups_of_a_long_prefix_are_one_question_and_one_plan():
    groups = [chain("long", 200, group=group) for group in (0, 1)]
    options = TieringOptions(lookup_wait=0.0, load_wait=10.0, one_tier=0.8, all_tiers=0.8)
    bench = Bench(rows=4096, tokens_per_chunk=(16, 16), options=options)
    for keys in groups:
        bench.tier["a"].put(keys)
    ctx = bench.request()
    assert bench.reach(groups, ctx) == (0, 3200, False)
    assert bench.tier["a"].asked[0] == groups[0] + groups[1]
    bench.step()
    assert bench.reach(groups, ctx) == (3200, 0, False)
    assert len(bench.tier["a"].loads) == 1


def windowed(windows=(0, 4, 2), chunks=12, rows=256, hold=False, job_bytes=1 << 20, **more):
    """A bench of full attention and windows of some chunks, and a prompt's keys by group."""
    options = TieringOptions(lookup_wait=0.02, load_wait=5.0, one_tier=1.0, all_tiers=1.0, job_bytes=job_bytes)
    bench = Bench(rows=rows, tokens_per_chunk=(16,) * len(windows), windows=windows, options=options, hold=hold, **more)
    return bench, [chain("p", chunks, group) for group in range(len(windows))]


def test_a_prompt_of_all_groups_is_one_question_one_plan_and_read_by_nobody_in_part():
    bench, prompt = windowed(hold=True)
    bench.tier["a"].put([*prompt[0], *prompt[1][8:], *prompt[2][10:]])
    ctx = bench.request()
    assert bench.reach(prompt, ctx) == (0, 192, False)
    assert bench.tier["a"].asked[0] == [*prompt[0], *prompt[1][8:], *prompt[2][10:]]
    bench.step()
    assert sorted(bench.tier["a"].loads[0].keys) == sorted([*prompt[0], *prompt[1][8:], *prompt[2][10:]])
    bench.tier["a"].end_all()
    bench.step()
    assert bench.reach(prompt, ctx) == (192, 0, False)
    assert bench.load([*prompt[0], *prompt[1][8:], *prompt[2][10:]], ctx)
    assert bench.figures()["lookups"] == 18


def test_of_windows_that_no_tier_has_whole_nothing_is_loaded_and_the_place_before_them_is_found():
    bench, prompt = windowed()
    bench.tier["a"].put([*prompt[0], *prompt[1][2:6], *prompt[1][9:], *prompt[2]])
    ctx = bench.request()
    assert bench.reach(prompt, ctx) == (0, 96, False)
    bench.step()
    (job,) = bench.tier["a"].loads
    assert sorted(job.keys) == sorted([*prompt[0][:6], *prompt[1][2:6], *prompt[2][4:6]])


def test_while_an_answer_about_a_window_is_missing_nothing_of_its_prompt_is_loaded():
    bench, prompt = windowed()
    tier = bench.tier["a"]
    tier.put(prompt[0])
    tier.lookup_many = lambda keys, context: [HIT if key in prompt[0] else RETRY for key in keys]
    ctx = bench.request()
    assert bench.reach(prompt, ctx) == (0, 0, True)
    bench.step()
    assert not tier.loads
    del tier.lookup_many
    tier.put([*prompt[1][8:], *prompt[2][10:]])
    assert bench.reach(prompt, ctx) == (0, 192, False)


def test_a_plan_that_no_row_is_there_for_is_decided_without_it():
    """Nothing of it is pending, so no clock of a load would end the wait."""
    bench = Bench(rows=40, options=TieringOptions(lookup_wait=0.02, one_tier=0.25, all_tiers=0.5))
    keys = chain("long", 80)
    bench.tier["a"].put(keys)
    assert bench.begin_store(chain("others", 40))
    assert bench.lookup(keys, bench.request()) == (0, 0, False)


def test_a_prompt_with_windows_that_is_larger_than_a_tiers_budget_is_loaded_in_parts():
    options = TieringOptions(lookup_wait=0.02, load_wait=5.0, one_tier=0.25, all_tiers=0.25)
    bench = Bench(rows=200, tokens_per_chunk=(16, 16), windows=(0, 4), options=options)
    prompt = [chain("p", 90, group) for group in range(2)]
    for keys in prompt:
        bench.tier["a"].put(keys)
    ctx = bench.request()
    for _ in range(4):
        reach = bench.reach(prompt, ctx)
        bench.step()
    assert reach == (1440, 0, False)


def test_a_trial_of_a_slow_tier_leaves_the_prompts_own_chunks_where_they_are(monkeypatch):
    bench = Bench(rows=64, options=TieringOptions(lookup_wait=0.02))
    keys = chain("k", 40)
    bench.store(keys[:20])
    bench.store(chain("others", 44))
    bench.tier["a"].put(keys)
    monkeypatch.setattr(Waits, "is_sooner", lambda *_: False)
    monkeypatch.setattr(Waits, "trial", lambda *_: 16)
    assert bench.lookup(keys, bench.request()) == (20, 0, False)
    bench.step()
    assert bench.tier["a"].loads


def test_a_shared_prompt_whose_checkpoint_is_far_to_the_left_is_found_within_a_few_answers():
    """A question takes a step or more: one boundary after the other the wait for answers would be over first."""
    bench, prompt = windowed(windows=(0, 8), chunks=256)
    tier = bench.tier["a"]
    tier.put([*prompt[0], *prompt[1][120:128]])
    known, answer = set(), tier.lookup_many

    def later(keys, context):
        """Answer in the step after the one in which it is asked."""
        asked = tuple(keys)
        if asked in known:
            return answer(keys, context)
        pending.append(asked)
        return [RETRY] * len(keys)

    pending, tier.lookup_many = [], later
    ctx, steps = bench.request(), 0
    while not (reach := bench.reach(prompt, ctx))[1]:
        steps += 1
        assert reach[2]
        assert steps < 5
        known.update(pending)
        bench.step()
    assert reach == (0, 2048, False)


def test_chunks_ahead_of_a_boundary_have_to_be_present():
    bench, prompt = windowed(windows=(0,))
    bench.tier["a"].put(prompt[0][:7])
    ctx = bench.request()
    bench.manager.reach([PromptGroup(prompt[0], ahead=1)], ctx)
    bench.step()
    assert bench.manager.reach([PromptGroup(prompt[0], ahead=1)], ctx)[:3] == (96, 0, False)
    assert bench.manager.reach([PromptGroup(prompt[0])], ctx)[:3] == (112, 0, False)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_boundary_is_the_last_place_that_all_groups_have(data):
    """Against a search chunk by chunk: whatever lies where, in the primary, in a tier, or nowhere."""
    windows = data.draw(st.sampled_from([(0,), (0, 0), (0, 3), (0, 2, 4), (3,), (1, 0)]))
    chunks = data.draw(st.integers(1, 12))
    bench, prompt = windowed(windows, chunks)
    places = st.sets(st.tuples(st.integers(0, len(windows) - 1), st.integers(0, chunks - 1)))
    here, there = data.draw(places), data.draw(places)
    if not windows[0] and data.draw(st.booleans()):
        there |= {(0, place) for place in range(chunks)}
    bench.store([prompt[group][place] for group, place in here])
    bench.tier["a"].values.clear()
    bench.tier["a"].put([prompt[group][place] for group, place in there])
    computed = data.draw(st.integers(0, chunks - 1))
    had = here | there

    def is_whole(end):
        return all(
            (group, place) in had
            for group, window in enumerate(windows)
            for place in range(max(computed, end - window) if window else computed, end)
        )

    truth = next(end for end in range(chunks, computed - 1, -1) if is_whole(end))
    ctx = bench.request()
    for _ in range(3):
        ready, pending, unresolved = bench.reach(prompt, ctx, computed=16 * computed)
        bench.step()
    assert (ready, pending, unresolved) == (16 * (truth - computed), 0, False)


def test_a_request_that_waits_is_answered_as_before_until_something_changes(monkeypatch):
    bench = Bench(rows=64, options=WIDE, hold=True)
    bench.tier["a"].put(KEYS)
    ctx, other = bench.request(), bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    assert bench.lookup(KEYS[:4], other) == (0, 4, False)
    asked = []
    resident_run = CPUPrimaryTier.resident_run
    monkeypatch.setattr(CPUPrimaryTier, "resident_run", lambda *args: asked.append(1) or resident_run(*args))
    for _ in range(3):
        bench.step()
        assert bench.lookup(list(KEYS), ctx) == (0, 8, False)
        assert bench.lookup(KEYS[:4], other) == (0, 4, False)
    assert not asked
    assert bench.lookup(KEYS[:7], ctx) == (0, 7, False), "another question"
    assert bench.lookup(KEYS[:4] + chain("x", 4), ctx) == (0, 4, False)
    (job,) = bench.tier["a"].held
    bench.tier["a"].end(job, landed=KEYS[:2])
    bench.step()
    assert bench.lookup(KEYS, ctx) == (2, 0, False)
    assert bench.lookup(KEYS[:4], other)[0] == 2


@pytest.mark.parametrize("change", ["reset", "abandon"])
def test_a_request_that_waits_learns_of_a_reset_and_of_a_load_that_is_given_up(change):
    bench = Bench(rows=64, options=WIDE, hold=True)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    bench.tier["a"].answer = MISS
    if change == "reset":
        bench.manager.reset_cache()
    else:
        bench.step(bench.slots[0].options.deadline + 1)
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)


@pytest.mark.parametrize("policy", ["lru", "arc", "turn-hazard"])
def test_a_runs_own_chunks_do_not_make_room_for_the_rest_of_it(policy):
    bench = Bench(rows=6, options=WIDE, policy=policy, tiers={"a": {"read_only": True}})
    bench.store(KEYS[:2] + KEYS[6:8])  # the coldest of all
    bench.store(chain("other", 2))
    bench.tier["a"].put(KEYS[2:6])
    assert bench.lookup(KEYS, bench.request()) == (2, 2, False)
    assert bench.primary.find(KEYS) == [HIT, HIT, PENDING, PENDING, MISS, MISS, HIT, HIT]


def test_asking_is_counted_once_for_each_chunk_and_request_whatever_is_asked_again():
    bench = Bench(tokens_per_chunk=(16, 16), options=WIDE)
    ctx = bench.request()
    for _ in range(3):
        bench.reach([KEYS[:4], chain("k", 4, group=1)], ctx)
        bench.step()
    assert bench.figures()["lookups"] == 8
    bench.reach([KEYS[:6], chain("k", 6, group=1)], ctx)
    assert bench.figures()["lookups"] == 12


def ahead(bench, name="a"):
    """Have a tier that takes announcements; what is announced to it."""
    asked = []
    bench.tier[name].announce = lambda keys: asked.append(list(keys))
    return asked


def test_what_a_request_will_look_up_is_announced_as_far_as_the_primary_lacks_it():
    bench = Bench(tiers={"a": {}, "b": {}})
    bench.store(KEYS[:3])
    first, second = ahead(bench), ahead(bench, "b")
    bench.manager.announce([PromptGroup(KEYS)])
    bench.manager.announce([PromptGroup(KEYS[:3])])
    assert first == second == [KEYS[3:]]


def test_a_tier_that_takes_no_announcement_or_is_not_there_or_raises_is_left_alone():
    bench = Bench(tiers={"a": {}, "b": {}})
    bench.step()
    bench.manager.announce([PromptGroup(KEYS)])
    asked = ahead(bench)
    bench.tier["a"].available = False
    bench.manager.announce([PromptGroup(KEYS)])
    assert not asked

    bench.tier["a"].available = True
    bench.tier["a"].announce = lambda keys: 1 / 0
    bench.manager.announce([PromptGroup(KEYS)])
    bench.manager.shutdown(0.0)
    asked = ahead(bench, "b")
    bench.manager.announce([PromptGroup(KEYS)])
    assert not asked


def test_an_engine_that_looks_again_in_a_step_sees_what_has_come_since():
    bench = Bench(options=WIDE, hold=True)
    bench.tier["a"].put(KEYS[:2])
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 2, False)
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 2, False)
    bench.tier["a"].end_all()
    assert bench.lookup(KEYS, ctx) == (0, 2, False), "events are taken once a step"
    bench.manager.look_again()
    assert bench.lookup(KEYS, ctx) == (2, 0, False)


def test_an_engine_that_has_nothing_else_to_do_hurries_for_a_tiers_answer_alone():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    tier, asked = bench.tier["a"], ahead(bench)
    first, second = chain("first", 16), chain("second", 16)
    tier.put(first + second)
    ctx, other = bench.request(), bench.request()
    tier.answer = RETRY
    assert bench.lookup(first, ctx) == (0, 0, True)
    assert bench.manager.hurry(ctx)
    assert asked == [[]], "what was asked is sent"
    tier.answer = None
    assert bench.lookup(first, ctx) == (0, 16, False)
    assert bench.lookup(second, other) == (0, 0, True)
    assert not bench.manager.hurry(other), "it is in line for rows"
    tier.end_all()
    bench.manager.shutdown(0.0)
    assert not bench.manager.hurry(ctx)
    assert asked == [[]]


@pytest.mark.parametrize("windows", [(0,), (0, 4, 2)])
def test_a_request_waits_on_until_its_last_chunk_or_first_chunk_comes_whatever_else_does(windows):
    bench, prompt = windowed(windows=windows, hold=True, job_bytes=2 * ROW_BYTES)
    tier, ctx, manager = bench.tier["a"], bench.request(), bench.manager
    tier.put([key for keys in prompt for key in keys])
    assert manager.waits_on(ctx, 0, 192) is None, "it was not asked about"
    assert bench.reach(prompt, ctx, end=192) == (0, 192, False)
    assert manager.waits_on(ctx, 0, 192)[:3] == (0, 192, False)
    assert (manager.waits_on(ctx, 16, 192), manager.waits_on(ctx, 0, 176)) == (None, None)
    bench.step()
    jobs, begun = list(tier.held), 0
    for job in jobs:
        tier.end(job)
        bench.step()
        waits = manager.waits_on(ctx, 0, 192)
        begins = bench.primary.ready_run(prompt[0][:1])
        assert (waits is None) == (begins != begun or job == jobs[-1])
        if waits is None:
            begun = begins
            answer = bench.reach(prompt, ctx, end=192)
    assert answer == (192, 0, False)
    assert manager.waits_on(ctx, 0, 192) is None


@pytest.mark.parametrize("why", ["time", "reset", "weights", "lost", "overdue"])
def test_a_request_whose_wait_is_over_waits_on_no_longer(why):
    bench = Bench(rows=64, options=TieringOptions(load_wait=0.1, job_bytes=2 * ROW_BYTES), hold=True)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert bench.manager.reach([PromptGroup(KEYS)], ctx, 0, 128).pending == 128
    bench.step()
    assert bench.manager.waits_on(ctx, 0, 128)
    if why == "reset":
        bench.manager.reset_cache()
    elif why == "weights":
        bench.manager.set_weights_version("new")
    elif why == "lost":
        bench.tier["a"].end(list(bench.tier["a"].held)[1], landed=[])
    bench.step({"time": 0.1, "overdue": bench.slots[0].options.deadline + 1}.get(why, 0.0))
    assert bench.manager.waits_on(ctx, 0, 128) is None


def test_a_request_in_line_for_rows_waits_on_until_it_may_have_them():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    first, second = chain("first", 16), chain("second", 16)
    bench.tier["a"].put(first + second)
    bench.lookup(first, bench.request())
    ctx = bench.request()
    assert bench.manager.reach([PromptGroup(second)], ctx, 0, 256).unresolved
    bench.step()
    assert bench.manager.waits_on(ctx, 0, 256)[:3] == (0, 0, True)
    bench.tier["a"].end_all()
    bench.step()
    assert bench.manager.waits_on(ctx, 0, 256) is None
    assert bench.lookup(second, ctx) == (0, 16, False)


LONG = TieringOptions(lookup_wait=0.0, load_wait=10.0, one_tier=0.8, all_tiers=0.8)


def test_the_next_part_of_a_long_plan_is_reserved_without_another_look_at_the_tiers():
    keys = chain("long", 1500)
    bench = Bench(rows=2048, options=LONG)
    bench.tier["a"].put(keys)
    ctx = bench.request()
    reaches = [bench.lookup(keys, ctx)]
    bench.tier["a"].asked.clear()
    while reaches[-1][2]:
        bench.step()
        reaches.append(bench.lookup(keys, ctx))
    assert len(reaches) == 4
    assert bench.tier["a"].asked == []
    bench.step()
    assert bench.lookup(keys, ctx) == (1500, 0, False)
    assert bench.load(keys, ctx)


def test_a_chunk_that_leaves_while_a_long_plan_gets_its_rows_is_loaded_again():
    keys = chain("long", 1500)
    bench = Bench(rows=2048, options=LONG)
    bench.tier["a"].put(keys)
    ctx = bench.request()
    assert bench.lookup(keys, ctx)[2]
    bench.step()
    assert bench.lookup(keys, ctx)[2]
    assert not bench.primary.forget(keys[7:9])
    for _ in range(8):
        reach = bench.lookup(keys, ctx)
        bench.step()
    assert reach == (1500, 0, False)
    assert bench.load(keys, ctx)


def test_a_chunk_that_another_request_brings_while_a_long_plan_gets_its_rows_is_loaded_once():
    keys = chain("long", 1500)
    bench = Bench(rows=2048, options=LONG)
    bench.tier["a"].put(keys)
    ctx = bench.request()
    assert bench.lookup(keys, ctx)[2]
    bench.store(keys[600:620])
    for _ in range(8):
        reach = bench.lookup(keys, ctx)
        bench.step()
    assert reach == (1500, 0, False)
    loaded = [key for job in bench.tier["a"].loads for key in job.keys]
    assert sorted(loaded) == sorted(set(keys) - set(keys[600:620]))


def telling(bench, name="a"):
    """Let a tier say, without being asked, which chunks it lacks, as the tiers in hosts do."""
    tier = bench.tier[name]
    tier.lacks_all = lambda keys: not any(tier.has(keys))
    return tier


def looks_for(ctx, monkeypatch):
    """Return a list that gets an entry each time that this request's boundary is looked for."""
    looks, find = [], BoundarySearch.find

    def noted(search, look):
        looks.extend([look.end] * (look.state.context is ctx))
        find(search, look)

    monkeypatch.setattr(BoundarySearch, "find", noted)
    return looks


@pytest.mark.parametrize("windows", [(0,), (0, 4, 2)])
@pytest.mark.parametrize("found", [12, 8])
def test_while_its_loads_land_a_request_keeps_its_plan_and_is_answered_as_one_that_comes_anew(
    monkeypatch, windows, found
):
    """Also if the tier has a part of the prompt, as long as nobody has got more of it."""
    bench, prompt = windowed(windows=windows, hold=True, job_bytes=2 * ROW_BYTES)
    tier, ctx = telling(bench), bench.request()
    looks = looks_for(ctx, monkeypatch)
    tier.put([key for keys in prompt for key in keys[:found]])
    assert bench.reach(prompt, ctx) == (0, found * 16, False)
    bench.step()
    looks.clear()
    for job in list(tier.held):
        tier.end(job)
        bench.step()
        answer = bench.reach(prompt, ctx)
        assert answer == bench.reach(prompt, bench.request())
    assert answer == (found * 16, 0, False)
    assert not looks
    tier.put([key for keys in prompt for key in keys])
    assert bench.begin_store(chain("other", 1))
    assert sum(bench.reach(prompt, ctx)[:2]) == 12 * 16


def test_one_whose_first_chunks_were_loaded_goes_on_with_the_rest_of_its_plan(monkeypatch):
    bench = Bench(rows=64, options=WIDE, hold=True)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    looks = looks_for(ctx, monkeypatch)
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    looks.clear()
    assert bench.lookup(KEYS[3:], ctx, first=3) == (0, 5, False)
    (job,) = bench.tier["a"].held
    bench.tier["a"].end(job, landed=KEYS[:6])
    bench.step()
    assert not looks
    bench.tier["a"].answer = MISS
    assert bench.lookup(KEYS[5:], ctx, first=5) == (1, 0, False), "the others are lost"
    assert bench.lookup(KEYS[4:], ctx, first=4) == (2, 0, False), "it has lost one on the GPU"
    assert bench.lookup(KEYS[4:], ctx) == (2, 0, False), "another prompt, which ends as the one before"
    assert bench.lookup(KEYS[6:], ctx, first=6) == (0, 0, False)


@pytest.mark.parametrize("windows", [(0,), (0, 1), (0, 4, 2)])
def test_a_prompt_of_which_nobody_has_anything_asks_nobody_again_and_is_found_as_soon_as_it_is_there(windows):
    bench, prompt = windowed(windows=windows, chunks=300)
    tier = telling(bench)
    if len(windows) > 1:
        tier.put(prompt[0])
    ctx = bench.request()
    assert bench.reach(prompt, ctx) == (0, 0, False)
    tier.asked.clear()
    for _ in range(3):
        bench.store(chain("other", 2))
        bench.step()
        assert bench.reach(prompt, ctx) == (0, 0, False)
    assert tier.asked == []
    tier.put([key for keys in prompt for key in keys])
    assert bench.reach(prompt, ctx)[1] > 0


def test_a_boundary_that_lies_behind_more_than_a_search_may_try_is_found_where_the_tier_tells_what_it_lacks():
    bench, prompt = windowed(windows=(0, 1), chunks=600, rows=2048)
    tier = telling(bench)
    tier.put([*prompt[0], prompt[1][9]])
    assert bench.reach(prompt, bench.request()) == (0, 160, False)


def test_a_plan_that_is_of_no_use_in_part_evicts_nothing_when_there_are_rows_for_a_part_of_it_alone():
    bench, prompt = windowed(windows=(0, 4), chunks=40, rows=60)
    bench.tier["a"].put([*prompt[0], *prompt[1][36:]])
    bench.store(chain("other", 20))
    held = bench.begin_store(chain("held", 36))
    resident = set(bench.primary.residents())
    assert bench.reach(prompt, bench.request())[1] == 0
    assert set(bench.primary.residents()) == resident
    bench.manager.complete_store(held)


@pytest.mark.parametrize(("stored", "counted"), [("full", 1), ("both", 0), ("window", 0), ("nothing", 0)])
def test_a_request_whose_prefix_has_no_boundary_is_counted_once(stored, counted):
    bench, prompt = windowed(windows=(0, 2), chunks=8)
    bench.tier["a"].put(
        [*(prompt[0] if stored in {"full", "both"} else ()), *(prompt[1] if stored in {"window", "both"} else ())]
    )
    ctx = bench.request()
    for _ in range(3):
        bench.reach(prompt, ctx)
        bench.step()
    assert bench.manager.stats()["engine"]["unusable_prefixes"] == counted


def in_line_behind_another(windows, chunks, rows, share):
    """A bench whose tier has two prompts and rows for one: the bench, both prompts, what the second one needs."""
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=share, all_tiers=share)
    bench = Bench(rows=rows, tokens_per_chunk=(16,) * len(windows), windows=windows, options=options, hold=True)
    other = [chain("o", chunks + 5, group) for group in range(len(windows))]
    mine = [chain("m", chunks, group) for group in range(len(windows))]
    needed = [key for keys, window in zip(mine, windows, strict=True) for key in keys[-window:]]
    bench.tier["a"].put([*(key for keys in other for key in keys), *needed])
    return bench, other, mine, needed


@pytest.mark.parametrize(
    ("windows", "chunks", "rows"), [((0, 1), 40, 100), ((0,), 1000, 2500)], ids=["whole", "in parts"]
)
def test_a_plan_in_line_is_without_what_another_request_has_loaded_meanwhile(windows, chunks, rows):
    bench, other, mine, _ = in_line_behind_another(windows, chunks, rows, (chunks + 10) / rows)
    first, second, third = bench.request(), bench.request(), bench.request()
    assert bench.reach(other, first)[1]
    assert bench.reach(mine, second) == bench.reach(mine, third) == (0, 0, True), "in line"
    for _ in range(12):
        bench.step(0.00001)
        bench.tier["a"].end_all()
        for prompt, ctx in ((other, first), (mine, second), (mine, third)):
            bench.reach(prompt, ctx)
    assert bench.reach(mine, second) == bench.reach(mine, third) == (16 * chunks, 0, False)
    assert bench.figures("a")["dropped_promotions"] == 0


@pytest.mark.parametrize("windows", [(0, 1), (0,)], ids=["whole", "in parts"])
def test_a_plan_whose_time_in_line_ends_is_without_what_was_stored_meanwhile(windows):
    bench, other, mine, needed = in_line_behind_another(windows, 40, 100, 0.5)
    warm, ctx = chain("w", 20), bench.request()
    bench.tier["a"].put(warm)
    bench.tier["a"].seconds = 0.0001
    bench.lookup(warm, ctx)
    bench.step(0.0001)
    bench.tier["a"].end_all()
    bench.step(0.0001, prefill_tokens=1000, prefill_seconds=1.0)
    bench.lookup(warm, ctx)
    bench.manager.on_request_finished(ctx)
    bench.primary.forget(warm)
    bench.step()
    first, second = bench.request(), bench.request()
    assert bench.reach(other, first)[1]
    assert bench.reach(mine, second) == (0, 0, True), "in line"
    bench.step()
    bench.manager.complete_store(bench.begin_store(needed))
    while (answer := bench.reach(mine, second))[2]:
        bench.step(0.01)
    assert answer == (16 * 40, 0, False)
