"""The entry module of the tier type ``memory-async``: its options, and how to open it."""

from pydantic import Field

from kvtiers.api import SecondaryTierManager, TierConfig, TierContext, TierPlugin, hookimpl

__all__ = ["MemoryAsyncConfig", "kvtiers_tier"]


class MemoryAsyncConfig(TierConfig):
    """The options of a ``memory-async`` tier."""

    max_blocks: int = Field(ge=1, description="most chunks held; the least recently used go first")
    simulate_async: bool = Field(
        default=True, description="a thread moves the bytes and jobs finish in a later step; false: within the submit"
    )


def _open(config: MemoryAsyncConfig, context: TierContext) -> SecondaryTierManager:
    # Imported here, so that reading the options alone never loads a tier's libraries.
    from kvtiers_example.example_tier import ExampleSecondaryTier

    return ExampleSecondaryTier(context, max_blocks=config.max_blocks, simulate_async=config.simulate_async)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``memory-async``."""
    return TierPlugin(name="memory-async", kind="manager", config=MemoryAsyncConfig, open=_open, api_version=1)
