"""Entry point of the tier type ``fs``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, ConfigError, TierContext, TierPlugin, hookimpl
from kvtiers_fs.config import FsConfig

__all__ = ["kvtiers_tier"]


def _open(config: FsConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, stays small.
    from kvtiers_fs.store import FsStore

    if config.capacity < context.value_bytes:
        raise ConfigError(
            f"{context.tier_name}: capacity {config.capacity} bytes has no room for one value of "
            f"{context.value_bytes} bytes; set it to many values"
        )
    return FsStore(config, read_only=context.read_only)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``fs``."""
    return TierPlugin(name="fs", kind="store", config=FsConfig, open=_open, api_version=1)
