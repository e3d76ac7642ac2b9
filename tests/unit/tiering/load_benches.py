"""Benches on which requests wait for loads: their tiers hold every job until a test ends it."""

import itertools

from kvtiers.tiering.jobs import TieringOptions

from .harness import Bench, chain

KEYS = chain("k", 8)
_measures = itertools.count()


def bench_with(load_wait, tiers=("a",), rows=64, **more):
    options = TieringOptions(lookup_wait=0.02, load_wait=load_wait, one_tier=0.4, all_tiers=0.5)
    return Bench(rows=rows, tiers={name: {} for name in tiers}, options=options, hold=True, **more)


def waited(bench, keys, ctx, tick=0.005, most=4000):
    """Ask each step until the answer is final; return it and how long that took."""
    begin = bench.clock.now
    for _ in range(most):
        ready, pending, unresolved = bench.lookup(keys, ctx)
        if not pending and not unresolved:
            return ready, bench.clock.now - begin
        bench.step(tick)
    raise AssertionError("it waits for ever")


def by_tier(bench, figure):
    return {name: bench.figures(name)[figure] for name in bench.tier}


def prefill(bench, seconds_per_token=0.001):
    bench.step(prefill_tokens=1000, prefill_seconds=1000 * seconds_per_token)


def measure(bench, seconds, name="a", chunks=4):
    """Let a tier load some chunks in this time."""
    tier = bench.tier[name]
    keys = chain(f"measured-{next(_measures)}-", chunks)
    tier.put(keys)
    tier.seconds = seconds
    bench.lookup(keys, ctx := bench.request())
    bench.step()
    tier.end_all()
    bench.step()
    bench.manager.on_request_finished(ctx)
    return keys


def roomy(rows=4096, **more):
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.8, all_tiers=0.8)
    bench = Bench(rows=rows, options=options, hold=True, **more)
    prefill(bench)
    return bench
