"""The offload scheduler's interfaces: what it calls of the tiering manager, and what it needs of its engine."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvtiers.api import OffloadKey
from kvtiers.types import ChunkBlocks, LoadPlan, OffloadPolicy, PromptGroup, Reach, RequestContext, StorePlan

__all__ = ["BlockHolder", "EngineRequest", "FreeQueue", "OffloadManager"]


class OffloadManager(Protocol):
    """The calls of ``TieringManager`` that the scheduler makes; their promises are written there."""

    @property
    def lock(self) -> threading.Lock:
        """The lock, held from the first call of a step to ``on_schedule_end``."""

    def on_new_request(self, ctx: RequestContext, prompt_tokens: int = 0) -> OffloadPolicy:
        """Record a request with this many tokens."""

    def tenant_of(self, ctx: RequestContext) -> str | None:
        """Return a request's tenant, "" for none; None: it may use no tier."""

    def reach(
        self,
        groups: Sequence[PromptGroup],
        ctx: RequestContext,
        computed: int = 0,
        end: int | None = None,
        step: int | None = None,
    ) -> Reach:
        """Return how much of a prompt can be loaded."""

    def prepare_store(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> StorePlan | None:
        """Lease rows for the keys that are not in the primary."""

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """End a store plan."""

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> LoadPlan | None:
        """Pin readable chunks."""

    def complete_load(self, plan: LoadPlan, success: bool = True) -> None:
        """End a load plan."""

    @property
    def wants_descriptions(self) -> bool:
        """Return whether ``describe`` does anything."""

    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take what KV events say of chunks."""

    def on_request_finished(self, ctx: RequestContext, output_tokens: int = 0) -> None:
        """Record that the engine is done with a request, which has so many tokens of output."""

    def record_request(
        self,
        arrival: float,
        prompt_tokens: int,
        tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object],
    ) -> None:
        """Record what a request was."""

    def on_schedule_end(
        self, prefill_tokens: int = 0, prefill_seconds: float = 0.0, prefill_position: float = 0.0
    ) -> None:
        """End the step."""

    def take_lost_ranks(self) -> Collection[int]:
        """Return the ranks that were lost since the last call, or earlier and have not rejoined."""

    def has_pending_work(self) -> bool:
        """Return whether the engine should keep stepping though it has no request."""

    def reset_cache(self) -> None:
        """Forget all chunks."""

    def set_weights_version(self, version: str) -> None:
        """Retire all KV of the weights so far."""


class EngineRequest(Protocol):
    """A request as the engine keeps it. The scheduler never changes it, and reads it again in every call.

    One that has ``token_ids``, a sequence of all its tokens so far, has them in its KV events (``events`` in a config).
    """

    @property
    def context(self) -> RequestContext:
        """The same object for the request's whole life."""

    @property
    def num_tokens(self) -> int:
        """All tokens so far, computed or not."""

    @property
    def block_hashes(self) -> Sequence[Sequence[bytes]]:
        """By group: the chained hash of each full block, from the first on; entries are only appended.

        Equal hashes must mean equal KV, so they cover everything that varies by request: the adapter, the salt of a
        tenant, an image behind placeholder tokens. ``BlockHashChain`` makes such hashes. The tenant itself
        (``kvtiers_tenant`` in the context's parameters) need not be in them: it is added to each key.
        """

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """By group: the GPU block of each logical block, as far as they are allocated.

        ``SchedulerOptions.null_block`` stands where the request has no block (any more), as before a sliding window.
        A chunk that loses a block before it is full is never stored: with windows shorter than a chunk, an engine keeps
        the chunk's blocks until then.
        """


class BlockHolder(Protocol):
    """The engine's block pool: GPU blocks that a transfer still touches must not be handed out again."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Count one more holder for each of these blocks. Ids are unique over all groups."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one holder less for each of these blocks."""


@runtime_checkable
class FreeQueue(BlockHolder, Protocol):
    """A block pool that shows which of its free blocks are reused next: what lazy offloading needs besides."""

    @property
    def allocated(self) -> int:
        """The number of blocks allocated since the start."""

    def next_free(self, count: int) -> Sequence[int]:
        """Return that many free blocks, or all there are, in the order in which they will be reused."""

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the chained hash of the block's content, in use or free; None: its content cannot be found again."""

    def put_back(self, block_ids: Sequence[int]) -> None:
        """Do what ``release`` does, but blocks that become free by it are the next to be reused, the first id first."""
