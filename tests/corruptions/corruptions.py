"""Corrupted values: real values of each tier kind, damaged where they are stored, and loaded through a real engine.

``python tests/corruptions/corruptions.py --count 10000``. An engine stores chunks through its tier; their values are
then damaged in the store, behind its back; the engine forgets its primary, looks each chunk up and loads it. Every load
must give the very bytes that were stored, or be a miss. Exit status 1: a wrong byte, or a value that was left alone and
not loaded (then nothing was tested).
"""

import argparse
import contextlib
import importlib.util
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvtiers
from kvtiers.api import make_offload_key
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import StorageNames
from kvtiers.testing.ports import free_port
from kvtiers.types import PromptGroup, RequestContext

ROOT = Path(__file__).parents[2]
PAYLOAD, PAGE, SEAL = 9_000, 4_096, 64
BATCH, ROWS = 96, 512
PATIENCE = 60.0
# Nothing is given up, taken out of use or tried again: each value is read once.
STRICT = {"retries": 0, "breaker": {"failures": 10**6, "min_calls": 10**6}, "deadline": "60s"}
WAITS = {"lookup_wait": "60s", "load_wait": "60s"}


def layout(weights):
    return CacheLayout(
        ModelIdentity("corruptions", weights=weights), (KVGroup("all", 16),), (KVTensor("t", 0, PAYLOAD),)
    )


def payload(key, version):
    """The bytes of a chunk: other ones for each key and each version of the weights."""
    return random.Random(key + version.encode()).randbytes(PAYLOAD)


# -- ways to damage a value. ``of``: the value's own bytes, and what else is stored.


class Stored:
    """A value, another one of the same batch, and the same key's of other weights and of another namespace."""

    def __init__(self, value, another, older, elsewhere, chance):
        self.value, self.another, self.older, self.elsewhere, self.chance = value, another, older, elsewhere, chance

    def part(self, least=0):
        return sorted(self.chance.sample(range(least, len(self.value) + 1), 2))


def flip(value, at, bit):
    value = bytearray(value)
    value[at] ^= 1 << bit
    return bytes(value)


def flip_many(of):
    value = of.value
    for _ in range(of.chance.randint(2, 64)):
        value = flip(value, of.chance.randrange(len(value)), of.chance.randrange(8))
    return value


def fill(of, make):
    start, end = of.part()
    return of.value[:start] + make(end - start) + of.value[end:]


