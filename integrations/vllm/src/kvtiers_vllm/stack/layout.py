"""The cache layout, from vLLM's config: the same in the scheduler's process and in each worker's.

Groups are those that vLLM offloads, in its order; tensors are their layers. A layer's page is taken without vLLM's
padding. Rows are direct, a cell for each rank, or, where vLLM's config wants it (``canonical_layout``) and vLLM
certifies it, canonical: their bytes do not depend on how many ranks hold the heads.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvtiers.api import StartError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import CopyRun, RankMap
from kvtiers_vllm.engine import Engine
from kvtiers_vllm.stack.keys import GroupKeys

__all__ = [
    "auto_blocks_per_chunk",
    "cache_layout",
    "checkpoint_interval",
    "checkpoints_in_words",
    "group_keys",
    "layer_tensors",
    "rank_map",
]

_CHECKPOINT_TOKENS = 8192
_CHUNK_TOKENS = 64
_MOST_VALUE_BYTES = 16 * 2**20


def auto_blocks_per_chunk(kv_cache_config: Any, world_size: int, retention_interval: int | None) -> int:
    """Return how many of vLLM's blocks make 64 tokens in each group; fewer where values would exceed 16 MiB.

    Each chunk costs the engine's thread about as much, however large: of 64 tokens instead of 16 a prompt takes a half
    to a quarter, and hits lose .2 % of their tokens. 1 where the blocks of some group have 64 tokens already, and
    beside states, which vLLM may find at the ends of parts of a block. ``retention_interval``: vLLM's, which chunks
    must divide.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    specs = [group.kv_cache_spec for group in groups]
    tokens = [int(spec.block_size) for spec in specs]
    if not specs or max(tokens) >= _CHUNK_TOKENS or any(getattr(spec, "mamba_cache_mode", "") for spec in specs):
        return 1
    value = max(world_size * sum(_pages(group.kv_cache_spec, group.layer_names).values()) for group in groups)
    return next(
        blocks
        for blocks in range(-(-_CHUNK_TOKENS // min(tokens)), 0, -1)
        if blocks == 1
        or (blocks * value <= _MOST_VALUE_BYTES and not any((retention_interval or 0) % (blocks * n) for n in tokens))
    )


def checkpoint_interval(retention_interval: int | None, chunks: Iterable[tuple[Any, int]]) -> int | None:
    """Return every how many tokens windows are stored: vLLM's interval, or 8,192 tokens where that is 0.

    By that default the windows before a prompt's end are stored, and those before a prefix that vLLM has seen shared:
    the first other prompt that shares most of a long one would find nothing. ``chunks``: of each KV group, its spec and
    how many tokens a chunk has.
    """
    kept = [(spec, tokens) for spec, tokens in chunks if not _has_aligned_states(spec)]
    if retention_interval != 0 or all(_group(0, tokens, spec).kind == "full_attention" for spec, tokens in kept):
        return retention_interval
    # A prompt is found at the end of a chunk of full attention, too: a checkpoint elsewhere would never be loaded.
    least = math.lcm(*(tokens for _, tokens in kept))
    return max(least, _CHECKPOINT_TOKENS // least * least)


def checkpoints_in_words(layout: CacheLayout, offloading: Any, engine: Engine) -> str:
    """Return at which places of a prompt vLLM has the windows or states of all KV groups stored; "" if it has none."""
    groups = engine.kv_cache_config.kv_cache_groups
    specs = [groups[group.group_id].kv_cache_spec for group in offloading.groups]
    retained = getattr(getattr(engine.vllm_config, "cache_config", None), "prefix_cache_retention_interval", None)
    interval = checkpoint_interval(retained, [(spec, layout.tokens_per_chunk(n)) for n, spec in enumerate(specs)])
    if any(map(_has_aligned_states, specs)):
        if retained is None:
            return "where a step's part of a prompt ends"
        more = f", and at multiples of {retained} tokens at which a step's part of it ends" if retained else ""
        return f"at a prompt's end, and where vLLM has seen prompts part{more}"
    if all(group.kind == "full_attention" for group in layout.groups):
        return ""
    return "at the end of each chunk" if interval is None else f"every {interval} tokens, and before a prompt's end"


def cache_layout(model: ModelIdentity, offloading: Any, engine: Engine) -> CacheLayout:
    """Return the layout of this engine's rows. ``offloading``: vLLM's; StartError if canonical rows cannot be had."""
    groups, tensors = [], []
    kv_cache_config, shards = engine.kv_cache_config, _head_shards(offloading, engine)
    for index, group in enumerate(offloading.groups):
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        groups.append(_group(index, int(group.tokens_per_block), spec))
        pages = _pages(spec, group.layer_names)
        tensors += [KVTensor(name, index, page, shards * page) for name, page in pages.items()]
    return CacheLayout(
        model,
        tuple(groups),
        tuple(tensors),
        blocks_per_chunk=int(offloading.cache.blocks_per_chunk),
        world_size=int(offloading.parallel.world_size),
        row_layout="canonical" if shards else "direct",
    )


def group_keys(layout: CacheLayout, offloading: Any) -> Mapping[int, GroupKeys]:
    """Return how keys are made, by vLLM's numbers of the groups, with which its keys end."""
    tokens_per_hash = int(offloading.cache.tokens_per_hash)
    return {
        group.group_id: GroupKeys(
            index,
            layout.tokens_per_chunk(index) // tokens_per_hash,
            whole_prefix=layout.groups[index].kind == "full_attention",
            hashes_per_block=layout.groups[index].tokens_per_block // tokens_per_hash,
            window=layout.windows[index] * layout.tokens_per_chunk(index),
            tokens_per_chunk=layout.tokens_per_chunk(index),
        )
        for index, group in enumerate(offloading.groups)
    }


def layer_tensors(layout: CacheLayout, caches: Any) -> list[Any]:
    """Return a worker's KV tensors, one a tensor of the layout. ``caches``: vLLM's ``CanonicalKVCaches``.

    StartError if its pages are not those that the layout names.
    """
    found = []
    for index, refs in enumerate(caches.group_data_refs):
        wanted = [tensor for tensor in layout.tensors if tensor.group == index]
        if len(refs) != len(wanted):
            raise StartError(
                f"KV group {index} has {len(wanted)} layers in {len(refs)} pages of KV memory; kvtiers needs a page "
                "for each layer, so this model runs with vLLM's own offloading only"
            )
        for tensor, ref in zip(wanted, refs, strict=True):
            if tensor.page_bytes != ref.page_size_bytes:
                raise StartError(
                    f"a block of {tensor.name} has {ref.page_size_bytes} bytes in KV memory, but {tensor.page_bytes} "
                    "by vLLM's config; kvtiers cannot find where its KV lies"
                )
            found.append(caches.tensors[ref.tensor_idx].tensor)
    return found


def rank_map(layout: CacheLayout, caches: Any) -> RankMap | None:
    """Return where this rank's bytes lie in a canonical row, as vLLM says; None where rows are direct.

    StartError where vLLM does not certify what its config promised.
    """
    if layout.row_layout != "canonical":
        return None
    mappings = [ref.mapping for refs in caches.group_data_refs for ref in refs]
    for tensor, mapping in zip(layout.tensors, mappings, strict=True):
        found = mapping.canonical_page_size_bytes if mapping is not None and mapping.parallelism_agnostic else None
        if found != tensor.canonical_page_bytes:
            raise StartError(
                f"canonical_layout: vLLM does not certify the pages of {tensor.name}: canonical bytes are {found}, "
                f"expected {tensor.canonical_page_bytes}; leave canonical_layout out"
            )
    turns = {(mapping.writer_index, mapping.num_writers) for mapping in mappings}
    if len(turns) > 1:
        raise StartError("canonical_layout: layers are held by different numbers of ranks; leave canonical_layout out")
    runs = [
        CopyRun(
            tensor,
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        )
        for tensor, mapping in enumerate(mappings)
        for run in mapping.runs
    ]
    return RankMap(tuple(runs), *turns.pop())


def _head_shards(offloading: Any, engine: Engine) -> int:
    """Return on how many ranks different heads lie, for canonical rows; 0 where rows are direct."""
    if not getattr(offloading, "canonical_layout", False):
        return 0
    if not offloading.parallel.is_parallelism_agnostic:
        raise StartError("canonical_layout: vLLM does not certify it for this model and these ranks; leave it out")
    model_config = engine.vllm_config.model_config
    if model_config.use_mla:
        return 1
    return min(int(offloading.parallel.tp_size), int(model_config.get_total_num_kv_heads()))


def _group(index: int, tokens_per_block: int, spec: Any) -> KVGroup:
    kind = type(spec).__name__  # by name: this module is used without vLLM
    name = f"group-{index}"
    window = getattr(spec, "attention_chunk_size", None) or getattr(spec, "sliding_window", None)
    if kind.startswith(("SlidingWindow", "ChunkedLocal")) and window:
        return KVGroup(name, tokens_per_block, "sliding_window", int(window))
    if kind.startswith("Mamba"):
        return KVGroup(name, tokens_per_block, "state_space")
    return KVGroup(name, tokens_per_block)


def _has_aligned_states(spec: Any) -> bool:
    """Return whether a group has states that vLLM hands over one by one, where it keeps them."""
    return getattr(spec, "mamba_cache_mode", "") == "align"


def _pages(spec: Any, layers: Iterable[str]) -> dict[str, int]:
    """Return the bytes of one block of each of a group's layers."""
    by_layer = getattr(spec, "kv_cache_specs", {})
    return {name: _page_bytes(by_layer.get(name, spec)) for name in layers}


def _page_bytes(spec: Any) -> int:
    """Return the bytes of one block of one layer, without padding, as vLLM's own worker takes them."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    if unpadded is not None:
        return int(unpadded)
    return int(dataclasses.replace(spec, page_size_padded=None).page_size_bytes)
