"""kvtiers in SGLang: the tiers as a storage backend of HiCache. ``plugin`` is loaded by SGLang, ``backend`` by HiCache.

SGLang names the class as ``kvtiers_sglang`` and ``KvtiersHiCache``. It is imported when it is asked for: SGLang loads
the plugin in each of its processes, of which the schedulers alone have a cache.
"""

from typing import Any

__all__ = ["KvtiersHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KvtiersHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtiers_sglang.backend import KvtiersHiCache

    return KvtiersHiCache
