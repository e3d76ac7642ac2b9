"""The tenant of a request: read from its parameters or the owner of its salt, and checked before any key is made.

A tenant is a part of each key (``api/keys.py``), and so of each name. What is no tenant here never becomes another
one's space: such a request runs without tiers, and a line says why.
"""

import logging
from collections.abc import Collection, Mapping

from kvtiers._failures import log_with_backoff
from kvtiers.api import ConfigError
from kvtiers.layout.storage_name import check_tenant
from kvtiers.types import TENANT_FIELD

__all__ = ["Tenants"]

_log = logging.getLogger("kvtiers")
_MOST_CHECKED = 4_096


class Tenants:
    """Who a request's tenant is. ``is_on``: the config has ``tenants``; else only requests without one are served.

    ``known``: those that the config names; others are served if ``allows_unknown``. ``required``: every request has
    one. ``salt_separator``: the tenant is what stands before it in the salt of a request that names none; "": never.
    """

    def __init__(
        self,
        namespace: str,
        *,
        is_on: bool = True,
        known: Collection[str] = (),
        allows_unknown: bool = True,
        required: bool = False,
        salt_separator: str = "",
    ) -> None:
        self.is_on = is_on
        self._namespace = namespace
        self._known = frozenset(known)
        self._allows_unknown = allows_unknown
        self._required = required
        self._separator = salt_separator
        self._checked: set[str] = set()
        self.refused = 0
        """Requests that ran without tiers, for want of a tenant that may be used."""

    def check(self, tenant: str) -> str:
        """Return the tenant, "" for none, if requests may have it; ConfigError, in one line, if not."""
        if tenant in self._checked:
            return tenant
        if not tenant:
            if self._required:
                raise ConfigError("no tenant is named, which 'tenants: {required: true}' in the config does not allow")
            return tenant
        check_tenant(tenant, self._namespace)
        if not self.is_on:
            raise ConfigError(f"tenant {tenant!r} is named, but the config has no 'tenants'; add 'tenants: {{}}'")
        if not self._allows_unknown and tenant not in self._known:
            raise ConfigError(f"tenant {tenant!r} is not among 'tenants.named' in the config, which allows no other")
        if len(self._checked) < _MOST_CHECKED:
            self._checked.add(tenant)
        return tenant

    def of(self, params: Mapping[str, object], salt: str = "") -> str | None:
        """Return a request's tenant, "" for none; None: it may use no tier. Counted, and logged with backoff."""
        named = params.get(TENANT_FIELD, "") if params else ""
        if isinstance(named, str) and not named and not self._separator and not self._required:
            return ""
        try:
            return self.named(params, salt)
        except ConfigError as error:
            self.refused += 1
            text = "a request runs without tiers: %s (%d requests so far)"
            log_with_backoff(self.refused, _log.warning, text, error, self.refused)
            return None

    def named(self, params: Mapping[str, object], salt: str = "") -> str:
        """Return a request's tenant, "" for none; ConfigError, in one line, if it may use no tier."""
        named = params.get(TENANT_FIELD, "") if params else ""
        if not isinstance(named, str):
            raise ConfigError(f"{TENANT_FIELD} is of type {type(named).__name__}, expected a text")
        owner, separator, _ = salt.partition(self._separator) if self._separator else ("", "", "")
        if separator and named and owner != named:
            raise ConfigError(f"{TENANT_FIELD} is {named[:80]!r}, but the salt is of tenant {owner[:80]!r}")
        return self.check(named or (owner if separator else ""))
