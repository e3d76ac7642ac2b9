"""``kvtiers check``: whether a config is valid, its tiers work, and it will run on this machine."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from kvtiers.api import ConfigError, Finding, StartError
from kvtiers.api.units import format_size, parse_duration
from kvtiers.cli.output import print_table, value_bytes_option, with_unit
from kvtiers.config import EventsConfig, OffloadConfig, load_config
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_file_warnings, open_keys
from kvtiers.encryption.keys import KeyRing
from kvtiers.kv_events.open import missing_libraries
from kvtiers.layout.cache_layout import VALUE_ALIGN

__all__ = ["check"]


class _Line(NamedTuple):
    """One line of the report: what it is about (``config``, ``machine``, ``tier NAME``), and the finding."""

    about: str
    finding: Finding


@click.command(
    epilog="""\b
Examples:
  kvtiers check tiers.yaml
  kvtiers check tiers.yaml --offline            only: is the file right?
  kvtiers check tiers.yaml --value-bytes 8MiB   with values as large as your model's chunks
  kvtiers check tiers.yaml --json | jq .ok

Each line is ok, a warning (it runs, but worse) or an error (it does not run), with the fix. All tiers are tried at
the same time, each in a process of its own: one that ends early, or does not end, is an error. Values are written as
'_check/...' and deleted again (a tier that moves its values by itself has no delete: there one stays, under a random
key, until the tier evicts it).

Exit status: 0 no error (with --strict: no warning either), 1 an error, 2 the config or the command line is wrong."""
)
@click.argument("file", type=click.Path())
@click.option("--offline", is_flag=True, help="Only validate the file; open nothing.")
@value_bytes_option("Size of the value that is written to each tier; a multiple of 4096.")
@click.option(
    "--timeout",
    metavar="DURATION",
    callback=with_unit(parse_duration),
    default="30s",
    show_default=True,
    help="How long all tiers together may take.",
)
@click.option("--strict", is_flag=True, help="Count a warning as a failure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(
    ctx: click.Context, file: str, offline: bool, value_bytes: int, timeout: float, strict: bool, as_json: bool
) -> None:
    """Validate the config FILE, try every tier, and examine this machine.

    Every tier is opened; one random value is written, read back, compared and deleted, by every way that the tier
    has for that. A read-only tier is only listed and read. Then the tier's own diagnosis runs, where it has one.
    """
    try:
        config = load_config(file)
    except ConfigError as error:
        if not as_json:
            raise
        _report(file, [_Line("config", Finding("error", problem)) for problem in error.problems], as_json, strict)
        ctx.exit(2)
    lines = [_Line("config", Finding("ok", _summary(config))), *_without_a_unit(config)]
    if not offline:
        lines += _examine(config, value_bytes, timeout)
    failed = _report(file, lines, as_json, strict)
    ctx.exit(1 if failed else 0)


def _summary(config: OffloadConfig) -> str:
    tiers = ", ".join(tier.tier_name for tier in config.secondary) or "none"
    return f"valid: primary of {format_size(config.primary.capacity)}, secondary tiers: {tiers}"


def _without_a_unit(config: OffloadConfig) -> Iterator[_Line]:
    """Yield an error for each capacity that holds nothing of any model: ``64`` is 64 bytes."""
    tiers = ((f"tier {tier.tier_name}", getattr(tier, "capacity", None)) for tier in config.secondary)
    for about, capacity in (("config", config.primary.capacity), *tiers):
        if isinstance(capacity, int) and capacity < VALUE_ALIGN:
            where = "primary.capacity" if about == "config" else "capacity"
            text = f"{where}: {format_size(capacity)} holds no chunk of any model. Did you mean {capacity}GiB?"
            yield _Line(about, Finding("error", text, "write the unit: a number without one is of bytes"))


def _examine(config: OffloadConfig, value_bytes: int, timeout: float) -> list[_Line]:
    # Imported here: `--offline`, the usual thing in a pre-commit hook, needs none of it.
    from kvtiers.cli.check.check_machine import examine
    from kvtiers.cli.check.check_tier import try_tiers
    from kvtiers.cli.machine import Machine

    lines = [_Line("machine", finding) for finding in examine(config, Machine())]
    lines += [_Line("encryption", finding) for finding in _encryption(config)]
    lines += [_Line("events", finding) for finding in _try_events(config.events)]
    trials = try_tiers(config.secondary, config.namespace, value_bytes, timeout)
    lines += [_Line(f"tier {trial.name}", finding) for trial in trials for finding in trial.findings]
    return lines


def _encryption(config: OffloadConfig) -> Iterator[Finding]:
    """Read the keys as a tier host would, commands included."""
    encryption = config.encryption
    if encryption is None:
        return
    clear = [tier.tier_name for tier in config.secondary if not tier.encrypt]
    try:
        ring = open_keys(encryption, config.namespace)
    except ConfigError as error:
        fix = "correct it where the config says that it is from; without it, the tiers are out of use"
        yield Finding("error", str(error), fix)
        return
    found = f"{ring.in_words()} of namespace {config.namespace!r}"
    yield Finding("ok", f"{found}; in clear: {', '.join(clear)}" if clear else found)
    named = () if config.tenants is None or not encryption.others_have_own else config.tenants.named
    for tenant in dict.fromkeys([*encryption.listed, *named]):
        yield from _tenant_key(encryption, config.namespace, tenant, ring)
    for line in open_file_warnings(encryption):
        where, _, fix = line.rpartition("; ")
        yield Finding("warning", where, fix)


def _tenant_key(encryption: EncryptionConfig, namespace: str, tenant: str, ring: KeyRing) -> Iterator[Finding]:
    try:
        own = open_keys(encryption, namespace, tenant)
    except ConfigError as error:
        fix = "correct it where the config says that it is from; without it, this tenant runs without tiers"
        yield Finding("error", str(error), fix)
        return
    yield Finding("ok", f"{own.in_words()} of tenant {tenant!r}")
    if other := ring.add(tenant, own):
        yield Finding("warning", f"tenant {tenant!r} and {other} have the same key", "give each a key of its own")


def _try_events(events: EventsConfig | None) -> list[Finding]:
    """Open the endpoints of KV events for a moment."""
    if events is None:
        return []
    if line := missing_libraries():
        _, problem, fix = line.split(": ")
        return [Finding("error", problem, fix)]
    from kvtiers.kv_events.sockets import EventSockets

    try:
        sockets = EventSockets(events, 0)
    except StartError as error:
        return [Finding("warning", f"{error}; until then the engine runs without KV events")]
    sockets.close(0.0)
    return [Finding("ok", f"KV events can be published at {sockets.endpoint}")]


def _report(file: str, lines: Sequence[_Line], as_json: bool, strict: bool) -> bool:
    """Print the report; return whether there is an error in it, or, if ``strict``, a warning."""
    errors = sum(line.finding.level == "error" for line in lines)
    warnings = sum(line.finding.level == "warning" for line in lines)
    failed = errors > 0 or (strict and warnings > 0)
    if as_json:
        findings = [
            {"about": about, "level": finding.level, "text": finding.text, "fix": finding.fix}
            for about, finding in lines
        ]
        click.echo(json.dumps({"ok": not failed, "config": file, "findings": findings}, indent=2))
    else:
        rows = [[finding.level, about, _with_fix(finding)] for about, finding in lines]
        print_table(["level", "about", "finding"], rows, header=False)
        click.echo(f"{file}: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
    return failed


def _with_fix(finding: Finding) -> str:
    text = finding.text
    return f"{text}{'' if text.endswith(('.', '?')) else '.'} Fix: {finding.fix}" if finding.fix else text


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
