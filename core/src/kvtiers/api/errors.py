"""The exceptions of kvtiers.

::

    KvtiersError
    ├── ConfigError        the user's configuration or command line is wrong; the text says where and what to do
    ├── TierPluginError    an installed plugin cannot be used (import, hook, API number)
    ├── StartError         an engine or a rank cannot start (region, layout, memory)
    ├── TierUnavailable    a tier's backend cannot be reached; counts towards its breaker
    ├── ChunkCorrupt       bytes came back that are not the ones stored for this key; a miss
    ├── NotKept            the store does not keep a value; the write is dropped, without retry or breaker
    └── StoreContractError a store answered, or kept, what the contract does not allow: a bug of its plugin
"""

__all__ = [
    "ChunkCorrupt",
    "ConfigError",
    "KvtiersError",
    "NotKept",
    "StartError",
    "StoreContractError",
    "TierPluginError",
    "TierUnavailable",
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


class NotKept(KvtiersError):  # noqa: N818 -- not an error of the tier: the write is simply dropped
    """A store does not keep a value: raised by ``ChunkStore.write``, an answer of ``SupportsBatch.write_many``.

    Drops this write and nothing else. ``reason``: one line, which the log has. ``full``: there is no room for the
    value, for now or at all (``dropped_full``); False: it is not taken for another reason, as by a disk that has become
    read-only or a server of several that is down (``dropped_refused``).
    """

    def __init__(self, reason: str, *, full: bool = True) -> None:
        self.reason = reason
        self.full = full
        super().__init__(reason)


class StoreContractError(KvtiersError):
    """A store did what the contract does not allow: a bug of its plugin, never retried. ``method``: whose."""

    def __init__(self, store: object, method: str, text: str) -> None:
        self.method = method
        super().__init__(f"{type(store).__name__}.{method} {text}")
