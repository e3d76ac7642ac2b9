"""SGLang's real cache controller, with its own threads, over a backend attached as a server attaches it."""

import queue
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import redis
import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.runtime_context import get_parallel

from kvtiers.api import ConfigError

from .parts import Server, mha_pool

PAGE = 16
PATIENCE = 60.0


@pytest.fixture
def controller(tmp_path, publish, monkeypatch):
    """Controllers of servers without a GPU: the device's side is never called, since nothing is computed."""
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr("sglang.srt.managers.cache_controller.is_dp_attention_enabled", lambda: False)
    controllers = []

    def make(pool):
        device = SimpleNamespace(device="cpu", layer_num=3, register_layer_transfer_counter=lambda counter: None)
        allocator = SimpleNamespace(get_kvcache=lambda: device)
        made = HiCacheController(allocator, pool, PAGE, torch.distributed.group.WORLD, threading.Event())
        controllers.append(made)
        return made

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**ranks):
        yield make
        for made in controllers:
            made.detach_storage_backend()
    torch.distributed.destroy_process_group()


def attach(controller, config, model="served", **more):
    extra = {
        "backend_name": "kvtiers",
        "module_path": "kvtiers_sglang",
        "class_name": "KvtiersHiCache",
        "interface_v1": 1,
        "config": config,
        "deadline": "20s",
        "bounce_bytes": "4MiB",
    }
    controller.attach_storage_backend("dynamic", PAGE, model, extra | more)


def content(pool, slots):
    return Server.content(SimpleNamespace(pools={"kv": pool}, parts=lambda *a: Server.parts(holder(pool), *a)), slots)


def holder(pool):
    return SimpleNamespace(pools={"kv": pool})


def fill(pool, slots, seed):
    rng = np.random.default_rng(seed)
    for part in Server.parts(holder(pool), slots, "kv"):
        part[:] = torch.from_numpy(rng.integers(0, 256, part.numel(), np.uint8))
    return content(pool, slots)


def back_up(controller, pool, tokens):
    """Write a prompt's pages as the scheduler does; return their content, and how many tokens were stored."""
    slots = pool.alloc(len(tokens))
    written = fill(pool, slots, 1)
    hashes = list(controller.get_hash_str(tokens, None, PAGE))
    controller.write_storage(slots, tokens, hashes)
    return written, controller.ack_backup_queue.get(timeout=PATIENCE).completed_tokens


def prefetch(controller, pool, tokens):
    """Prefetch a prompt as the scheduler does; return how many tokens the query and the transfer have found."""
    controller.prefetch("request", tokens)
    operation = controller.prefetch_hit_queue.get(timeout=PATIENCE)
    if not operation.storage_hit_count:
        return 0, 0, b""
    operation.host_indices = pool.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    completed, until = 0, time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ack = controller.ack_prefetch_queue.get(timeout=PATIENCE)
        completed = ack.completed_tokens if ack.completed_tokens is not None else completed
        if ack.completed_req:
            return operation.storage_hit_count, completed, content(pool, operation.host_indices[:completed])
    raise queue.Empty


def test_a_prompt_that_one_server_has_backed_up_is_prefetched_by_the_next_one_byte_for_byte(controller, config):
    tokens = np.random.default_rng(0).integers(0, 32_000, 6 * PAGE).tolist()
    pool = mha_pool()
    first = controller(pool)
    attach(first, config)
    written, stored = back_up(first, pool, tokens)
    assert stored == len(tokens)
    first.detach_storage_backend()
    pool = mha_pool()
    second = controller(pool)
    attach(second, config)
    assert prefetch(second, pool, [*tokens, *range(2 * PAGE)]) == (len(tokens), len(tokens), written)
    assert prefetch(second, pool, [7, *tokens[1:]])[0] == 0


def test_a_backend_that_is_refused_fails_the_attach_and_leaves_the_controller_without_one(controller, config):
    made = controller(mha_pool())
    with pytest.raises(ConfigError, match="'colour'"):
        attach(made, config, colour="red")
    assert not made.enable_storage
    attach(made, config)
    assert made.enable_storage


# -- trouble and strangers, with each kind of store

TOKENS = np.random.default_rng(4).integers(0, 32_000, 6 * PAGE).tolist()
PAGES = 6


class FsStore:
    """A directory; its outage is a file in its place, and with it goes all that it had."""

    def __init__(self, folder):
        self.tier = {"type": "fs", "path": str(folder), "capacity": "1GiB", "min_free": 0, "processes": 1}
        self._folder = folder

    def damage(self, count):
        stored = sorted(path for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size == 16_384)
        assert len(stored) == PAGES
        for path in stored[:count]:
            path.write_bytes(_damaged(path.read_bytes()))

    def stop(self):
        shutil.rmtree(self._folder)
        self._folder.write_text("in the way")

    def resume(self):
        self._folder.unlink()


