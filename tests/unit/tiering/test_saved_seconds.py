"""The seconds that a request's loads saved are priced once, when it uses them, by the position of their tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .harness import HIT, chain
from .load_benches import measure, prefill, roomy, waited


def load(bench, keys, first=0, seconds=0.008):
    """Let a tier load these chunks, of which the first is the request's chunk ``first``; return the request."""
    tier = bench.tier["a"]
    tier.put(keys)
    tier.seconds = seconds
    bench.lookup(keys, ctx := bench.request(), first)
    bench.step()
    tier.end_all()
    bench.step()
    return ctx


def test_what_a_load_saved_is_priced_once_when_its_request_uses_it():
    bench = roomy()  # a millisecond a token
    keys = chain("saved-", 8)
    ctx = load(bench, keys)
    assert bench.figures("a")["computing_seconds"] == 0.0, "it has landed, and was not used yet"
    assert bench.load(keys, ctx)
    figures = bench.figures("a")
    assert figures["computing_seconds"] == pytest.approx(8 * 16 * 0.001)
    saved = figures["saved_seconds"]
    assert 0.0 < saved <= 8 * 16 * 0.001
    for _ in range(12):
        prefill(bench, seconds_per_token=0.01)  # dearer now: nothing is valued again
    assert bench.load(keys, ctx)
    assert bench.load(keys, bench.request()), "another one, from the primary"
    assert bench.figures("a")["computing_seconds"] == figures["computing_seconds"]
    assert bench.figures("a")["saved_seconds"] == saved


def test_the_seconds_of_a_windows_loads_are_no_savings():
    """What a prefix takes to load and what its windows take, from another tier or the same, both count."""
    for tiers in (("a",), ("a", "b")):
        bench = roomy(tokens_per_chunk=(16, 16), windows=(0, 8), tiers={name: {} for name in tiers})
        for name in tiers:
            measure(bench, 0.004, name)  # a millisecond a chunk
        before = sum(bench.figures(name)["saved_seconds"] for name in tiers)
        keys, window = chain("w-", 8), chain("w-", 8, group=1)
        bench.tier["a"].put(keys)
        bench.tier[tiers[-1]].put(window)
        ctx = bench.request()
        for _ in range(3):
            bench.reach([keys, window], ctx)
            for name in tiers:
                bench.tier[name].seconds = 0.016 / len(tiers)
                bench.tier[name].end_all()
            bench.step()
        assert bench.load([*keys, *window], ctx)
        saved = sum(bench.figures(name)["saved_seconds"] for name in tiers) - before
        assert saved == pytest.approx(8 * 16 * 0.001 - 0.016, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([16, 40, 600, 2_000, 8_192]), min_size=1, max_size=12),
    st.lists(st.integers(1, 32), min_size=1, max_size=5),
    st.sampled_from([(), (0, 4), (0, 8, 1)]),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.05),
)
def test_no_loads_save_more_than_computing_would_have_taken(steps, prompts, windows, fixed, seconds):
    """Steps take a fixed time and a millisecond a token; 16 tokens are left to compute after a hit."""
    bench = roomy(tokens_per_chunk=(16,) * max(1, len(windows)), windows=windows)
    whole = 0.0
    for number, (tokens, chunks) in enumerate(zip(steps, prompts, strict=False)):
        bench.step(prefill_tokens=tokens, prefill_seconds=fixed + tokens * 0.001)
        groups = [chain(f"p{number}-", chunks)]
        groups += [chain(f"p{number}-", chunks, group)[-window:] for group, window in enumerate(windows) if window]
        for keys in groups:
            bench.tier["a"].put(keys)
        bench.tier["a"].seconds = seconds
        ctx = bench.request()
        for _ in range(4):
            bench.reach([chain(f"p{number}-", chunks, group) for group in range(len(groups))], ctx)
            bench.step(prefill_tokens=16, prefill_seconds=fixed + 0.016)
            bench.tier["a"].end_all()
        if bench.load([key for keys in groups for key in keys], ctx):
            whole += fixed + 0.001 * 16 * chunks
        figures = bench.figures("a")
        assert figures["saved_seconds"] <= figures["computing_seconds"] <= whole + 1e-9


@pytest.mark.parametrize("first", [0, 100, 300])
def test_what_a_load_saved_is_priced_by_the_position_of_its_tokens(first):
    bench = roomy()
    for position in range(500, 8500, 1000):  # a prompt of 8,000 tokens, in parts: each dearer than the one before
        seconds = 1000 * (0.001 + 1e-6 * position)
        bench.step(prefill_tokens=1000, prefill_seconds=seconds, prefill_position=position)
    keys = chain("far-", 8)
    assert bench.load(keys, load(bench, keys, first))
    middle = 16 * (first + 4)
    assert bench.figures("a")["computing_seconds"] == pytest.approx(8 * 16 * (0.001 + 1e-6 * middle))


def test_parts_of_a_load_have_positions_of_their_own_and_what_did_not_come_is_not_priced():
    bench = roomy()
    for position in range(500, 8500, 1000):
        bench.step(prefill_tokens=1000, prefill_seconds=1.0 + position / 1000, prefill_position=position)
    keys = chain("parts-", 8)
    tier = bench.tier["a"]
    tier.put(keys[:4])
    tier.answer = HIT
    bench.lookup(keys, ctx := bench.request(), 100)
    tier.answer = None
    bench.step()
    tier.end_all()
    bench.step()
    assert bench.load(keys[:4], ctx)
    assert bench.figures("a")["loaded_chunks"] == 4
    assert bench.figures("a")["computing_seconds"] == pytest.approx(4 * 16 * (0.001 + 1e-6 * 16 * 102))


def test_a_load_that_no_request_waits_for_has_saved_nothing():
    bench = roomy()
    measure(bench, 0.004)
    before = bench.figures("a")
    keys = chain("late-", 8)
    bench.tier["a"].put(keys)
    assert waited(bench, keys, bench.request())[0] == 0, "it has gone over to computing"
    bench.tier["a"].end_all()
    bench.step()  # of the last lookup, which has seen the tier's results already
    bench.step()
    after = bench.figures("a")
    assert after["loaded_chunks"] == before["loaded_chunks"] + 8
    assert after["computing_seconds"] == before["computing_seconds"]
    assert after["saved_seconds"] == before["saved_seconds"]
