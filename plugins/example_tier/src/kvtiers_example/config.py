"""Options of the tier types ``memory`` and ``memory-async``."""

from pydantic import Field

from kvtiers.api import Quotas, Size, TierConfig

__all__ = ["MemoryAsyncConfig", "MemoryConfig"]


class MemoryConfig(TierConfig):
    """The options of a ``memory`` tier."""

    capacity: Size = Field(gt=0, description="most bytes of values held; the least recently used go first")


class MemoryAsyncConfig(TierConfig):
    """The options of a ``memory-async`` tier."""

    max_blocks: int = Field(ge=1, description="most chunks held; the least recently used go first")
    quotas: Quotas = Field(
        default_factory=dict,
        description="by tenant, the most bytes of its chunks here, whose oldest go first; '*': of each other tenant",
    )
    simulate_async: bool = Field(
        default=True, description="a thread moves the bytes and jobs finish in a later step; false: within the submit"
    )
