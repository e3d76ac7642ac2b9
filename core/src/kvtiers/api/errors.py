"""The exceptions of kvtiers.

::

    KvtiersError
    ├── ConfigError        the user's configuration or command line is wrong; the text says where and what to do
    ├── TierPluginError    an installed plugin cannot be used (import, hook, API number)
    ├── StartError         an engine or a rank cannot start (region, layout, memory)
    ├── TierUnavailable    a tier's backend cannot be reached; counts towards its breaker
    ├── ChunkCorrupt       bytes came back that are not the ones stored for this key; a miss
    ├── StoreFull          the store has no room; the write is dropped, without retry or breaker
    │   └── WritesRefused  the same of a store that takes nothing for another reason, which the text says
    └── StoreContractError a store answered, or kept, what the contract does not allow: a bug of its plugin
"""

__all__ = [
    "ChunkCorrupt",
    "ConfigError",
    "KvtiersError",
    "StartError",
    "StoreContractError",
    "StoreFull",
    "TierPluginError",
    "TierUnavailable",
    "WritesRefused",
]


class KvtiersError(Exception):
    """The root of all errors that kvtiers raises on purpose. Its text is one clear line."""


class ConfigError(KvtiersError):
    """A configuration file or option is wrong. ``problems`` has one line for each thing to mend."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TierPluginError(KvtiersError):
    """An installed tier plugin cannot be used; the other plugins are not touched by it."""


class StartError(KvtiersError):
    """An engine, a rank or a region cannot start. Raised before start is complete, never after."""


class TierUnavailable(KvtiersError):  # noqa: N818 -- a state of the tier, named as in the design
    """A tier's backend cannot be used now."""


class ChunkCorrupt(KvtiersError):  # noqa: N818 -- a state of the chunk, named as in the design
    """A value's bytes are not those that were stored under its name."""


class StoreFull(KvtiersError):  # noqa: N818 -- not an error of the tier: the write is simply dropped
    """A store has no room for a value. Raised by ``ChunkStore.write``; drops this write and nothing else."""


class WritesRefused(StoreFull):
    """A store that has room takes no values now, and is read as before: its disk has become read-only, for example.

    Raised by ``ChunkStore.write``; drops this write and nothing else. Its text is the reason, which the log says.
    """


class StoreContractError(KvtiersError):
    """A store did what the contract does not allow: a bug of its plugin, never retried. ``method``: whose."""

    def __init__(self, store: object, method: str, text: str) -> None:
        self.method = method
        super().__init__(f"{type(store).__name__}.{method} {text}")
