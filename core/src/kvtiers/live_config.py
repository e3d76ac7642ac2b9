"""The live part of a running engine's config: the options that are marked live, and its tiers.

Everything here runs on a command's own thread: it reads the config's file, builds tiers and ends them. What the engine
itself uses changes in ``in_step`` alone, on the engine's thread.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from kvtiers.api import ConfigError, KvtiersError, TierConfig
from kvtiers.api.config import dump_resolved, load_resolved
from kvtiers.config import OffloadConfig, load_config
from kvtiers.config.options import may_change
from kvtiers.encryption.config import encryption_of
from kvtiers.host.messages import Limits
from kvtiers.plugins import load_tier
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tier_set import TierSet
from kvtiers.tiering.command_queue import CommandRefused
from kvtiers.tiering.engine_side import InStep
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager

__all__ = ["LiveEngine"]

_OPEN_SECONDS = 5.0  # for an attached tier to open, before the answer says that it has not yet
_END_SECONDS = 10.0
_LIVE_BUDGETS = ("store_reserve", "all_tiers", "one_tier")


class _Change(NamedTuple):
    """A tier's config from now on, and what its hosts are sent of it."""

    config: TierConfig
    limits: Limits


class LiveEngine:
    """The config and the tiers of a running engine. ``options``: makes the tiering options of a config."""

    def __init__(
        self,
        config: OffloadConfig,
        manager: TieringManager,
        tiers: TierSet,
        options: Callable[[OffloadConfig], TieringOptions],
    ) -> None:
        self._config = config
        self._tier_commands = manager.tier_commands
        self._set_bounds = manager.set_bounds
        self._add_event_tier = manager.add_event_tier
        self._tiers = tiers
        self._options = options
        self._configs = {tier.tier_name: tier for tier in config.secondary}
        self._next_index = len(config.secondary)
        self._one = threading.Lock()  # of commands that change what this class has
        self._reading = threading.Lock()  # of those, who reads a file, which may be on a file system that hangs

    def limit(self, name: str, changes: Mapping[str, Any], in_step: InStep) -> Mapping[str, Any]:
        """Give a tier other threads, or another rate limit."""
        with self._one_at_a_time():
            self._store_tier(name)
            change = self._change(self._changed(name, changes))
            return in_step(lambda: self._apply(change))

    def reload(self, path: str, in_step: InStep) -> Mapping[str, Any]:
        """Apply the live options of the config's file, or of the one given; return those, and a line for each other."""
        config = self._read(path)
        with self._one_at_a_time():
            found = list(self._differing(config))
            applied = [name for name, why in found if not why]
            refused = [f"{name}: {why}" for name, why in found if why]
            changes = [self._change(tier) for tier in self._live_tiers(config, applied)]
            bounds = self._bounds(config) if any(not name.startswith("secondary.") for name in applied) else None

            def apply() -> dict[str, Any]:
                for change in changes:
                    self._apply(change)
                if bounds is not None:
                    self._config = bounds
                    self._set_bounds(self._options(bounds))
                return {"applied": applied, "refused": refused, "config": config.source}

            return in_step(apply)

    def attach(self, name: str, path: str, in_step: InStep) -> Mapping[str, Any]:
        """Add the tier of this name in the config's file, at its place in the file's order."""
        file = self._read(path)
        with self._one_at_a_time():
            slot, place, config = self._built(name, file)
            was_added = False

            def add() -> dict[str, Any]:
                nonlocal was_added
                was_added = True
                self._tiers.add(slot)
                self._tier_commands.add(slot, place)
                self._add_event_tier(config)
                self._configs[name] = config
                return {}

            try:
                in_step(add)
            finally:
                if not was_added:
                    self._tiers.end(name, self._of_a_store(name, slot.tier), _END_SECONDS)
            error = self._of_a_store(name, slot.tier).wait_open(_OPEN_SECONDS)
            return {"tier": name, "place": place, "open": not error, "error": error}

    def detach(self, name: str, in_step: InStep) -> Mapping[str, Any]:
        """Switch a tier off, and close it when it has no job in flight any more."""
        with self._one_at_a_time():
            tier = self._store_tier(name)

            def remove() -> dict[str, Any] | None:
                if self._tier_commands.remove(name) is None:
                    return None
                self._tiers.take_out(name)
                del self._configs[name]
                return {"tier": name}

            done = in_step(remove)
            self._tiers.end(name, tier, _END_SECONDS)
            return done

    # -- inside

    def _one_at_a_time(self) -> "_OneAtATime":
        return _OneAtATime(self._one, "another command changes the engine's options or tiers")

    def _read(self, path: str) -> OffloadConfig:
        source = path or self._config.source
        if not source:
            raise CommandRefused("this engine's config was no file; give one: --config FILE")
        try:
            with _OneAtATime(self._reading, "another command still reads a config's file"):
                return load_config(source)
        except ConfigError as error:
            count = len(error.problems)
            more = f" (and {count - 1} more: 'kvtiers check {source}')" if count > 1 else ""
            logged = f"{source} is no config that can be used: {count} problem{'s' * (count > 1)}; nothing was changed"
            raise CommandRefused(f"{error.problems[0]}{more}; nothing was changed", logged) from None

    def _built(self, name: str, config: OffloadConfig) -> tuple[Any, int, TierConfig]:
        if name in self._configs:
            raise CommandRefused(f"the tier {name!r} is attached already")
        order = [tier.tier_name for tier in config.secondary]
        if name not in order:
            raise CommandRefused(
                f"there is no tier {name!r} in {config.source}, which has {', '.join(order) or 'none'}"
            )
        tier = config.secondary[order.index(name)]
        if load_tier(tier.type).kind == "manager":
            raise CommandRefused(f"{name}: a tier that moves its rows by itself is opened at the start only")
        if encryption_of(tier, config.encryption) != encryption_of(tier, self._config.encryption):
            raise CommandRefused(
                f"{name}: {config.source} has another 'encryption' than this engine, which reads it at its start only; "
                "restart the engine"
            )
        try:
            slot = self._tiers.build(tier, self._next_index)
        except KvtiersError as error:
            raise CommandRefused(f"{name}: {error}") from None
        self._next_index += 1
        before = set(order[: order.index(name)])
        return slot, sum(other in before for other in self._configs), tier

    def _store_tier(self, name: str) -> ChunkStoreTier:
        return self._of_a_store(name, self._tier_commands.slot(name).tier)

    @staticmethod
    def _of_a_store(name: str, tier: Any) -> ChunkStoreTier:
        if not isinstance(tier, ChunkStoreTier):
            raise CommandRefused(f"{name}: a tier that moves its rows by itself; core has no threads and hosts of it")
        return tier

    def _change(self, config: TierConfig) -> _Change:
        return _Change(config, self._tiers.limits_of(config))

    def _changed(self, name: str, changes: Mapping[str, Any]) -> TierConfig:
        old = self._configs[name]
        data = dump_resolved(old)
        for option, value in changes.items():
            data[option] = {**data[option], **value} if isinstance(value, Mapping) else value
        try:
            return load_resolved(type(old), data)
        except ValueError as error:
            reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
            raise CommandRefused(f"{name}: {', '.join(changes)}: {' '.join(str(reason).split())}") from None

    def _apply(self, change: _Change) -> dict[str, Any]:
        """Use a tier's changed config; engine's thread."""
        config = change.config
        name, limit = config.tier_name, config.rate_limit
        slot, tier = self._tier_commands.slot(name), self._store_tier(name)
        tier.set_limits(change.limits)
        tier.set_waits(config.exists_ttl, config.store_queue)
        slot.read_only_by_config = config.read_only
        self._configs[name] = config
        return {
            "tier": name,
            "threads": config.threads,
            "bytes_per_second": limit.bytes_per_second,
            "requests_per_second": limit.requests_per_second,
        }

    # -- inside: what a file changes

    def _differing(self, config: OffloadConfig) -> Iterator[tuple[str, str]]:
        """Yield each option that differs, and why it cannot be applied, "" if it can."""
        for name, old, new in _differences(self._config, config):
            if name == "budgets":
                for inner, _, _ in _differences(old, new):
                    yield f"budgets.{inner}", _why_not(type(old), inner)
            elif name != "secondary":
                yield name, _why_not(OffloadConfig, name)
        tiers = {tier.tier_name: tier for tier in config.secondary}
        for name in self._configs.keys() - tiers.keys():
            yield f"secondary.{name}", f"it is not in the file any more; 'kvtiers ctl detach {name}' closes it"
        for name, tier in tiers.items():
            if name in self._configs:
                yield from self._tier_differing(self._configs[name], tier)
            else:
                yield f"secondary.{name}", f"it is new; 'kvtiers ctl attach {name}' opens it"

    def _tier_differing(self, old: TierConfig, new: TierConfig) -> Iterator[tuple[str, str]]:
        name = old.tier_name
        again = f"it is read when the tier is opened; 'kvtiers ctl detach {name}', then attach"
        if type(old) is not type(new):
            yield f"secondary.{name}.type", again
            return
        opened_read_only = self._tier_commands.slot(name).options.read_only
        is_store = isinstance(self._tier_commands.slot(name).tier, ChunkStoreTier)
        for option, _, _ in _differences(old, new):
            can = is_store and may_change(TierConfig, option) and not (option == "read_only" and opened_read_only)
            yield f"secondary.{name}.{option}", "" if can else again

    def _live_tiers(self, config: OffloadConfig, applied: Sequence[str]) -> Iterator[TierConfig]:
        """Yield the config of each tier with live options that differ: with those, and the others as they were."""
        for tier in config.secondary:
            prefix = f"secondary.{tier.tier_name}."
            changed = [name.removeprefix(prefix) for name in applied if name.startswith(prefix)]
            if changed:
                old = self._configs[tier.tier_name]
                yield old.model_copy(update={option: getattr(tier, option) for option in changed})

    def _bounds(self, config: OffloadConfig) -> OffloadConfig:
        budgets = self._config.budgets.model_copy(
            update={name: getattr(config.budgets, name) for name in _LIVE_BUDGETS}
        )
        waits = {"lookup_wait": config.lookup_wait, "load_wait": config.load_wait}
        return self._config.model_copy(update={**waits, "budgets": budgets})


class _OneAtATime:
    """A lock that is refused, not waited for."""

    def __init__(self, lock: threading.Lock, otherwise: str) -> None:
        self._lock, self._otherwise = lock, otherwise

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise CommandRefused(f"{self._otherwise}; try again")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _why_not(model: type[BaseModel], option: str) -> str:
    return "" if may_change(model, option) else "it is read at the start only; restart the engine"


def _differences(old: BaseModel, new: BaseModel) -> Iterator[tuple[str, Any, Any]]:
    for name in type(old).model_fields:
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            yield name, was, now
