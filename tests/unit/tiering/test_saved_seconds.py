"""The seconds that a load saved are priced once, by the position of its tokens."""

import pytest

from .harness import HIT, chain
from .load_benches import measure, prefill, roomy, waited


def load(bench, keys, first=0, seconds=0.008):
    """Let a tier load these chunks, of which the first is the request's chunk ``first``; return the request."""
    tier = bench.tier["a"]
    tier.put(keys)
    tier.seconds = seconds
    bench.manager.lookup_prefix(keys, ctx := bench.request(), first)
    bench.step()
    tier.end_all()
    bench.step()
    return ctx


def test_what_a_load_saved_is_priced_once_when_it_lands():
    bench = roomy()  # a millisecond a token
    keys = chain("saved-", 8)
    ctx = load(bench, keys)
    figures = bench.figures("a")
    assert figures["computing_seconds"] == pytest.approx(8 * 16 * 0.001), "it has landed, and was not read yet"
    saved = figures["saved_seconds"]
    assert 0.0 < saved <= 8 * 16 * 0.001
    for _ in range(12):
        prefill(bench, seconds_per_token=0.01)  # dearer now: nothing is valued again
    assert bench.load(keys, ctx)
    assert bench.figures("a")["computing_seconds"] == figures["computing_seconds"]
    assert bench.figures("a")["saved_seconds"] == saved


@pytest.mark.parametrize("first", [0, 100, 300])
def test_what_a_load_saved_is_priced_by_the_position_of_its_tokens(first):
    bench = roomy()
    for position in range(500, 8500, 1000):  # a prompt of 8,000 tokens, in parts: each dearer than the one before
        seconds = 1000 * (0.001 + 1e-6 * position)
        bench.step(prefill_tokens=1000, prefill_seconds=seconds, prefill_position=position)
    load(bench, chain("far-", 8), first)
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
    bench.manager.lookup_prefix(keys, bench.request(), 100)
    tier.answer = None
    bench.step()
    tier.end_all()
    bench.step()
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
