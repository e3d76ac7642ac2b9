"""vLLM's own primary with kvtiers' eviction policies, without an engine: what they hit, and that they never fail.

Prints the release, the hits of vLLM's LRU and of kvtiers' one, which are to be the same, those of turn-hazard, and the
errors of kvtiers' policies. Sessions come back, some of them sooner, among prompts that never do; stores fail now and
then, loads overlap.
"""

import inspect
import random
from typing import Any

import vllm
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvtiers_vllm.plugin import register

CHUNKS, SESSIONS, HOT, TURNS, OWN, SCAN = 1000, 60, 12, 30, 10, 40
now = [0.0]


def served(policy: str) -> tuple[int, int]:
    """Return the hits of a fixed workload, and the errors that were suppressed."""
    chance, hits = random.Random(7), 0
    arguments = {"num_chunks": CHUNKS, "cache_policy": policy}
    known = inspect.signature(CPUOffloadingManager).parameters
    manager = CPUOffloadingManager(**{name: value for name, value in arguments.items() if name in known})
    ours = getattr(manager._policy, "_policy", None)
    if ours is not None:
        ours.clock = lambda: now[0]
    now[0] = 0.0
    in_flight: list[tuple[list[bytes], Any]] = []
    for number in range(SESSIONS * TURNS):
        now[0] += 5.0
        session = number % (SESSIONS if number % 2 else HOT)
        name, length = (f"s{session}", OWN) if number % 3 else (f"once {number}", SCAN)
        keys = [make_offload_key(f"{name} {place}".encode().rjust(32), 0) for place in range(length)]
        context = ReqContext(req_id=str(number))
        for place, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 16 * place)
        manager.on_new_request(context)
        there = next((place for place, key in enumerate(keys) if manager._policy.get(key) is None), length)
        hits += there
        manager.prepare_load(keys[:there], context)
        in_flight.append((keys[:there], context))
        for start in range(there, length, 8):
            part = keys[start : start + 8]
            if manager.prepare_store(part, context) is not None:
                manager.complete_store(part, context, success=chance.random() > 0.02)
        manager.on_request_finished(context)
        while len(in_flight) > chance.randrange(4):
            manager.complete_load(*in_flight.pop(0))
    return hits, manager._policy.bugs.count if ours is not None else 0


def main() -> None:
    register()
    CachePolicyFactory.register_cache_policy("kvtiers-lru", "kvtiers_vllm.own_tiering.cache_policy", "lru")
    found = [served(name) for name in ("lru", "kvtiers-lru", "kvtiers-turn-hazard")]
    print(vllm.__version__, *(hits for hits, _ in found), sum(bugs for _, bugs in found))  # noqa: T201 -- it is read


main()
