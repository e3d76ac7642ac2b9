"""Entry point of the tier type ``mooncake``: its plugin record, and how to open a store."""

from kvtiers.api import ChunkStore, TierContext, TierPlugin, hookimpl
from kvtiers_mooncake.config import FIGURES, MooncakeConfig

__all__ = ["kvtiers_tier"]


def _open(config: MooncakeConfig, context: TierContext) -> ChunkStore:
    # Imported here, so that the engine's process, which wants the options alone, never loads the client library.
    from kvtiers_mooncake.store import MooncakeStore

    return MooncakeStore(config, region=context.region, read_only=context.read_only)


@hookimpl
def kvtiers_tier() -> TierPlugin:
    """Return the tier type ``mooncake``."""
    return TierPlugin(
        name="mooncake",
        kind="store",
        config=MooncakeConfig,
        open=_open,
        api_version=1,
        shareable=True,
        figures=FIGURES,
        when_full=(
            "contribute more memory ('segment'), and see that each machine of the pool can be reached from all others; "
            "the master evicts what was not read lately"
        ),
    )
