"""What the offload scheduler needs of the others: of the tiering manager, and of the engine that it works for."""

import threading
from collections.abc import Sequence
from typing import Protocol

from kvtiers.api import OffloadKey
from kvtiers.base import LoadPlan, OffloadPolicy, PrefixHits, RequestContext, StorePlan

__all__ = ["BlockHolder", "EngineRequest", "OffloadManager"]


class OffloadManager(Protocol):
    """The calls of ``TieringManager`` that the scheduler makes; their promises are written there."""

    @property
    def lock(self) -> threading.Lock:
        """Held from the first call of a step to ``on_schedule_end``."""

    def on_new_request(self, ctx: RequestContext) -> OffloadPolicy:
        """Take note of a request."""

    def lookup_prefix(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> PrefixHits:
        """Return the leading run of one group's keys that is present."""

    def prepare_store(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> StorePlan | None:
        """Lease rows for those of the keys that are not there."""

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """End a store plan."""

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> LoadPlan | None:
        """Pin readable chunks."""

    def complete_load(self, plan: LoadPlan, success: bool = True) -> None:
        """End a load plan."""

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Take note that the engine is done with a request."""

    def on_schedule_end(self, prefill_tokens: int = 0, prefill_seconds: float = 0.0) -> None:
        """End the step."""

    def has_pending_work(self) -> bool:
        """Say whether the engine should keep stepping though it has no request."""


class EngineRequest(Protocol):
    """A request as the engine keeps it. The scheduler only reads it, and reads it anew in every call."""

    @property
    def context(self) -> RequestContext:
        """The same object for the request's whole life."""

    @property
    def num_tokens(self) -> int:
        """All tokens so far, computed or not."""

    @property
    def block_hashes(self) -> Sequence[Sequence[bytes]]:
        """By group: the chained hash of each full block, from the first on."""

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """By group: the GPU block of each logical block, as far as they are allocated."""


class BlockHolder(Protocol):
    """The engine's block pool: GPU blocks that a transfer still touches must not be handed out again."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Count one more holder for each of these blocks. Ids are unique over all groups."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one holder less for each of these blocks."""
