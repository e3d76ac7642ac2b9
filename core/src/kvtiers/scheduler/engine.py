"""What the offload scheduler needs of its engine."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvtiers.types import RequestContext

__all__ = ["BlockHolder", "EngineRequest", "FreeQueue"]


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
