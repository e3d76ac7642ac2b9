"""A store's tier as a lane, Redis or Mooncake: its hosts map the rows, and it is driven as an engine drives it."""

import os
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

from lib.processes import tier_hosts

from kvtiers.api import OffloadKey, TierConfig, TransferJob, make_offload_key
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.types import RequestContext

JOB_BYTES = TieringOptions().job_bytes
NAMES = StorageNames("bench/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
STEP_SECONDS = 0.0002
PATIENCE = 120.0


class TierLane:
    """One tier. ``client``: opens what deletes values by name.

    ``step_seconds``: how often it is asked for events; ``rest``: what is done for so long in between. Stores are waited
    for as loads are: an engine looks at a tier with nothing but stores every 20 ms, and a turn of 128 MiB, which takes
    60 to 100 ms, would be measured in steps of that.
    """

    def __init__(
        self, client: Callable[[], Any], fd: int, rows: memoryview, nbytes: int, config: TierConfig, stack: ExitStack
    ) -> None:
        self._client = client
        region = HostedRegion(fd, len(rows), len(rows), nbytes, [(nbytes - 64, nbytes)])
        hosts = TierHosts(region, "bench", lambda: NAMES, is_awaited=True)
        stack.callback(hosts.close, 10.0)
        self.tier = ChunkStoreTier(config, hosts.pool(config, load_tier(config.type)))
        stack.callback(self.tier.close)
        assert not (problem := self.tier.wait_open(30.0)), problem
        self.pids = tier_hosts()
        self.keys: list[OffloadKey] = []
        self.step_seconds = STEP_SECONDS
        self.rest: Callable[[float], None] = time.sleep
        self._count = len(rows) // nbytes
        self._nbytes = len(rows)
        self._per_job = JOB_BYTES // nbytes
        self._numbers = count(1)

    def forget(self) -> None:
        """Take new keys, since core writes none twice; the old values make room for the new ones."""
        with self._client() as client:
            client.delete("nothing", *NAMES.names(self.keys))
        self.keys = [make_offload_key(os.urandom(32), 0) for _ in range(self._count)]

    def rate(self, way: str, seconds: float = 0.0) -> float:
        """Return the GB/s at which all values are written, under new keys, or read, as often as fills the seconds."""
        moved, spent = 0, 0.0
        while not moved or spent < seconds:
            if way == "write":
                self.forget()
            begin = time.perf_counter()
            self.move(way)
            spent += time.perf_counter() - begin
            moved += self._nbytes
        return moved / 1e9 / spent

    def move(self, way: str) -> None:
        """Move all values."""
        left = 0
        for start in range(0, self._count, self._per_job):
            keys = self.keys[start : start + self._per_job]
            rows = memoryview(array("i", range(start, start + len(keys))))
            job = TransferJob(next(self._numbers), keys, rows, is_promotion=way == "read", context=RequestContext("b"))
            (self.tier.submit_load if way == "read" else self.tier.submit_store)(job)
            left += 1
        self.tier.on_schedule_end()
        until = time.perf_counter() + PATIENCE
        while left:
            self.rest(self.step_seconds)
            for result in self.tier.get_finished_jobs():
                assert result.success, result
                left -= 1
            assert time.perf_counter() < until, "the tier has not answered"
