"""The arguments of a client's calls, as the tiers take them: offload keys, and values with their places in the call.

What does not fit is refused: counted and logged, and left out, so that it is False in the call's result.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtiers._failures import error_text
from kvtiers.api import ConfigError, OffloadKey, make_offload_key
from kvtiers.client.buffers import Part, Views, length_of, parts_of
from kvtiers.client.rows import RegionRows
from kvtiers.client.state import ClientState
from kvtiers.gpu.copier import CudaError
from kvtiers.layout.tenants import Tenants

__all__ = ["Arguments", "Value"]

_LONGEST_KEY = 65_531


class Value(NamedTuple):
    """A value of a call, and the places that it has in it: a key may be given twice."""

    key: OffloadKey
    nbytes: int
    parts: list[list[Part]]
    places: list[int]
    in_region: list[tuple[int, int]] | None = None
    """Where its parts lie in the client's region; None: not all of them do."""


class Arguments:
    """Checks the arguments of one client's calls.

    ``groups``: the KV group of each length of values. ``tenants``: whose values there may be. ``tenant``: whose they
    are where a call does not say it. ``region``: the rows of the client's region, if it has one.
    """

    def __init__(
        self, groups: Mapping[int, int], tenants: Tenants, tenant: str, region: RegionRows | None, state: ClientState
    ) -> None:
        self._groups = groups
        self._tenants = tenants
        self._tenant = tenant
        self._region = region
        self._state = state

    def keys(self, keys: Sequence[bytes], value_bytes: int | None, tenant: str | None) -> list[list[OffloadKey]]:
        """Return each key's offload keys, for values of this length or of all lengths; none for one that is refused."""
        whose = self._whose(tenant, len(keys))
        if whose is None:
            return [[] for _ in keys]
        groups = [*self._groups.values()] if value_bytes is None else [self._groups.get(value_bytes, -1)]
        if -1 in groups:
            self._state.refuse(f"values of {value_bytes!r} bytes; this client's have {self._lengths()}", len(keys))
            return [[] for _ in keys]
        named = [
            [make_offload_key(key, group, whose) for group in groups] if _is_key(key, whose) else [] for key in keys
        ]
        if wrong := named.count([]):
            self._state.refuse("a key that is not 1 to 65,531 bytes", wrong)
        return named

    def values(
        self, keys: Sequence[bytes], views: Sequence[Views], tenant: str | None, *, writable: bool
    ) -> list[Value]:
        """Return the values of a call, each key once. ``writable``: their views are to be filled."""
        values: dict[OffloadKey, Value] = {}
        whose = self._whose(tenant, len(keys))
        if whose is None:
            return []
        if len(keys) != len(views):
            self._state.refuse(f"{len(keys)} keys with {len(views)} values", len(keys))
            return []
        for place, (key, view) in enumerate(zip(keys, views, strict=True)):
            try:
                parts = parts_of(view, writable=writable)
                group = self._groups.get(length_of(parts))
            except (TypeError, ValueError, BufferError, CudaError, OSError) as error:
                self._state.refuse(error_text(error))
                continue
            if group is None or not _is_key(key, whose):
                what = f"of {length_of(parts)} bytes" if group is None else f"with a key of {type(key).__name__}"
                self._state.refuse(f"a value {what}; this client's have {self._lengths()}")
                continue
            offload_key = make_offload_key(key, group, whose)
            if (known := values.get(offload_key)) is None:
                values[offload_key] = Value(offload_key, length_of(parts), [parts], [place])
            else:
                known.parts.append(parts)
                known.places.append(place)
        return [self._located(value) for value in values.values()]

    def _whose(self, tenant: str | None, values: int) -> str | None:
        """Return the tenant of a call, "" for none; None for one that may not be: its values are refused."""
        try:
            return self._tenants.check(self._tenant if tenant is None else tenant)
        except (ConfigError, TypeError) as error:
            self._state.refuse(f"a call: {error}", values)
            return None

    def _located(self, value: Value) -> Value:
        """Return a value with where it lies in the region, if it does, and has one place in its call."""
        if self._region is None or len(value.places) > 1:
            return value
        return value._replace(in_region=self._region.parts_of(value.parts[0]))

    def _lengths(self) -> str:
        return f"{', '.join(map(str, self._groups))} bytes"


def _is_key(key: object, tenant: str) -> bool:
    return isinstance(key, bytes) and 0 < len(key) <= _LONGEST_KEY - len(tenant)
