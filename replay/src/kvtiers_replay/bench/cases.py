"""One case of a benchmark: a tier through the client, with its hosts, seals and checks, as an engine has it.

=======  ==============================================================================================
written  values that the tier did not have, in batches
hot      read again in the client that wrote them: connections are open, pages may be in the page cache
cold     read in a client that was just opened, after the tier's files on this machine were dropped from
         the page cache; a tier whose values end with its host has none
=======  ==============================================================================================

Every value is random, under a random key, and is compared when it comes back. All of them lie in the namespace
``kvtiers-bench``, so that an engine's values are never touched, and are deleted in the end. A tier of the third rung
has no way to delete any: it keeps them until it needs the room.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtiers import Client, ModelIdentity, open_client
from kvtiers.api import KvtiersError, TierConfig, TierPlugin
from kvtiers.api.units import format_size
from kvtiers.config import OffloadConfig
from kvtiers.plugins import load_tier

__all__ = ["NAMESPACE", "BenchTier", "Case", "Figures", "NotStoredError", "fitting", "measure"]

NAMESPACE = "kvtiers-bench"
_MOST_BOUNCE = 256 << 20
_SINGLES = 24
_COLD_SINGLES = 8
_SHARE_OF_CAPACITY = 4  # a case takes at most one part of so many: evicting is not what is measured
_SINGLES_SHARE = 4  # of the values of a case, at most one part of so many is also written alone
_POOL_VALUES = 8  # different contents; each key has one
_CALL_SECONDS = 60.0
_KEY_BYTES = 32
_OPEN_SECONDS = 30.0

Array = npt.NDArray[np.uint8]


class NotStoredError(KvtiersError):
    """A tier has not taken values of a case: they are too large for it, or it is full."""


@dataclass(frozen=True, slots=True)
class BenchTier:
    """A tier to measure, and the config that it stands in. ``label``: what it is called in the results."""

    label: str
    config: OffloadConfig
    tier: TierConfig

    @property
    def plugin(self) -> TierPlugin:
        """The tier's type."""
        return load_tier(self.tier.type)

    @property
    def has_hosts(self) -> bool:
        """Whether ``threads`` of it move its values; a tier of the third rung moves them itself."""
        return self.plugin.kind == "store"

    @property
    def may_have_hosts(self) -> bool:
        """Whether several tier hosts may share its work: those of a tier in a host's memory would not find it all."""
        return self.has_hosts and self.tier.io == "process" and self.plugin.shareable

    def with_options(self, **options: object) -> "BenchTier":
        """Return the same tier with other options."""
        return BenchTier(self.label, self.config, self.tier.model_copy(update=options))


@dataclass(frozen=True, slots=True)
class Case:
    """``value_bytes``: of one value. ``batch``: values of one call. ``threads``, ``processes``: the tier's."""

    value_bytes: int
    batch: int
    threads: int
    processes: int | str


@dataclass(frozen=True, slots=True)
class Figures:
    """What a case has measured: bytes per second in batches; seconds of one value alone, median and 99th percentile.

    None: the tier has no such figure, as one whose values end with its host has none for cold reads.
    """

    case: Case
    values: int
    write: float
    hot: float
    cold: float | None
    write_seconds: tuple[float, float]
    hot_seconds: tuple[float, float]
    cold_seconds: float | None


