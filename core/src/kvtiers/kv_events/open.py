"""The way to a publisher: from a config and a layout, where the config wants one.

Nothing of ZMQ is imported before that: it is an extra, and an engine without events does without.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig
from kvtiers.kv_events.naming import GroupFacts

if TYPE_CHECKING:
    from kvtiers.kv_events.publisher import EventPublisher

__all__ = ["event_publisher", "missing_libraries"]


def missing_libraries() -> str:
    """Return what is not installed that KV events take, and what to do, in one line; "" if nothing is missing."""
    return "" if find_spec("zmq") else "events: needs pyzmq: pip install 'kvtiers[events]'"


def event_publisher(config: OffloadConfig, groups: Sequence[GroupFacts], rank: int = 0) -> "EventPublisher | None":
    """Return the publisher that the config wants, None if it wants none; ConfigError without its libraries."""
    if config.events is None:
        return None
    if line := missing_libraries():
        raise ConfigError(line)
    from kvtiers.kv_events.publisher import EventPublisher

    return EventPublisher(config.events, groups, config.secondary, rank)
