"""The options in vLLM's ``kv_connector_extra_config``: a tier's own, checked as in YAML, and those of all tiers."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, field_validator

from kvtiers.api import ConfigError, Duration, StrictModel, TierConfig
from kvtiers.config import load_config
from kvtiers.config.models import LoadWait
from kvtiers.config.problems import problems_in
from kvtiers.config.tenants import TenantsConfig
from kvtiers.encryption.config import EncryptionConfig, refuse_key
from kvtiers.layout.tenants import Tenants
from kvtiers_vllm.own_tiering.tier_names import PREFIX, tier_names

__all__ = ["OPTIONS_KEY", "TierSettings", "load_tier_options"]

OPTIONS_KEY = "kvtiers"
"""The key in kv_connector_extra_config under which the options of all kvtiers tiers stand."""


class TierSettings(StrictModel):
    """Options for all kvtiers tiers of an engine."""

    def tenant_rule(self) -> Tenants:
        """Return the rule by which requests have tenants."""
        return Tenants(self.namespace, is_on=False) if self.tenants is None else self.tenants.rule(self.namespace)

    namespace: str = Field(default="default", description="first part of every storage name")
    weights: str | None = Field(
        default=None, min_length=1, description="what names these very weights, where vLLM's config does not"
    )
    lookup_wait: Duration = Field(default=0.02, description="longest wait of a request for a tier's answer")
    load_wait: LoadWait = Field(
        default="auto", description="longest wait of a request for loads; auto: as long as computing would take"
    )
    tenants: TenantsConfig | None = Field(
        default=None, description="tenants that share no values in the tiers; by the request's own field alone here"
    )
    drain: Duration = Field(default=10.0, description="how long an engine that ends may still write to a tier")
    encryption: EncryptionConfig | None = Field(default=None, description="encrypt what the tiers hold, and its names")

    @field_validator("encryption", mode="before")
    @classmethod
    def _is_no_key(cls, encryption: object) -> object:
        return refuse_key(encryption, "a mapping with 'key'")


def load_tier_options(
    tier_type: str, options: Mapping[str, Any], extra_config: Mapping[str, Any]
) -> tuple[TierConfig, TierSettings]:
    """Return a tier's options and those of all tiers; ConfigError with one line for each problem.

    ``tier_type``: as in vLLM's config, with the prefix. ``extra_config``: vLLM's ``kv_connector_extra_config``.
    """
    where = f"kv_connector_extra_config: {OPTIONS_KEY}"
    common = extra_config.get(OPTIONS_KEY, {})
    try:
        settings = TierSettings.model_validate(common)
    except ValidationError as error:
        raise ConfigError([f"{where}: {problem}" for problem in problems_in(error, TierSettings, common)]) from None
    entry = {"type": tier_type.removeprefix(PREFIX), **options}
    document = {"version": 1, "namespace": settings.namespace, "primary": {"capacity": "1MiB"}, "secondary": [entry]}
    if "tenants" in common:
        document["tenants"] = common["tenants"]
    if settings.encryption is not None:
        document["encryption"] = common["encryption"]
    try:
        (config,) = load_config(document).secondary
    except ConfigError as error:
        raise ConfigError([_placed(problem, tier_type) for problem in error.problems]) from None
    problems = [f"secondary_tiers ({tier_type}): {problem}" for problem in _not_here(config, extra_config)]
    if settings.tenants is not None:
        given = {"salt_separator": settings.tenants.salt_separator, "named": settings.tenants.shares()}
        needs = "needs the whole stack (KvtiersConnector): here the memory is vLLM's, and salts are not seen"
        problems += [f"{OPTIONS_KEY}: tenants.{name}: {needs}" for name, value in given.items() if value]
    if problems:
        raise ConfigError([f"kv_connector_extra_config: {problem}" for problem in problems])
    return config, settings


def _placed(problem: str, tier_type: str) -> str:
    """Name a problem's place in vLLM's config instead of one in a YAML file."""
    place, _, text = problem.removeprefix("config: ").partition(": ")
    where = f"secondary_tiers ({tier_type})" if place.startswith("secondary") else f"{OPTIONS_KEY}.{place}"
    return f"kv_connector_extra_config: {where}: {text}"


def _not_here(config: TierConfig, extra_config: Mapping[str, Any]) -> list[str]:
    """Return the options that vLLM's own primary does not allow, and a duplicate tier name."""
    problems = []
    if tier_names(extra_config).count(config.tier_name) > 1:
        problems.append(f"the name {config.tier_name!r} is that of another tier, too; give one of them another 'name'")
    if config.admission != "all":
        problems.append(
            f"admission: {config.admission!r} needs the whole stack (KvtiersConnector); here it can be 'all' alone"
        )
    return problems
