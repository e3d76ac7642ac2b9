"""The life of a chunk in a tiering manager, led batch by batch, and what each phase of it costs."""

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvtiers.tiering.manager import TieringManager
from kvtiers.types import PromptGroup, RequestContext

BATCH = 64  # chunks a request
BLOCK = 50  # rounds of one manager before it is another's turn: some times as many as any policy gathers work for
PHASES = ("miss", "store", "cascade", "touch", "hit", "load", "end")


class Life(Protocol):
    """A manager that leads batches of chunks through their lives."""

    def free_rows(self) -> int:
        """Rows that nothing was stored in yet."""

    def one(self, keys: list[bytes], timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Lead one batch through its life; every call of the manager goes through ``timed``."""


class OurLife:
    """Our manager over any primary and tiers. ``pause``: between steps, while the tiers have something to do."""

    def __init__(self, manager: TieringManager, *, pause: float = 0.0) -> None:
        self.manager = manager
        self.primary = manager._primary  # noqa: SLF001 -- to choose, untimed, chunks that are resident
        self.pause = pause
        self.stored: list[list[bytes]] = []
        self._requests = 0

    def free_rows(self) -> int:
        """Return the rows that nothing was stored in yet."""
        return int(self.manager.stats()["primary"]["free_rows"])

    def one(self, keys: list[bytes], timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Lead one batch of new chunks through its life, and an old one through a hit."""
        manager = self.manager
        ctx = self.request()
        timed("end", lambda: manager.on_new_request(ctx))
        hits = timed("miss", lambda: manager.reach([PromptGroup(keys)], ctx).in_chunks(manager.tokens_per_chunk[0]))
        while hits.waits:  # a tier has to ask elsewhere
            self.step(timed)
            time.sleep(self.pause)
            hits = timed("miss", lambda: manager.reach([PromptGroup(keys)], ctx).in_chunks(manager.tokens_per_chunk[0]))
        plan = timed("store", lambda: manager.prepare_store(keys, ctx))
        timed("store", lambda: manager.complete_store(plan))
        self.step(timed)
        timed("touch", lambda: manager.touch(keys))
        timed("end", lambda: manager.on_request_finished(ctx))
        if plan.keys:  # a policy may decline what would evict something better
            self.stored.append(list(plan.keys))
        reader, old = self.any_resident(timed)
        load = timed("load", lambda: manager.prepare_load(old, reader))
        timed("load", lambda: manager.complete_load(load))
        timed("end", lambda: manager.on_request_finished(reader))
        self.step(timed)

    def step(self, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """End the step, and as many more as the tiers need."""
        timed("cascade", self.manager.on_schedule_end)
        while self.pause and self.manager.has_pending_work():
            time.sleep(self.pause)
            timed("cascade", self.manager.on_schedule_end)

    def request(self) -> RequestContext:
        """Return a new request."""
        self._requests += 1
        return RequestContext(f"r{self._requests}")

    def any_resident(self, timed: Callable[[str, Callable[[], Any]], Any]) -> tuple[RequestContext, list[bytes]]:
        """Let a new request look up some earlier one's chunks that are all still here."""
        manager, primary = self.manager, self.primary
        while True:
            index = random.randrange(len(self.stored))
            keys = self.stored[index]
            if primary.resident_run(keys)[0] == len(keys):
                break
            self.stored[index] = self.stored[-1]
            self.stored.pop()
        ctx = self.request()
        timed("end", lambda: manager.on_new_request(ctx))
        timed("hit", lambda: manager.reach([PromptGroup(keys)], ctx).in_chunks(manager.tokens_per_chunk[0]))
        return ctx, keys


def new_keys(count: int = BATCH) -> list[bytes]:
    """Return keys as an engine's: 32 bytes of hash, 4 of group."""
    return [os.urandom(32) + bytes(4) for _ in range(count)]


def measure(lives: Sequence[Life], rounds: int) -> list[dict[str, float]]:
    """Fill each primary; return microseconds a chunk by phase: means of a block of rounds, medians over the blocks.

    Means first, since a policy that gathers its work does it in few rounds, which a median of rounds leaves out.
    """
    for life in lives:
        while life.free_rows() >= BATCH:
            life.one(new_keys(), lambda _phase, work: work())
    blocks: list[list[dict[str, float]]] = [[] for _ in lives]
    for _ in range(0, rounds, BLOCK):
        for life, means in zip(lives, blocks, strict=True):
            spent = [one_round(life) for _ in range(BLOCK)]
            means.append({phase: statistics.fmean(one[phase] for one in spent) / BATCH * 1e6 for phase in PHASES})
    return [with_sum({phase: statistics.median(one[phase] for one in means) for phase in PHASES}) for means in blocks]


def one_round(life: Life) -> dict[str, float]:
    """Return the seconds that one batch's life takes, by phase."""
    spent = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = work()
        spent[phase] += time.thread_time() - begin
        return result

    life.one(new_keys(), timed)
    return spent


def with_sum(phases: dict[str, float]) -> dict[str, float]:
    """Add the sum of the phases."""
    return {**phases, "sum": sum(phases.values())}
