"""The field ``kvtiers`` of a request in vLLM: ``kv_transfer_params: {"kvtiers": {"ttl": "1h", "tenant": "blue"}}``.

One line of ``_NAMES`` a name: how its value is read. What is no such value is left out, counted, and logged once for
each name and kind; a client writes it, and an engine waits. Names of the field win over those beside it.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvtiers.api.units import parse_duration
from kvtiers.types import TENANT_FIELD

__all__ = ["FIELD", "NEED_OWN_PRIMARY", "RequestField", "tenant_param"]

FIELD = "kvtiers"
_log = logging.getLogger("kvtiers.vllm")
_LONGEST = 64  # letters of a value, and of what is shown of one
_MOST_TTL = 86_400.0
_MOST_NAMES = 64  # of which wrong ones are noted
_PRIORITIES = ("high", "normal", "low")


def _ttl(value: object) -> float:
    if isinstance(value, str) and len(value) <= _LONGEST:
        value = parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError("expected seconds above 0, or a text such as '1h'")
    return float(min(_MOST_TTL, value))


def _priority(value: object) -> str:
    if value not in _PRIORITIES:
        raise ValueError(f"expected {', '.join(_PRIORITIES)}")
    return str(value)


def _prefetch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")  # noqa: TRY004 -- one kind of error, as of the others
    return value


def _tenant(value: object) -> object:
    return value  # of whatever kind: the rule of tenants refuses a request with a wrong one, which is never left out


_NAMES: Mapping[str, Callable[[object], Any]] = {
    "ttl": _ttl,
    "priority": _priority,
    "prefetch": _prefetch,
    "tenant": _tenant,
}
_PARAMS = {"tenant": TENANT_FIELD}
"""Where a request's parameters have another name for it than the field."""
NEED_OWN_PRIMARY = frozenset({"ttl", "priority", "prefetch"})
"""Names that say something of the primary, which under vLLM's own tiering is vLLM's."""


def tenant_param(given: Mapping[str, object] | None) -> Mapping[str, object]:
    """Return what a request's parameters say of its tenant, in the field or beside it; cheap, and says nothing."""
    if not given:
        return {}
    field = given.get(FIELD)
    if isinstance(field, Mapping) and "tenant" in field:
        return {TENANT_FIELD: field["tenant"]}
    return {TENANT_FIELD: given[TENANT_FIELD]} if TENANT_FIELD in given else {}


class RequestField:
    """Reads the field of each request. ``unused``: names that have no effect here, and ``why``."""

    def __init__(self, unused: Collection[str] = (), why: str = "") -> None:
        self._unused = unused
        self._why = why
        self._noted: set[str] = set()
        self.refused = 0
        """Values that were left out."""

    def params(self, given: Mapping[str, object] | None) -> Mapping[str, object]:
        """Return a request's parameters, with those of the field among them."""
        if not given or FIELD not in given:
            return given or {}
        field = given[FIELD]
        params = {name: value for name, value in given.items() if name != FIELD}
        if not isinstance(field, Mapping):
            self._refuse(FIELD, field, 'expected an object, such as {"ttl": "1h"}')
            return params
        for name, value in field.items():
            read = _NAMES.get(name) if isinstance(name, str) else None
            if read is None or not isinstance(name, str):
                self._refuse("a name of the field", name, f"expected {', '.join(_NAMES)}")
            elif name in self._unused:
                self._refuse(name, value, self._why)
            else:
                try:
                    params[_PARAMS.get(name, name)] = read(value)
                except (ValueError, TypeError, OverflowError) as error:
                    self._refuse(name, value, str(error))
        return params

    def _refuse(self, what: str, value: object, why: str) -> None:
        self.refused += 1
        if what not in self._noted and len(self._noted) < _MOST_NAMES:
            self._noted.add(what)
            text = repr(value[:_LONGEST]) if isinstance(value, str) else _number(value)
            _log.warning(
                "kv_transfer_params: %r: %s is %s; %s; it is left out, and others like it are, without a line",
                FIELD,
                what,
                text,
                why[: 4 * _LONGEST],
            )


def _number(value: object) -> str:
    """Return what is shown of a value that is no text: a number, if it is not long, else its type."""
    is_short = isinstance(value, float | bool) or (isinstance(value, int) and value.bit_length() <= _LONGEST)
    return repr(value) if is_short else f"of type {type(value).__name__}"
