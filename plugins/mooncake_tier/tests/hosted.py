"""The tier as an engine has it: jobs and questions to the tier's host, over rows that both map."""

import contextlib
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mooncake_pool import PATIENCE

from kvtiers.api import LookupResult, TransferJob, make_offload_key
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import create_memfd, map_memory
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.secondary.supervisor import HostPace
from kvtiers.types import RequestContext
from kvtiers_mooncake.config import MooncakeConfig

_NAMES = StorageNames("ns/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
_REQUEST = RequestContext("test")
VALUE_BYTES = 64 << 10
PAYLOAD_BYTES = VALUE_BYTES - 64
_ROWS = 64


def children() -> set[int]:
    """Return the process ids of this process's children."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def key_of(number: int) -> bytes:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def name_of(key: bytes) -> str:
    """Return the name of a key's value."""
    return _NAMES.name(key)


class Hosted:
    """A tier, its host, and an engine's steps."""

    def __init__(self, tier: ChunkStoreTier, rows: memoryview, others: set[int]) -> None:
        self._tier, self._rows, self._others = tier, rows, others
        self._jobs = 0
        self._results = {}

    @property
    def host(self) -> int:
        """The host's process id."""
        [pid] = children() - self._others
        return pid

    def wait_open(self) -> None:
        self.step_until(lambda: bool(self.figure("open")) and self._tier.is_available(), "the tier is in use")

    def fill(self, row: int, seed: int) -> bytes:
        """Put a payload into a row, and return it."""
        payload = bytes([seed % 251]) * PAYLOAD_BYTES
        self._rows[row * VALUE_BYTES : row * VALUE_BYTES + PAYLOAD_BYTES] = payload
        return payload

    def payload(self, row: int) -> bytes:
        return bytes(self._rows[row * VALUE_BYTES : row * VALUE_BYTES + PAYLOAD_BYTES])

    def store(self, keys: Sequence[bytes], rows: Sequence[int]):
        """Store these rows; return the job's result."""
        return self._move(self._tier.submit_store, keys, rows, is_promotion=False)

    def load(self, keys: Sequence[bytes], rows: Sequence[int]):
        """Load into these rows; return the job's result."""
        return self._move(self._tier.submit_load, keys, rows, is_promotion=True)

    def _move(self, submit: Callable[[TransferJob], None], keys, rows, *, is_promotion: bool):
        self._jobs += 1
        number = self._jobs
        submit(TransferJob(number, list(keys), memoryview(array("i", rows)), is_promotion, _REQUEST))
        self.step_until(lambda: number in self._results, f"job {number} has ended")
        return self._results[number]

    def lookup(self, key: bytes) -> LookupResult:
        """Ask for a key until there is an answer."""
        answers: list[LookupResult] = []

        def answered() -> bool:
            answers[:] = self._tier.lookup_many([key], _REQUEST)
            return answers[0] is not LookupResult.RETRY

        self.step_until(answered, "the lookup has an answer")
        return answers[0]

    def step_until(self, true: Callable[[], bool], what: str) -> None:
        """Do what an engine does at each of its steps until this is so."""
        until = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < until, f"{what}: not within {PATIENCE:g} s"
            self._tier.on_schedule_end()
            for result in self._tier.get_finished_jobs():
                self._results[result.job_id] = result
            time.sleep(0.002)

    def figure(self, name: str) -> float:
        return self._tier.stats().get(name, 0)

    def is_in_use(self) -> bool:
        return self._tier.is_available()


@contextlib.contextmanager
def hosted(config: MooncakeConfig) -> Iterator[Hosted]:
    """Start the tier's host, which opens its store by itself; nothing of it is left at the end."""
    others = children()
    total = _ROWS * VALUE_BYTES
    fd = create_memfd("kvtiers-mooncake-test", total)
    mapping = map_memory(fd, total, total)
    region = HostedRegion(fd, total, total, VALUE_BYTES, [(PAYLOAD_BYTES, VALUE_BYTES)])
    hosts = TierHosts(region, "ns", lambda: _NAMES, pace=HostPace(first_delay=0.05))
    plugin = load_tier(config.type)
    tier = ChunkStoreTier(config, hosts.pool(config, plugin), when_full=plugin.when_full)
    try:
        yield Hosted(tier, mapping.view, others)
    finally:
        tier.close()
        hosts.close(10.0)
        os.close(fd)
        del mapping
    assert children() <= others, "a host, or its zombie, is left"
