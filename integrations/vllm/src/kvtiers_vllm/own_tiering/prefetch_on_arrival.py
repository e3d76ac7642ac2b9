"""Probes on arrival: tiers are probed for a request before vLLM looks it up, so that the answer is there in time.

vLLM looks a request up in the scheduling pass that could begin it. No tier answers within that pass, and a request
without an answer is deferred by a step: tens of milliseconds where others are being computed. But a server's engine
receives requests on a thread of its own, while a step runs. The probe is sent from there (``compat``).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from kvtiers.api import OffloadKey, make_offload_key

__all__ = ["prefix_keys"]


def prefix_keys(offloading: Any, request: Any) -> Iterator[Sequence[OffloadKey]]:
    """Yield the keys by which vLLM's own manager looks a request up, of models whose KV is all of one kind.

    ``offloading``: vLLM's ``OffloadingConfig``.
    """
    if len(offloading.groups) == 1:
        (group,) = offloading.groups
        number = int(getattr(group, "group_id", 0))
        chunk_tokens = int(group.tokens_per_block) * int(offloading.cache.blocks_per_chunk)
        every = chunk_tokens // int(offloading.cache.tokens_per_hash)
        yield [make_offload_key(bytes(end), number) for end in request.block_hashes[every - 1 :: every]]
