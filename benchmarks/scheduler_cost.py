"""The cost of the tiering manager on the engine's thread, beside vLLM's.

The life of a chunk, in microseconds a chunk: it is looked up and missed, stored, cascaded to two tiers (which answer at
once), touched; a later request, whose chunks are chosen at random among the resident ones, hits and loads it; both
requests end. Requests have 64 chunks. The primary is full, with 1,000 or 100,000 chunks, so that every store evicts.
All times are processor time of the engine's thread, means of a block of rounds and medians over the blocks; the
managers take turns by blocks; the garbage collector runs as it would in an engine. The share of vLLM's time is a goal
only where vLLM is measured beside ours: on a busy machine all of them take twice their time.

The policy turn-hazard looks at a run of chunks again whenever its age passes one of 21 bounds, most of which are in the
first minutes: work by the second for each run that was used of late, at most 256 of them a call. Here all chunks were
used within seconds, so with 100,000 of them that is a third of what the policy takes, and in a short run a life grows
by more than the goal. Less often would mean to evict by what a run was worth some time ago.

Besides: a look-up of a long prefix, an idle step, and the same life with real tiers: behind core's sealing threads, and
in two host processes.

A look-up of a long prefix is all calls of ``reach`` that one request makes until its answer is not
``unresolved``: one call reserves 448 chunks at most, or 1,536 while there are other prompts to compute, as here; so a
prefix that the tiers have is walked in several steps. Its loads are in flight meanwhile, as those of a real tier are
for a few steps. The engine's thread waits for one call at a time, so the goal is about the longest of them; beside it
stand the sum of all calls, without the steps between, and how many there are.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from baselines import vllm_tiering
from lib.results import options_of, say
from rigs.chunk_life import BATCH, PHASES, Life, OurLife, measure, new_keys

import kvtiers
from kvtiers.api import JobResult, LookupResult, OffloadKey, TierConfig, TierRequest, TransferJob
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import StorageNames
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.secondary.managed.sealed_tier import SealedTier
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.engine_side import TraceSide, Watchers
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import PromptGroup

STEP_SECONDS = 0.002  # shorter than any engine's step, so that more steps than in an engine's life are in the figures
SIZES = (1_024, 102_400)
POLICIES = ("lru", "turn-hazard")
PREFIX = 8192
STRETCH = 64  # chunks in a row that are at the same place, in the mixed prefix
VALUE_BYTES = 4096
LAYOUT = CacheLayout(ModelIdentity("benchmark", weights="w"), (KVGroup("g", 16),), (KVTensor("t", 0, 4000),))
PATIENT = TieringOptions(lookup_wait=60.0)  # a machine that is busy ends no look-up; load_wait: auto
SECONDS_PER_TOKEN = 0.001  # of an engine that every tier is faster than
# Growth: keys among 100,000 lie in memory and no longer in the caches, so the same work takes a little longer there;
# work that itself grows with what is resident would show as a multiple.
GOAL_SHARE, GOAL_GROWTH, GOAL_PREFIX_MS, GOAL_IDLE_US = 1 / 3, 1.25, 3.0, 20.0


class InstantTier(EventTier):
    """Takes everything, has what ``there`` says, and has ended each job when it is asked; on ``hold`` none."""

    def __init__(self) -> None:
        self.there: set[OffloadKey] = set()
        self.hold = False
        self._held: list[JobResult] = []
        self._finished: list[JobResult] = []

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:
        """Answer up to the first chunk that is not there."""
        del context
        there, hits = self.there, 0
        for key in keys:
            if key not in there:
                return [*[LookupResult.HIT] * hits, LookupResult.MISS]
            hits += 1
        return [LookupResult.HIT] * hits

    def submit_store(self, job: TransferJob) -> None:
        """Have done it, or hold it."""
        if self.hold:
            self._held.append(JobResult(job.job_id, success=False))
        else:
            self._finished.append(JobResult(job.job_id, True, None, VALUE_BYTES * len(job.keys), 0.001))

    submit_load = submit_store

    def fail_held(self) -> None:
        """End what is held: nothing of it has come."""
        self._finished += self._held
        self._held.clear()

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Report what came since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def drain(self, timeout: float) -> bool:
        """Nothing is ever left."""
        del timeout
        return True


class EngineSide:
    """All ranks are there, and no tier has figures of its own."""

    def ready(self) -> bool:
        """Yes."""
        return True

    def dma_may_run(self) -> bool:
        """No."""
        return False

    def tier_stats(self, name: str) -> dict[str, float]:
        """None."""
        del name
        return {}


def in_process(
    resident: int, policy: str = "lru", tracing: TraceSide | None = None
) -> tuple[OurLife, list[InstantTier]]:
    """Return our manager with two instant tiers, given to it directly."""
    primary = CPUPrimaryTier(resident, VALUE_BYTES, memoryview(bytearray(resident * VALUE_BYTES)), policy=policy)
    tiers = [InstantTier(), InstantTier()]
    slots = [
        TierSlot(index, tier, TierOptions(name)) for index, (name, tier) in enumerate(zip("ab", tiers, strict=True))
    ]
    manager = TieringManager(
        "benchmark", primary, slots, [16], EngineSide(), PATIENT, watchers=Watchers(tracing=tracing)
    )
    return OurLife(manager), tiers


@contextlib.contextmanager
def sealed(resident: int) -> Iterator[OurLife]:
    """Yield our manager with two instant tiers behind core's sealing threads, over real rows."""
    view = memoryview(bytearray(resident * VALUE_BYTES))
    primary = CPUPrimaryTier(resident, VALUE_BYTES, view)
    names = StorageNames.of_layout("benchmark", LAYOUT)
    sizes = [(LAYOUT.payload_bytes(0), LAYOUT.value_bytes(0))]
    tiers = [
        SealedTier(TierConfig(type=name), InstantTier, ValueViews(view, VALUE_BYTES), names, sizes) for name in "ab"
    ]
    for tier in tiers:
        assert not tier.wait_open(10)
    slots = [
        TierSlot(index, tier, TierOptions(name)) for index, (name, tier) in enumerate(zip("ab", tiers, strict=True))
    ]
    yield OurLife(TieringManager("benchmark", primary, slots, [16], EngineSide()), pause=STEP_SECONDS)
    for tier in tiers:
        tier.close()


