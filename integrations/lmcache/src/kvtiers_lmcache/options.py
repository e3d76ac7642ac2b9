"""The options of both modes: the adapter's ``adapter_params``, or ``remote_storage_plugin.kvtiers.*`` of the config."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from kvtiers.api import ConfigError, Duration, Size, StrictModel

__all__ = ["Options", "describe_options", "options_of"]


class Options(StrictModel):
    """The options, validated."""

    config: str | dict[str, Any] = Field(description="file of the tiers, or what would stand in it")
    weights: str | dict[str, str] = Field(
        default="",
        description="commit or digest of the model's weights, or an object with that of each model by its name; "
        "found out where the model's name is a folder",
    )
    kv_dtype: str = Field(default="", description="numbers of a packed KV cache (uint8, int8), such as fp8_e4m3")
    kv_layout: str = Field(default="", description="anything else that decides the bytes; servers share only if equal")
    tenant: str = Field(default="", description="whose values those are whose key names no tenant")
    salt_is_tenant: bool = Field(default=False, description="whether LMCache's salt of a key is its tenant")
    lookup_deadline: Duration = Field(default=2.0, gt=0, description="time in which a lookup ends")
    deadline: Duration = Field(default=10.0, gt=0, description="time in which a load ends")
    store_deadline: Duration = Field(default=60.0, gt=0, description="time in which a store or a deletion ends")
    bounce_bytes: Size = Field(
        default=256 << 20, gt=0, description="shared memory for each model and shape, for values on their way"
    )
    capacity: Size = Field(
        default=0, ge=0, description="bytes at which LMCache's own eviction begins; 0: the tiers' limits alone"
    )


def options_of(given: Mapping[str, Any], where: str) -> Options:
    """Read the options; ConfigError, a line for each problem. ``where``: what they stand in, for these lines."""
    try:
        return Options.model_validate(dict(given))
    except ValidationError as error:
        names = ", ".join(Options.model_fields)
        raise ConfigError(
            [
                f"{where}: {'.'.join(map(str, problem['loc'][:1]))!r}: {problem['msg']}; it has {names}"
                for problem in error.errors()
            ]
        ) from None


def describe_options() -> str:
    """Return the options with their meaning, one a line."""
    return "\n".join(f"- {name}: {field.description}" for name, field in Options.model_fields.items())
