"""Entry point of the tier type ``fs``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, ConfigError, TierContext, TierPlugin, hookimpl
from kvtiers_fs.config import FEWEST_SEGMENTS, FsConfig

__all__ = ["kvtiers_tier"]


def _open(config: FsConfig, context: TierContext) -> ChunkStore:
    if config.capacity < context.value_bytes:
        raise ConfigError(
            f"{context.tier_name}: capacity {config.capacity} bytes has no room for one value of "
            f"{context.value_bytes} bytes; set it to many values"
        )
    if config.layout == "slab" and config.capacity < FEWEST_SEGMENTS * context.value_bytes:
        raise ConfigError(
            f"{context.tier_name}: capacity {config.capacity} bytes has no room for {FEWEST_SEGMENTS} segments with "
            f"one value of {context.value_bytes} bytes each; set it to many values, or 'layout: files'"
        )
    # Imported here, so that the engine's process, which wants the options alone, stays small.
    if config.layout == "slab":
        from kvtiers_fs.slab.store import SlabStore

        return SlabStore(config, context.value_bytes, read_only=context.read_only)
    from kvtiers_fs.store import FsStore

    return FsStore(config, read_only=context.read_only)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``fs``."""
    return TierPlugin(name="fs", kind="store", config=FsConfig, open=_open, api_version=1)
