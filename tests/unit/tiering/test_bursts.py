"""Requests that come together share what a step reserves, so that none is long, and none of them waits for nothing."""

import pytest

from kvtiers.tiering.jobs import TieringOptions

from .bench import PENDING, Bench, chain

PER_TOKEN = 0.001  # seconds to compute
CHUNK = 16 * PER_TOKEN


def bench_with(load_wait=100.0, groups=1, **more):
    options = TieringOptions(lookup_wait=0.02, load_wait=load_wait, one_tier=0.8, all_tiers=0.8)
    return Bench(rows=4096, tokens_per_chunk=(16,) * groups, options=options, **more)


def requests(bench, count, length, group=0):
    """So many requests, each with a prefix that the tier has."""
    asked = [(bench.request(), chain(f"p{number}-", length, group)) for number in range(count)]
    for _, keys in asked:
        bench.tier["a"].put(keys)
    return asked


def measured(bench, chunks=4):
    """Have both sides measured: a chunk comes in a hundredth of the time that computing it takes."""
    bench.step(prefill_tokens=1000, prefill_seconds=1000 * PER_TOKEN)
    tier, keys = bench.tier["a"], chain("measured", chunks)
    tier.put(keys)
    tier.seconds = chunks * CHUNK / 100
    bench.lookup(keys, ctx := bench.request())
    bench.step()
    tier.end_all()
    bench.step()
    bench.manager.on_request_finished(ctx)


def test_later_requests_of_a_step_share_what_the_first_leaves_and_each_gets_some():
    bench = bench_with()
    asked = requests(bench, 6, 64)
    steps = []
    for _ in range(3):
        steps.append([bench.lookup(keys, ctx) for ctx, keys in asked])
        bench.step()
    assert steps == [
        [(0, 64, False)] * 2 + [(0, 16, True)] * 4,
        [(64, 0, False)] * 2 + [(16, 48, False)] * 2 + [(16, 32, True), (16, 16, True)],
        [(64, 0, False)] * 4 + [(48, 16, False), (32, 32, False)],
    ]


def test_who_got_no_row_or_waits_takes_nothing_of_it():
    bench = bench_with(hold=True)
    (waits, kept), (late, keys) = requests(bench, 2, 200)
    assert bench.lookup(kept, waits) == (0, 200, False)
    bench.step()
    fits = bench.begin_store(chain("leased", bench.primary.free_rows))
    assert bench.lookup(kept, waits) == (0, 200, False)
    assert bench.lookup(keys, late) == (0, 0, False), "no row is free"
    bench.manager.complete_store(fits, success=False)
    other, _ = requests(bench, 3, 200)[2]
    assert bench.lookup(chain("p2-", 200), other) == (0, 200, False)


def test_an_engine_that_rests_in_a_step_reserves_more_when_it_looks_again():
    bench = bench_with(hold=True)
    (first, some), (second, keys) = requests(bench, 2, 128)
    assert bench.lookup(some, first) == (0, 128, False)
    assert bench.lookup(keys, second) == (0, 16, True)
    assert bench.lookup(chain("k", 8), bench.request()) == (0, 0, False)
    bench.manager.look_again()
    assert bench.lookup(keys, second) == (0, 128, False)


def test_groups_of_requests_that_come_together_do_not_take_their_chunks_from_each_other():
    bench = bench_with(groups=3)
    asked = [[requests(bench, 4, 100, group)[number] for group in range(3)] for number in range(4)]
    asked = [(groups[0][0], [keys for _, keys in groups]) for groups in asked]
    for _ in range(7):
        found = []
        for ctx, (first, second, window) in asked:
            ready, pending, _ = bench.lookup(first, ctx)
            reached = bench.lookup(second[: ready + pending], ctx)
            place = reached[0] + reached[1] - 1
            found.append((reached, bench.manager.lookup(window[place], ctx)))
        bench.step()
    assert [reached for reached, _ in found] == [(100, 0, False)] * 4
    loads = sum(len(job.keys) for job in bench.tier["a"].loads)
    assert 800 <= loads <= 800 + 4 * 7, "nothing was let go and loaded again"
    assert PENDING not in {window for _, window in found}


def test_auto_waits_for_what_was_found_though_each_step_reserves_a_little_of_it():
    bench = bench_with(load_wait=None, hold=True)
    measured(bench)
    asked = requests(bench, 5, 128)
    ctx, keys = asked.pop()
    for pending in (16, 32, 48, 64):  # computing all of it takes 128 chunks' time
        other, taken = asked.pop()
        assert bench.lookup(taken, other) == (0, 128, False)
        assert bench.lookup(keys, ctx) == (0, pending, True)
        bench.step(40 * CHUNK)
    assert bench.lookup(keys, ctx) == (0, 0, False)


@pytest.mark.parametrize("is_lost", [False, True])
def test_auto_waits_no_longer_than_for_what_there_is_once_the_rest_is_gone(is_lost):
    bench = bench_with(load_wait=None, hold=True)
    measured(bench)
    (first, some), (second, keys) = requests(bench, 2, 128)
    bench.lookup(some, first)
    assert bench.lookup(keys, second) == (0, 16, True)
    if is_lost:
        bench.tier["a"].values.clear()
    bench.step(15 * CHUNK)
    expected = (0, 16, False) if is_lost else (0, 128, False)
    assert bench.lookup(keys, second) == expected
    bench.step(2 * CHUNK)
    expected = (0, 0, False) if is_lost else (0, 128, False)
    assert bench.lookup(keys, second) == expected
