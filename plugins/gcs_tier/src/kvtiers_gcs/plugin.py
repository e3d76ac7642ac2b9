"""Entry point of the tier type ``gcs``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, TierContext, TierPlugin, hookimpl
from kvtiers_gcs.config import GcsConfig
from kvtiers_objectstore.requests import FIGURES

__all__ = ["kvtiers_tier"]


def _open(config: GcsConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, stays small.
    from kvtiers_gcs.store import GcsStore

    return GcsStore(config, read_only=context.read_only)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``gcs``."""
    return TierPlugin(
        name="gcs",
        kind="store",
        config=GcsConfig,
        open=_open,
        api_version=1,
        shareable=True,
        figures=FIGURES,
        when_full="have old objects deleted by a lifecycle rule or 'kvtiers store prune'",
    )
