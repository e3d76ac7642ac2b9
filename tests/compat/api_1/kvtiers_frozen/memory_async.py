"""Entry point of the tier type ``frozen-async``: its plugin record, and how to open a tier manager."""

from kvtiers.api import SecondaryTierManager, TierContext, TierPlugin, hookimpl
from kvtiers_frozen.config import MemoryAsyncConfig

__all__ = ["kvtiers_tier"]


def _open(config: MemoryAsyncConfig, context: TierContext) -> SecondaryTierManager:
    # Imported here, so that reading the options alone never loads a tier's libraries.
    from kvtiers_frozen.example_tier import ExampleSecondaryTier

    return ExampleSecondaryTier(context, max_blocks=config.max_blocks, simulate_async=config.simulate_async)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``frozen-async``."""
    return TierPlugin(name="frozen-async", kind="manager", config=MemoryAsyncConfig, open=_open, api_version=1)
