"""Entry point of the tier type ``azure``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, TierContext, TierPlugin, hookimpl
from kvtiers_azure.config import AzureConfig
from kvtiers_objectstore.requests import FIGURES

__all__ = ["kvtiers_tier"]


def _open(config: AzureConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, stays small.
    from kvtiers_azure.store import AzureStore

    return AzureStore(config, read_only=context.read_only)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``azure``."""
    return TierPlugin(
        name="azure",
        kind="store",
        config=AzureConfig,
        open=_open,
        api_version=1,
        shareable=True,
        figures=FIGURES,
        when_full="have old blobs deleted by a lifecycle rule or 'kvtiers store prune'",
    )