@contextlib.contextmanager
def hosted(resident: int) -> Iterator[OurLife]:
    """Yield our manager with two memory tiers in host processes."""
    config = {
        "version": 1,
        "primary": {"capacity": resident * VALUE_BYTES},
        "secondary": [{"type": "memory", "name": name, "capacity": "256MiB"} for name in "ab"],
        "lookup_wait": "10s",
        "load_wait": "10s",
        "budgets": {"one_tier": "50%"},
    }
    manager = kvtiers.open_manager(config, LAYOUT)
    worker = kvtiers.open_worker(config, LAYOUT, [np.zeros((1, 4000), np.uint8)], engine_id=manager.engine_id)
    try:
        manager.wait_ready(30)
        until = time.monotonic() + 30
        while not all(tier["own"]["open"] for tier in manager.stats()["tiers"].values()):
            if time.monotonic() > until:
                raise TimeoutError("the hosts do not open")
            manager.on_schedule_end()
            time.sleep(0.001)
        yield OurLife(manager, pause=STEP_SECONDS)
    finally:
        worker.shutdown()
        manager.shutdown(5)


def prefix_lookups(life: OurLife, tiers: list[InstantTier], rounds: int) -> dict[str, dict[str, float]]:
    """Return what looking up a prefix of 8,192 chunks takes, by where they are: the calls, their sum, the longest."""
    here = [key for keys in life.stored if life.primary.resident_run(keys)[0] == BATCH for key in keys][:PREFIX]
    away = new_keys(PREFIX)
    mixed: list[bytes] = []
    for number, start in enumerate(range(0, PREFIX, STRETCH)):
        mixed += (here, away)[number % 2][start : start + STRETCH]
    for number, start in enumerate(range(STRETCH, PREFIX, 2 * STRETCH)):
        tiers[number % 2].there.update(away[start : start + STRETCH])
    life.manager.touch(here)  # what is away gets other rows
    results = {}
    for name, keys in {"miss": new_keys(PREFIX), "hit": here, "mixed": mixed, "in a tier": away}.items():
        if name == "in a tier":
            tiers[0].there.update(away)
        taken = [lookup_seconds(life, tiers, keys, 0 if name == "miss" else PREFIX) for _ in range(rounds)]
        results[name] = {
            "longest_ms": statistics.median(map(max, taken)) * 1e3,
            "sum_ms": statistics.median(map(sum, taken)) * 1e3,
            "calls": statistics.median(map(len, taken)),
        }
    return results


def lookup_seconds(
    life: OurLife, tiers: Sequence[InstantTier], keys: Sequence[OffloadKey], expected: int
) -> list[float]:
    """Return the seconds of each call that one request makes until it has its run, of ``expected`` chunks."""
    manager, ctx = life.manager, life.request()
    manager.on_new_request(ctx)
    for tier in tiers:
        tier.hold = True
    seconds = []
    unresolved = True
    while unresolved:
        begin = time.thread_time()
        hits = manager.reach([PromptGroup(keys)], ctx).in_chunks(manager.tokens_per_chunk[0])
        seconds.append(time.thread_time() - begin)
        unresolved = hits.unresolved
        manager.on_schedule_end(prefill_tokens=512, prefill_seconds=512 * SECONDS_PER_TOKEN)
    assert hits.tokens == expected, hits
    for tier in tiers:
        tier.hold = False
        tier.fail_held()
    manager.on_request_finished(ctx)
    manager.on_schedule_end()
    return seconds


