"""Entry point of the tier type ``frozen``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, ConfigError, TierContext, TierPlugin, hookimpl
from kvtiers_frozen.config import MemoryConfig

__all__ = ["kvtiers_tier"]


def _open(config: MemoryConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, never loads a store's libraries.
    from kvtiers_frozen.memory_store import MemoryStore

    if config.capacity < context.value_bytes:
        raise ConfigError(
            f"{context.tier_name}: capacity {config.capacity} bytes has no room for one value of "
            f"{context.value_bytes} bytes; set it to several values at least"
        )
    return MemoryStore(config.capacity)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``frozen``."""
    return TierPlugin(
        name="frozen",
        kind="store",
        config=MemoryConfig,
        open=_open,
        api_version=1,
        figures={"held_bytes": "Bytes of the values held.", "held_values": "Values held."},
        when_full="raise 'capacity'",
    )
