"""A workload with much to hit, made up in the same way each time; and the cases' budgets for so small a one."""

import itertools
import random

from kvtiers.config import BudgetConfig
from kvtiers_replay.workload import ReplayRequest, Workload

# A small primary must take a whole request's promotion, as a real one does.
WIDE = BudgetConfig(store_reserve=0.0, one_tier=0.6, all_tiers=0.6, protected=0.4)


def synthetic(requests: int = 500, seed: int = 3, tokens_per_block: int = 16) -> Workload:
    """Prompts that go on from some point of an earlier one; the last token never ends a block."""
    chance = random.Random(seed)
    names = (number.to_bytes(8, "big") for number in itertools.count())
    prompts = [list(itertools.islice(names, 20))]
    for _ in range(requests - 1):
        start = chance.choice(prompts[-50:])
        shared = start[: chance.randint(0, len(start))]
        prompts.append((shared + list(itertools.islice(names, chance.choice([0, 1, 4, 12]))))[:60] or [next(names)])
    return Workload(
        "made up",
        tokens_per_block,
        [ReplayRequest(len(blocks) * tokens_per_block + 1, blocks, float(at)) for at, blocks in enumerate(prompts)],
    )
