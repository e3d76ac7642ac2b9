"""Throughput of a client between a caller's memory and a store, beside the stack and a plain loop over the same store.

Lanes take turns, a round after the other, each on new values: `stack` is an engine's: a manager and one rank, whose KV
tensors lie in host memory: each value is copied into a row, stored, forgotten, loaded into a row, and copied back.
`client` puts and gets the same values with one call each way, from one thread; `client x4` from four; `2 parts` has
each value in two places far apart. `region` and `region 2` are these two with the values in the client's own region,
which the hosts map. `tier` has the values in rows already, and
drives the hosts alone: a ceiling without the copy. `plain` calls the store in a loop, in this process, without a seal.
`control` is `client` once more: what its share of `client` differs from 1 is noise. All with tier hosts (`io: process`)
and jobs as they come. All lanes use one Redis server, whose processor time counts with that of the tier hosts. Medians;
shares are turn by turn, since turns beside each other differ less than rounds.

With `--one-by-one` another question, that of Mooncake's storage benchmark: how fast are large values over `fs`, each
put or got when the one before has ended? `client` has them in its region. `plain` writes them one behind the other into
a file and reads them from there, as that benchmark's own storage does; `control` is `plain` once more.
"""

import contextlib
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from lib.results import WAYS, at_least, middle_share, options_of, say

import kvtiers
from kvtiers import BlockSpec, CacheLayout, KVGroup, KVTensor, ModelIdentity, PromptGroup, RequestContext, open_client
from kvtiers.api import ChunkStore, TransferJob, make_offload_key
from kvtiers.api.units import format_size
from kvtiers.config import load_config
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import create_memfd, map_memory
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers_example.config import MemoryConfig
from kvtiers_example.memory_store import MemoryStore
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.store import RedisStore

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "plugins" / "redis_tier" / "tests")]

from servers import Server  # noqa: E402 -- the server of the tier's tests

