"""The value types of the engine's side, shared by an engine, its scheduler, its workers and the tiering manager."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers.api import OffloadKey
from kvtiers.api.units import parse_duration

__all__ = [
    "NO_HINTS",
    "NO_PARAMS",
    "NO_RETENTION",
    "TENANT_FIELD",
    "BlockSpec",
    "ChunkBlocks",
    "ChunkIds",
    "LoadPlan",
    "OffloadEvent",
    "OffloadPolicy",
    "PromptGroup",
    "Reach",
    "RequestContext",
    "RequestHints",
    "Retention",
    "StorePlan",
    "TransferResult",
    "request_hints",
    "retention_of",
]

ChunkIds: TypeAlias = npt.NDArray[np.int32]
"""Row indexes of the primary region, one a chunk."""


NO_PARAMS: Mapping[str, object] = MappingProxyType({})
TENANT_FIELD = "kvtiers_tenant"
"""The parameter of a request that names its tenant."""
_MOST_NAMES = _LONGEST_NAME = 256
_LONGEST_TURN = 1e9
_LONGEST_TTL, _USUAL_TTL = 86_400.0, 600.0
_MOST_TOKENS = 1 << 40


class OffloadPolicy(Enum):
    """The chunks of a request that an engine offers to ``prepare_store``."""

    CHUNK_LEVEL = "chunk"
    """Newly computed chunks only."""
    REQUEST_LEVEL = "request"
    """All chunks, prefix hits included: some tier wants whole requests."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request, as the engine names it; the same object in all calls for that request.

    ``params``: the request's free-form transfer parameters. ``kv_load_tiers`` in them, a list of tier names in any
    case, limits which secondary tiers this request may load from; an empty list allows none. What is no name is
    skipped; a list without any name, or anything else than a list, is no limit. No more than 256 entries are read: a
    client writes them, and the engine waits. ``kvtiers_tenant`` names its tenant, which is in its keys then.
    ``session``, ``session_ends`` and ``expects_turn_in`` are hints (``RequestHints``), and so are ``priority`` and
    ``ttl`` (``Retention``). ``traceparent``: its trace context, as W3C writes it in a header; for ``tracing``.
    """

    request_id: str
    params: Mapping[str, object] = field(default_factory=dict)
    traceparent: str = ""

    def may_load_from(self, tier_name: str) -> bool:
        """Return whether this request may load from this secondary tier."""
        allowed = self.params.get("kv_load_tiers")
        if not isinstance(allowed, list):
            return True
        names = [name.lower() for name in allowed[:_MOST_NAMES] if isinstance(name, str) and len(name) <= _LONGEST_NAME]
        return tier_name.lower() in names or (bool(allowed) and not names)


class RequestHints(NamedTuple):
    """What a client says of a request that only it can say, for the eviction policy: among its parameters.

    ``session``: the id of its conversation. ``session_ends``: no turn follows this one. ``expects_turn_in``: seconds
    until the next one: few while a tool runs, more while a user thinks. ``output_tokens``: the length of the answer,
    once it is known; an engine fills it in when the request ends.
    """

    session: str = ""
    session_ends: bool = False
    expects_turn_in: float | None = None
    output_tokens: int = 0


NO_HINTS = RequestHints()


def request_hints(params: Mapping[str, object]) -> RequestHints:
    """Return the hints among a request's parameters; what is not of the right kind or size counts as absent.

    A client writes them. A policy keeps a session's id with each run, and JSON has numbers that no float can hold.
    """
    session, ends, turn = params.get("session"), params.get("session_ends"), params.get("expects_turn_in")
    output = params.get("output_tokens")
    is_number = isinstance(turn, int | float) and not isinstance(turn, bool) and 0 <= turn <= _LONGEST_TURN
    is_count = isinstance(output, int) and not isinstance(output, bool) and 0 < output <= _MOST_TOKENS
    found = RequestHints(
        session if isinstance(session, str) and len(session) <= _LONGEST_NAME else "",
        ends is True,
        float(turn) if is_number else None,  # type: ignore[arg-type]  # a number
        output if is_count else 0,  # type: ignore[arg-type]  # an int
    )
    return found if found != NO_HINTS else NO_HINTS


class Retention(NamedTuple):
    """How long a client wants the chunks of a prompt to stay in the primary: a hint, never a lock.

    ``priority``: "high", "normal", or "low": what such a request brings leaves first. ``ttl``: seconds for which the
    chunks leave later than others; at most a day. 0: no hint; with high priority alone ten minutes, with low none.
    """

    priority: str = "normal"
    ttl: float = 0.0


NO_RETENTION = Retention()


def retention_of(params: Mapping[str, object]) -> Retention:
    """Return the retention among a request's parameters; what is not of the right kind or size counts as absent.

    ``priority``: one of three words. ``ttl``: seconds, or a text with a unit, such as "1h".
    """
    named, seconds = params.get("priority"), _ttl_of(params.get("ttl"))
    priority = named if isinstance(named, str) and named in {"high", "low"} else "normal"
    if priority == "low":
        seconds = 0.0
    elif seconds is None:
        seconds = _USUAL_TTL if priority == "high" else 0.0
    found = Retention(priority, seconds)
    return found if found != NO_RETENTION else NO_RETENTION


def _ttl_of(value: object) -> float | None:
    """Return a TTL in seconds; None if this is none."""
    if isinstance(value, str):
        try:
            value = parse_duration(value) if len(value) <= _LONGEST_NAME else None
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(min(_LONGEST_TTL, value))


class PromptGroup(NamedTuple):
    """What a prompt has in one KV group. ``keys``: of its chunks, the prompt's first one first, as far as it is hashed.

    ``window``: how many tokens before a position are read there, 1 for a state; 0: all of them. ``ahead``: how many
    chunks behind the end of a load have to be present, too, though they are not loaded.
    """

    keys: Sequence[OffloadKey]
    window: int = 0
    ahead: int = 0


class Reach(NamedTuple):
    """How much of a prompt can be loaded, in tokens behind those that the engine has.

    ``ready``: of these all chunks are readable. ``pending``: tokens with chunks that are on their way into the primary.
    ``unresolved``: more may be found. Ask again in the next step until none is pending and it is not unresolved.
    ``begins``: the first chunk is readable, of the first KV group: a load may begin before all have come.
    """

    ready: int
    pending: int
    unresolved: bool
    begins: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens there are, ready or not."""
        return self.ready + self.pending

    def in_chunks(self, tokens: int) -> "Reach":
        """Return the same in chunks of so many tokens: that is how many keys of a group each number is about."""
        return self._replace(ready=self.ready // tokens, pending=self.pending // tokens)

    @property
    def waits(self) -> bool:
        """Whether to ask again in the next step."""
        return self.pending > 0 or self.unresolved


@dataclass(frozen=True, slots=True, eq=False)
class StorePlan:
    """Rows leased for copies from the GPU; ends with exactly one ``complete_store``.

    ``keys``: those of the offered keys that are to be stored, in offered order; ``chunk_ids[i]`` is the row of
    ``keys[i]``. Nothing to store: both empty, and the plan is still completed.
    """

    plan_id: int
    keys: Sequence[OffloadKey]
    chunk_ids: ChunkIds
    evicted: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """Rows pinned for copies to the GPU, until exactly one ``complete_load``. Co-indexed like StorePlan."""

    plan_id: int
    keys: Sequence[OffloadKey]
    chunk_ids: ChunkIds


@dataclass(frozen=True, slots=True, eq=False)
class BlockSpec:
    """GPU blocks of one transfer, group by group.

    ``block_ids``: the physical block ids of all groups, concatenated. ``group_sizes[g]``: how many of them belong to
    group g (zero is fine; they sum to ``len(block_ids)``). ``block_indices[g]``: the index, within its request, of
    group g's first block; modulo ``blocks_per_chunk`` it says how many blocks of the first chunk to skip.
    """

    block_ids: npt.NDArray[np.int64]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The one result of a worker's GPU transfer: bytes moved, seconds taken, and the reason if it failed."""

    job_id: int
    success: bool
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""


class ChunkBlocks(NamedTuple):
    """What one chunk covers, for KV events: what a router needs beyond the chunk's key.

    ``hashes``: of each of its blocks in order, as the engine itself names them to routers. ``parent``: the hash of the
    block before them, None at the head of a prompt. ``tokens``: those of all its blocks; empty: not to be published.
    ``adapter``: the LoRA adapter's name. ``extra_keys``: by block, what enters its hash besides tokens, in vLLM's form.
    """

    key: OffloadKey
    hashes: Sequence[bytes]
    parent: bytes | None = None
    tokens: Sequence[int] = ()
    adapter: str | None = None
    extra_keys: Sequence[tuple[object, ...] | None] | None = None


@dataclass(frozen=True, slots=True)
class OffloadEvent:
    """A change of what is resident: chunks that were stored in, or removed from, the primary or a tier.

    ``tier`` is the secondary tier's name, or "" for the primary. Stored in a tier is each chunk that was sent down
    and that it has now, also one that it had before. Removed from a tier is each chunk that a load did not get from
    it. What a tier evicts by itself is no event.
    """

    keys: Sequence[OffloadKey]
    removed: bool
    tier: str = ""
