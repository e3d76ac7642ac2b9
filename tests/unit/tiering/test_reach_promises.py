"""What ``reach`` promises, over tiers and primaries of all kinds: what it calls ready can be loaded, and it decides."""

from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.types import PromptGroup

from .harness import Bench, chain

STEPS = 60


def bench_of(chance, sizes, windows):
    """Return a bench of small budgets, and each group's keys, which its tiers have in part."""
    options = TieringOptions(
        lookup_wait=0.02,
        load_wait=chance.choice((None, 0.05)),
        one_tier=chance.choice((0.1, 0.25, 1.0)),
        all_tiers=chance.choice((0.3, 0.5, 1.0)),
    )
    rows, hold = chance.choice((12, 30, 80)), chance.random() < 0.4
    bench = Bench(rows, {"a": {}, "b": {}}, sizes, options, hold=hold, windows=windows)
    tokens = chance.choice((96, 320, 960))
    prompt = [chain("k", tokens // size, group) for group, size in enumerate(sizes)]
    for keys in prompt:
        for tier in bench.tier.values():
            tier.put([key for key in keys if chance.random() < 0.9])
        some = [key for key in keys if chance.random() < 0.3][:3]
        if some and (plan := bench.begin_store(some)):
            bench.manager.complete_store(plan)
    return bench, prompt


def end_some(bench, chance):
    """End some of the jobs that a tier holds, some of them in part."""
    for tier in bench.tier.values():
        for held in list(tier.held):
            if chance.random() < 0.5:
                landed = [key for key in tier.held[held].job.keys if chance.random() < 0.9]
                tier.end(held, landed=landed if chance.random() < 0.3 else None)


@given(chance=st.randoms(use_true_random=False))
def test_what_is_called_ready_can_be_loaded_no_request_waits_for_ever_and_no_row_is_lost(chance):
    sizes = tuple(chance.choice((16, 16, 32)) for _ in range(chance.choice((1, 2, 3))))
    windows = (0, *(chance.choice((0, 1, 3)) for _ in sizes[1:]))
    ahead = [chance.choice((0, 0, 1)) for _ in sizes]
    bench, prompt = bench_of(chance, sizes, windows)
    groups = [
        PromptGroup(keys, window * size, more)
        for keys, window, size, more in zip(prompt, windows, sizes, ahead, strict=True)
    ]
    requests = [bench.request() for _ in range(3)]
    waiting = list(requests)
    for _ in range(STEPS):
        for ctx in list(waiting):
            reach = bench.manager.reach(groups, ctx)
            if not reach.waits:
                waiting.remove(ctx)
                for keys, window, size, more in zip(prompt, windows, sizes, ahead, strict=True):
                    first = max(0, reach.tokens - window * size) // size if window else 0
                    needed = keys[first : -(-reach.tokens // size) + more] if reach.tokens else []
                    assert bench.manager.ready_run(needed) == len(needed)
        bench.step(chance.choice((0.001, 0.02)))
        end_some(bench, chance)
    assert not waiting
    for ctx in requests:
        bench.manager.on_request_finished(ctx)
    for tier in bench.tier.values():
        tier.hold = False
        for held in list(tier.held):
            tier.end(held)
    for _ in range(10):
        bench.step(0.01)
    assert not bench.manager._budget.held
    assert not any(slot.metrics.loading_chunks for slot in bench.slots)
