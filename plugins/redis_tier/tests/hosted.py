"""The tier as an engine has it: jobs and questions to the tier's hosts, over rows that both map."""

import contextlib
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from redis_servers import PATIENCE

from kvtiers.api import TransferJob, make_offload_key
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import create_memfd, map_memory
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.types import RequestContext
from kvtiers_redis.config import RedisConfig

_NAMES = StorageNames("ns/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
_REQUEST = RequestContext("test")
_ROWS, _VALUE_BYTES, _SEAL_BYTES = 64, 16384, 64


class Hosted:
    """A tier and its hosts."""

    def __init__(self, tier: ChunkStoreTier) -> None:
        self._tier = tier
        self._jobs = 0
        self._ended = 0
        self.successes = 0

    def wait_open(self) -> None:
        problem = self._tier.wait_open(PATIENCE)
        assert not problem, problem

    def store(self, count: int) -> None:
        """Begin a job with so many new values, from rows that none of the jobs before has used."""
        self.store_keys([make_offload_key(os.urandom(32), 0) for _ in range(count)])

    def store_keys(self, keys: Sequence[bytes]) -> None:
        """The same with these keys."""
        count = len(keys)
        first = self._jobs * count
        self._jobs += 1
        rows = memoryview(array("i", range(first, first + count)))
        self._tier.submit_store(TransferJob(self._jobs, keys, rows, is_promotion=False, context=_REQUEST))

    @staticmethod
    def name_of(key: bytes) -> str:
        """Return the name of a key's value."""
        return _NAMES.name(key)

    def ask(self) -> None:
        """Ask for a value that was never stored."""
        self._tier.lookup_many([make_offload_key(os.urandom(32), 0)], _REQUEST)

    def step_until(self, true: Callable[[], bool], what: str) -> None:
        """Do what an engine does at each of its steps until this is so."""
        until = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < until, f"{what}: not within {PATIENCE:g} s"
            self._tier.on_schedule_end()
            for result in self._tier.get_finished_jobs():
                self._ended += 1
                self.successes += result.success
            time.sleep(0.005)

    def figure(self, name: str) -> float:
        return self._tier.stats().get(name, 0)

    def is_in_use(self) -> bool:
        return self._tier.is_available()

    def all_ended(self) -> bool:
        return self._ended == self._jobs


@contextlib.contextmanager
def hosted(config: RedisConfig) -> Iterator[Hosted]:
    """Start the tier's hosts; they open their stores by themselves, each before its deadline."""
    config = config.model_copy(update={"deadline": 2 * PATIENCE})  # a busy machine takes half a minute for that
    total = _ROWS * _VALUE_BYTES
    fd = create_memfd("kvtiers-redis-test", total)
    mapping = map_memory(fd, total, total)
    region = HostedRegion(fd, total, total, _VALUE_BYTES, [(_VALUE_BYTES - _SEAL_BYTES, _VALUE_BYTES)])
    hosts = TierHosts(region, "ns", lambda: _NAMES)
    plugin = load_tier(config.type)
    tier = ChunkStoreTier(config, hosts.pool(config, plugin), when_full=plugin.when_full)
    try:
        yield Hosted(tier)
    finally:
        tier.close()
        hosts.close(10.0)
        os.close(fd)
        del mapping
