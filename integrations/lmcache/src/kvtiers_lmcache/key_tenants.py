"""The tenant of a key: from LMCache's salt or tag, or the one that the options name for all others.

=====================================  ==========================================================================
mode                                   a key's tenant
=====================================  ==========================================================================
multi-process server (``ObjectKey``)   of its salt: all of it (``salt_is_tenant``), or what stands before
                                       ``tenants.salt_separator`` of the tiers' config
inside an engine (``CacheEngineKey``)  of its tag ``kvtiers_tenant``, which a request sets
=====================================  ==========================================================================

A key whose tenant the config does not allow is neither stored nor found, and one log line says why.
"""

from collections.abc import Iterable
from typing import Any

from kvtiers import OffloadConfig
from kvtiers.api import ConfigError
from kvtiers.types import TENANT_FIELD
from kvtiers_lmcache.options import Options

__all__ = ["KeyTenants"]


class KeyTenants:
    """Finds the tenants of keys. Any thread. ConfigError, in one line, if the options and the config disagree."""

    def __init__(self, options: Options, config: OffloadConfig) -> None:
        self._rule = config.tenant_rule()
        self._separator = config.tenants.salt_separator if config.tenants is not None else ""
        self._default = options.tenant
        self._is_salt = options.salt_is_tenant
        if options.tenant:
            self._rule.check(options.tenant)
        if options.salt_is_tenant and config.tenants is None:
            raise ConfigError("kvtiers: 'salt_is_tenant' is set, but the tiers' config has no 'tenants': {}")
        if options.salt_is_tenant and self._separator:
            raise ConfigError(
                "kvtiers: 'salt_is_tenant' is set, and 'tenants.salt_separator' in the tiers' config; leave one out"
            )

    def of_salts(self, salts: Iterable[str]) -> dict[str, str | None]:
        """Return the tenant of each salt, "" for none; None: its keys may not be used."""
        return {salt: self._of(self._owner(salt)) for salt in set(salts)}

    def of_tags(self, tags: Iterable[tuple[str, Any]] | None) -> str | None:
        """Return the tenant that a key's tags name, "" for none; None: the key may not be used."""
        return self._of(next((value for name, value in tags or () if name == TENANT_FIELD), ""))

    def _owner(self, salt: str) -> str:
        if self._is_salt:
            return salt
        owner, separator, _ = salt.partition(self._separator) if self._separator else ("", "", "")
        return owner if separator else ""

    def _of(self, named: Any) -> str | None:
        return self._rule.of({TENANT_FIELD: self._default if named == "" else named})
