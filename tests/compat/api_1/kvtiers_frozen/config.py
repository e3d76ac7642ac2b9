"""Options of the tier types ``frozen`` and ``frozen-async``."""

from pydantic import Field

from kvtiers.api import Size, TierConfig

__all__ = ["MemoryAsyncConfig", "MemoryConfig"]


class MemoryConfig(TierConfig):
    """The options of a ``frozen`` tier."""

    capacity: Size = Field(gt=0, description="most bytes of values held; the least recently used go first")


class MemoryAsyncConfig(TierConfig):
    """The options of a ``frozen-async`` tier."""

    max_blocks: int = Field(ge=1, description="most chunks held; the least recently used go first")
    simulate_async: bool = Field(
        default=True, description="a thread moves the bytes and jobs finish in a later step; false: within the submit"
    )
