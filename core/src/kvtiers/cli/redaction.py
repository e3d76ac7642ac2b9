"""The removal of secrets from a config and from all that stands beside it in a report.

A secret is what an option of type ``Secret`` has, what an option has whose name says so, and the password in a URL.
Where a variable or a file is named instead of it, the name stays, but its value is taken out of the log and all else.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from kvtiers.api import Secret, TierPluginError
from kvtiers.plugins import load_tier

__all__ = ["Redaction"]

_HIDDEN = "***"
_SHORTEST = 4  # what is shorter stands in many other places, too
_NAME = re.compile(
    r"passw|passphrase|secret|token|credential|(api|access|account|private)_?key|^sas$|auth", re.IGNORECASE
)
_NOT = re.compile(r"tokens_per_block|authority|\w+_file")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"(?i)(?<=[?&])((?:sig|signature|token|password|secret|key|x-amz-\w+)=)[^&\s\"']+")
_HEADER = re.compile(r"(?i)\b(authorization:\s*\w+|bearer)\s+\S+")


class Redaction:
    """Takes secrets out of a config, remembers their values, and takes those out of any other text."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def config(self, text: str) -> list[str]:
        """Return the lines of a config without its secrets and comments; one line, if it is no YAML."""
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            place = f" in line {where.line + 1}" if where else ""
            return [f"it is no YAML{place}, and left out, since it may have secrets"]
        try:
            return yaml.safe_dump(self._cleaned(found, frozenset()), sort_keys=False).splitlines()
        except RecursionError:
            return ["it contains itself, by an alias, and is left out"]

    def apply(self, text: str) -> str:
        """Return the text without what any of its lines has that is a secret."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, _HIDDEN)
        return _HEADER.sub(rf"\1 {_HIDDEN}", _QUERY.sub(rf"\1{_HIDDEN}", _USER.sub(_HIDDEN, text)))

    def _cleaned(self, value: Any, secret_options: frozenset[str]) -> Any:
        match value:
            case Mapping():
                own = secret_options | _secret_options(value.get("type"))
                return {
                    name: self._hidden(part) if _is_secret(str(name), own) else self._cleaned(part, own)
                    for name, part in value.items()
                }
            case list():
                return [self._cleaned(part, secret_options) for part in value]
            case str() if user := _USER.search(value):
                for part in user[0].split(":"):
                    self._remember(part)
                return self.apply(value)
        return value

    def _hidden(self, value: Any) -> Any:
        match value:
            case None | bool() | "":
                return value
            case {"file": str(path)}:
                with contextlib.suppress(OSError, UnicodeDecodeError):  # then it is in no log either
                    self._remember(Path(path).read_text(encoding="utf-8").strip())
                return value
            case str() if _VARIABLE.fullmatch(value):
                self._remember(value)
                return value
        for part in _texts(value):
            self._remember(part)
        return _HIDDEN

    def _remember(self, text: str) -> None:
        self._values |= {os.environ.get(name, "") for name in _VARIABLE.findall(text)}
        self._values.add(_VARIABLE.sub("", text))
        self._values = {value for value in self._values if len(value) >= _SHORTEST}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
    else:
        yield str(value)


def _is_secret(name: str, secret_options: frozenset[str]) -> bool:
    return name in secret_options or (not _NOT.fullmatch(name) and bool(_NAME.search(name)))


def _secret_options(tier_type: object) -> frozenset[str]:
    """Return the options of this tier type that are secrets by their type; none where it cannot be loaded."""
    try:
        fields = load_tier(tier_type).config.model_fields if isinstance(tier_type, str) else {}
    except TierPluginError:
        return frozenset()
    return frozenset(name for name, field in fields.items() if _has_secret(field.annotation))


def _has_secret(annotation: object) -> bool:
    return annotation is Secret or any(map(_has_secret, get_args(annotation)))
