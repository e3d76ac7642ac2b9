"""What ``reach`` promises, over tiers and primaries of all kinds: what it calls ready can be loaded, and it decides."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.types import PromptGroup

from .harness import RETRY, Bench, chain, payload

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
                    assert bench.primary.ready_run(needed) == len(needed)
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


class Requests:
    """Requests for prompts that share their beginnings, over tiers that answer late, stores that evict, and aborts."""

    def __init__(self, chance):
        self.chance = chance
        self.sizes = tuple(chance.choice((16, 16, 32)) for _ in range(chance.choice((1, 2, 3))))
        self.windows = (0, *(chance.choice((0, 1, 3)) for _ in self.sizes[1:]))
        self.bench, first = bench_of(chance, self.sizes, self.windows)
        cuts = [chance.randrange(len(first[0]) * self.sizes[0] // 32) * 32 for _ in range(2)]
        others = [[chain(f"o{cut}-", len(keys), group) for group, keys in enumerate(first)] for cut in cuts]
        self.prompts = [first] + [
            [a[: cut // size] + b[cut // size :] for a, b, size in zip(first, other, self.sizes, strict=True)]
            for cut, other in zip(cuts, others, strict=True)
        ]
        self.steps = 0
        self.waiting, self.loads, self.stores = [], [], []
        for tier in self.bench.tier.values():
            for prompt in self.prompts[1:]:
                tier.put([key for keys in prompt for key in keys])
            self.answer_late(tier, chance.choice((0, 1, 3)))

    def answer_late(self, tier, steps):
        """Have a tier answer about a chunk so many steps after it was first asked."""
        answer, asked = tier.lookup_many, {}

        def late(keys, context):
            known = sum(asked.setdefault(key, self.steps) + steps <= self.steps for key in keys)
            return answer(keys[:known], context) + [RETRY] * (len(keys) - known)

        tier.lookup_many = late

    def groups(self, prompt):
        return [
            PromptGroup(keys, window * size)
            for keys, window, size in zip(prompt, self.windows, self.sizes, strict=True)
        ]

    def look(self, ctx, prompt):
        """Ask; load what is ready, whose bytes have to be the prompt's, and store the rest."""
        reach = self.bench.manager.reach(self.groups(prompt), ctx)
        if reach.waits:
            return
        self.waiting.remove((ctx, prompt))
        needed, rest = [], []
        for keys, window, size in zip(prompt, self.windows, self.sizes, strict=True):
            first = max(0, reach.tokens - window * size) // size if window else 0
            needed += keys[first : reach.tokens // size]
            rest += keys[reach.tokens // size :][-window if window else 0 :]
        if needed:
            plan = self.bench.manager.prepare_load(needed, ctx)
            assert plan is not None, "what is called ready can be loaded"
            self.loads.append((plan, needed))
        if rest and (plan := self.bench.begin_store(rest, ctx)):
            self.stores.append(plan)
        self.bench.manager.on_request_finished(ctx)

    def step(self, seconds):
        chance, manager = self.chance, self.bench.manager
        for one in list(self.waiting):
            self.look(*one)
        if self.waiting and chance.random() < 0.1:
            ctx, _ = self.waiting.pop(chance.randrange(len(self.waiting)))
            manager.on_request_finished(ctx)
        for plan, needed in self.loads:
            for key, row in zip(needed, plan.chunk_ids.tolist(), strict=True):
                assert bytes(self.bench.row(row)) == payload(key), "a pinned row has its own bytes"
        self.end_copies(0.5)
        self.steps += 1
        self.bench.step(seconds)
        end_some(self.bench, chance)

    def end_copies(self, share):
        for load in list(self.loads):
            if self.chance.random() < share:
                self.loads.remove(load)
                self.bench.manager.complete_load(load[0])
        for plan in list(self.stores):
            if self.chance.random() < share:
                self.stores.remove(plan)
                self.bench.manager.complete_store(plan, self.chance.random() < 0.9)


@settings(max_examples=20)
@given(chance=st.integers(0, 1 << 32).map(random.Random))
def test_many_requests_over_late_tiers_and_a_small_primary_load_their_own_bytes_or_compute_and_leave_nothing(chance):
    played = Requests(chance)
    manager = played.bench.manager
    for _ in range(40):
        while len(played.waiting) < 6 and chance.random() < 0.5:
            played.waiting.append((played.bench.request(), chance.choice(played.prompts)))
        played.step(chance.choice((0.001, 0.005, 0.02)))
    for _ in range(STEPS):
        if played.waiting:
            played.step(0.02)
    assert not played.waiting, "no request waits for ever"
    played.end_copies(1.0)
    for tier in played.bench.tier.values():
        tier.hold = False
        tier.end_all()
    for seconds in (0.0, 60.0, 0.0, 0.0):
        played.bench.step(seconds)
    assert not manager._budget.held
    assert not manager._waits.gpu.waiting
    assert not played.bench.figures()["misuse"]
    assert played.bench.unused_rows() == played.bench.rows
