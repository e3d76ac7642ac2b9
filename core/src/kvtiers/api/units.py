"""Sizes, durations and shares as people write them: ``64GiB``, ``250ms``, ``10%``.

Each is a plain number once validated (bytes, seconds, a fraction) and is annotated with the ``Unit`` that it was
written in, so that tools can show it again as text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema

__all__ = [
    "DURATION",
    "SHARE",
    "SIZE",
    "Duration",
    "Share",
    "Size",
    "Unit",
    "format_duration",
    "format_size",
    "parse_duration",
    "parse_size",
    "waitable",
]

RESOLVED = "kvtiers.resolved"
"""Key of a validation context: the options were resolved before, so that numbers are final and ``${...}`` is text."""

_SIZES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z%]*)")
_LARGEST = float(1 << 60)  # of any number before its unit, and of bytes (1 EiB); a larger one is a typing error
_LONGEST_SECONDS = 100 * 365 * 86400.0  # what waits for longer than 292 years overflows in the kernel's clock


def _split(value: object, expected: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected {expected}, got {value!r}")  # noqa: TRY004 -- pydantic turns ValueError into a problem line
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"expected {expected}, got {value!r}")
    if float(match[1]) > _LARGEST:
        raise ValueError(f"expected {expected}, got a number of {len(match[1])} digits")
    return float(match[1]), match[2]


def _is_resolved(value: object, info: ValidationInfo) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return bool(is_number and info.context and info.context.get(RESOLVED))


def parse_size(value: object) -> int:
    """Return the number of bytes that ``value`` (``"64GiB"``, ``"500 MB"``, ``4096``) stands for."""
    if type(value) is int and 0 <= value <= _LARGEST:
        return value  # as it is: a float has not all whole numbers above 2**53
    number, unit = _split(value, "a size such as '64GiB'")
    factor = _SIZES.get(unit.lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {value!r}; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    if number * factor > _LARGEST:
        raise ValueError(f"{value!r} is more than any machine has; expected at most {format_size(_LARGEST)}")
    return int(number * factor)


def parse_duration(value: object) -> float:
    """Return the number of seconds that ``value`` (``"250ms"``, ``"24h"``) stands for. A bare number is refused."""
    number, unit = _split(value, "a duration such as '250ms'")
    if not unit and number == 0:
        return 0.0
    factor = _DURATIONS.get(unit.lower())
    if factor is None:
        wrong = f"unknown unit {unit!r}" if unit else "no unit"
        raise ValueError(f"{wrong} in {value!r}; use us, ms, s, m, h or d, such as '250ms'")
    if number * factor > _LONGEST_SECONDS:
        raise ValueError(f"{value!r} is too long; expected at most {format_duration(_LONGEST_SECONDS)}")
    return number * factor


def waitable(seconds: float) -> float:
    """Return a caller's duration as one that can be waited for: 0 at least, 100 years at most, as in a config.

    The kernel's clock and Python's waits end at 292 years, with an OverflowError: so does ``math.inf``.
    """
    return min(max(0.0, seconds), _LONGEST_SECONDS)


def _size(value: object, info: ValidationInfo) -> Any:
    return value if _is_resolved(value, info) else parse_size(value)


def _duration(value: object, info: ValidationInfo) -> Any:
    return value if _is_resolved(value, info) else parse_duration(value)


def _share(value: object, info: ValidationInfo) -> Any:
    return value if _is_resolved(value, info) else _parse_share(value)


def _parse_share(value: object) -> float:
    number, unit = _split(value, "a share such as '10%'")
    if unit not in {"", "%"}:
        raise ValueError(f"unknown unit {unit!r} in {value!r}; write a share such as '10%'")
    share = number / 100 if unit else number
    if share > 1:
        raise ValueError(f"a share is at most 100%, got {value!r}")
    return share


def format_size(nbytes: float) -> str:
    """Return ``nbytes`` as people write it, with at most one digit behind the point."""
    for unit, factor in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + unit
    return f"{nbytes:.0f}B"


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as people write it, with at most one digit behind the point."""
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:.0f}{unit}"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.1f}".removesuffix(".0") + unit
    return f"{seconds / 1e-6:.0f}us" if seconds else "0s"


def _format_share(share: float) -> str:
    return f"{share * 100:g}%"


@dataclass(frozen=True, slots=True)
class Unit:
    """A notation of numbers in a config model: the type's name, its formatter, an example.

    ``pattern`` and ``bare`` are for the JSON schema: what its text looks like, and the JSON type of a bare number.
    """

    name: str
    format: Callable[[float], str]
    example: str
    pattern: str
    bare: str | None = None

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        types = ["string", self.bare] if self.bare else "string"
        return {"type": types, "pattern": rf"^\s*{self.pattern}\s*$|\$\{{", "examples": [self.example]}


_NUMBER = r"[0-9]+(\.[0-9]+)?\s*"
SIZE = Unit("size", format_size, "64GiB", rf"{_NUMBER}([KkMmGgTtPp][Ii]?)?[Bb]?", "integer")
DURATION = Unit("duration", format_duration, "250ms", rf"({_NUMBER}([Uu]s|[Mm]s|[Ss]|[Mm]|[Mm]in|[Hh]|[Dd])|0)")
SHARE = Unit("share", _format_share, "10%", rf"{_NUMBER}%?", "number")

Size: TypeAlias = Annotated[int, BeforeValidator(_size), SIZE]
Duration: TypeAlias = Annotated[float, BeforeValidator(_duration), DURATION]
Share: TypeAlias = Annotated[float, BeforeValidator(_share), Field(ge=0), SHARE]
