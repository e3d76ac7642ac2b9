"""Entry point of the tier type ``gcs``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, TierContext, TierPlugin, hookimpl
from kvtiers_gcs.config import GcsConfig

__all__ = ["FIGURES", "kvtiers_tier"]

FIGURES = {
    "get_requests": "Requests of the kind GET.",
    "head_requests": "Requests of the kind HEAD.",
    "put_requests": "Requests of the kind PUT.",
    "post_requests": "Requests of the kind POST.",
    "list_requests": "Requests of the kind LIST.",
    "delete_requests": "Requests of the kind DELETE.",
    "failed_requests": "Requests that failed.",
    "throttled_requests": "Requests that the service turned away for their rate.",
    "read_bytes": "Bytes that were read.",
    "written_bytes": "Bytes that were written.",
    "request_dollars": "US dollars for these requests, by put_price and get_price.",
}


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
