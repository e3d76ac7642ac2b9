"""LMCache inside an engine: its own loader, remote backend and memory objects, over real tiers."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from kvtiers.api import ConfigError

from .conftest import config_of
from .parts import WEIGHTS

LAYERS, CHUNK, HEADS, DIM = 3, 16, 2, 32
PLUGIN = "remote_storage_plugin.kvtiers"


class Engine:
    """The parts of an engine's LMCache that have to do with remote storage."""

    def __init__(
        self, options: dict[str, Any], *, dtype: Any = torch.bfloat16, heads: int = HEADS, **more: Any
    ) -> None:
        extra = {f"{PLUGIN}.module_path": "kvtiers_lmcache", f"{PLUGIN}.class_name": "KvtiersConnectorAdapter"}
        extra |= {f"{PLUGIN}.{name}": value for name, value in options.items()}
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            local_cpu=False,
            max_local_cpu_size=0.05,
            remote_storage_plugins=["kvtiers"],
            extra_config=extra,
        )
        self.world, self.rank = more.pop("world", 1), more.pop("rank", 0)
        self.model, self.dtype = more.pop("model", "test/model"), dtype
        assert not more
        self.metadata = LMCacheMetadata(
            self.model,
            self.world,
            self.world,
            self.rank,
            self.rank,
            dtype,
            (LAYERS, 2, CHUNK, heads, DIM),
            chunk_size=CHUNK,
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.local = LocalCPUBackend(self.config, self.metadata, "cpu")
        self.remote = RemoteBackend(self.config, self.metadata, self.loop, self.local, "cpu", plugin_name="kvtiers")
        self.free = self.free_bytes()

    @property
    def connector(self) -> Any:
        return self.remote.connection.getWrappedConnector()

    def free_bytes(self) -> int:
        return int(self.local.memory_allocator.pin_allocator.total_allocated_size)

    def close(self) -> None:
        if self.remote.connection is not None:
            self.remote.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()
        self.local.memory_allocator.close()

    def keys(self, count: int, first: int = 0, **more: Any) -> list[CacheEngineKey]:
        facts = {"model_name": self.model, "world_size": self.world, "worker_id": self.rank, "dtype": self.dtype} | more
        return [CacheEngineKey(chunk_hash=place + 1, **facts) for place in range(first, first + count)]

    def objects(self, count: int, seed: int, tokens: int = CHUNK) -> list[Any]:
        rng = np.random.default_rng(seed)
        found = [
            self.local.allocate(self.metadata.get_shapes(tokens), self.metadata.get_dtypes()) for _ in range(count)
        ]
        for it in found:
            it.byte_array.cast("B")[:] = rng.integers(0, 256, it.get_size(), np.uint8).tobytes()
        return found

    def store(self, keys: list[CacheEngineKey], seed: int = 0, tokens: int = CHUNK) -> list[bytes]:
        """Store as the cache engine does: the references that it holds are its own, and it waits for none."""
        objects = self.objects(len(keys), seed, tokens)
        stored = [bytes(it.byte_array) for it in objects]
        ended = threading.Semaphore(0)
        self.remote.batched_submit_put_task(keys, objects, on_complete_callback=lambda _: ended.release())
        for it in objects:
            it.ref_count_down()
        for _ in keys:
            assert ended.acquire(timeout=60)
        return stored

    def load(self, keys: list[CacheEngineKey]) -> list[bytes | None]:
        found = self.remote.batched_get_blocking(keys)
        content = [None if it is None else bytes(it.byte_array) for it in found]
        for it in found:
            if it is not None:
                assert it.get_shapes() == self.metadata.get_shapes()
                it.ref_count_down()
        return content


@pytest.fixture
def start(config: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(**more: Any) -> Engine:
            options = {"config": config, "weights": WEIGHTS, "bounce_bytes": "4MiB", "lookup_deadline": "60s"}
            names = ("config", "weights", "lookup_deadline", "deadline")
            options |= {name: more.pop(name) for name in names if name in more}
            engine = Engine(options, **more)
            stack.callback(engine.close)
            return engine

        yield start


def run(engine: Engine, call: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(call, engine.loop).result(60)


def test_every_chunk_comes_back_from_each_tier_and_no_memory_is_lost(start, tier):
    engine = start(config=config_of(tier))
    keys = engine.keys(5)
    assert engine.load(keys) == [None] * 5
    stored = engine.store(keys)
    assert engine.load(engine.keys(6)) == [*stored, None]
    assert engine.remote.batched_contains(engine.keys(8)) == 5
    assert engine.remote.contains(keys[0])
    assert not engine.remote.contains(engine.keys(1, first=9)[0])
    one = engine.remote.get_blocking(keys[2])
    assert bytes(one.byte_array) == stored[2]
    one.ref_count_down()
    assert engine.free_bytes() == engine.free


def test_another_engine_finds_them_and_asynchronous_calls_do_too(start):
    first = start()
    stored = first.store(first.keys(4))
    second = start()
    keys = second.keys(6)
    assert run(second, second.remote.batched_async_contains("id", keys)) == 4
    found = run(second, second.remote.batched_get_non_blocking("id", [*keys[:2], *second.keys(1, first=9), keys[2]]))
    assert [bytes(it.byte_array) for it in found] == stored[:2]
    for it in found:
        it.ref_count_down()
    assert second.free_bytes() == second.free
    assert second.connector.exists_sync(keys[0])
    assert run(second, second.connector.list()) == []
    assert run(first, first.connector.list()) == [key.to_string() for key in first.keys(4)]


OTHERS = {
    "model": {"model": "test/other"},
    "weights": {"weights": "another revision"},
    "dtype": {"dtype": torch.float16},
    "heads": {"heads": 4},
    "rank": {"world": 2, "rank": 1},
    "world": {"world": 2},
}


def test_another_engines_chunks_are_misses(start):
    first = start()
    stored = first.store(first.keys(2))
    for place, (what, other) in enumerate(OTHERS.items()):
        second = start(**other)
        assert second.load(second.keys(2)) == [None, None], what
        own = second.store(second.keys(2), seed=place + 1)
        assert second.load(second.keys(2)) == own, what
    assert first.load(first.keys(2)) == stored


def test_tags_are_a_part_of_the_key(start):
    engine = start()
    tagged = engine.keys(1, request_configs={"lmcache.tag.user": "a"})
    engine.store(tagged)
    for other in (
        {},
        {"lmcache.tag.user": "b"},
        {"lmcache.tag.use": "ra"},
        {"lmcache.tag.user": "a", "lmcache.tag.x": ""},
    ):
        assert engine.load(engine.keys(1, request_configs=other)) == [None]
    assert engine.load(tagged) != [None]


def test_a_chunk_that_is_not_full_is_not_stored(start):
    engine = start()
    engine.store(engine.keys(2), tokens=CHUNK - 3)
    assert engine.load(engine.keys(2)) == [None, None]
    assert engine.connector.stats()["short_chunks"] == 2


def test_a_chunk_is_removed(start):
    engine = start()
    keys = engine.keys(2)
    stored = engine.store(keys)
    assert engine.remote.remove(keys[0])
    assert engine.load(keys) == [None, stored[1]]
    assert run(engine, engine.connector.list()) == [keys[1].to_string()]


def test_a_damaged_chunk_is_a_miss(start, tmp_path):
    engine = start()
    stored = engine.store(engine.keys(2))
    files = [path for path in (tmp_path / "fs").rglob("*") if path.is_file() and path.stat().st_size >= len(stored[0])]
    assert len(files) == 2
    damaged = bytearray(files[0].read_bytes())
    damaged[77] ^= 1
    files[0].write_bytes(damaged)
    assert sorted(it is None for it in engine.load(engine.keys(2))) == [False, True]
    assert engine.free_bytes() == engine.free


def test_a_call_that_lmcache_gives_up_leaves_no_memory_behind(start):
    """LMCache cancels what takes too long; the memory object of a load that ends later is released."""
    engine = start()
    engine.store(engine.keys(1))
    allocated, go_on = threading.Event(), threading.Event()
    allocate = engine.connector._allocate

    def slow() -> Any:
        memory = allocate()
        allocated.set()
        assert go_on.wait(60)
        return memory

    engine.connector._allocate = slow
    future = asyncio.run_coroutine_threadsafe(engine.connector.get(engine.keys(1)[0]), engine.loop)
    assert allocated.wait(60)
    future.cancel()
    go_on.set()
    until = time.monotonic() + 60
    while engine.free_bytes() != engine.free:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_tier_that_hangs_costs_an_engine_its_deadline(start, unanswered):
    tier = {"type": "redis", "url": f"redis://127.0.0.1:{unanswered}/0"}
    engine = start(config={**config_of(tier), "start_wait": "0s"}, lookup_deadline="200ms", deadline="200ms")
    begin = time.monotonic()
    assert engine.load(engine.keys(2)) == [None, None]
    engine.store(engine.keys(2))
    assert engine.remote.batched_contains(engine.keys(2)) == 0
    assert time.monotonic() - begin < 20
    assert engine.free_bytes() == engine.free


def test_no_call_raises_and_after_a_close_all_miss(start):
    engine = start()
    keys = engine.keys(2)
    engine.store(keys)
    assert engine.connector.batched_contains([None]) == 0
    assert run(engine, engine.connector.get(None)) is None
    assert not engine.connector.exists_sync(3)
    assert engine.connector.failed_calls == 3
    run(engine, engine.connector.close())
    assert engine.load(keys) == [None, None]
    engine.store(keys)
    assert engine.remote.batched_contains(keys) == 0
    assert engine.free_bytes() == engine.free


def test_what_cannot_be_established_is_refused_and_the_engine_goes_on_without(start, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(
        "lmcache.v1.storage_backend.remote_backend.logger.warning",
        lambda text, *args: lines.append(text % args if args else text),
    )
    engine = start(weights="")
    (line,) = [it for it in lines if "kvtiers" in it]
    assert "the weights of 'test/model' cannot be identified" in line
    assert engine.remote.connection is None
    assert not engine.remote.contains(engine.keys(1)[0])


@pytest.mark.parametrize(
    ("settings", "options", "line"),
    [
        ({"remote_serde": "cachegen"}, {}, "'remote_serde' is 'cachegen'"),
        ({"use_layerwise": True}, {}, "'use_layerwise' is set"),
        ({}, {"capacity": "1GiB"}, "'capacity' is for the multi-process server"),
        ({}, {"salt_is_tenant": True}, "'salt_is_tenant' is for the multi-process server"),
        ({}, {"tenant": "Blue"}, "tenant 'Blue' cannot be used"),
        ({}, {"tenant": "blue"}, "tenant 'blue' is named, but the config has no 'tenants'"),
        ({}, {"typo": "1"}, "extra_config: remote_storage_plugin.kvtiers: 'typo'"),
        ({}, {"config": "/no/such/file.yaml"}, "/no/such/file.yaml"),
    ],
)
def test_wrong_settings_have_their_line(start, config, settings, options, line):
    engine = start()
    for name, value in settings.items():
        setattr(engine.config, name, value)
    engine.config.extra_config |= {f"{PLUGIN}.{name}": value for name, value in options.items()}
    with pytest.raises(ConfigError, match=line):
        CreateConnector(
            "plugin://kvtiers", engine.loop, engine.local, engine.config, engine.metadata, plugin_name="kvtiers"
        )
