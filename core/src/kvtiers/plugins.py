"""The plugin loader: finds, imports and checks the one plugin that a config names.

Plugins are entry points: tiers in the group ``kvtiers.tiers``, eviction policies in ``kvtiers.eviction``, admission
policies in ``kvtiers.admission``, shadow caches in ``kvtiers.shadows``, commands in ``kvtiers.commands``. Only the one
that is asked for is imported, so that a broken plugin never stops another.
"""

import contextlib
import difflib
import functools
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pluggy

from kvtiers._failures import error_text, plugin_boundary
from kvtiers.api import (
    API_VERSION,
    ConfigError,
    SecondaryTierManager,
    SupportsQuotas,
    TierConfig,
    TierContext,
    TierPlugin,
    TierPluginError,
)
from kvtiers.api.command import COMMAND_API_VERSION, COMMAND_GROUP, CommandPlugin
from kvtiers.api.config import quota_of
from kvtiers.api.declared import class_problems, option_problems
from kvtiers.api.plugin import ENTRY_POINT_GROUP, OLD_API_VERSIONS, TierHookSpec

__all__ = [
    "ADMISSION_GROUP",
    "EVICTION_GROUP",
    "SHADOW_GROUP",
    "comes_with",
    "did_you_mean",
    "distribution_of",
    "installed_names",
    "installed_tiers",
    "is_remote",
    "load_class",
    "load_command",
    "load_subclass",
    "load_tier",
    "open_plugin",
    "shown_name",
]

EVICTION_GROUP = "kvtiers.eviction"
ADMISSION_GROUP = "kvtiers.admission"
SHADOW_GROUP = "kvtiers.shadows"

_GROUPS = "kvtiers."
_HOOK = "kvtiers_tier"
_log = logging.getLogger("kvtiers.plugins")
_OWN_TIER = re.compile(r"(kvtiers-([\w-]+))\b.*extra == ['\"]tiers['\"]")
_T = TypeVar("_T")
_NAME = re.compile(r"\w{1,40}(-[A-Za-z0-9_]{1,20}){0,3}", re.ASCII)
_POLICIES = {EVICTION_GROUP: "turn-hazard", ADMISSION_GROUP: "expected-reuse", SHADOW_GROUP: "what-if"}
_warned: set[str] = set()


def installed_tiers() -> list[EntryPoint]:
    """Return the entry points of all installed tier types by name, two of one name included. Imports none of them."""
    return _installed(ENTRY_POINT_GROUP)


def installed_names(group: str) -> list[str]:
    """Return the names of the entry points of this group, in order, each once."""
    return sorted({entry.name for entry in _installed(group)})


def distribution_of(entry: EntryPoint) -> str:
    """Return the name and version of the distribution that declares this entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the known word that is closest, or nothing if none is close."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def shown_name(name: str) -> str:
    """Return a name that is not known, as a message quotes it: its length alone, if it is no name.

    Else whatever stands where a name was expected would be shown, such as the lines of a file that was not meant.
    """
    return repr(name) if _NAME.fullmatch(name) else f"({len(name)} characters that are no name, not shown)"


def open_plugin(plugin: TierPlugin, config: TierConfig, context: TierContext, kind: type[Any]) -> Any:
    """Open a plugin's store or tier, which gets its quotas; TierPluginError if it is not a ``kind`` of the contract."""
    opened = plugin.open(config, context)
    if not isinstance(opened, kind):
        raise TierPluginError(f"open() returned a {type(opened).__name__}, expected a {kind.__name__}")
    try:
        if problems := class_problems(type(opened)):
            _refuse("; ".join(problems))
        if config.quotas and isinstance(opened, SecondaryTierManager):
            _set_quotas(opened, config)
    except BaseException:
        with contextlib.suppress(Exception):  # what is wrong with it is about to be said
            opened.close()
        raise
    return opened


def _set_quotas(tier: SecondaryTierManager, config: TierConfig) -> None:
    if not isinstance(tier, SupportsQuotas):
        _refuse(f"its type takes 'quotas', but {type(tier).__name__} has no set_quotas(); leave 'quotas' out")
    elif not config.read_only:
        tier.set_quotas(functools.partial(quota_of, config.quotas))


def _refuse(problem: str) -> NoReturn:
    raise TierPluginError(problem)


