"""The tier as an engine has it: jobs and questions to a tier host, over rows that both map."""

import contextlib
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvtiers.api import JobResult, LookupResult, OffloadKey, TransferJob, make_offload_key
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import create_memfd, map_memory
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.types import RequestContext
from kvtiers_objectstore.testing.proxy import Proxy

__all__ = ["NAMES", "Service", "behind_proxy", "new_keys", "service"]

NAMES = StorageNames("bench/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
_SEAL = 64
_REQUEST = RequestContext("test")


def new_keys(count: int) -> list[OffloadKey]:
    """Return keys that were never used."""
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


class Service:
    """One tier in a host of its own. ``rows``: what both see; row i is ``rows[i]``, a value with room for its seal.

    ``step_seconds``: how often the tier is asked for events; ``rest``: what is done for so long in between.
    """

    def __init__(
        self, tier: ChunkStoreTier, config: Any, rows: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"
    ) -> None:
        self.tier = tier
        self.config = config
        self.rows = rows
        self.step_seconds = 0.002
        self.rest: Callable[[float], None] = time.sleep
        self._jobs = 0
        self._results: list[JobResult] = []

    @property
    def payload(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        return self.rows[:, :-_SEAL]

    def store(self, keys: Sequence[OffloadKey], first_row: int = 0) -> JobResult:
        return self.run(keys, first_row, load=False)

    def load(self, keys: Sequence[OffloadKey], first_row: int = 0) -> JobResult:
        return self.run(keys, first_row, load=True)

    def run(self, keys: Sequence[OffloadKey], first_row: int, *, load: bool) -> JobResult:
        """Move one job and wait for its end."""
        return self.run_all([(keys, first_row)], load=load)[0]

    def run_all(self, jobs: Sequence[tuple[Sequence[OffloadKey], int]], *, load: bool) -> list[JobResult]:
        """Move these jobs and wait for their end: at the same time, but for those with the same first row.

        The next ones of a row wait for those that are further behind: the trivial server keeps what was written last.
        """
        waiting: dict[int, deque[Sequence[OffloadKey]]] = {}
        for keys, first_row in jobs:
            waiting.setdefault(first_row, deque()).append(keys)
        rows: dict[int, int] = {}
        results: list[JobResult] = []

        def begin() -> None:
            most = max(map(len, waiting.values()), default=0)
            for first_row, left in waiting.items():
                if len(left) >= max(1, most - 1) and first_row not in rows.values():
                    self.submit(left.popleft(), first_row, load=load)
                    rows[self._jobs] = first_row

        def ended() -> bool:
            for result in self._results:
                results.append(result)
                del rows[result.job_id]
                begin()
            self._results.clear()
            return len(results) == len(jobs)

        begin()
        self._step_until(ended)
        return results

    def submit(self, keys: Sequence[OffloadKey], first_row: int, *, load: bool) -> None:
        self._jobs += 1
        rows = memoryview(array("i", range(first_row, first_row + len(keys))))
        job = TransferJob(self._jobs, keys, rows, is_promotion=load, context=_REQUEST)
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def hits(self, keys: Sequence[OffloadKey]) -> int:
        """Return how long the leading run is that the tier has."""
        answers: Sequence[LookupResult] = ()

        def answered() -> bool:
            nonlocal answers
            answers = self.tier.lookup_many(keys, _REQUEST)
            return LookupResult.RETRY not in answers

        self._step_until(answered)
        return sum(answer is LookupResult.HIT for answer in answers)

    def figure(self, name: str) -> float:
        return self.tier.stats()[name]

    def figures_after(self, seconds: float = 1.2) -> dict[str, float]:
        """Return the tier's figures when the store's own, which are taken once a second, are new."""
        until = time.monotonic() + seconds
        self._step_until(lambda: time.monotonic() >= until)
        return self.tier.stats()

    def _step_until(self, done: Callable[[], bool], patience: float = 60.0) -> None:
        until = time.monotonic() + patience
        while True:
            self.tier.on_schedule_end()
            self._results += self.tier.get_finished_jobs()
            if done():
                return
            if time.monotonic() > until:
                raise AssertionError("the tier does not come to an end")
            self.rest(self.step_seconds)


@contextlib.contextmanager
def service(config: Any, value_bytes: int, rows: int, *, is_awaited: bool = False) -> Iterator[Service]:
    """Start a host with this tier and wait until it is open.

    ``is_awaited``: the end of a store is seen at the next poll, as for a client; an engine looks every 20 ms.
    """
    total = rows * value_bytes
    fd = create_memfd("kvtiers-objects-test", total)
    mapping = map_memory(fd, total, total)
    region = HostedRegion(fd, total, total, value_bytes, [(value_bytes - _SEAL, value_bytes)])
    hosts = TierHosts(region, "bench", lambda: NAMES, is_awaited=is_awaited)
    tier = ChunkStoreTier(config, hosts.pool(config, load_tier(config.type)))
    try:
        problem = tier.wait_open(60.0)
        assert not problem, problem
        yield Service(tier, config, np.frombuffer(mapping.view, np.uint8).reshape(rows, value_bytes))
    finally:
        tier.close()
        hosts.close(10.0)
        os.close(fd)


@contextlib.contextmanager
def behind_proxy(port: int, config_of: Callable[..., Any], **options: Any) -> Iterator[tuple[Service, Proxy]]:
    """Start a tier whose server, at this port, lies behind a proxy; give both. No breaker hides the faults.

    ``config_of``: the tier's options, given the proxy and more of them.
    """
    none = {"failures": 10_000, "min_calls": 100_000}
    with Proxy(port) as proxy:
        config = config_of(proxy, **{"threads": 4, "deadline": "30s", "retries": 1, "breaker": none, **options})
        with service(config, 16 * 4096, 8) as tier:
            yield tier, proxy
            proxy.script = lambda _request: None
