"""The what-if thread: shadow caches in a running engine, beside it and never in its way.

    the engine's thread   request: copies the list of hashes, or drops the request where too many wait
    the what-if thread    serves the shadows, a fraction of a millisecond at a time, and sleeps so long in between that
                          it takes ``CORE_SHARE`` of a core at most

Where requests come faster than that, the shadows begin again with half the sample. Their rows, and so their memory, are
bounded: an engine with more rows has a smaller sample from the start.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvtiers._failures import logged_boundary
from kvtiers.api import TierConfig
from kvtiers.config import OffloadConfig
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.primary.eviction import BUILT_IN
from kvtiers_policies.what_if.keys_only import STEP_TOKENS, Case, CaseTier
from kvtiers_policies.what_if.shadows import Asked, Shadows

__all__ = ["CORE_SHARE", "WhatIf"]

_log = logging.getLogger("kvtiers.what_if")
CORE_SHARE = 0.005
_CREDIT_SECONDS = 10.0
_MOST_PRIMARIES = 32  # the largest tier of a shadow, so that its keys are bounded
_MOST_ROWS = 1024  # of the shadow with the engine's own size
_FEWEST_ROWS = 64  # of the same: with fewer the smallest shadow has no more than a request takes
_MOST_WAITING = 1 << 16
_REPORT_SECONDS = 5.0


class WhatIf:
    """The shadows of one engine. ``request``: any one thread, never waits. ``report``: any thread.

    ``now``: the engine's own primary, policy and tiers. ``policies``: to be compared. ``capacity``: bytes of the
    primary, for the report. ``group``: the KV group whose chunks are looked at, of ``blocks_per_chunk`` blocks and
    ``tokens_per_chunk`` tokens each. ``core_share``: of a core, the most that the thread takes, ``credit_seconds``: of
    unused time that it may catch up on. ``most_waiting``: chunks of requests that are not served yet.
    """

    def __init__(
        self,
        now: Case,
        policies: Sequence[str],
        capacity: int,
        tokens_per_chunk: int,
        blocks_per_chunk: int = 1,
        group: int = 0,
        core_share: float = CORE_SHARE,
        *,
        credit_seconds: float = _CREDIT_SECONDS,
        report_seconds: float = _REPORT_SECONDS,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self._now = now
        self._capacity = capacity
        self._policies = list(dict.fromkeys([now.policy, *policies]))
        self._tokens_per_chunk = tokens_per_chunk
        self._blocks_per_chunk = blocks_per_chunk
        self._group = group
        self._core_share = core_share
        self._credit_seconds = credit_seconds
        self._report_seconds = report_seconds
        self._most_waiting = most_waiting
        self._shadows = self._made(min(1.0, _MOST_ROWS / now.primary))
        self._queue: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._put = 0  # chunks handed over, counted by the engine's thread alone
        self._taken = 0  # chunks dealt with, counted by the what-if thread alone
        self._closing = threading.Event()
        self._free_at = self._report_at = 0.0
        self._report: dict[str, Any] = {}
        self.dropped = 0
        """Requests that were left out, since the thread was behind."""
        self.seconds = 0.0
        """Processor time of the thread."""
        self._thread = threading.Thread(target=self._run, name="kvtiers-what-if", daemon=True)
        self._thread.start()

    @classmethod
    def of_engine(cls, config: OffloadConfig, layout: CacheLayout, rows: int, row_stride: int) -> Self:
        """Return the shadows of an engine with so many rows, of ``row_stride`` bytes; groups have equal parts of them.

        They are of the group by which prompts are measured.
        """
        groups = range(len(layout.groups))
        values = sum(layout.value_bytes(group) for group in groups)
        share = max(1, rows // len(groups))
        tiers = tuple(
            CaseTier(
                tier.tier_name,
                _chunks_of(tier, values, share),
                tier.admission,
                tier.read_only,
                tier.may_lose,
                None if tier.writes_per_hour is None else tier.writes_per_hour / values,
            )
            for tier in config.secondary
        )
        shares = tuple(config.tenants.shares().items()) if config.tenants is not None else ()
        now = Case(share, config.primary.eviction, tiers, config.budgets, config.clean_reserve, shares)
        group = layout.prefix_group
        policies = [*BUILT_IN, "turn-hazard"]
        return cls(now, policies, rows * row_stride, layout.tokens_per_chunk(group), layout.blocks_per_chunk, group)

    def request(
        self,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object],
    ) -> None:
        """Take a request that has ended; ``block_hashes`` by group. Dropped, and counted, where too much waits."""
        every = self._blocks_per_chunk
        chunks = prompt_tokens // self._tokens_per_chunk
        if self._closing.is_set() or self._put - self._taken + chunks > self._most_waiting:
            self.dropped += 1
            return
        hashes = block_hashes[self._group][every - 1 : chunks * every : every]
        usable = max(0, prompt_tokens - 1) // self._tokens_per_chunk
        self._put += len(hashes)
        self._queue.put(Asked(arrival, hashes, usable, params, output_tokens))

    def report(self) -> dict[str, Any]:
        """Return the last figures, at most some seconds old, as plain data; empty while nothing has been served."""
        ours = {"capacity": self._capacity, "dropped": self.dropped, "seconds": self.seconds}
        return self._report and self._report | ours

    def close(self, timeout: float) -> None:
        """End the thread, within ``timeout`` seconds; what waits is not served."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout)

    def _made(self, share: float) -> Shadows:
        return Shadows(self._now, self._policies, share, STEP_TOKENS // self._tokens_per_chunk)

    # -- the what-if thread

    def _run(self) -> None:
        with logged_boundary(_log, "what if: the shadow caches have ended; a bug of kvtiers"):
            unreported = False
            while not self._closing.is_set():
                begin = time.thread_time()
                try:
                    asked = self._queue.get(timeout=self._report_seconds)
                except queue.Empty:
                    asked = None
                if asked is not None:
                    self._serve(asked)
                    unreported = True
                if unreported and (asked is None or time.monotonic() >= self._report_at):
                    self._report = self._shadows.report()
                    self._report_at = time.monotonic() + self._report_seconds
                    unreported = False
                self._rest(time.thread_time() - begin)
        self._closing.set()

    def _serve(self, asked: Asked) -> None:
        self._taken += len(asked.hashes)
        is_behind = self._put - self._taken > self._most_waiting // 2
        if is_behind and self._shadows.share * self._now.primary >= 2 * _FEWEST_ROWS:
            self._shadows = self._made(self._shadows.share / 2)
        sampled = self._shadows.take(asked)
        if sampled is None:
            return
        for name in self._shadows.names():
            self._shadows.serve(name, sampled)
            time.sleep(0)  # the engine's thread may be waiting for the interpreter

    def _rest(self, spent: float) -> None:
        self.seconds += spent
        now = time.monotonic()
        self._free_at = max(self._free_at, now - self._credit_seconds) + spent / self._core_share
        if self._free_at > now:
            self._closing.wait(self._free_at - now)


def _chunks_of(tier: TierConfig, value_bytes: int, rows: int) -> int:
    """Return what a tier holds; one whose capacity is not known here counts as the largest that is simulated."""
    capacity = getattr(tier, "capacity", None)
    most = _MOST_PRIMARIES * rows
    return min(most, max(1, capacity // value_bytes)) if isinstance(capacity, int) else most
