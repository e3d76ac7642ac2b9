"""The scheduler's state of a request between two calls."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.api.keys import key_ending
from kvtiers.scheduler.engine import EngineRequest
from kvtiers.scheduler.geometry import Group
from kvtiers.scheduler.options import RequestLimits
from kvtiers.types import ChunkBlocks, LoadPlan, RequestContext

__all__ = ["Hit", "RequestState"]


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The pinned chunks of a request's last lookup: they cover the tokens from ``start`` to ``end``."""

    plan: LoadPlan
    start: int
    end: int


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from ``add_request`` to ``finish_request``. Positions are in tokens.

    ``whole``: some tier wants all chunks of the request, also those that were hits.
    """

    context: RequestContext
    whole: bool
    limits: RequestLimits
    prompt_tokens: int
    keys: list[list[OffloadKey]]
    """By group: the keys of its full chunks, as far as their hashes were known."""

    tenant: str = ""
    """Whose chunks these are; in each key."""

    arrival: float = field(default_factory=time.time)
    hit: Hit | None = None
    loading: int | None = None
    """The job of its load in flight."""
    may_load: bool = True
    """False once a load has failed: it is computed then, until it starts over."""
    yielded: bool = False
    """It has yielded to another request that loads the same chunks."""

    loaded: range = field(default=range(0))
    """Chunks that came from the cache, so that they need not be stored."""
    unloaded: dict[int, range] = field(default_factory=dict)
    """By windowed group: the tokens that a load left out, since nothing reads them; their blocks hold no KV."""
    computed: int = 0
    offered: int = 0
    """Up to here its chunks have been dealt with by the stores."""
    refused: int = 0
    """There was no room for all chunks up to here; 0: there was."""
    described: list[int] = field(default_factory=list)
    """By group: how many of its first chunks have been described for KV events."""
    outdated: bool = False
    """Its blocks hold KV of weights that have been replaced."""

    def chunk_keys(self, request: EngineRequest, group: int, blocks_per_chunk: int) -> list[OffloadKey]:
        """Return the keys of all chunks of a group whose hashes are known now. Only new ones take time."""
        keys = self.keys[group]
        hashes = request.block_hashes[group]
        if (len(keys) + 1) * blocks_per_chunk <= len(hashes):
            last_blocks = hashes[(len(keys) + 1) * blocks_per_chunk - 1 :: blocks_per_chunk]
            ending = key_ending(group, self.tenant)
            keys += [block_hash + ending for block_hash in last_blocks]
        return keys

    def new_chunks(self, request: EngineRequest, groups: Sequence[Group], blocks_per_chunk: int) -> list[ChunkBlocks]:
        """Return descriptions, for KV events, of the chunks whose hashes have come since the last call."""
        self.described = self.described or [0] * len(groups)
        tokens: Sequence[int] = getattr(request, "token_ids", ())
        found = []
        for group in groups:
            keys, hashes = self.chunk_keys(request, group.index, blocks_per_chunk), request.block_hashes[group.index]
            for chunk in range(self.described[group.index], len(keys)):
                first, step = chunk * blocks_per_chunk, group.tokens_per_chunk
                found.append(
                    ChunkBlocks(
                        keys[chunk],
                        hashes[first : first + blocks_per_chunk],
                        hashes[first - 1] if first else None,
                        tokens[chunk * step : (chunk + 1) * step],
                    )
                )
            self.described[group.index] = len(keys)
        return found

    def start_over(self) -> None:
        """Reset its progress: its blocks were taken away. A load in flight has no receiver now."""
        self.loading = None
        self.may_load = True
        self.outdated = False
        self.unloaded.clear()
        self.store_again()

    def store_again(self) -> None:
        """Forget which of its chunks are stored, and described."""
        self.described = []
        self.loaded = range(0)
        self.offered = self.refused = 0
