"""Endless traffic between an engine and two `memory` tiers: store and load values of 2 MiB, flat out or at a pace.

A value is 16 tokens of an 8B model in 16 bits. A request has 1,024 tokens: in the conversation trace of Mooncake (FAST
'25), 12,031 requests, a tenth of the prompts have less than 964, half of them less than 6,909. With shorter requests
the engine's thread has more to do for each byte.
"""

import os
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from rigs.busy_loop import STEP_SECONDS

import kvtiers
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import PromptGroup, RequestContext

VALUE_BYTES = 2 << 20
REGION_ROWS = 512
BATCH = 64  # chunks a request: 1,024 tokens, the tenth percentile of real prompts
MOST_IN_FLIGHT = 128  # chunks a tier: what it may pin
MOST_LOADS = 2  # requests a tier that wait for their loads
MOST_BEHIND_SECONDS = 0.2  # of what is due at the pace, no more is made up for
TIERS = ("one", "two")
LAYOUT = CacheLayout(
    ModelIdentity("benchmark", weights="w"), (KVGroup("g", 16),), (KVTensor("t", 0, VALUE_BYTES - 4096),)
)


def open_engine(io: str, bytes_per_tier: int) -> tuple[TieringManager, Any]:
    """Return a manager whose rank has joined and whose tiers are open, and its worker."""
    config = {
        "version": 1,
        "primary": {"capacity": f"{REGION_ROWS * VALUE_BYTES >> 20}MiB"},
        "secondary": [
            {"type": "memory", "name": name, "io": io, "capacity": f"{bytes_per_tier + (64 << 20) >> 20}MiB"}
            for name in TIERS
        ],
        "lookup_wait": "600s",
        "load_wait": "600s",
    }
    manager = kvtiers.open_manager(config, LAYOUT)
    tensors = [np.zeros((1, VALUE_BYTES - 4096), np.uint8)]
    worker = kvtiers.open_worker(config, LAYOUT, tensors, engine_id=manager.engine_id)
    manager.wait_ready(60)
    until = time.monotonic() + 60
    while not all(tier["own"].get("open") for tier in manager.stats()["tiers"].values()):
        manager.on_schedule_end()
        time.sleep(0.005)
        if time.monotonic() > until:
            raise RuntimeError("the tiers do not open")
    time.sleep(0.5)  # the region is touched in the background meanwhile
    return manager, worker


class Traffic:
    """What an engine has its tiers do, endlessly: chunks go down to both and come up again, each tier's in an order.

    ``pace``: bytes a second, 0 for as many as they can. ``paused``: nothing new is begun.
    """

    def __init__(self, manager: TieringManager, chunks: int) -> None:
        self.manager = manager
        self.chunks = chunks
        self.rounds = 0
        self.pace = 0.0
        self.paused = False
        self.step_seconds: list[float] = []
        """Of processor time."""
        self._allowed = self._stepped = 0.0
        self._loading: dict[str, list[tuple[RequestContext, Sequence[bytes]]]] = {name: [] for name in TIERS}
        # What no engine asks for in a step must not cost it anything: all figures would.
        self._tiers = [slot.metrics for slot in manager._slots]  # noqa: SLF001
        self._names = (f"request {number}" for number in count())
        self._steps = self._all_steps()

    def step(self) -> None:
        """Do what an engine does in a step."""
        now, begin = time.perf_counter(), time.thread_time()
        if self.pace:
            self._allowed = min(self._allowed + self.pace * (now - self._stepped), self.pace * MOST_BEHIND_SECONDS)
        self._stepped = now
        next(self._steps)
        self.manager.on_schedule_end()
        self.step_seconds.append(time.thread_time() - begin)

    def fill(self) -> None:
        """Move everything both ways once: memory that was never used costs a virtual machine much more than later."""
        while self.rounds < 1:
            self.step()
            time.sleep(STEP_SECONDS / 10)

    def settle(self) -> None:
        """Let what is in flight end, and begin nothing new: the tiers are at rest then."""
        self.paused = True
        while any(self._loading.values()) or self.manager.has_pending_work():
            self.step()
            time.sleep(STEP_SECONDS / 10)

    def go_on(self) -> None:
        """Begin again, if nothing was begun: without what has become due meanwhile."""
        if self.paused:
            self.paused, self._allowed, self._stepped = False, 0.0, time.perf_counter()

    @property
    def nbytes(self) -> int:
        """Bytes moved so far by both tiers, both ways."""
        return sum(tier.stored_bytes + tier.loaded_bytes for tier in self._tiers)

    def _is_due(self, nbytes: int) -> bool:
        """Say whether so many bytes more may be moved now, and count them."""
        if self.paused or self._allowed < 0:
            return False
        if self.pace:
            self._allowed -= nbytes
        return True

    def _all_steps(self) -> Iterator[None]:
        while True:
            runs: list[list[bytes]] = []
            yield from self._store(runs)
            self.manager.reset_cache()
            yield from self._load(runs)
            self.manager.reset_cache()
            self.rounds += 1

    def _store(self, runs: list[list[bytes]]) -> Iterator[None]:
        manager = self.manager
        expected = (self.rounds + 1) * self.chunks
        while min(tier.stored_chunks + tier.failed_stores + tier.dropped_cascades for tier in self._tiers) < expected:
            pinned = max(self._tiers[0].pinned_rows, self._tiers[1].pinned_rows)
            while len(runs) * BATCH < self.chunks and pinned + BATCH <= MOST_IN_FLIGHT:
                if not self._is_due(len(TIERS) * BATCH * VALUE_BYTES):
                    break
                context, digests = RequestContext(next(self._names)), os.urandom(32 * BATCH)
                keys = [digests[at : at + 32] + bytes(4) for at in range(0, len(digests), 32)]
                plan = manager.prepare_store(keys, context)
                if plan is None:
                    break
                manager.complete_store(plan)
                manager.on_request_finished(context)
                runs.append(keys)
                pinned += BATCH
            yield
        if any(tier.stored_chunks != expected for tier in self._tiers):
            raise RuntimeError(f"not everything was stored: {manager.stats()['tiers']}")

    def _load(self, runs: Sequence[Sequence[bytes]]) -> Iterator[None]:
        waiting = {"one": list(reversed(runs)), "two": list(runs)}
        while any(waiting.values()) or any(self._loading.values()):
            for name, asked in self._loading.items():
                left = waiting[name]
                while left and len(asked) < MOST_LOADS and self._is_due(BATCH * VALUE_BYTES):
                    asked.append((RequestContext(next(self._names), {"kv_load_tiers": [name]}), left.pop()))
                if asked:
                    asked[:] = [(context, run) for context, run in asked if not self._has_landed(run, context)]
            yield

    def _has_landed(self, run: Sequence[bytes], context: RequestContext) -> bool:
        hits = self.manager.reach([PromptGroup(run)], context).in_chunks(self.manager.tokens_per_chunk[0])
        if hits.waits:
            return False
        if hits.ready:
            plan = self.manager.prepare_load(run[: hits.ready], context)
            if plan is not None:
                self.manager.complete_load(plan)
        self.manager.on_request_finished(context)
        return True
