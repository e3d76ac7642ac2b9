"""The cost of sealing and checking a value, beside a plain memory copy (numpy.copyto) of the same bytes.

The three take turns over the values of a region much larger than the processor's caches, as a tier's threads would
find them: first sealed or copied after it has left the cache. Medians over the rounds, one thread.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from lib.results import options_of, say

from kvtiers.api.units import format_size
from kvtiers.layout.seal import SealVerdict, check_value, seal_value
from kvtiers.region.memfd import Mapping

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
REGION_BYTES = 512 << 20
NAME = "bench/model-0123456789abcdef01234567/" + "00" * 36
LAYOUT_ID = bytes(8)
# A seal reads the payload once, a copy reads and writes it: hashing must not cost more than moving.
GOAL_SHARE_OF_COPY = 1.0
GOAL_FROM_BYTES = 256 << 10


def per_value_us(work: Callable[[memoryview], None], values: list[memoryview]) -> float:
    """Return the microseconds that ``work`` takes for each of these values."""
    start = time.perf_counter()
    for value in values:
        work(value)
    return (time.perf_counter() - start) * 1e6 / len(values)


def measure(region: memoryview, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the figures of values of this many bytes."""
    payload = nbytes - 64
    values = [region[at : at + nbytes] for at in range(0, len(region) - nbytes + 1, nbytes)]
    target = np.empty(nbytes, np.uint8)

    def seal(value: memoryview) -> None:
        seal_value(value, payload, NAME, LAYOUT_ID)

    def check(value: memoryview) -> None:
        assert check_value(value, payload, NAME, LAYOUT_ID) is SealVerdict.OK

    def copy(value: memoryview) -> None:
        np.copyto(target, np.frombuffer(value, np.uint8))

    samples: dict[str, list[float]] = {"copy": [], "seal": [], "check": []}
    for _ in range(rounds):
        for name, work in (("seal", seal), ("check", check), ("copy", copy)):
            samples[name].append(per_value_us(work, values))
    us = {name: statistics.median(taken) for name, taken in samples.items()}
    return {
        "value_bytes": nbytes,
        "us": us,
        "gb_per_s": {name: nbytes / 1e3 / taken for name, taken in us.items()},
        "share_of_copy": {name: us[name] / us["copy"] for name in ("seal", "check")},
    }


def results(*, quick: bool) -> dict[str, Any]:
    """Return the figures of all sizes, and the goals."""
    total = REGION_BYTES // 4 if quick else REGION_BYTES
    mapping = Mapping(-1, total, total)
    np.frombuffer(mapping.view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    sizes = [measure(mapping.view, nbytes, 5 if quick else 9) for nbytes in SIZES]
    goals = []
    for name in ("seal", "check"):
        worst = max(size["share_of_copy"][name] for size in sizes if size["value_bytes"] >= GOAL_FROM_BYTES)
        goals.append(
            {
                "name": f"{name}, as a share of a copy, values of {format_size(GOAL_FROM_BYTES)} and more",
                "value": worst,
                "goal": GOAL_SHARE_OF_COPY,
                "met": worst <= GOAL_SHARE_OF_COPY,
            }
        )
    return {"sizes": sizes, "goals": goals}


def report(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print("  value     copy us    seal us   check us      GB/s: copy    seal   check   seal/copy  check/copy")
    for size in found["sizes"]:
        us, rate, share = size["us"], size["gb_per_s"], size["share_of_copy"]
        print(
            f"  {format_size(size['value_bytes']):8}{us['copy']:9.1f}  {us['seal']:9.1f}  {us['check']:9.1f}"
            f"        {rate['copy']:8.1f}{rate['seal']:8.1f}{rate['check']:8.1f}"
            f"{share['seal']:12.2f}{share['check']:12.2f}"
        )


def main() -> None:
    options = options_of(__doc__, "a smaller region and fewer rounds").parse_args()
    found = results(quick=options.quick)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
