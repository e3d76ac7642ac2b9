"""kvtiers in LMCache: ``l2_adapter`` for its multi-process server, ``connector`` for LMCache inside an engine.

LMCache names the classes by this module. They are imported when they are asked for: each mode loads its own half of
LMCache alone.
"""

from typing import Any

__all__ = ["KvtiersConnectorAdapter", "KvtiersL2Adapter", "KvtiersL2AdapterConfig"]


def __getattr__(name: str) -> Any:
    if name in {"KvtiersL2Adapter", "KvtiersL2AdapterConfig"}:
        from kvtiers_lmcache import l2_adapter

        return getattr(l2_adapter, name)
    if name == "KvtiersConnectorAdapter":
        from kvtiers_lmcache.connector import KvtiersConnectorAdapter

        return KvtiersConnectorAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