GOAL_OF_STACK = 0.9
SIZES = [64 << 10, 1 << 20, 4 << 20]
STORES = ("memory", "fs", "redis")
IDENTITY = ModelIdentity("benchmark", weights="w")
NAMES = StorageNames("bench/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
STEP_SECONDS = 0.0002
PATIENCE = 120.0
JOB_BYTES = 128 << 20
Values = npt.NDArray[np.uint8]
WAYS_OF_MEMORY = {
    "2 parts": (2, True),
    "region": (1, False),
    "region 2": (2, False),
}
"""Lanes of a client's: parts a value, and whether they lie in the caller's own memory."""
ONE_BY_ONE_BYTES = 78 * 64 * (512 + 64 + 128) * 2
"""A value of Mooncake's storage benchmark: GLM-5, by layers, tokens, numbers of KV and index, bytes a number."""
ONE_BY_ONE_COUNT = 40
GOAL_OF_PLAIN = 0.7


class StackLane:
    """An engine's way: a rank copies values between its tensors and rows, the tier between rows and the store."""

    def __init__(self, config: dict[str, Any], values: Values, back: Values, stack: ExitStack) -> None:
        count, payload = values.shape
        layout = CacheLayout(IDENTITY, (KVGroup("g", 16),), (KVTensor("t", 0, payload),))
        rows = 2 * count + 8
        own = {
            "primary": {"capacity": f"{rows * layout.row_stride}B", "prefault": "all"},
            "budgets": {"store_reserve": 0, "all_tiers": 1, "one_tier": 1, "protected": 0},
            "lookup_wait": "600s",
            "load_wait": "600s",
        }
        self._manager = kvtiers.open_manager({**config, **own}, layout)
        stack.callback(self._manager.shutdown, 5.0)
        self._values, self._back = values, back
        self._tensor = np.concatenate([values, np.zeros_like(values)])
        self._worker = kvtiers.open_worker({**config, **own}, layout, [self._tensor], engine_id=self._manager.engine_id)
        stack.callback(self._worker.shutdown)
        self._manager.wait_ready(60)
        self._numbers = iter(range(1, 1 << 30))
        self._count = count

    def write(self, keys: Sequence[bytes]) -> None:
        """Copy all values into rows and wait for the tier to have them."""
        request = RequestContext(str(next(self._numbers)))
        plan = self._manager.prepare_store([make_offload_key(key, 0) for key in keys], request)
        assert plan is not None
        assert len(plan.keys) == len(keys)
        self._worker.submit_store(1, self._blocks(0), plan.chunk_ids)
        self._await_copy()
        self._manager.complete_store(plan)
        self._manager.on_request_finished(request)
        self._until(lambda: not self._manager.has_pending_work())

    def read(self, keys: Sequence[bytes]) -> None:
        """Load all values into rows and copy them into the tensor's other half."""
        self._manager.reset_cache()
        request, wanted = RequestContext(str(next(self._numbers))), [make_offload_key(key, 0) for key in keys]

        def landed() -> bool:
            hits = self._manager.reach([PromptGroup(wanted)], request).in_chunks(self._manager.tokens_per_chunk[0])
            return not hits.waits and hits.ready == len(wanted)

        self._until(landed)
        plan = self._manager.prepare_load(wanted, request)
        assert plan is not None
        self._worker.submit_load(1, plan.chunk_ids, self._blocks(self._count))
        self._await_copy()
        self._manager.complete_load(plan)
        self._manager.on_request_finished(request)

    def check(self) -> None:
        """Compare what was read."""
        assert np.array_equal(self._tensor[self._count :], self._values)
        self._tensor[self._count :] = 0
        self._manager.reset_cache()

    def _blocks(self, first: int) -> BlockSpec:
        return BlockSpec(np.arange(first, first + self._count), (self._count,), (0,))

    def _await_copy(self) -> None:
        until = time.monotonic() + PATIENCE
        while not (done := self._worker.get_finished()):
            time.sleep(STEP_SECONDS)
            assert time.monotonic() < until
        assert done[0].success, done

    def _until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            self._manager.on_schedule_end()
            time.sleep(STEP_SECONDS)
            assert time.monotonic() < until, self._manager.stats()


class ClientLane:
    """A client, called from so many threads."""

    def __init__(self, config: dict[str, Any], values: Values, back: Values, stack: ExitStack, threads: int) -> None:
        self._client = stack.enter_context(open_client(config, IDENTITY, values.shape[1]))
        self._values, self._back = values, back
        self._threads = threads

    def write(self, keys: Sequence[bytes]) -> None:
        """Put all values."""
        self._run(lambda part: all(self._client.put(keys[part], list(self._values[part])).stored))

    def read(self, keys: Sequence[bytes]) -> None:
        """Get all values."""
        self._run(lambda part: all(self._client.get_into(keys[part], list(self._back[part]))))

    def check(self) -> None:
        """Compare what was read."""
        assert np.array_equal(self._back, self._values)
        self._back[:] = 0

    def _run(self, call: Callable[[slice], bool]) -> None:
        count, each = len(self._values), -(-len(self._values) // self._threads)
        parts = [slice(start, start + each) for start in range(0, count, each)]
        done: list[bool] = []
        threads = [threading.Thread(target=lambda part=part: done.append(call(part))) for part in parts[1:]]
        for thread in threads:
            thread.start()
        done.append(call(parts[0]))
        for thread in threads:
            thread.join()
        assert done == [True] * len(parts), self._client.stats()


class RegionLane:
    """A client whose caller's values lie in its region, or (``is_own``) in memory of the caller's, in so many parts."""

    def __init__(self, config: dict[str, Any], values: Values, stack: ExitStack, *, parts: int, is_own: bool) -> None:
        count, payload = values.shape
        nbytes = 0 if is_own else 2 * values.nbytes
        self._client = stack.enter_context(open_client(config, IDENTITY, payload, region_bytes=nbytes))
        memory = np.empty(2 * values.nbytes, np.uint8) if is_own else np.frombuffer(self._client.region, np.uint8)
        # One part of all values behind the other: those of one value lie far apart, as K and V do.
        self._from, self._back = memory.reshape(2, parts, count, payload // parts)
        self._values = values.reshape(count, parts, payload // parts).swapaxes(0, 1)
        self._from[:] = self._values
        self._is_own = is_own

    def write(self, keys: Sequence[bytes]) -> None:
        """Put all values."""
        assert all(self._client.put(keys, self._views(self._from)).stored), self._client.stats()

    def read(self, keys: Sequence[bytes]) -> None:
        """Get all values."""
        found = self._client.get_into(keys, self._views(self._back))
        assert all(found), self._client.stats()

    def check(self) -> None:
        """Compare what was read, and make sure of the way that it took."""
        assert np.array_equal(self._back, self._values)
        self._back[:] = 0
        stats = self._client.stats()
        assert stats["direct_values"] == (0 if self._is_own else stats["put_values"] + stats["get_values"])

    def _views(self, memory: Values) -> list[list[Values]]:
        return [list(parts) for parts in memory.swapaxes(0, 1)]


class TierLane:
    """Jobs on rows that hold the values, without an engine and without a copy."""

    def __init__(self, config: dict[str, Any], values: Values, stack: ExitStack) -> None:
        payload = values.shape[1]
        nbytes = -(-(payload + 64) // 4096) * 4096
        total = nbytes * len(values)
        fd = create_memfd("kvtiers-bench", total)
        stack.callback(os.close, fd)
        mapping = map_memory(fd, total, total)
        self._rows = np.frombuffer(mapping.view, np.uint8).reshape(len(values), nbytes)
        self._rows[:, :payload] = values
        self._values, self._payload = values, payload
        [options] = load_config(config).secondary
        hosts = TierHosts(HostedRegion(fd, total, total, nbytes, [(payload, nbytes)]), "bench", lambda: NAMES)
        stack.callback(hosts.close, 10.0)
        self._tier = ChunkStoreTier(options, hosts.pool(options, load_tier(options.type)))
        stack.callback(self._tier.close)
        assert not (problem := self._tier.wait_open(30.0)), problem
        self._numbers = iter(range(1, 1 << 30))

    def write(self, keys: Sequence[bytes]) -> None:
        """Store all rows."""
        self._run(keys, load=False)

    def read(self, keys: Sequence[bytes]) -> None:
        """Fill all rows."""
        self._run(keys, load=True)

    def check(self) -> None:
        """Compare what was read."""
        assert np.array_equal(self._rows[:, : self._payload], self._values)

    def _run(self, keys: Sequence[bytes], *, load: bool) -> None:
        per_job = max(1, JOB_BYTES // self._rows.shape[1])
        left = 0
        for start in range(0, len(keys), per_job):
            part = [make_offload_key(key, 0) for key in keys[start : start + per_job]]
            rows = memoryview(array("i", range(start, start + len(part))))
            job = TransferJob(next(self._numbers), part, rows, is_promotion=load, context=RequestContext("bench"))
            (self._tier.submit_load if load else self._tier.submit_store)(job)
            left += 1
        self._tier.on_schedule_end()
        while left:
            time.sleep(STEP_SECONDS)
            for result in self._tier.get_finished_jobs():
                assert result.success
                left -= 1


class PlainLane:
    """The store's own methods in a loop, on the caller's memory."""

    def __init__(self, store: ChunkStore, values: Values, back: Values) -> None:
        self._store, self._values, self._back = store, values, back

    def write(self, keys: Sequence[bytes]) -> None:
        """Write all values."""
        for key, value in zip(keys, self._values, strict=True):
            self._store.write(NAMES.prefix + key.hex(), memoryview(value).toreadonly())

    def read(self, keys: Sequence[bytes]) -> None:
        """Read all values."""
        for key, value in zip(keys, self._back, strict=True):
            assert self._store.read_into(NAMES.prefix + key.hex(), memoryview(value))

    def check(self) -> None:
        """Compare what was read."""
        assert np.array_equal(self._back, self._values)
        self._back[:] = 0


class OneByOneLane:
    """A client with one value in its region, and room for one that is read."""

    def __init__(self, config: dict[str, Any], value: Values, stack: ExitStack) -> None:
        self._config = config
        self._client = stack.enter_context(open_client(config, IDENTITY, value.nbytes, region_bytes=2 * value.nbytes))
        self._from, self._back = np.frombuffer(self._client.region, np.uint8).reshape(2, -1)
        self._from[:] = value

    def write(self, keys: Sequence[bytes]) -> None:
        """Put values that begin with their keys."""
        for key in keys:
            self._from[: len(key)] = np.frombuffer(key, np.uint8)
            assert all(self._client.put([key], [self._from]).stored), self._client.stats()

    def read(self, keys: Sequence[bytes]) -> None:
        """Get these values."""
        for key in keys:
            assert all(self._client.get_into([key], [self._back])), self._client.stats()
            assert self._back[: len(key)].tobytes() == key

    def clear(self) -> None:
        """Remove them."""
        assert np.array_equal(self._back, self._from)
        clear(self._config)


class PlainFileLane:
    """One file, written and read in this process."""

    def __init__(self, path: Path, value: Values, stack: ExitStack) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, self._file)
        self._from, self._back = value.copy(), np.zeros_like(value)

    def write(self, keys: Sequence[bytes]) -> None:
        """Write values that begin with their keys, one behind the other."""
        for place, key in enumerate(keys):
            self._from[: len(key)] = np.frombuffer(key, np.uint8)
            assert os.pwrite(self._file, self._from, place * self._from.nbytes) == self._from.nbytes

    def read(self, keys: Sequence[bytes]) -> None:
        """Read these values."""
        for place, key in enumerate(keys):
            assert os.preadv(self._file, [self._back], place * self._back.nbytes) == self._back.nbytes
            assert self._back[: len(key)].tobytes() == key

    def clear(self) -> None:
        """Remove them."""
        assert np.array_equal(self._back, self._from)
        os.truncate(self._file, 0)


def config_of(kind: str, place: str, total: int) -> dict[str, Any]:
    """Return a config with one tier. In memory the oldest values go first; what else holds values ``clear`` empties.

    ``place``: a directory, or the URL of a Redis server.
    """
    tier: dict[str, Any] = {"type": kind, "store_queue": 1 << 20}
    if kind == "fs":
        tier |= {"path": place, "min_free": 0, "capacity": "64GiB"}
    elif kind == "redis":
        tier |= {"url": place}
    else:
        tier |= {"capacity": f"{3 * total + (64 << 20)}B"}
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}


def open_plain(config: dict[str, Any]) -> FsStore | RedisStore | MemoryStore:
    """Open the store of the config's tier in this process."""
    [options] = load_config(config).secondary
    if isinstance(options, FsConfig):
        return FsStore(options)
    if isinstance(options, RedisConfig):
        return RedisStore(options)
    assert isinstance(options, MemoryConfig)
    return MemoryStore(options.capacity)


def clear(config: dict[str, Any]) -> None:
    """Remove all values of a store that is more than memory of its process."""
    with closing(open_plain(config)) as store:
        store.delete([entry.name for entry in store.list("")])


class Turn(NamedTuple):
    """One turn of a lane: seconds, and the seconds that this process and the tier hosts had a processor."""

    seconds: float
    caller: float
    hosts: float


Samples: TypeAlias = dict[str, list[tuple[Turn, Turn]]]
"""The turns of each lane: of writing and of reading."""


def measure(kind: str, nbytes: int, total: int, rounds: int, top: Path) -> dict[str, Any]:
    """Return the rates of all lanes with values of this size in this store."""
    count = total // nbytes
    values = np.random.default_rng(0).integers(0, 256, (count, nbytes - 4096), np.uint8)
    back = np.zeros_like(values)
    folder = top / kind
    folder.mkdir()
    with ExitStack() as stack:
        server = Server(folder) if kind == "redis" else None
        if server is not None:
            server.start()
            stack.callback(server.stop)

        def config(lane: str) -> dict[str, Any]:
            place = str(folder / lane.replace(" ", "-")) if server is None else server.url
            return config_of(kind, place, total)

        lanes: dict[str, Any] = {
            "stack": StackLane(config("stack"), values, back, stack),
            "client": ClientLane(config("client"), values, back, stack, 1),
            "client x4": ClientLane(config("client x4"), values, back, stack, 4),
            **{
                name: RegionLane(config(name), values, stack, parts=parts, is_own=is_own)
                for name, (parts, is_own) in WAYS_OF_MEMORY.items()
            },
            "control": ClientLane(config("control"), values, back, stack, 1),
            "tier": TierLane(config("tier"), values, stack),
            "plain": PlainLane(stack.enter_context(closing(open_plain(config("plain")))), values, back),
        }

        def settle(name: str, lane: Any) -> None:
            lane.check()
            clear(config(name))

        samples = samples_of(lanes, rounds, count, settle)
        del lanes
    gc.collect()
    shutil.rmtree(folder)
    return {"store": kind, "value_bytes": nbytes} | figures_of(samples, values.nbytes / 1e9)


def figures_of(samples: Samples, moved: float) -> dict[str, Any]:
    """Return what the turns of all lanes say, each of which has moved so many GB."""

    def shares(ones: str, others: str) -> dict[str, float]:
        """How fast the second lane is, as a share of the first."""
        return {
            way: middle_share(
                [pair[i].seconds for pair in samples[ones]], [pair[i].seconds for pair in samples[others]]
            )
            for i, way in enumerate(WAYS)
        }

    return {
        "gb_per_s": {
            name: {way: moved / statistics.median(pair[i].seconds for pair in pairs) for i, way in enumerate(WAYS)}
            for name, pairs in samples.items()
        },
        "processor_s_per_gb": {
            name: {
                way: [
                    statistics.median(pair[i].caller for pair in pairs) / moved,
                    statistics.median(pair[i].hosts for pair in pairs) / moved,
                ]
                for i, way in enumerate(WAYS)
            }
            for name, pairs in samples.items()
        },
        "client_of": {other: shares(other, "client") for other in ("stack", "tier", "plain")},
        "of_client": {name: shares("client", name) for name in (*WAYS_OF_MEMORY, "control")},
    }


def measure_one_by_one(rounds: int, top: Path) -> dict[str, Any]:
    """Return the rates of calls with one large value each."""
    value = np.random.default_rng(0).integers(0, 256, ONE_BY_ONE_BYTES, np.uint8)
    with ExitStack() as stack:
        lanes: dict[str, Any] = {
            "plain": PlainFileLane(top / "plain", value, stack),
            "client": OneByOneLane(config_of("fs", str(top / "client"), 0), value, stack),
            "control": PlainFileLane(top / "control", value, stack),
        }
        samples = samples_of(lanes, rounds, ONE_BY_ONE_COUNT, lambda _, lane: lane.clear())
        del lanes
    gc.collect()
    moved = ONE_BY_ONE_COUNT * ONE_BY_ONE_BYTES / 1e9
    plain = samples["plain"]
    return {
        name: {
            way: {
                "gb_per_s": [moved / pair[i].seconds for pair in pairs],
                "of_plain": [beside[i].seconds / pair[i].seconds for beside, pair in zip(plain, pairs, strict=True)],
                "processor_s_per_gb": [(pair[i].caller + pair[i].hosts) / moved for pair in pairs],
            }
            for i, way in enumerate(WAYS)
        }
        for name, pairs in samples.items()
    }


def goals_one_by_one(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        at_least(
            f"one by one, {way}: the client as a share of plain I/O",
            statistics.median(found["client"][way]["of_plain"]),
            GOAL_OF_PLAIN,
        )
        for way in WAYS
    ]


def report_one_by_one(found: dict[str, Any]) -> None:
    """Print medians and ranges."""
    for name, ways in found["one_by_one"].items():
        for way, figures in ways.items():
            cells = ", ".join(
                f"{figure} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
                for figure, values in figures.items()
            )
            print(f"{name:8}{way:6} {cells}")


def samples_of(lanes: dict[str, Any], rounds: int, count: int, settle: Callable[[str, Any], None]) -> Samples:
    """Return what the lanes took, in turns whose order rotates; ``settle(name, lane)`` follows each turn."""
    samples: Samples = {name: [] for name in lanes}
    order = [*lanes]
    for turn in range(rounds + 1):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            keys = [os.urandom(32) for _ in range(count)]
            pair = turn_of(lanes[name].write, keys), turn_of(lanes[name].read, keys)
            settle(name, lanes[name])
            if turn:  # the first one warms up
                samples[name].append(pair)
    return samples


def turn_of(work: Callable[[Sequence[bytes]], None], keys: Sequence[bytes]) -> Turn:
    hosts, caller, begin = hosts_seconds(), time.process_time(), time.perf_counter()
    work(keys)
    return Turn(time.perf_counter() - begin, time.process_time() - caller, hosts_seconds() - hosts)


def hosts_seconds() -> float:
    """Return the seconds that the child processes have had a processor. On a busy machine they say more than rates."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            for child in (task / "children").read_text().split():
                for thread in Path(f"/proc/{child}/task").iterdir():
                    total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def goals_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for kind in dict.fromkeys(one["store"] for one in found):
        for way in WAYS:
            by_size = {
                format_size(one["value_bytes"]): one["client_of"]["stack"][way] for one in found if one["store"] == kind
            }
            name = f"{kind}, {way}: the client as a share of the stack"
            goals.append(at_least(name, min(by_size.values()), GOAL_OF_STACK) | {"by_size": by_size})
    return goals


def report(found: dict[str, Any]) -> None:
    """Print the rates as a table, and the client's shares."""
    names = list(found["sizes"][0]["gb_per_s"])
    print("GB/s" + " " * 16 + "".join(f"{name:>11}" for name in names) + "   client of stack, tier, plain")
    for one in found["sizes"]:
        for way in WAYS:
            rates = "".join(f"{one['gb_per_s'][name][way]:11.2f}" for name in names)
            shares = ", ".join(f"{one['client_of'][other][way]:.2f}" for other in one["client_of"])
            print(f"{one['store']:7}{format_size(one['value_bytes']):>6} {way:6}{rates}   {shares}")
    print("processor seconds a GB, this process + tier hosts")
    for one in found["sizes"]:
        for way in WAYS:
            spent = [one["processor_s_per_gb"][name][way] for name in names]
            cells = "".join(f"{f'{caller:.2f}+{hosts:.2f}':>11}" for caller, hosts in spent)
            print(f"{one['store']:7}{format_size(one['value_bytes']):>6} {way:6}{cells}")
    names = list(found["sizes"][0]["of_client"])
    print("as a share of client" + "".join(f"{name:>11}" for name in names))
    for one in found["sizes"]:
        for way in WAYS:
            shares = "".join(f"{one['of_client'][name][way]:11.2f}" for name in names)
            print(f"{one['store']:7}{format_size(one['value_bytes']):>6} {way:6}{shares}")


def main() -> None:
    parser = options_of(__doc__, "fewer bytes and rounds")
    parser.add_argument("--store", choices=STORES, help="this store alone (all)")
    parser.add_argument("--path", type=Path, help="a folder on the disk for fs (the one for temporary files)")
    parser.add_argument("--one-by-one", action="store_true", help="calls with one large value each, over fs, alone")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    total, rounds = (64 << 20, 3) if options.quick else (192 << 20, 7)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="kvtiers-bench-") as top:
        if options.one_by_one:
            by_one = measure_one_by_one(rounds, Path(top))
            say({"one_by_one": by_one, "goals": goals_one_by_one(by_one)}, report_one_by_one, as_json=options.json)
            return
        stores = [options.store] if options.store else STORES
        sizes = [measure(kind, nbytes, total, rounds, Path(top)) for kind in stores for nbytes in SIZES]
    say({"sizes": sizes, "goals": goals_of(sizes)}, report, as_json=options.json)


if __name__ == "__main__":
    main()
