"""Weights that change while a server runs: a hook before each of SGLang's updates, and the record that one has come.

The identity of a server's pages is that of the weights that it has started with. After an update nothing is stored or
found in this process any more: by no backend that is open, and none that is attached later. SGLang applies plugins'
hooks in each of its processes, of which the schedulers alone have a cache; so nothing but its registry is imported
here, and that late.
"""

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["UPDATER", "UPDATES", "begin_update", "register_hooks", "unhooked_updates", "update_begun"]

_log = logging.getLogger("kvtiers.sglang")
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_begun = ""
_before_updates: list[Callable[..., None]] = []
"""The hooks that this process has registered."""


def register_hooks() -> None:
    """Have ``begin_update`` called before each of the updates, once SGLang applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for update in UPDATES:
        hook = _before(update)
        _before_updates.append(hook)
        HookRegistry.register(f"{UPDATER}.{update}", hook, HookType.BEFORE)


def unhooked_updates() -> list[str]:
    """Return the updates that would go unnoticed in this process: SGLang has applied no hook to them."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks, applied = HookRegistry._hooks, HookRegistry._patched  # noqa: SLF001 -- nothing public says it
    ours = [target for target, entries in hooks.items() if any(entry[1] in _before_updates for entry in entries)]
    return [update for update in UPDATES if f"{UPDATER}.{update}" not in applied.intersection(ours)]


def begin_update(name: str) -> None:
    """Record that the weights are about to change: the tiers are of no use to this process from now on."""
    global _begun  # noqa: PLW0603 -- of this process, as the weights are
    if not _begun:
        _begun = name
        _log.warning("%s: the weights change; no page is stored or found until the server is started again", name)


def update_begun() -> str:
    """Return the name of the first update that has begun in this process, "" if none has."""
    return _begun


def _before(name: str) -> Callable[..., None]:
    def before(*_: Any, **__: Any) -> None:
        begin_update(name)

    return before
