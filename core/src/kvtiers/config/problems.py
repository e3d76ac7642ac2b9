"""Config problems: pydantic's errors as one line for each thing to fix.

The value in a line is always the one that was written: what ``${NAME}`` stood for, and any secret, stays out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtiers.api import Secret
from kvtiers.api.config import expand_variables
from kvtiers.config.options import expected, models_in
from kvtiers.plugins import did_you_mean, shown_name

__all__ = ["one_line", "problems_in", "shown"]

_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_UNKNOWN = ("extra_forbidden", "invalid_key")
_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class _Place:
    """An error's place in the document: the path as far as the document has it, the value there, and its type."""

    path: tuple[str | int, ...]
    value: Any
    annotation: Any
    metadata: Sequence[Any]

    def __str__(self) -> str:
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return text.removeprefix(".")

    @property
    def options(self) -> list[str]:
        return [name for model in models_in(self.annotation) for name in model.model_fields]


def problems_in(error: ValidationError, model: type[BaseModel], document: Mapping[Any, Any]) -> list[str]:
    """Return one line for each problem of ``document``, which was read as ``model``; no file name."""
    details = error.errors(include_url=False, include_input=False)
    lines: list[str] = []
    suggested: set[tuple[str, str]] = set()
    for detail in details:
        if detail["type"] in _UNKNOWN:
            place, name = _locate(model, document, detail["loc"][:-1]), str(detail["loc"][-1])
            hint = did_you_mean(name, place.options)
            suggested.update((str(place), option) for option in place.options if repr(option) in hint)
            lines.append(_join(place, f"unknown option {shown_name(name)}.{hint or _all_options(place)}"))
    for detail in details:
        if detail["type"] == "missing":
            place, name = _locate(model, document, detail["loc"][:-1]), str(detail["loc"][-1])
            # A misspelled key is one mistake, and its line is there already.
            if (str(place), name) not in suggested:
                lines.append(_join(place, f"{name!r} is missing; expected {_expected_of(place, name)}"))
        elif detail["type"] not in _UNKNOWN:
            place = _locate(model, document, detail["loc"])
            lines.append(_join(place, _message(detail, place)))
    return list(dict.fromkeys(lines))


def one_line(text: str, longest: int = 600) -> str:
    """Return ``text`` without line breaks, cut where it is very long."""
    text = " ".join(text.splitlines())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def shown(value: object) -> str:
    """Return a value of a config as it stands behind "got"."""
    match value:
        case None:
            return "nothing"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case bool():
            return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _join(place: _Place, text: str) -> str:
    return f"{place}: {text}" if place.path else text


def _all_options(place: _Place) -> str:
    return f" Options: {', '.join(place.options)}."


def _expected_of(place: _Place, name: str) -> str:
    for model in models_in(place.annotation):
        if field := model.model_fields.get(name):
            return expected(field.annotation, field.metadata)
    return "a value"


def _locate(model: type[BaseModel], document: Any, loc: Sequence[str | int]) -> _Place:
    """Follow a pydantic location as far as the document has it: the parts behind that name members of a union."""
    place = _Place((), document, model, ())
    for part in loc:
        value = place.value
        in_mapping = isinstance(value, Mapping) and part in value
        in_list = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if not (in_mapping or in_list):
            break
        place = _step(place, part)
    return place


def _step(place: _Place, part: str | int) -> _Place:
    path, value = (*place.path, part), place.value[part]
    for model in models_in(place.annotation):
        if field := model.model_fields.get(str(part)):
            return _Place(path, value, field.annotation, field.metadata)
    inner = [argument for argument in get_args(place.annotation) if argument is not Ellipsis]
    return _Place(path, value, inner[-1] if inner else Any, ())


def _message(detail: ErrorDetails, place: _Place) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    wanted = expected(place.annotation, place.metadata)
    if place.value is None:
        return f"expected {wanted}, got nothing"
    if kind in {"value_error", "assertion_error"}:
        return _as_written(str(context.get("error") or detail["msg"]), place.value)
    got = "" if _is_secret(place.annotation) else f", got {shown(place.value)}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"expected {words} {context[name]:g}{got}"
    if kind.endswith(("_type", "_parsing", "_error", "_parsing_size", "_from_float")) or kind == "enum":
        quotes = (
            "; put it in quotes" if wanted == "a text" and not isinstance(place.value, str | list | Mapping) else ""
        )
        return f"expected {wanted}{got}{quotes}"
    text = re.sub(r"^\w+ should (be|have) ", "", detail["msg"])
    return f"expected {text[:1].lower()}{text[1:]}{got}"


def _is_secret(annotation: Any) -> bool:
    return annotation is Secret or any(_is_secret(argument) for argument in get_args(annotation))


def _as_written(text: str, value: object) -> str:
    """Put ``${NAME}`` back where a message quotes what it stood for."""
    if isinstance(value, str) and "${" in value:
        try:
            return text.replace(repr(expand_variables(value)), repr(value))
        except ValueError:
            pass
    return text
