"""What the manager remembers of one request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.base import RequestContext
from kvtiers.tiering.tiers import TierSlot

__all__ = ["RequestState"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between ``on_new_request`` and the tiers' ``on_request_finished``.

    ``given_up``: chunks that are a MISS for this request, for good: it waited too long for them, or their load failed.
    The two clocks start with the first answer that makes the request wait and are never wound again.
    """

    context: RequestContext
    slots: Sequence[TierSlot]
    """The tiers that this request may load from, in order."""
    whole: tuple[TierSlot, ...] = ()
    """The tiers that want all chunks of this request."""
    given_up: set[OffloadKey] = field(default_factory=set)
    lookup_until: float | None = None
    load_until: float | None = None
    shortest_tokens: int | None = None
    """The shortest run of this step, in tokens; None: not asked in this step."""
    counted: int = 0
    """Chunks already counted as looked up."""
    open_stores: int = 0
    parked: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys that a tier of ``whole`` wants but that are not readable yet."""
    finished: bool = False