def idle_us(manager: TieringManager, steps: int) -> float:
    """Return the microseconds of a step in which nothing happens."""
    seconds = []
    for _ in range(20):
        begin = time.thread_time()
        for _ in range(steps // 20):
            manager.on_schedule_end()
        seconds.append((time.thread_time() - begin) / (steps // 20))
    return statistics.median(seconds) * 1e6


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    rounds = 200 if options.quick else 1500
    policies = [*POLICIES, *(options.policy or ())]
    ours = {(policy, size): in_process(size, policy) for policy in policies for size in SIZES}
    results: dict[str, Any] = {
        "policies": policies,
        "vllm": vllm_tiering.prepare(options.vllm) or "measured in this run",
    }
    lives: dict[str, Life] = {f"{policy}, {size:,}": life for (policy, size), (life, _) in ours.items()}
    if results["vllm"] == "measured in this run":
        lives |= {f"vLLM, {size:,}": vllm_tiering.VllmLife(size, BATCH) for size in SIZES}
    results["us_per_chunk"] = dict(zip(lives, measure(list(lives.values()), rounds), strict=True))
    results["prefix_lookup"] = prefix_lookups(*ours[POLICIES[0], SIZES[-1]], 10 if options.quick else 40)
    results["idle_step_us"] = {"given directly": idle_us(ours[POLICIES[0], SIZES[0]][0].manager, rounds * 4)}
    for name, opened in (("behind the sealing thread", sealed), ("in two host processes", hosted)):
        with opened(SIZES[0]) as life:
            (figures,) = measure([life], rounds // 10)
            results["us_per_chunk"][f"{POLICIES[0]}, {name}, {SIZES[0]:,}"] = figures
            results["idle_step_us"][name] = idle_us(life.manager, rounds * 4)
    results["goals"] = goals(results)
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    sums = {name: figures["sum"] for name, figures in results["us_per_chunk"].items()}
    found = []

    def goal(name: str, value: float, limit: float) -> None:
        found.append({"name": name, "value": value, "goal": limit, "met": value <= limit})

    for policy in results["policies"]:
        small, large = (sums[f"{policy}, {size:,}"] for size in SIZES)
        for size, life in zip(SIZES, (small, large), strict=True):
            if peer := sums.get(f"vLLM, {size:,}"):
                goal(f"a chunk's life, {policy}, {size:,} resident, as a share of vLLM's", life / peer, GOAL_SHARE)
        goal(f"a chunk's life, {policy}, {SIZES[1]:,} resident against {SIZES[0]:,}", large / small, GOAL_GROWTH)
    for name, taken in results["prefix_lookup"].items():
        goal(f"reach of {PREFIX:,} chunks, {name}, the longest call, ms", taken["longest_ms"], GOAL_PREFIX_MS)
    for name, microseconds in results["idle_step_us"].items():
        goal(f"idle step, two tiers {name}, us", microseconds, GOAL_IDLE_US)
    return found


def report(results: dict[str, Any]) -> None:
    """Print the figures as tables."""
    print(f"vLLM's TieringOffloadingManager: {results['vllm']}\n")
    print(f"{'us a chunk':46}" + "".join(f"{phase:>9}" for phase in (*PHASES, "sum")))
    for name, figures in results["us_per_chunk"].items():
        print(f"{name:46}" + "".join(f"{figures.get(phase, 0.0):9.2f}" for phase in (*PHASES, "sum")))
    print()
    for name, taken in results["prefix_lookup"].items():
        calls = f"{taken['calls']:.0f} calls, each in a step of its own" if taken["calls"] > 1 else "1 call"
        print(
            f"reach of {PREFIX:,} chunks, {name}: {taken['sum_ms']:.2f} ms in {calls}, "
            f"the longest {taken['longest_ms']:.2f} ms"
        )
        if taken["sum_ms"] > GOAL_PREFIX_MS:
            print(f"    ALL CALLS TOGETHER TAKE MORE THAN {GOAL_PREFIX_MS:g} ms; the goal counts the longest one")


def main() -> None:
    parser = options_of(__doc__, "fewer rounds")
    parser.add_argument("--policy", action="append", metavar="NAME", help="an installed policy besides ours")
    parser.add_argument(
        "--vllm",
        metavar="FOLDER",
        default=os.environ.get("KVTIERS_VLLM"),
        help="the unpacked Python files of its wheel",
    )
    results = run(options := parser.parse_args())
    say(results, report, as_json=options.json)


if __name__ == "__main__":
    main()
