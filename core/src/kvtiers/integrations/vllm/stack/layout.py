"""What a row holds, from vLLM's config: the same in the scheduler's process and in each worker's.

Groups are those that vLLM offloads, in its order; tensors are their layers. A layer's page is taken without vLLM's
padding. Rows are direct: a cell for each rank.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvtiers.api import StartError
from kvtiers.integrations.vllm.stack.keys import GroupKeys
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity

__all__ = ["cache_layout", "group_keys", "layer_tensors"]


def cache_layout(model: ModelIdentity, offloading: Any, kv_cache_config: Any) -> CacheLayout:
    """Return the layout of this engine's rows. ``offloading``, ``kv_cache_config``: vLLM's."""
    groups, tensors = [], []
    for index, group in enumerate(offloading.groups):
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        groups.append(_group(index, int(group.tokens_per_block), spec))
        by_layer = getattr(spec, "kv_cache_specs", {})
        tensors += [KVTensor(name, index, _page_bytes(by_layer.get(name, spec))) for name in group.layer_names]
    return CacheLayout(
        model,
        tuple(groups),
        tuple(tensors),
        blocks_per_chunk=int(offloading.cache.blocks_per_chunk),
        world_size=int(offloading.parallel.world_size),
    )


def group_keys(layout: CacheLayout, offloading: Any) -> Mapping[int, GroupKeys]:
    """Return how keys come about, by vLLM's numbers of the groups, with which its keys end."""
    tokens_per_hash = int(offloading.cache.tokens_per_hash)
    return {
        group.group_id: GroupKeys(
            index,
            layout.tokens_per_chunk(index) // tokens_per_hash,
            whole_prefix=layout.groups[index].kind == "full_attention",
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
                    "by vLLM's config; kvtiers cannot tell where its KV lies"
                )
            found.append(caches.tensors[ref.tensor_idx].tensor)
    return found


def _group(index: int, tokens_per_block: int, spec: Any) -> KVGroup:
    kind = type(spec).__name__  # by name: this module is used without vLLM
    name = f"group-{index}"
    window = getattr(spec, "attention_chunk_size", None) or getattr(spec, "sliding_window", None)
    if kind.startswith(("SlidingWindow", "ChunkedLocal")) and window:
        return KVGroup(name, tokens_per_block, "sliding_window", int(window))
    if kind.startswith("Mamba"):
        return KVGroup(name, tokens_per_block, "state_space")
    return KVGroup(name, tokens_per_block)


def _page_bytes(spec: Any) -> int:
    """Return the bytes of one block of one layer, without padding, as vLLM's own worker takes them."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    if unpadded is not None:
        return int(unpadded)
    return int(dataclasses.replace(spec, page_size_padded=None).page_size_bytes)
