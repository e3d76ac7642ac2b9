"""Canonical plain data of a section of vLLM's config: equal in every process, different for other settings."""

import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["digest", "plain"]

_TEXTLESS: tuple[object, object] = (object.__str__, object.__repr__)


def plain(value: Any) -> Any:
    """Return a value as plain data: of an object its class and public fields, of a class or function its name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    return _fields(value) if isinstance(value, Mapping) else _object(value)


def digest(document: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that stand for a document of plain data."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(plain(name)): plain(item) for name, item in fields.items() if not str(name).startswith("_")}


def _object(value: Any) -> Any:
    """Return an object's class and public fields; never its address, which differs by process."""
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "__qualname__"):
        return _name(value)
    kind = type(value)
    if not hasattr(value, "__dict__") and (kind.__str__, kind.__repr__) != _TEXTLESS:
        return str(value)
    slots = {name: getattr(value, name, None) for base in kind.__mro__ for name in getattr(base, "__slots__", ())}
    return {"class": _name(kind), "fields": _fields(slots | getattr(value, "__dict__", {}))}


def _name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"
