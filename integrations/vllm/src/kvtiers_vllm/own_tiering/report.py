"""The answer of one tier to ``kvtiers status``."""

from typing import Any

from kvtiers.metrics import TierMetrics
from kvtiers.status import StatusSocket, Troubles, answer_status
from kvtiers_vllm.own_tiering.build import OpenedTier

__all__ = ["open_status"]


def open_status(opened: OpenedTier, troubles: Troubles, engine: str) -> StatusSocket:
    """Answer questions about a tier from now on."""
    return answer_status(
        engine,
        opened.model,
        troubles,
        lambda: {opened.name: _figures_of(opened)},
        namespace=opened.namespace,
        fingerprint=lambda: opened.fingerprint,
    )


def _figures_of(opened: OpenedTier) -> dict[str, Any]:
    """Return a tier's figures as of now, each as it is when it is read: the engine's thread counts on meanwhile."""
    driver = opened.driver
    counted = {name: getattr(driver.metrics, name) for name in TierMetrics.__slots__}
    return counted | {
        "off": opened.off,
        "shared": opened.shared,
        "hits": driver.metrics.loaded_chunks,
        "tokens": driver.loaded_tokens,
        "left_out_requests": driver.left_out_requests,
        "own": driver.own_stats(),
    }
