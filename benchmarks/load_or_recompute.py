"""The cost of deciding between a tier and computing, beside the better of always loading and always computing.

Twenty-five scenes of an engine of one GPU and its tiers are played by the clock against the real ``TieringManager``
(``rigs/simulated_engine.py``). Regret: all requests' seconds to the first token together, over those of the better of
the two ways that do not decide. Below 1 the decision is better than both: GPU and tier work side by side. In
"colder than the priors" nothing that can be known says that both sides become faster soon: it shows what that costs.
Figures do not depend on the machine.
"""

import json
import random
from collections.abc import Callable, Sequence

from lib.results import at_most, options_of
from rigs.simulated_engine import CHUNK_BYTES, Arrival, Outcome, Scene, Tier, play

GOAL_REGRET = 1.05
WAYS = ("decide", "load", "compute")
_LONG, _SHORT, _TINY = 16_384, 2_048, 384
_WINDOWS = (8,) * 5  # of 1,024 tokens each


def rate(gigabytes: float) -> Callable[[float], float]:
    """Return the seconds a chunk of a tier that brings so many GB/s."""
    return lambda _now: CHUNK_BYTES / (gigabytes * 1e9)


def known(count: int, tokens: int, every: float, start: float = 2.0, tiers: int = 1) -> list[Arrival]:
    """Return so many requests, one ``every`` seconds, whose prompts all tiers have."""
    return [Arrival(start + number * every, tokens, (tokens,) * tiers) for number in range(count)]


def new(count: int, tokens: int, every: float, start: float = 0.0) -> list[Arrival]:
    """Return so many requests, one ``every`` seconds, whose prompts no tier has."""
    return [Arrival(start + number * every, tokens) for number in range(count)]


