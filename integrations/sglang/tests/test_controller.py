"""SGLang's real cache controller, with its own threads, over a backend attached as a server attaches it."""

import queue
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
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


def attach(controller, config, **more):
    extra = {
        "backend_name": "kvtiers",
        "module_path": "kvtiers_sglang",
        "class_name": "KvtiersHiCache",
        "interface_v1": 1,
        "config": config,
        "deadline": "20s",
        "bounce_bytes": "4MiB",
    }
    controller.attach_storage_backend("dynamic", PAGE, "served", extra | more)


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
