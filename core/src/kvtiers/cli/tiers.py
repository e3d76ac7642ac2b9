"""``kvtiers tiers``: the installed tier types and their options in the YAML file."""

import dataclasses
import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import click

from kvtiers.api import API_VERSION, TierConfig, TierPlugin, TierPluginError
from kvtiers.cli.output import print_heading, print_table
from kvtiers.cli.trial import tried
from kvtiers.config.options import Option, options_of
from kvtiers.plugins import distribution_of, installed_tiers, load_tier

__all__ = ["tiers"]


@dataclass(frozen=True, slots=True)
class _Installed:
    """One installed tier type; ``plugin`` is None, and ``error`` is one line, if it cannot be used."""

    entry: EntryPoint
    plugin: TierPlugin | None
    error: str = ""

    @property
    def distribution(self) -> str:
        return self.entry.dist.name if self.entry.dist else ""

    @property
    def version(self) -> str:
        return self.entry.dist.version if self.entry.dist else ""


@click.command(
    epilog="""\b
Examples:
  kvtiers tiers
  kvtiers tiers --json | jq -r '.tiers[].name'
  kvtiers tiers --json-schema > tiers.schema.json

With the first line of a YAML file as below, editors with a YAML language server complete and check it:

\b
  # yaml-language-server: $schema=tiers.schema.json

Exit status: 1 if an installed tier type cannot be used."""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--json-schema", is_flag=True, help="Print a JSON schema of the YAML file, for editors.")
@click.pass_context
def tiers(ctx: click.Context, as_json: bool, json_schema: bool) -> None:
    """List the installed tier types: where each is from, and its options with types and defaults."""
    if as_json and json_schema:
        raise click.UsageError("--json and --json-schema exclude each other")
    found = [_load(entry) for entry in installed_tiers()]
    if json_schema:
        # Imported here: only this option needs it.
        from kvtiers.cli.schema import editor_schema

        click.echo(json.dumps(editor_schema([item.plugin for item in found if item.plugin]), indent=2))
        for item in found:
            if item.error:
                click.echo(f"error: {item.error}", err=True)
    elif as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
    else:
        _print(found)
    ctx.exit(1 if any(item.error for item in found) else 0)


def _load(entry: EntryPoint) -> _Installed:
    try:
        tried(f"tier type {entry.name!r} ({distribution_of(entry)})", lambda: load_tier(entry.name).name)
        return _Installed(entry, load_tier(entry.name))
    except TierPluginError as error:
        return _Installed(entry, None, str(error))


def _common_names() -> set[str]:
    return {option.name for option in options_of(TierConfig)}


def _as_json(found: list[_Installed]) -> dict[str, Any]:
    common = _common_names()
    return {
        "api_version": API_VERSION,
        "tiers": [
            {
                "name": item.plugin.name,
                "kind": item.plugin.kind,
                "distribution": item.distribution,
                "version": item.version,
                "api_version": item.plugin.api_version,
                "options": [
                    {**dataclasses.asdict(option), "common": option.name in common}
                    for option in options_of(item.plugin.config)
                ],
            }
            for item in found
            if item.plugin
        ],
        "broken": [
            {
                "name": item.entry.name,
                "distribution": item.distribution,
                "version": item.version,
                "error": item.error,
            }
            for item in found
            if item.error
        ],
    }


def _print(found: list[_Installed]) -> None:
    if not found:
        click.echo("No tier types are installed: install one with pip, kvtiers-example for instance.")
        return
    common = options_of(TierConfig)
    for item in found:
        if item.plugin is None:
            click.secho(f"error: {item.error}", fg="red")
        else:
            kind = "a store" if item.plugin.kind == "store" else "a tier manager"
            print_heading(
                f"{item.plugin.name}: {kind} from {item.distribution} {item.version}, API {item.plugin.api_version}"
            )
            # An option of every tier that this one has changed, its default say, is one of its own.
            _print_options([option for option in options_of(item.plugin.config) if option not in common])
        click.echo()
    print_heading("options of every tier:")
    _print_options(common)


def _print_options(options: list[Option]) -> None:
    rows = [
        [option.name, option.type, "required" if option.required else option.default, option.description]
        for option in options
    ]
    if rows:
        print_table(["option", "type", "default", "what it is"], rows)
    else:
        click.echo("  no options of its own")