def together(*arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return all of these in the order in which they come."""
    return sorted((one for some in arrivals for one in some), key=lambda arrival: arrival.at)


def poisson(count: int, per_second: float, share: float, seed: int = 7) -> list[Arrival]:
    """Return requests of many lengths that come by chance, a share of which the tier has; of half of those a part."""
    chance, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(per_second)
        tokens = chance.choice([1_024, 4_096, 8_192, 16_384])
        there = chance.choice([tokens, tokens // 2]) if chance.random() < share else 0
        arrivals.append(Arrival(at, tokens, (there,)))
    return arrivals


def degrading(now: float) -> float:
    """Return the seconds a chunk of a tier that is 20 times slower between 20 and 50 s."""
    return CHUNK_BYTES / (0.35e9 if 20 <= now < 50 else 7e9)


def cold(now: float) -> float:
    """Return the seconds a token of an engine while its memory is pinned, as measured with vLLM on an H100: 220 us."""
    return 220e-6 if now < 5.0 else 30e-6


def cold_tier(now: float) -> float:
    """Return the seconds a chunk of a tier that has half its rate meanwhile."""
    return CHUNK_BYTES / (3.5e9 if now < 5.0 else 7e9)


def colder_tier(now: float) -> float:
    """Return the seconds a chunk of a tier that is at first as slow as computing by the prior, then 8 times faster."""
    return CHUNK_BYTES / (0.9e9 if now < 2.5 else 7e9)


def waking_tier(now: float) -> float:
    """Return the seconds a chunk of a tier in memory whose first loads take several times as long."""
    return CHUNK_BYTES / (2e9 if now < 0.3 else 9e9)


def scenes(*, quick: bool = False) -> dict[str, Scene]:
    """Return the scenes by name; ``quick``: with fewer requests."""
    many = 1 if quick else 3
    warm = new(2, _LONG, 0.6)
    return {
        "idle, one at a time": Scene([*warm, *known(12 * many, _LONG, 1.0)], [Tier(rate(7))]),
        "busy, most are new": Scene(
            together(warm, new(30 * many, _LONG // 2, 0.3, 2.0), known(15 * many, _LONG // 2, 0.6)), [Tier(rate(7))]
        ),
        "slow disk": Scene([*warm, *known(20 * many, _LONG, 1.0)], [Tier(rate(0.5), 0.01)]),
        "fast memory": Scene([*warm, *known(12 * many, _LONG, 0.5)], [Tier(rate(15))]),
        "short prefixes": Scene([*warm, *known(60 * many, _SHORT, 0.1)], [Tier(rate(7))]),
        "long prefixes": Scene([*warm, *known(6 * many, 4 * _LONG, 3.0)], [Tier(rate(7))]),
        "tiny prompts, distant tier": Scene([*warm, *known(200 * many, _TINY, 0.05)], [Tier(rate(2), 0.05)]),
        "cold start": Scene(known(20 * many, _LONG, 0.7, 0.0), [Tier(cold_tier)], cold),
        "colder than the priors": Scene(known(20 * many, _LONG, 0.7, 0.0), [Tier(colder_tier)], cold),
        "a tier degrades and recovers": Scene([*warm, *known(80, _LONG, 1.0)], [Tier(degrading)]),
        "burst after a restart": Scene([*warm, *known(24, _LONG // 2, 0.0, 3.0)], [Tier(rate(7))]),
        "burst as the first thing, slow answers": Scene(
            known(24, _LONG // 2, 0.0, 0.0), [Tier(waking_tier, 0.02, 0.03)]
        ),
        "burst over fast memory": Scene([*warm, *known(24, _LONG // 2, 0.0, 3.0)], [Tier(rate(15))]),
        "burst over fast memory as the first thing": Scene(
            known(24, _LONG // 2, 0.0, 0.0), [Tier(rate(15), 0.02, 0.03)]
        ),
        "burst over fast memory as the first thing, late answers": Scene(
            known(24, _LONG // 2, 0.0, 0.0), [Tier(rate(15), 0.02, 0.2)]
        ),
        "burst over a network as the first thing": Scene(known(24, _LONG // 2, 0.0, 0.0), [Tier(rate(2), 0.02, 0.03)]),
        "burst over a slow disk as the first thing": Scene(
            known(24, _LONG // 2, 0.0, 0.0), [Tier(rate(0.5), 0.02, 0.03)]
        ),
        "a disk slower than computing, all known": Scene(known(20 * many, _LONG, 1.5, 0.0), [Tier(rate(1.8), 0.005)]),
        "mixed, half are known": Scene(poisson(60 * many, 3.0, 0.5), [Tier(rate(5), 0.005)], decoding=0.005),
        "a slow tier before a fast one": Scene(
            [*warm, *known(12 * many, _LONG, 1.0, tiers=2)], [Tier(rate(0.5), 0.02), Tier(rate(7))]
        ),
        "windows, one at a time": Scene([*warm, *known(12 * many, _LONG, 1.0)], [Tier(rate(7))], windows=_WINDOWS),
        "windows, short prefixes": Scene([*warm, *known(60 * many, _SHORT, 0.1)], [Tier(rate(7))], windows=_WINDOWS),
        "windows, a slow disk": Scene(
            [*warm, *known(20 * many, _LONG, 1.0)], [Tier(rate(0.5), 0.01)], windows=_WINDOWS
        ),
        "windows, a burst over fast memory": Scene(
            [*warm, *known(24, _LONG // 2, 0.0, 3.0)], [Tier(rate(15))], windows=_WINDOWS, rows=4096
        ),
        "states, mixed, half are known": Scene(
            poisson(60 * many, 3.0, 0.5), [Tier(rate(5), 0.005)], decoding=0.005, windows=(1, 1, 1)
        ),
    }


def regret(found: dict[str, Outcome]) -> float:
    """Return the total of deciding over that of the better of the two other ways."""
    return found["decide"].total / min(found["load"].total, found["compute"].total)


def main() -> None:
    """Play all scenes, and print what came of them."""
    args = options_of(__doc__, "fewer requests").parse_args()
    played = {name: {way: play(scene, way) for way in WAYS} for name, scene in scenes(quick=args.quick).items()}
    goals = [at_most(f"regret, {name}", regret(found), GOAL_REGRET) for name, found in played.items()]
    if args.json:
        totals = {name: {way: found[way].total for way in WAYS} for name, found in played.items()}
        print(json.dumps({"seconds_to_first_token": totals, "goals": goals}))
        return
    print(
        f"{'seconds to the first token, all requests':<42}{'decide':>9}{'load':>9}{'compute':>9}{'regret':>8}{'end':>8}"
    )
    for (name, found), goal in zip(played.items(), goals, strict=True):
        row = "".join(f"{found[way].total:>9.2f}" for way in WAYS)
        print(f"{name:<42}{row}{goal['value']:>8.3f}{found['decide'].end:>8.1f}{'' if goal['met'] else '  MISSED'}")


if __name__ == "__main__":
    main()
