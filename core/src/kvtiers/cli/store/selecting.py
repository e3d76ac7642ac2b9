"""The options that say which values of a store are meant, and in which tier: the same for all commands about values."""

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from kvtiers.api import ConfigError
from kvtiers.api.units import parse_duration, parse_size
from kvtiers.cli.output import value_bytes_option, with_unit
from kvtiers.cli.store.inventory import Selection
from kvtiers.layout.storage_name import check_tenant

__all__ = ["exit_status", "selecting"]

_EXIT = """
Exit status: 0 all is well, 1 {one}, 2 the config or the command line is wrong, 130 stopped by Ctrl-C (what was done
until then is reported)."""


def exit_status(one: str) -> str:
    """Return the end of a command's help. ``one``: what exit status 1 means."""
    return _EXIT.format(one=one)


def _fingerprint(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"[0-9a-f]{4,24}", value.lower()):
        raise click.BadParameter(f"expected 4 to 24 hex digits, got {value!r}")
    return value.lower()


def _tenant(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        return check_tenant(value) if value else ""
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the tier, the config, and the options that say which values are meant, as a ``Selection``."""

    @functools.wraps(command)
    def run(
        *args: Any,
        prefix: str,
        namespace: str,
        model: str,
        older_than: float | None,
        larger_than: int | None,
        fingerprint: str,
        tenant: str,
        **options: Any,
    ) -> Any:
        selection = Selection(prefix, namespace, model, older_than, larger_than, fingerprint, tenant)
        return command(*args, selection=selection, **options)

    options = [
        click.argument("tier"),
        click.option("--config", "file", metavar="FILE", required=True, type=click.Path(), help="The tiers, as YAML."),
        click.option("--namespace", metavar="NAME", default="", help="Only values of this namespace."),
        click.option(
            "--model", metavar="NAME", default="", help="Only values of this model: its name, or as 'du' shows it."
        ),
        click.option(
            "--fingerprint",
            metavar="HEX",
            default="",
            callback=_fingerprint,
            help="Only values whose fingerprint begins so, as 'du', 'kvtiers status' and an engine's start show it.",
        ),
        click.option("--tenant", metavar="NAME", default="", callback=_tenant, help="Only values of this tenant."),
        click.option("--prefix", metavar="TEXT", default="", help="Only values whose names begin so."),
        click.option(
            "--older-than",
            metavar="DURATION",
            callback=with_unit(parse_duration),
            help="Only values not written (or used, where the tier records it) for this long: 12h, 30d.",
        ),
        click.option(
            "--larger-than", metavar="SIZE", callback=with_unit(parse_size), help="Only values larger than this."
        ),
        value_bytes_option("Size of the memory for one value that the tier is opened with; grows where it has to."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ]
    for option in reversed(options):
        run = option(run)
    return click.pass_context(run)
