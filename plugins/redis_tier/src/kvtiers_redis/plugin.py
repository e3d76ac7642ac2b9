"""Entry point of the tier type ``redis``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, TierContext, TierPlugin, hookimpl
from kvtiers_redis.config import RedisConfig

__all__ = ["FIGURES", "kvtiers_tier"]

FIGURES = {
    "connects": "Connections that were opened.",
    "dropped_values": "Values that a server did not take.",
    "redirected_requests": "Requests that another server of a cluster had to answer.",
    "unreachable_values": "Values whose server could not be asked.",
}


def _open(config: RedisConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, never loads redis-py.
    from kvtiers_redis.store import RedisStore

    return RedisStore(config, read_only=context.read_only)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``redis``."""
    return TierPlugin(
        name="redis",
        kind="store",
        config=RedisConfig,
        open=_open,
        api_version=1,
        shareable=True,
        figures=FIGURES,
        when_full="raise the server's maxmemory, or set its maxmemory-policy to allkeys-lru: then it evicts",
    )
