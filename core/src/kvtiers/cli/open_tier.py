"""A tier opened without an engine, over an anonymous region."""

import mmap

from kvtiers.api import ChunkStore, SecondaryTierManager, TierConfig, TierContext
from kvtiers.plugins import load_tier, open_plugin

__all__ = ["anonymous_region", "open_tier"]


def anonymous_region(rows: int, value_bytes: int) -> memoryview:
    """Return memory for this many rows. Only touched pages use memory."""
    return memoryview(mmap.mmap(-1, rows * value_bytes))


def open_tier(
    config: TierConfig, *, namespace: str, value_bytes: int, region: memoryview
) -> ChunkStore | SecondaryTierManager:
    """Open the tier over this region, whose rows are ``value_bytes`` apart. Raises any error of its plugin."""
    plugin = load_tier(config.type)
    context = TierContext(
        tier_name=config.tier_name,
        value_bytes=value_bytes,
        namespace=namespace,
        read_only=config.read_only,
        region=region,
        row_stride=value_bytes,
    )
    tier: ChunkStore | SecondaryTierManager = open_plugin(
        plugin, config, context, ChunkStore if plugin.kind == "store" else SecondaryTierManager
    )
    return tier
