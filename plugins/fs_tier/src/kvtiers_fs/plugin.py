"""Entry point of the tier type ``fs``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, ConfigError, TierContext, TierPlugin, hookimpl
from kvtiers_fs.config import FEWEST_SEGMENTS, FsConfig

__all__ = ["FIGURES", "kvtiers_tier"]

FIGURES = {
    "bytes": "Bytes of the values in the directory.",
    "values": "Values in the directory.",
    "free_bytes": "Bytes that the file system has free.",
    "evicted_values": "Values that were deleted for room.",
    "evicted_bytes": "Bytes of these.",
    "expired_values": "Values that were deleted for their age.",
    "reclaimed_files": "Files of killed writers that were deleted.",
    "skipped": "Files and folders that could not be listed or removed.",
    "dropped_values": "Values that found no room, or were not taken.",
    "segments": "Segment files, of the layout 'slab'.",
    "kept_values": "Values that were in use and were copied instead of evicted, in the layout 'slab'.",
    "direct": "1: values are read and written past the page cache.",
}


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
    return TierPlugin(
        name="fs",
        kind="store",
        config=FsConfig,
        open=_open,
        api_version=1,
        shareable=True,
        writes_locally=True,
        figures=FIGURES,
        when_full="make room on the disk, or lower 'capacity': then it evicts before the disk is full",
        shared_figures=frozenset({"bytes", "values", "free_bytes", "segments", "skipped", "direct"}),
    )