class RedisStore:
    """A Redis server; its outage is its death, with all that it had."""

    def __init__(self, server):
        self.tier = {"type": "redis", "url": server.url, "processes": 1}
        self._server = server

    def damage(self, count):
        with redis.Redis(port=self._server.port) as connection:
            stored = [key for key in sorted(connection.keys()) if connection.strlen(key) == 16_384]
            assert len(stored) == PAGES
            for key in stored[:count]:
                connection.set(key, _damaged(connection.get(key)))

    def stop(self):
        self._server.kill()

    def resume(self):
        self._server.start()


def _damaged(value):
    return value[:5000] + bytes([value[5000] ^ 1]) + value[5001:]


@pytest.fixture(params=["fs", "redis"])
def store(request, tmp_path):
    if request.param == "fs":
        return FsStore(tmp_path / "fs")
    return RedisStore(request.getfixturevalue("redis_server"))


@pytest.fixture
def attached(controller, config, store):
    """Attach a server to the store; return its controller and its pool."""
    config["secondary"] = [{**store.tier, "breaker": {"delay": "10ms", "max_delay": "50ms"}}]

    def attached(pool=None, **more):
        pool = pool if pool is not None else mha_pool()
        made = controller(pool)
        attach(made, config, **more)
        return made, pool

    return attached


def test_of_a_damaged_prompt_only_pages_that_are_sound_are_used_and_the_rest_is_written_again(attached, store):
    first, pool = attached()
    written, stored = back_up(first, pool, TOKENS)
    assert stored == len(TOKENS)
    first.detach_storage_backend()
    store.damage(2)
    second, pool = attached()
    hit, completed, loaded = prefetch(second, pool, TOKENS)
    assert hit == len(TOKENS), "it is there, so it is found; what it is shows when it is read"
    assert completed < len(TOKENS)
    assert completed % PAGE == 0
    assert loaded == written[: len(written) * completed // len(TOKENS)]
    assert back_up(second, pool, TOKENS) == (written, len(TOKENS))
    assert prefetch(second, pool, TOKENS) == (len(TOKENS), len(TOKENS), written)


def test_through_an_outage_the_controller_goes_on_and_stores_again_after_it(attached, store):
    server, pool = attached()
    written, stored = back_up(server, pool, TOKENS)
    assert stored == len(TOKENS)
    store.stop()
    others = [token + 1 for token in TOKENS]
    assert back_up(server, pool, others)[1] == 0
    assert prefetch(server, pool, others)[0] == 0
    assert prefetch(server, pool, TOKENS)[1] == 0, "its query may be remembered; its pages are not there"
    store.resume()
    until = time.monotonic() + PATIENCE
    while back_up(server, pool, others)[1] < len(others):
        pool.clear()
        assert time.monotonic() < until, "the store is not used again"
    assert prefetch(server, pool, others) == (len(others), len(others), written)


@pytest.mark.parametrize("other", ["revision", "type", "layout", "model"])
def test_a_server_that_is_another_one_prefetches_nothing(attached, publish, other):
    first, pool = attached()
    back_up(first, pool, TOKENS)
    first.detach_storage_backend()
    if other == "revision":
        publish(revision="1" * 40)
    pools = {"type": lambda: mha_pool(dtype=torch.float16), "layout": lambda: mha_pool("page_head")}
    stranger, pool = attached(pools.get(other, mha_pool)(), model="another" if other == "model" else "served")
    assert prefetch(stranger, pool, TOKENS) == (0, 0, b"")
    assert back_up(stranger, pool, TOKENS)[1] == len(TOKENS)
    stranger.detach_storage_backend()
    publish()
    again, pool = attached()
    assert prefetch(again, pool, TOKENS)[:2] == (len(TOKENS), len(TOKENS))


def test_a_refused_sidecar_closes_what_was_opened_before_it(serve, caplog):
    """SGLang leaves such a backend attached: it stores and finds nothing, and nothing of it stays open."""
    pool = mha_pool()
    backends = []
    with pytest.raises(ConfigError, match="does not show where a page lies"):
        serve(pool, sidecars={"swa": SimpleNamespace(page_size=16)}, made=backends.append)
    [backend] = backends
    assert backend.batch_exists(["0" * 64]) == 0
    assert backend.stats()["kv"]["tiers"] == {}
