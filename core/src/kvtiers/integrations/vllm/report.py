"""What one tier of this engine says to ``kvtiers status``."""

import logging
import os
from typing import Any

from kvtiers.integrations.status import LastTrouble, StatusSocket
from kvtiers.integrations.vllm.opening import OpenedTier

__all__ = ["open_status", "status_of"]


def open_status(opened: OpenedTier, engine: str) -> StatusSocket:
    """Answer questions about a tier from now on, and listen to what the log says of it."""
    trouble = LastTrouble(opened.name)
    logging.getLogger("kvtiers").addHandler(trouble)
    return StatusSocket(lambda: status_of(opened, engine, trouble.text))


def status_of(opened: OpenedTier, engine: str, trouble: str) -> dict[str, Any]:
    """Return a tier's figures as of now. Reads numbers that the engine's thread counts; a step is never torn apart."""
    driver = opened.driver
    metrics, own = driver.metrics, driver.own_stats()
    tier = {
        "off": opened.off,
        "shared": opened.shared,
        "open": bool(own.get("open", 0)),
        "breaker_state": int(own.get("breaker_state", 0)),
        "hits": metrics.loaded_chunks,
        "tokens": driver.loaded_tokens,
        "saved_seconds": driver.saved_seconds,
        "load_seconds": metrics.load_seconds,
        "loaded_bytes": metrics.loaded_bytes,
        "stored_chunks": metrics.stored_chunks,
        "stored_bytes": metrics.stored_bytes,
        "unread_bytes": driver.unread_chunks * opened.value_bytes,
        "queue": metrics.loading_chunks + own.get("storing_chunks", 0),
        "seal_failures": own.get("seal_failures", 0),
        "wait_expired": metrics.wait_expired,
        "recomputed_cheaper": metrics.recomputed_cheaper,
        "left_out_requests": driver.left_out_requests,
        "trouble": trouble,
    }
    return {"engine": engine, "pid": os.getpid(), "model": opened.model, "tiers": {opened.name: tier}}