def load_tier(type_name: str) -> TierPlugin:
    """Import the plugin of this tier type and return what it offers; TierPluginError, one line, if it is unusable."""
    entry = _find(ENTRY_POINT_GROUP, type_name, "tier type")
    where = f"tier type {type_name!r} ({distribution_of(entry)})"
    plugin = _call_hook(_import(entry, where), where)
    _check(plugin, entry, where)
    return plugin


def is_remote(plugin: TierPlugin) -> bool:
    """Return whether tiers of this type have their store on another machine, by what it says of itself."""
    return plugin.shareable and not plugin.writes_locally


def load_class(group: str, name: str, what: str) -> type[Any]:
    """Import the class that the entry point ``name`` of this group leads to; ``what`` names the group in errors.

    TierPluginError, one line, if there is no such entry point or it does not lead to a class.
    """
    entry = _find(group, name, what)
    where = f"{what} {name!r} ({distribution_of(entry)})"
    loaded = _import(entry, where)
    if not isinstance(loaded, type):
        raise TierPluginError(f"{where}: expected the entry point {entry.value!r} to be a class, got {_short(loaded)}")
    return loaded


def load_subclass(group: str, name: str, what: str, base: type[_T]) -> type[_T]:
    """Import a class as ``load_class`` does; ConfigError, one line, also if it is no complete subclass of ``base``."""
    try:
        found = load_class(group, name, what)
    except TierPluginError as error:
        raise ConfigError(str(error)) from error
    if not issubclass(found, base):
        raise ConfigError(f"{what} {name!r}: expected a subclass of {base.__name__}, got {found!r}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{what} {name!r}: {found.__name__} does not define {', '.join(missing)}")
    return found


def comes_with(group: str, name: str) -> str:
    """Return the distribution of kvtiers that has an entry point of this name, "" if none has."""
    return _distributions(group).get(name, "")


def load_command(name: str) -> CommandPlugin:
    """Return the description of a companion's command; TierPluginError, one line, if it is unusable."""
    entry = _find(COMMAND_GROUP, name, "command")
    where = f"command {name!r} ({distribution_of(entry)})"
    plugin = _import(entry, where)
    if not isinstance(plugin, CommandPlugin):
        raise TierPluginError(f"{where}: expected {entry.value!r} to be a CommandPlugin, got {_short(plugin)}")
    if plugin.api_version != COMMAND_API_VERSION or isinstance(plugin.api_version, bool):
        raise TierPluginError(f"{where}: {_other_api(plugin.api_version, entry, 'command', COMMAND_API_VERSION)}")
    if plugin.name != name:
        raise TierPluginError(
            f"{where}: its CommandPlugin is named {plugin.name!r}, expected {name!r} as its entry point"
        )
    return plugin


def _installed(group: str) -> list[EntryPoint]:
    return [entry for entry in _entries(tuple((place, _changed(place)) for place in sys.path)) if entry.group == group]


def _changed(place: str) -> int:
    """Return when something was added to a folder of ``sys.path`` or removed from it; 0 for one that is not there."""
    try:
        return Path(place).stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


