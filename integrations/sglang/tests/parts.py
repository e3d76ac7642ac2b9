"""SGLang's real pools on CPU tensors, and a server's use of them: what its cache controller does with a backend."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_context

ARGUMENTS = {"model_path": "test/model", "revision": "0" * 40, "load_format": "auto", "kv_cache_dtype": "auto"}
TOKENS = 256
ON_CPU: Any = {
    "pin_memory": False,
    "device": "cpu",
    "device_capacity_tokens": TOKENS,
    "host_token_capacity": 2 * TOKENS,
    "start_layer": 0,
}
MHA_LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
MLA_LAYOUTS = ("page_first", "page_first_direct", "layer_first")


def published(**fields: Any) -> Any:
    """Return a context in which SGLang has published a server's arguments: real ones, resolved to these fields."""
    return get_context().override_server_args(**(ARGUMENTS | fields))


def _pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(
    layout: str = "page_first",
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    heads: int = 2,
    layers: int = 3,
    on_device: KVBufferLayout = KVBufferLayout.NHD,
    allocator: str = "default",
) -> MHATokenToKVPoolHost:
    shape = (TOKENS, heads, 32)
    k = tuple(torch.zeros(shape, dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros(shape, dtype=dtype) for _ in range(layers))
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=on_device)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=32,
        v_head_dim=32,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        page,
        layout,
        **ON_CPU,
        end_layer=layers - 1,
        allocator_type=allocator,
    )


def storage_config(extra: dict[str, Any], **more: Any) -> HiCacheStorageConfig:
    facts: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "served",
    }
    named = {"backend_name": "kvtiers", "module_path": "kvtiers_sglang", "class_name": "KvtiersHiCache"}
    return HiCacheStorageConfig(**(facts | more), extra_config={**named, "interface_v1": 1, **extra})


class Server:
    """A server's backend with its pools. Pages are SGLang's: keys by its hash chain, slots by its allocator."""

    def __init__(
        self,
        pool: Any,
        extra: dict[str, Any],
        sidecars: dict[str, Any] | None = None,
        made: Callable[[Any], object] = lambda _: None,
        **storage: Any,
    ) -> None:
        """``made``: called with the backend before pools are registered."""
        self.pool = pool
        self.pools = {"kv": pool, **(sidecars or {})}
        config = storage_config(extra, **storage)
        self.backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        made(self.backend)
        # As SGLang does: it closes no backend that refuses a further pool.
        self.backend.register_mem_pool_host(pool)
        for name, sidecar in self.pools.items() if sidecars else ():
            self.backend.register_mem_host_pool_v2(sidecar, name)
        self.backend.on_host_pools_registered()

    def close(self) -> None:
        self.backend.close()

    def keys(self, pages: int, seed: int = 0) -> list[str]:
        """Return the keys of a prompt's pages."""
        size = self.pool.page_size
        tokens = np.random.default_rng(seed).integers(0, 32_000, pages * size).tolist()
        found = get_hash_str(tokens, None, size)
        return list(found)

    def take(self, pages: int, name: str = "kv") -> torch.Tensor:
        pool = self.pools[name]
        slots = pool.alloc(pages * pool.page_size)
        assert slots is not None
        return slots

    def fill(self, slots: torch.Tensor, seed: int, name: str = "kv") -> bytes:
        """Write random bytes into the pages of these slots, through the pool's own tensors; return them."""
        rng = np.random.default_rng(seed)
        for part in self.parts(slots, name):
            part[:] = torch.from_numpy(rng.integers(0, 256, part.numel(), np.uint8))
        return self.content(slots, name)

    def content(self, slots: torch.Tensor, name: str = "kv") -> bytes:
        return b"".join(part.numpy().tobytes() for part in self.parts(slots, name))

    def parts(self, slots: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Return the memory of these pages as flat tensors, cut out of the pool's own by address."""
        pool = self.pools[name]
        addresses, sizes = pool.get_page_buffer_meta(slots)
        whole = [tensor.view(torch.uint8).flatten() for tensor in _tensors(pool)]
        return [_cut(whole, address, size) for address, size in zip(addresses, sizes, strict=True)]

    def store(self, pages: int = 4, seed: int = 0) -> tuple[list[str], bytes]:
        """Fill pages and back them up; return their keys and what they hold."""
        keys, slots = self.keys(pages, seed), self.take(pages)
        content = self.fill(slots, seed)
        assert self.backend.batch_set_v1(keys, slots) == [True] * pages
        assert self.content(slots) == content, "a backup changes nothing"
        return keys, content

    def load(self, keys: list[str]) -> tuple[list[bool], bytes]:
        """Prefetch pages into fresh slots; return which were found, and what the slots hold."""
        slots = self.take(len(keys))
        self.fill(slots, 99)
        found = self.backend.batch_get_v1(keys, slots), self.content(slots)
        self.pool.free(slots)
        return found


def _tensors(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, MambaPoolHost):
        return [pool.temporal_buffer, *pool.conv_buffer]
    if isinstance(pool, DSAIndexerPoolHost):
        return [pool.index_k_with_scale_buffer]
    return [pool.kv_buffer]


def _cut(whole: Sequence[torch.Tensor], address: int, size: int) -> torch.Tensor:
    for tensor in whole:
        at = address - tensor.data_ptr()
        if at >= 0 and at + size <= tensor.numel():
            return tensor[at : at + size]
    raise AssertionError("a part of a page lies outside of the pool")


def mla_pool(
    layout: str = "page_first", *, page: int = 16, rank: int = 64, layers: int = 3, allocator: str = "default"
) -> MLATokenToKVPoolHost:
    rope = 16
    buffers = tuple(torch.zeros(TOKENS, 1, rank + rope, dtype=torch.bfloat16) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_pointers(buffers),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        page,
        layout,
        **ON_CPU,
        end_layer=layers - 1,
        target_layer_num=layers,
        allocator_type=allocator,
    )


def mamba_pool(layers: int = 2, *, heads: int = 4, allocator: str = "default") -> MambaPoolHost:
    info = MambaStateBufferInfo(
        temporal=torch.zeros(layers, 16, heads, 8, dtype=torch.float32),
        conv=(torch.zeros(layers, 16, 12, 3, dtype=torch.bfloat16),),
    )
    kind: Any = {"pin_memory": False, "device": "cpu", "layout": "page_first", "allocator_type": allocator}
    return MambaPoolHost(info, 2.0, 0, device_capacity=16, **kind)


def indexer_pool(
    anchor: MLATokenToKVPoolHost, *, skips: Sequence[bool] = (False, True, False), allocator: str = "default"
) -> DSAIndexerPoolHost:
    """Return the index keys of DeepSeek's sparse attention, in the slots of a KV pool with pages of 64 tokens.

    ``skips``: for each layer whether it uses the choice of the layer before, and has no index keys.
    """
    rank, rope = anchor.kv_lora_rank, anchor.qk_rope_head_dim
    on_device = DSATokenToKVPool(
        TOKENS,
        anchor.page_size,
        rank,
        torch.bfloat16,
        rope,
        len(skips),
        "cpu",
        128,
        False,
        rank + rope,
        skip_topk_layers=list(skips),
    )
    decl = make_dsa_indexer_pool_decl(on_device)
    return DSAIndexerPoolHost(decl, anchor, pin_memory=False, allocator_type=allocator)
