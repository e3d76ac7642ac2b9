"""The options of a config model for people: type names, defaults as written in YAML, descriptions."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvtiers.api import Secret
from kvtiers.api.units import Unit

__all__ = ["Option", "expected", "may_change", "models_in", "options_of", "type_name", "written_default"]

_NAMES: list[tuple[type, str]] = [
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "text"),
    (Secret, "secret"),
    (PurePath, "path"),
    (BaseModel, "options"),
]  # bool before int: it is a subclass
_EXPECTED = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "text": "a text",
    "secret": "a text, '${NAME}' or {file: PATH}",
    "path": "a path",
    "options": "a mapping of options",
    "mapping": "a mapping",
}
_UNIONS = (Union, UnionType)


@dataclass(frozen=True, slots=True)
class Option:
    """One option; ``name`` is dotted where it lies in a nested model, ``default`` is text ("" if there is none)."""

    name: str
    type: str
    required: bool
    default: str
    description: str
    live: bool = False
    """``kvtiers ctl reload`` applies it to a running engine."""


def options_of(model: type[BaseModel]) -> list[Option]:
    """Return the options of this model in order, with those of nested models in the place of each."""
    return list(_options(model, None, "", is_live=False))


def may_change(model: type[BaseModel], option: str) -> bool:
    """Return whether an option of a config model may be changed while the engine runs."""
    field = model.model_fields.get(option)
    return field is not None and isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("live"))


def _options(model: type[BaseModel], values: BaseModel | None, prefix: str, *, is_live: bool) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        default = getattr(values, name) if values is not None else _default(field)
        nested = models_in(field.annotation)
        live = is_live or may_change(model, name)
        if isinstance(default, BaseModel):
            yield from _options(type(default), default, f"{prefix}{name}.", is_live=live)
        elif nested and field.is_required():
            yield from _options(nested[0], None, f"{prefix}{name}.", is_live=live)
        else:
            required = field.is_required() and values is None
            text = "" if required else _written(default, _unit(field.annotation, field.metadata))
            yield Option(f"{prefix}{name}", type_name(field), required, text, field.description or "", live)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return None
    return field.get_default(call_default_factory=True, validated_data={})


def _written(value: object, unit: Unit | None) -> str:
    match value:
        case None | bool():
            return str(value).lower()
        case int() | float() if unit:
            return unit.format(value)
        case Secret():
            return ""
        case enum.Enum():
            return str(value.value)
        case list() | tuple() | set() | frozenset():
            return ", ".join(_written(item, unit) for item in value)
    return str(value)


def written_default(field: FieldInfo) -> Any:
    """Return the default as it would be written in YAML; None if there is none to write."""
    value = _default(field)
    unit = _unit(field.annotation, field.metadata)
    match value:
        case bool() | str():
            return value
        case int() | float():
            return unit.format(value) if unit else value
        case list() | tuple() | set() | frozenset():
            return [_written(item, None) for item in value]
    return None


def type_name(field: FieldInfo) -> str:
    """Return what people call the type of this option: size, duration, text, ``process | thread`` and so on."""
    return _name(field.annotation, field.metadata)


def _unit(annotation: Any, metadata: Sequence[Any] = ()) -> Unit | None:
    if unit := next((item for item in metadata if isinstance(item, Unit)), None):
        return unit
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _unit(inner, more)
    if get_origin(annotation) in _UNIONS:
        return next((unit for part in get_args(annotation) if (unit := _unit(part))), None)
    return None


def _name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in _UNIONS:
        return " | ".join(dict.fromkeys(_name(part) for part in arguments if part is not NoneType))
    if unit := _unit(annotation, metadata):
        return unit.name
    if origin is Annotated:
        return _name(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    return _class_name(origin or annotation, arguments)


def _class_name(kind: Any, arguments: Sequence[Any]) -> str:
    if not isinstance(kind, type):
        return "any"
    if issubclass(kind, enum.Enum):
        return " | ".join(str(member.value) for member in kind)
    if name := next((name for base, name in _NAMES if issubclass(kind, base)), ""):
        return name
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, Sequence | set | frozenset):
        return f"list of {_name(arguments[0])}" if arguments else "list"
    return kind.__name__


def expected(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return the type as it stands behind "expected": ``a size such as '64GiB'``, ``'process' or 'thread'``."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return expected(inner, more)
    if get_origin(annotation) in _UNIONS:
        parts = [expected(part) for part in get_args(annotation) if part is not NoneType]
        return " or ".join(dict.fromkeys(parts))
    if unit := _unit(annotation, metadata):
        return f"a {unit.name} such as {unit.example!r}"
    if get_origin(annotation) is Literal:
        *most, last = map(repr, get_args(annotation))
        return f"{', '.join(most)} or {last}" if most else last
    name = _name(annotation, metadata)
    return _EXPECTED.get(name, f"a {name}")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that this annotation is, alone or in a union."""
    if get_origin(annotation) in (*_UNIONS, Annotated):
        return [model for part in get_args(annotation) for model in models_in(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