@functools.lru_cache(maxsize=1)
def _entries(places: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    """Return the entry points of all groups of ours, by name. Reading them of 150 distributions takes 10 ms.

    ``places``: the folders of ``sys.path``, so that a distribution that has been installed since is found. One that was
    just being installed, or was changed in place, is found when it is looked for (``_find``).
    """
    # importlib.metadata.entry_points() raises for all distributions if one has a malformed file.
    found: dict[tuple[str, str, str], EntryPoint] = {}
    for distribution in distributions(path=[place for place, _ in places]):
        with plugin_boundary() as boundary:
            for entry in distribution.entry_points:
                if entry.group.startswith(_GROUPS):
                    key = (entry.name, re.sub(r"[-_.]+", "-", distribution.name).lower(), entry.group)
                    found.setdefault(key, entry)  # the same distribution further down the path is shadowed
        if boundary.error:  # the others are fine
            _log.warning("entry points of an installed distribution cannot be read: %s", boundary.error)
    return [found[key] for key in sorted(found)]


def _find(group: str, name: str, what: str) -> EntryPoint:
    entries = _installed(group)
    if not any(entry.name == name for entry in entries):
        _entries.cache_clear()
        entries = _installed(group)
    matching = [entry for entry in entries if entry.name == name]
    if not matching:
        known = sorted({entry.name for entry in entries})
        others = _distributions(group)
        if name in others:
            where = f"comes with {others[name]}, which is not installed: pip install --find-links wheels {others[name]}"
            raise TierPluginError(f"{what} {name!r} {where}")
        installed = f"Installed {_plural(what)}: {', '.join(known)}." if known else f"No {what} is installed."
        hint = did_you_mean(name, {*known, *others})
        raise TierPluginError(f"unknown {what} {shown_name(name)}.{hint} {installed}")
    if len(matching) > 1:
        claims = " and ".join(distribution_of(entry) for entry in matching)
        raise TierPluginError(f"{what} {name!r} is claimed by {claims}; uninstall all but one of them")
    return matching[0]


def _distributions(group: str) -> dict[str, str]:
    """Return the distributions of kvtiers with entry points of this group, by name; tiers' are in core's metadata."""
    if group in _POLICIES:
        return {_POLICIES[group]: "kvtiers-policies"}
    if group != ENTRY_POINT_GROUP:
        return {}
    with contextlib.suppress(PackageNotFoundError):
        found = (_OWN_TIER.match(line) for line in requires("kvtiers") or ())
        return {match[2]: match[1] for match in found if match}
    return {}


def _plural(what: str) -> str:
    return what[:-1] + "ies" if what.endswith("y") else what + "s"


def _import(entry: EntryPoint, where: str) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise TierPluginError(f"{where} cannot be imported from {entry.value!r}: {error_text(error)}") from error


def _call_hook(module: Any, where: str) -> TierPlugin:
    # A manager of its own for each plugin: what one registers, no other ever sees.
    manager = pluggy.PluginManager("kvtiers")
    manager.add_hookspecs(TierHookSpec)
    try:
        manager.register(module)
        manager.check_pending()
    except Exception as error:
        unknown = [caller.name for caller in manager.get_hookcallers(module) or () if not caller.has_spec()]
        text = f"unknown hook {unknown[0]!r}.{did_you_mean(unknown[0], [_HOOK])}" if unknown else error_text(error)
        raise TierPluginError(f"{where}: {text}") from error
    if not manager.hook.kvtiers_tier.get_hookimpls():
        raise TierPluginError(f"{where}: no hook {_HOOK!r} in {_short(module)}; define it there under @hookimpl")
    try:
        results: Sequence[object] = manager.hook.kvtiers_tier()
    except (Exception, SystemExit) as error:
        raise TierPluginError(f"{where}: its hook {_HOOK!r} failed: {error_text(error)}") from error
    result = results[0] if results else None
    if not isinstance(result, TierPlugin):
        raise TierPluginError(f"{where}: expected its hook {_HOOK!r} to return a TierPlugin, got {_short(result)}")
    return result


def _check(plugin: TierPlugin, entry: EntryPoint, where: str) -> None:
    # The number comes first: with another contract, the other fields may mean something else.
    if plugin.api_version not in {API_VERSION, *OLD_API_VERSIONS} or isinstance(plugin.api_version, bool):
        raise TierPluginError(f"{where}: {_other_api(plugin.api_version, entry, 'tier', API_VERSION)}")
    if plugin.name != entry.name:
        problem = f"its TierPlugin is named {plugin.name!r}, expected {entry.name!r} as its entry point"
    elif plugin.kind not in ("store", "manager"):
        problem = f"its kind is {plugin.kind!r}, expected 'store' or 'manager'"
    elif not (isinstance(plugin.config, type) and issubclass(plugin.config, TierConfig)):
        problem = f"expected its config to be a subclass of TierConfig, got {_short(plugin.config)}"
    elif not callable(plugin.open):
        problem = f"expected its open to be a function, got {_short(plugin.open)}"
    elif problems := option_problems(plugin.config, plugin.kind):
        problem = "; ".join(problems)
    else:
        if plugin.api_version != API_VERSION and where not in _warned:
            _warned.add(where)  # it is loaded for its options and to be opened, but this is one fact
            text = _other_api(plugin.api_version, entry, "tier", API_VERSION)
            _log.warning("%s: %s; until kvtiers drops that number it works as it is", where, text)
        return
    raise TierPluginError(f"{where}: {problem}")


def _other_api(theirs: object, entry: EntryPoint, api: str, ours: int) -> str:
    if not isinstance(theirs, int) or isinstance(theirs, bool):
        return f"its api_version is {theirs!r}, expected the literal number {ours}"
    name = entry.dist.name if entry.dist else "the plugin"
    behind, number = ("kvtiers", theirs) if theirs > ours else (name, ours)
    return (
        f"it was written for {api} API {theirs}, this kvtiers has {api} API {ours}; "
        f"install a {behind} for {api} API {number} (pip install --upgrade {behind})"
    )


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