def fitting(tier: BenchTier, case: Case, most_bytes: int) -> Case:
    """Return the case with as many values in a call as ``most_bytes`` and the tier's capacity allow, at least one."""
    return replace(case, batch=max(1, min(case.batch, _room(tier, most_bytes) // case.value_bytes)))


def _room(tier: BenchTier, most_bytes: int) -> int:
    capacity = getattr(tier.tier, "capacity", None)
    return min(most_bytes, capacity // _SHARE_OF_CAPACITY) if isinstance(capacity, int) else most_bytes


def measure(tier: BenchTier, case: Case, *, most_bytes: int, seconds: float) -> Figures:
    """Measure one case that fits. Blocks for a few times ``seconds``, or less where ``most_bytes`` are moved sooner.

    NotStoredError, one line, if the tier does not take values; KvtiersError if it does not give them back; ConfigError
    if it cannot be opened.
    """
    bound = tier.with_options(threads=case.threads) if tier.has_hosts else tier
    if tier.may_have_hosts:
        bound = bound.with_options(processes=case.processes)
    config = _alone(bound)
    capacity = getattr(tier.tier, "capacity", None)
    if isinstance(capacity, int) and capacity < _SHARE_OF_CAPACITY * case.value_bytes:
        raise NotStoredError(f"a capacity of {format_size(capacity)} is less than {_SHARE_OF_CAPACITY} of them")
    count = max(case.batch, _room(tier, most_bytes) // case.value_bytes)
    alone_too = max(1, min(_SINGLES, count // _SINGLES_SHARE))
    run = _Run(bound, config, case)
    with run.opened() as client, contextlib.ExitStack() as if_it_fails:
        if_it_fails.callback(run.forget, client)
        singles = [run.put(client, 1) for _ in range(alone_too)]
        write = run.writes(client, count, seconds)
        alone = [run.get(client, [place]) for place in range(len(singles))]
        hot = run.reads(client, seconds)
        if_it_fails.pop_all()
    with run.opened() as client, contextlib.ExitStack() as at_last:
        at_last.callback(run.forget, client)
        run.drop_pages()
        cold = cold_seconds = None
        if run.is_there(client):
            ones = [run.get(client, [place]) for place in range(min(_COLD_SINGLES, len(run.keys) // 2))]
            cold_seconds = _quantiles(ones)[0]
            cold = run.reads(client, seconds, start=len(ones))
    return Figures(case, len(run.keys), write, hot, cold, _quantiles(singles), _quantiles(alone), cold_seconds)


def _alone(tier: BenchTier) -> OffloadConfig:
    """Return a config with this tier alone, in a namespace of its own."""
    alone = {"secondary": [tier.tier.model_copy(update={"required": True})], "namespace": NAMESPACE, "record": None}
    return tier.config.model_copy(update=alone | {"start_wait": _OPEN_SECONDS})


class _Run:
    """The values of one case: their keys, in the order in which they were written, and their contents."""

    def __init__(self, tier: BenchTier, config: OffloadConfig, case: Case) -> None:
        self.keys: list[bytes] = []
        self._tier = tier
        self._config = config
        self._case = case
        self._identity = ModelIdentity(f"kvtiers-bench-{case.value_bytes}", weights="random", kv_layout="bytes")
        random = np.random.default_rng()
        self._contents: Array = random.integers(0, 256, (_POOL_VALUES, case.value_bytes), np.uint8)
        self._into: Array = np.zeros((case.batch, case.value_bytes), np.uint8)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Client]:
        """Give a client of the tier."""
        bounce = min(_MOST_BOUNCE, max(64 << 20, 4 * self._case.batch * self._case.value_bytes))
        config = self._config
        client = open_client(config, self._identity, self._case.value_bytes, bounce_bytes=bounce, way_in="as a bench")
        try:
            yield client
        finally:
            client.close()

    def put(self, client: Client, count: int) -> float:
        """Write so many values more in one call; return the seconds it took."""
        first = len(self.keys)
        keys = [os.urandom(_KEY_BYTES) for _ in range(count)]
        views = [[self._content(first + place)] for place in range(count)]
        begin = time.perf_counter()
        done = client.put(keys, views, timeout=_CALL_SECONDS)
        took = time.perf_counter() - begin
        if not all(done.stored):
            missing = f"{done.stored.count(False)} of {count} values"
            raise NotStoredError(f"{missing} were not stored: {done.error or 'see the log'}")
        self.keys += keys
        return took

    def get(self, client: Client, places: Sequence[int]) -> float:
        """Read these values in one call, compare them, and return the seconds that the call took."""
        views = [[self._into[at]] for at in range(len(places))]
        keys = [self.keys[place] for place in places]
        begin = time.perf_counter()
        found = client.get_into(keys, views, timeout=_CALL_SECONDS)
        took = time.perf_counter() - begin
        if not all(found):
            raise KvtiersError(
                f"{self._tier.label}: {found.count(False)} of {len(found)} values of "
                f"{format_size(self._case.value_bytes)} that were stored were not found again, of "
                f"{format_size(len(self.keys) * self._case.value_bytes)} in all; has the tier room for so much?"
            )
        for at, place in enumerate(places):
            if not np.array_equal(self._into[at], self._content(place)):
                raise KvtiersError(f"{self._tier.label}: a value came back with other bytes than it was stored with")
        return took

    def writes(self, client: Client, count: int, seconds: float) -> float:
        """Write values in batches; return bytes per second."""
        before = len(self.keys)
        took = 0.0
        while len(self.keys) < before + count and (took < seconds or len(self.keys) < before + self._case.batch):
            took += self.put(client, self._case.batch)
        return (len(self.keys) - before) * self._case.value_bytes / took

    def reads(self, client: Client, seconds: float, start: int = 0) -> float:
        """Read all values in batches, from a place on; return bytes per second."""
        took, read = 0.0, 0
        for first in range(start, len(self.keys), self._case.batch):
            places = range(first, min(len(self.keys), first + self._case.batch))
            took += self.get(client, places)
            read += len(places)
            if took >= seconds:
                break
        return read * self._case.value_bytes / took

    def is_there(self, client: Client) -> bool:
        """Return whether the values have outlived the client that wrote them."""
        return client.exists_prefix(self.keys[:1], timeout=_CALL_SECONDS) == 1

    def forget(self, client: Client) -> None:
        """Delete all values, where the tier can."""
        if self._tier.has_hosts:
            client.delete(self.keys, timeout=_CALL_SECONDS)

    def drop_pages(self) -> None:
        """Have the page cache forget the tier's files, if they are on this machine."""
        path = getattr(self._tier.tier, "path", None)
        if not (self._tier.plugin.writes_locally and isinstance(path, Path)):
            return
        for file in path.rglob("*"):
            with contextlib.suppress(OSError):
                if file.is_file():
                    _forget(file)

    def _content(self, place: int) -> Array:
        content: Array = self._contents[place % _POOL_VALUES]
        return content


def _forget(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)  # pages that were not written yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
