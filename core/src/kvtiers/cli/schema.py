"""A JSON schema of the YAML file, with all installed tier types, for editors."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from kvtiers.api import TierPlugin
from kvtiers.config import OffloadConfig
from kvtiers.config.options import written_default

__all__ = ["editor_schema"]

_VARIABLE = {"type": "string", "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"}
_NUMERIC_LIMITS = ("ge", "gt", "le", "lt")


class _EditorSchema(GenerateJsonSchema):
    """The schema of the input, not of the parsed values: units, ``${NAME}``, and defaults as written in YAML."""

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return {"anyOf": [super().int_schema(schema), _VARIABLE]}

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), _VARIABLE]}

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        return {"anyOf": [super().bool_schema(schema), _VARIABLE]}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        result = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        for name, field in model.model_fields.items():
            option = result["properties"][name]
            option.pop("default", None)
            if (default := written_default(field)) is not None:
                option["default"] = default
            for limit in _NUMERIC_LIMITS:  # left over where a unit has put text in a number's place
                option.pop(limit, None)
        return result


def editor_schema(plugins: Sequence[TierPlugin]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a whole config, in which a tier is one of these plugins' models."""
    configs = dict.fromkeys(plugin.config for plugin in plugins)
    models: list[type[BaseModel]] = [OffloadConfig, *configs]
    references, schema = models_json_schema([(model, "validation") for model in models], schema_generator=_EditorSchema)
    definitions = schema["$defs"]

    def take(model: type[BaseModel]) -> dict[str, Any]:
        definition: dict[str, Any] = definitions.pop(references[model, "validation"]["$ref"].rpartition("/")[2])
        return definition

    root, tiers = take(OffloadConfig), {config: take(config) for config in configs}
    mapping = {}
    for plugin in plugins:
        # One of its own for each type: two types may share a config model.
        definition = tiers[plugin.config]
        properties = {**definition["properties"], "type": {"const": plugin.name, "description": "the tier type"}}
        required = sorted({*definition.get("required", ()), "type"})
        definitions[f"tier-{plugin.name}"] = {**definition, "properties": properties, "required": required}
        mapping[plugin.name] = f"#/$defs/tier-{plugin.name}"
    any_tier = {
        "oneOf": [{"$ref": reference} for reference in mapping.values()],
        "discriminator": {"propertyName": "type", "mapping": mapping},
    }
    root["properties"]["secondary"] = {
        "type": ["array", "null"],
        "items": any_tier if mapping else {},
        "description": OffloadConfig.model_fields["secondary"].description,
    }
    # The tiers of the model itself have no type yet; nothing refers to them any more.
    definitions.pop("TierConfig", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvtiers config",
        **{name: value for name, value in root.items() if name != "title"},
        "$defs": definitions,
    }
