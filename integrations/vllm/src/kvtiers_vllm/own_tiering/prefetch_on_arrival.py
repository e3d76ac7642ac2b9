"""Asks the tiers about a request as soon as it has come, so that their answer is there when vLLM wants it.

vLLM looks a request up in the scheduling pass that could begin it. No tier answers within that pass, and a request
without an answer is put off by a step: tens of milliseconds where others are being computed. But a server's engine
takes requests in on a thread of its own, while a step runs. The question is sent from there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtiers.api import OffloadKey, make_offload_key

__all__ = ["follow_arrivals", "is_idle", "prefix_keys"]


def follow_arrivals(core: Any, ask: Callable[[Any], None]) -> None:
    """Have ``ask`` see each request, on the thread that takes it in. ``core``: vLLM's engine core; None: nothing."""
    prepare = getattr(core, "preprocess_add_request", None)
    if prepare is None:
        return

    def prepare_and_ask(request: Any) -> Any:
        prepared = prepare(request)
        ask(prepared[0])
        return prepared

    core.preprocess_add_request = prepare_and_ask


def is_idle(core: Any) -> bool:
    """Say whether the engine has begun no request that it could go on with. In a pass it counts those begun there."""
    running = getattr(getattr(core, "scheduler", None), "running", None)
    return running is not None and not running


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
