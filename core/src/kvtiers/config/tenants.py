"""The config of tenants: who may use the tiers, and how much of the primary is whose. Quotas are options of a tier."""

from pydantic import Field, model_validator

from kvtiers.api import ConfigError, Share, StrictModel
from kvtiers.layout.storage_name import check_tenant
from kvtiers.layout.tenants import Tenants

__all__ = ["TenantConfig", "TenantsConfig"]


class TenantConfig(StrictModel):
    """What one tenant has."""

    share: Share = Field(default=0.0, description="share of the primary's rows below which no other tenant evicts it")


class TenantsConfig(StrictModel):
    """The tenants; without this section no request has one. Named by the request's parameter ``kvtiers_tenant``."""

    unknown: bool = Field(default=True, description="whether tenants that are not under 'named' may use the tiers")
    required: bool = Field(default=False, description="whether requests without a tenant run without tiers")
    salt_separator: str = Field(
        default="",
        max_length=8,
        description="vLLM, LMCache: a request's tenant is also what stands before this in its cache_salt, such as ':'",
    )
    named: dict[str, TenantConfig] = Field(default_factory=dict, description="tenants with a share")

    @model_validator(mode="after")
    def _fit(self) -> "TenantsConfig":
        total = sum(tenant.share for tenant in self.named.values())
        if total > 1 + 1e-9:
            raise ValueError(f"the shares of {len(self.named)} tenants are {total * 100:.4g}%, expected at most 100%")
        return self

    def shares(self) -> dict[str, float]:
        """Return the share of the primary of each tenant that has one."""
        return {name: tenant.share for name, tenant in self.named.items() if tenant.share}

    def rule(self, namespace: str) -> Tenants:
        """Return the rule by which requests have tenants."""
        return Tenants(
            namespace,
            known=self.named,
            allows_unknown=self.unknown,
            required=self.required,
            salt_separator=self.salt_separator,
        )

    def problems(self, namespace: str) -> list[str]:
        """Return a line for each name in this config that is not valid for a tenant."""
        lines = []
        for name in self.named:
            try:
                check_tenant(name, namespace)
            except ConfigError as error:
                lines.append(f"tenants.named: {error}")
        return lines