def seal_field(of):
    at = len(of.value) - SEAL + 8 * of.chance.randrange(SEAL // 8)
    return of.value[:at] + of.chance.randbytes(8) + of.value[at + 8 :]


def drop_a_part(of):
    start, end = of.part()
    return of.value[:start] + of.value[end:]


def tear(of, first, second):
    at = of.chance.randrange(PAGE, len(of.value), 512)
    return first[:at] + second[at:]


WAYS: dict[str, Callable[[Stored], bytes | None]] = {
    "left alone": lambda of: of.value,
    "written again": lambda of: bytes(bytearray(of.value)),
    "deleted": lambda of: None,
    "one bit flipped": lambda of: flip(of.value, of.chance.randrange(len(of.value)), of.chance.randrange(8)),
    "one bit of the seal flipped": lambda of: flip(of.value, -of.chance.randint(1, SEAL), of.chance.randrange(8)),
    "many bits flipped": flip_many,
    "a part zeroed": lambda of: fill(of, bytes),
    "a part overwritten": lambda of: fill(of, of.chance.randbytes),
    "a page zeroed": lambda of: bytes(PAGE) + of.value[PAGE:],
    "all zeroed": lambda of: bytes(len(of.value)),
    "seal zeroed": lambda of: of.value[:-SEAL] + bytes(SEAL),
    "a field of the seal changed": seal_field,
    "truncated": lambda of: of.value[: of.chance.randrange(len(of.value))],
    "truncated to pages": lambda of: of.value[: PAGE * of.chance.randrange(len(of.value) // PAGE)],
    "extended": lambda of: of.value + of.chance.randbytes(of.chance.randint(1, 3 * PAGE)),
    "extended by a page": lambda of: of.value + bytes(PAGE),
    "its end moved to the front": lambda of: of.value[PAGE:] + of.value[:PAGE],
    "a part dropped": drop_a_part,
    "twice": lambda of: of.value * 2,
    "another key's value": lambda of: of.another,
    "another's payload, its own seal": lambda of: of.another[:-SEAL] + of.value[-SEAL:],
    "its own payload, another's seal": lambda of: of.value[:-SEAL] + of.another[-SEAL:],
    "torn between two keys": lambda of: tear(of, of.value, of.another),
    "older weights' value": lambda of: of.older,
    "torn between two weights": lambda of: tear(of, of.older, of.value),
    "another namespace's value": lambda of: of.elsewhere,
    "random bytes": lambda of: of.chance.randbytes(len(of.value)),
    "one byte": lambda of: b"x",
}
INTACT = {"left alone", "written again"}


# -- stores, from behind


class StoredValue:
    """The values of a store in an engine's own process."""

    def __init__(self, store):
        self._store = store

    def get(self, names, key):
        return self._store._values[names.name(key)]

    def put(self, names, key, value):
        self._store.delete([names.name(key)])
        if value is not None:
            self._store.write(names.name(key), value)


class HeldByManager:
    """The values of a tier of the third rung, whose keys begin with the layout's id."""

    def __init__(self, tier):
        self._values = tier._values

    def get(self, names, key):
        return self._values[names.layout_id + key]

    def put(self, names, key, value):
        self._values.pop(names.layout_id + key, None)
        if value is not None:
            self._values[names.layout_id + key] = value


class Files:
    def __init__(self, root):
        from kvtiers_fs.paths import place_of

        self._root, self._place = root, place_of

    def _path(self, names, key):
        place = self._place(names.name(key))
        return self._root / place.folder / place.leaf

    def get(self, names, key):
        return self._path(names, key).read_bytes()

    def put(self, names, key, value):
        if value is None:
            self._path(names, key).unlink()
        else:
            self._path(names, key).write_bytes(value)


class SlabValues:
    """The values of a slab: damaged in their segment, where they keep their length."""

    def __init__(self, root):
        from kvtiers_fs.config import FsConfig
        from kvtiers_fs.slab.format import digest_of
        from kvtiers_fs.slab.store import SlabStore

        self._store = SlabStore(FsConfig(type="fs", path=root, capacity="1GiB", min_free=0, layout="slab"))
        self._digest = digest_of
        self.close = self._store.close

    def _found(self, names, key):
        slab = self._store.slab
        entry = slab.index.find(self._digest(names.name(key)))
        return entry, slab.segments.file(entry.segment, slab.index.row(entry.segment).birth).fd

    def get(self, names, key):
        entry, fd = self._found(names, key)
        return os.pread(fd, entry.nbytes, entry.at)

    def put(self, names, key, value):
        if value is None:
            self._store.delete([names.name(key)])
            return
        entry, fd = self._found(names, key)
        if len(value) == entry.nbytes:
            os.pwrite(fd, value, entry.at)
        else:
            self._store.write(names.name(key), memoryview(value))


class RedisKeys:
    def __init__(self, port):
        import redis

        self._client = redis.Redis(port=port)

    def get(self, names, key):
        return self._client.get(names.name(key))

    def put(self, names, key, value):
        if value is None:
            self._client.delete(names.name(key))
        else:
            self._client.set(names.name(key), value)


class Objects:
    def __init__(self, bucket, client):
        self._bucket, self._client = bucket, client

    def get(self, names, key):
        return self._client.get_object(Bucket=self._bucket, Key=names.name(key))["Body"].read()

    def put(self, names, key, value):
        if value is None:
            self._client.delete_object(Bucket=self._bucket, Key=names.name(key))
        else:
            self._client.put_object(Bucket=self._bucket, Key=names.name(key), Body=value)


class EmulatedObjects:
    """The objects of a bucket or a container; ``where``: its endpoint and its name."""

    def __init__(self, where, get, put, delete):
        self._where, self._get, self._put, self._delete = where, get, put, delete

    def get(self, names, key):
        return self._get(*self._where, names.name(key))

    def put(self, names, key, value):
        if value is None:
            self._delete(*self._where, names.name(key))
        else:
            self._put(*self._where, names.name(key), value)


class PoolObjects:
    """The objects of a Mooncake pool, by its own client; a key that is there would keep its old bytes."""

    def __init__(self, store):
        self._store, self._client = store, store._client

    def get(self, names, key):
        return self._client.get(names.name(key))

    def put(self, names, key, value):
        self._store.delete([names.name(key)])
        if value:  # there are no empty ones
            code = self._client.put(names.name(key), value)
            assert not code, f"put: {code}"


# -- engines


class Engine:
    """An engine with one tier, driven to the end of each thing that it is asked."""

    def __init__(self, tier, *, namespace="today", weights="today"):
        self.layout, self.version = layout(weights), namespace + weights
        self.names = StorageNames.of_layout(namespace, self.layout)
        rows = {"capacity": f"{ROWS * self.layout.row_stride}B", "prefault": False}
        config = {"version": 1, "namespace": namespace, "primary": rows, "secondary": [tier], **WAITS}
        config["budgets"] = {"one_tier": 0.5, "all_tiers": 0.5}
        self.manager = kvtiers.open_manager(config, self.layout)
        self.worker = kvtiers.open_worker(
            config, self.layout, [np.zeros((1, PAYLOAD), np.uint8)], engine_id=self.manager.engine_id
        )
        self.manager.wait_ready(PATIENCE)
        (self.tier,) = self.manager._engine.tiers.tiers.values()
        problem = self.tier.wait_open(PATIENCE)
        assert not problem, problem

    def until(self, done, what):
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, f"{what} does not happen"
            self.manager.on_schedule_end()
            time.sleep(0.0002)

    def row(self, row):
        at = row * self.layout.row_stride
        return self.manager._primary.get_kv_memoryview()[at : at + PAYLOAD]

    def store(self, keys):
        """Store these chunks into the tier, and forget them in the primary."""
        ctx = RequestContext("store")
        plans = []
        self.until(lambda: plans.append(self.manager.prepare_store(keys, ctx)) or plans[-1] is not None, "room")
        for key, row in zip(plans[-1].keys, plans[-1].chunk_ids, strict=True):
            self.row(row)[:] = payload(key, self.version)
        self.manager.complete_store(plans[-1])
        self.manager.on_request_finished(ctx)
        self.until(self._is_idle, "the end of the stores")
        self.manager.reset_cache()

    def _is_idle(self):
        (figures,) = self.manager.stats()["tiers"].values()
        return not figures["running_jobs"] and not self.manager.has_pending_work()

    def load(self, keys):
        """Load each of these chunks; yield it with its bytes, or None for a miss."""
        requests = {key: RequestContext(f"load {number}") for number, key in enumerate(keys)}
        answers = {}

        def ask():
            for key in requests.keys() - answers.keys():
                hits = self.manager.reach([PromptGroup([key])], requests[key]).in_chunks(
                    self.manager.tokens_per_chunk[0]
                )
                if not hits.waits:
                    answers[key] = hits.ready
            return len(answers) == len(requests)

        self.until(ask, "an answer")
        for key, ready in answers.items():
            found = None
            if ready:
                plan = self.manager.prepare_load([key], requests[key])
                found = bytes(self.row(plan.chunk_ids[0]))
                self.manager.complete_load(plan)
            yield key, found
            self.manager.on_request_finished(requests[key])
        self.until(self._is_idle, "the end of the loads")
        self.manager.reset_cache()

    def close(self):
        self.worker.shutdown()
        self.manager.shutdown(5.0)


# -- tier kinds


@contextlib.contextmanager
def served(command, answers):
    """Run a server until the end; ``answers()``: whether it does."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while not answers():
            assert process.poll() is None, f"{command[0]} has ended"
            assert time.monotonic() < end, f"{command[0]} does not answer"
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def store_of(tier):
    """Return the store of a tier with 'io: thread'."""
    (host,) = tier._hosts._hosts
    return host.backend._pool._opened.store


def module_of(path):
    """Import a file of a plugin's tests."""
    spec = importlib.util.spec_from_file_location(f"corruptions_{path.replace('/', '_')}", ROOT / "plugins" / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Each gives the options of a tier of its kind, and its values from behind: a function of the engine.


@contextlib.contextmanager
def memory_tier(_folder, _s3):
    # In the engine's own process, where its values can be got at.
    yield {"capacity": "64MiB", "io": "thread"}, lambda engine: StoredValue(store_of(engine.tier))


@contextlib.contextmanager
def memory_async_tier(_folder, _s3):
    yield {"max_blocks": 4_096}, lambda engine: HeldByManager(engine.tier._sealer.tier)


@contextlib.contextmanager
def fs_tier(folder, _s3):
    files = Files(folder / "values")
    yield {"path": str(folder / "values"), "capacity": "1GiB", "min_free": 0}, lambda _: files


@contextlib.contextmanager
def fs_slab_tier(folder, _s3):
    with contextlib.closing(SlabValues(folder / "values")) as values:
        options = {"path": str(folder / "values"), "capacity": "1GiB", "min_free": 0, "layout": "slab"}
        yield options, lambda _: values


@contextlib.contextmanager
def redis_tier(folder, _s3):
    port = free_port()
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "redis-server",
        "--port",
        str(port),
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    with served(command, lambda: listens(port)):
        keys = RedisKeys(port)
        yield {"url": f"redis://127.0.0.1:{port}"}, lambda _: keys


@contextlib.contextmanager
def s3_tier(_folder, s3):
    with s3_server(s3) as (endpoint, servers):
        bucket = servers.new_bucket(endpoint) if s3 != "trivial" else "bucket"
        options = {"endpoint": endpoint, "bucket": bucket, "region": "us-east-1", "threads": 8}
        keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY}
        objects = Objects(bucket, servers.client_of(endpoint))
        yield options | keys, lambda _: objects


@contextlib.contextmanager
def s3_server(which):
    """Run the S3 server of this name; give its URL, and the module of the S3 tier's own tests that starts it."""
    servers = module_of("s3_tier/tests/servers.py")
    if which == "ceph":
        with servers.Radosgw() as gateway:
            yield gateway.endpoint, servers
    else:
        with (servers.moto_server if which == "moto" else servers.trivial_server)() as endpoint:
            yield endpoint, servers


@contextlib.contextmanager
def gcs_tier(_folder, _s3):
    servers = module_of("gcs_tier/tests/servers.py")
    with servers.FakeGcs() as server:
        bucket = servers.new_bucket(server.endpoint)
        calls = servers.get_object, servers.put_object, servers.delete_object
        objects = EmulatedObjects((server.endpoint, bucket), *calls)
        yield {"endpoint": server.endpoint, "bucket": bucket, "anonymous": True}, lambda _: objects


@contextlib.contextmanager
def azure_tier(_folder, _s3):
    servers = module_of("azure_tier/tests/servers.py")
    with servers.Azurite() as server:
        container = servers.new_container(server.endpoint)
        account = {"account": servers.ACCOUNT, "account_key": servers.ACCOUNT_KEY}
        calls = servers.get_blob, servers.put_blob, servers.delete_blob
        blobs = EmulatedObjects((server.endpoint, container), *calls)
        yield {"endpoint": server.endpoint, "container": container, **account}, lambda _: blobs


@contextlib.contextmanager
def mooncake_tier(folder, _s3):
    from kvtiers_mooncake.config import MooncakeConfig
    from kvtiers_mooncake.store import MooncakeStore

    pool = module_of("mooncake_tier/tests/pool.py")
    with contextlib.ExitStack() as stack:
        master = pool.Master(folder / "master").start()
        stack.callback(master.kill)
        stack.callback(pool.SegmentOwner(master.address, 1 << 30).kill)
        store = MooncakeStore(MooncakeConfig(type="mooncake", master=master.address), region=memoryview(b""))
        stack.callback(store.close)
        objects = PoolObjects(store)
        yield {"master": master.address}, lambda _: objects


TIERS = {
    "memory": memory_tier,
    "memory-async": memory_async_tier,
    "fs": fs_tier,
    "fs-slab": fs_slab_tier,
    "redis": redis_tier,
    "s3": s3_tier,
    "gcs": gcs_tier,
    "azure": azure_tier,
    "mooncake": mooncake_tier,
}
KINDS = (*TIERS,)


# -- the run


class Run:
    """Corruptions of one tier kind. ``outcomes[way]``: how many loads were right, misses, wrong."""

    def __init__(self, kind, count, seed):
        self.kind, self.count, self.chance = kind, count, random.Random(f"{seed} {kind}")
        self.outcomes = {way: Counter() for way in WAYS}
        self.wrong = []
        self.done = 0

    def run(self, folder, s3, progress):
        with TIERS[self.kind](folder, s3) as (options, behind), contextlib.ExitStack() as stack:
            tier = {"type": self.kind.removesuffix("-slab"), "name": self.kind, **STRICT, **options}
            if self.kind == "memory-async":
                tier = {name: tier[name] for name in tier if name != "retries"}
            engines = [Engine(tier), Engine(tier, weights="older"), Engine(tier, namespace="elsewhere")]
            for engine in engines:
                stack.callback(engine.close)
            stores = [behind(engine) for engine in engines]
            while self.done < self.count:
                self.batch(engines, stores)
                progress(self)

    def batch(self, engines, stores):
        keys = [make_offload_key(self.chance.randbytes(32), 0) for _ in range(BATCH)]
        for engine in engines:
            engine.store(keys)
        held = [
            {key: store.get(engine.names, key) for key in keys} for engine, store in zip(engines, stores, strict=True)
        ]
        ways = self.ways()
        for number, (key, way) in enumerate(zip(keys, ways, strict=True)):
            own, older, elsewhere = (values[key] for values in held)
            stored = Stored(own, held[0][keys[number - 1]], older, elsewhere, self.chance)
            if way != "left alone":
                stores[0].put(engines[0].names, key, WAYS[way](stored))
        way_of = dict(zip(keys, ways, strict=True))
        for key, found in engines[0].load(keys):
            self.note(key, way_of[key], found)
        if self.done < self.count:  # room for the next batch
            self.forget(engines, stores, keys)

    def forget(self, engines, stores, keys):
        for engine, store in zip(engines, stores, strict=True):
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    store.put(engine.names, key, None)

    def ways(self):
        """Return a way for each value of a batch; most of them are damage, and all come up equally often."""
        damage = [way for way in WAYS if way not in INTACT]
        ways = [damage[(self.done + number) % len(damage)] for number in range(BATCH - 2 * len(INTACT))]
        self.done += len(ways)
        ways += [*INTACT] * 2
        self.chance.shuffle(ways)
        return ways

    def note(self, key, way, found):
        if found is None:
            self.outcomes[way]["miss"] += 1
        elif found == payload(key, "todaytoday"):
            self.outcomes[way]["right"] += 1
        else:
            self.outcomes[way]["wrong"] += 1
            self.wrong.append(f"{key.hex()} {way}")

    @property
    def total(self):
        return sum((self.outcomes[way] for way in WAYS if way not in INTACT), Counter())

    def complaints(self):
        """Return what fails the run, in words."""
        found = [f"{self.kind}: wrong bytes: {text}" for text in self.wrong[:5]]
        untested = sum(self.outcomes[way]["miss"] for way in INTACT)
        if untested:
            found.append(f"{self.kind}: {untested} values that were not damaged were not loaded")
        return found


def report(runs):
    """Print the outcomes by way and by kind; return the exit status."""
    print(f"\n{'':34}" + "".join(f"{run.kind:>22}" for run in runs))
    print(f"{'':34}" + "".join(f"{'right':>8}{'miss':>7}{'wrong':>7}" for _ in runs))
    for way in WAYS:
        print(f"{way:34}" + "".join(_cells(run.outcomes[way]) for run in runs))
    print(f"{'all that was damaged':34}" + "".join(_cells(run.total) for run in runs))
    complaints = [text for run in runs for text in run.complaints()]
    print("\n".join(complaints) or "ok: every load gave the right bytes or was a miss")
    return int(bool(complaints))


def _cells(counts):
    return f"{counts['right']:>8}{counts['miss']:>7}{counts['wrong']:>7}"


def missing(kind):
    """Return what a kind lacks on this machine, or ""."""
    if kind == "redis" and shutil.which("redis-server") is None:
        return "redis-server"
    if kind == "azure" and not (shutil.which("azurite-blob") or (ROOT / ".azurite" / "node_modules").is_dir()):
        return "Azurite ('make emulators')"
    if kind == "mooncake" and importlib.util.find_spec("mooncake") is None:
        return "client of Mooncake"
    return ""


def chosen(text):
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}; expected some of {', '.join(KINDS)}")
    return kinds


def progress_lines(stream=sys.stdout) -> Callable[[Run], None]:
    said = [time.monotonic()]

    def progress(run):
        if time.monotonic() - said[0] >= 5.0:
            said[0] = time.monotonic()
            counts = ", ".join(f"{count} {name}" for name, count in sorted(run.total.items()))
            print(f"{run.kind}: {run.done} of {run.count}: {counts}", file=stream, flush=True)

    return progress


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1_000, help="corruptions of each kind (default: %(default)s)")
    parser.add_argument("--kinds", type=chosen, default=list(KINDS), help=f"some of {','.join(KINDS)} (default: all)")
    parser.add_argument(
        "--s3", choices=("trivial", "moto", "ceph"), default="trivial", help="server (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="repeats a run")
    options = parser.parse_args(arguments)
    print(f"{options.count} corruptions of each of {', '.join(options.kinds)}; --seed {options.seed}", flush=True)
    runs = []
    for kind in options.kinds:
        if lacks := missing(kind):
            print(f"{kind}: not run: no {lacks} here")
            continue
        began, run = time.monotonic(), Run(kind, options.count, options.seed)
        with tempfile.TemporaryDirectory(prefix="corruptions-") as folder:
            run.run(Path(folder), options.s3, progress_lines())
        print(f"{kind}: {run.done} corruptions in {time.monotonic() - began:.1f} s", flush=True)
        runs.append(run)
    return report(runs)


if __name__ == "__main__":
    for name in ("kvtiers", "kvtiers_example"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each damaged value has a line of its own
    sys.exit(main())
