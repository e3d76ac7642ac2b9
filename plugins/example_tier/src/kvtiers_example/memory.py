"""The entry module of the tier type ``memory``: its options, and how to open it."""

from types import MappingProxyType

from pydantic import Field

from kvtiers.api import ChunkStore, ConfigError, Size, TierConfig, TierContext, TierPlugin, hookimpl

__all__ = ["MemoryConfig", "kvtiers_tier"]


class MemoryConfig(TierConfig):
    """The options of a ``memory`` tier."""

    figures = MappingProxyType(
        {
            "held_bytes": "Bytes of the values held.",
            "held_values": "Values held.",
        }
    )
    when_full = "raise 'capacity'"

    capacity: Size = Field(gt=0, description="most bytes of values held; the least recently used go first")


def _open(config: MemoryConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, never loads a store's libraries.
    from kvtiers_example.memory_store import MemoryStore

    if config.capacity < context.value_bytes:
        raise ConfigError(
            f"{context.tier_name}: capacity {config.capacity} bytes has no room for one value of "
            f"{context.value_bytes} bytes; set it to several values at least"
        )
    return MemoryStore(config.capacity)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``memory``."""
    return TierPlugin(name="memory", kind="store", config=MemoryConfig, open=_open, api_version=1)
