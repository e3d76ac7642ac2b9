"""``kvtiers ctl``: commands to a running engine, over its control socket."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtiers.api.units import parse_size
from kvtiers.cli.engines import NO_COMMANDS, meant
from kvtiers.cli.output import with_unit
from kvtiers.control import CommandRefused, send_command

__all__ = ["ctl"]

_SECONDS = 10.0
_NOT_GIVEN = "not given"
_F = TypeVar("_F", bound=Callable[..., Any])


def _options(seconds: float = _SECONDS) -> Callable[[_F], _F]:
    """Return a decorator with the options of every command: which engines, how long, and how to print."""

    def add(command: _F) -> _F:
        command = click.option("--json", "as_json", is_flag=True, help="Print a JSON list, one object an engine.")(
            command
        )
        command = click.option(
            "--timeout",
            "seconds",
            type=click.FloatRange(0, 3600),
            default=seconds,
            show_default=True,
            metavar="SECONDS",
            help="How long to wait for the engine's answer.",
        )(command)
        command = click.option("--all", "to_all", is_flag=True, help="Command all engines that run here.")(command)
        return click.option("--engine", "pid", type=int, metavar="PID", help="Which engine, if several run here.")(
            command
        )

    return add


def _size_or_none(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    if value == "none":
        return None
    return int(with_unit(parse_size)(ctx, param, value))


def _number_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> float | str | None:
    if value is None:
        return _NOT_GIVEN
    return None if value == "none" else _number(value, param, ctx)


def _number(value: str, param: click.Parameter, ctx: click.Context) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise click.BadParameter(f"expected a number above 0, or none, got {value!r}", ctx, param)
    return number


def _path(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:  # noqa: ARG001 -- click's
    return value if value is None else str(Path(value).absolute())  # the engine has another working directory


class _Ctl(click.Group):
    """A group in which each word that is no command is a tier's name."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or the commands to the tier of this name."""
        return super().get_command(ctx, cmd_name) or _tier(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands to an engine."""
        return sorted(super().list_commands(ctx))


@click.command(
    cls=_Ctl,
    subcommand_metavar="TIER on|off|read-only  or  COMMAND ...",
    epilog="""\b
Examples:
  kvtiers ctl fs off                 from now on its chunks are misses, and it gets none
  kvtiers ctl fs on
  kvtiers ctl fs rate-limit 200MiB
  kvtiers ctl drain                  answers when all that is on its way has been stored
  kvtiers ctl reload                 applies what may change while the engine runs, and names the rest
  kvtiers ctl fs --help           all commands to a tier

Commands the one engine that runs here as the same user (root: of any user), or those that --engine or --all say. The
engine does it in its next step, and logs who has sent it. Exit status: 0 done, 1 refused or not answered.""",
)
def ctl() -> None:
    """Command a running engine. A word that is no command is the name of a tier."""


def _tier(name: str) -> click.Group:
    """Return the commands to one tier."""

    def switch(to: str, text: str) -> None:
        @tier.command(to, help=text)
        @_options()
        @click.pass_context
        def command(ctx: click.Context, /, **how: Any) -> None:
            _send(ctx, "switch", how, tier=name, to=to)

    tier = click.Group(name, help=f"Command the tier {name}.", no_args_is_help=True)
    switch("on", "Use the tier as its config says.")
    switch("off", "Ask the tier nothing and store nothing in it; loads in flight are misses.")
    switch("read-only", "Load from the tier, and store nothing in it.")

    @tier.command("rate-limit")
    @click.argument("limit", metavar="SIZE|none", callback=_size_or_none)
    @click.option("--requests", metavar="N|none", callback=_number_or_none, help="Most calls of the store a second.")
    @_options()
    @click.pass_context
    def rate_limit(ctx: click.Context, /, limit: int | None, requests: Any, **how: Any) -> None:
        """Read and write at most SIZE a second, such as 200MiB, over all of the tier's hosts."""
        if requests is _NOT_GIVEN and limit is None:
            requests = None  # none at all
        calls = {} if requests is _NOT_GIVEN else {"requests_per_second": requests}
        _send(ctx, "limit", how, tier=name, bytes_per_second=limit, **calls)

    @tier.command("threads")
    @click.argument("threads", metavar="N", type=click.IntRange(1, 256))
    @_options()
    @click.pass_context
    def set_threads(ctx: click.Context, /, threads: int, **how: Any) -> None:
        """Make N transfers at the same time, in each of the tier's hosts."""
        _send(ctx, "limit", how, tier=name, threads=threads)

    return tier


@ctl.command()
@click.option("--config", metavar="FILE", callback=_path, help="The config's file; default: that of the start.")
@_options()
@click.pass_context
def reload(ctx: click.Context, /, config: str | None, **how: Any) -> None:
    """Apply the options of the config's file that may change while the engine runs; name the others."""
    _send(ctx, "reload", how, **_given(config=config))


@ctl.command()
@_options(60.0)
@click.pass_context
def drain(ctx: click.Context, /, **how: Any) -> None:
    """Wait until all that is on its way into the tiers has been stored."""
    _send(ctx, "drain", how)


@ctl.command()
@click.option("--fingerprint", metavar="HEX", help="If this is the engine's fingerprint; 8 digits or more of it.")
@click.option("--model", metavar="NAME", help="If this is the engine's model.")
@click.option("--tenant", metavar="NAME", help="Only this tenant's chunks.")
@_options()
@click.pass_context
def clear(ctx: click.Context, /, fingerprint: str | None, model: str | None, tenant: str | None, **how: Any) -> None:
    """Forget the chunks in the engine's CPU memory. What the tiers hold stays."""
    of = _given(fingerprint=fingerprint, model=model, tenant=tenant)
    if len(of) != 1:
        raise click.UsageError("give one of --fingerprint, --model and --tenant")
    _send(ctx, "clear", how, **of)


@ctl.command()
@click.argument("tier", metavar="TIER")
@click.option("--config", metavar="FILE", callback=_path, help="The file that has the tier; default: of the start.")
@_options(30.0)
@click.pass_context
def attach(ctx: click.Context, /, tier: str, config: str | None, **how: Any) -> None:
    """Open a tier of the config's file that the engine does not have yet."""
    _send(ctx, "attach", how, tier=tier, **_given(config=config))


@ctl.command()
@click.argument("tier", metavar="TIER")
@_options(60.0)
@click.pass_context
def detach(ctx: click.Context, /, tier: str, **how: Any) -> None:
    """Switch a tier off, let its stores end, and close it."""
    _send(ctx, "detach", how, tier=tier)


def _given(**arguments: str | None) -> dict[str, str]:
    return {name: value for name, value in arguments.items() if value is not None}


def _send(ctx: click.Context, action: str, how: dict[str, Any], **arguments: Any) -> None:
    """Send a command to the engines that are meant, print their answers, and exit."""
    answers: list[dict[str, Any]] = []
    for engine in meant(how["pid"], to_all=how["to_all"]):
        answer = {"engine": engine["engine"], "pid": engine["pid"]}
        if not engine.get("control"):
            answers.append({**answer, "error": f"{engine['engine']} {NO_COMMANDS}"})
            continue
        try:
            text, result = send_command(engine["control"], action, how["seconds"], engine["uid"], **arguments)
            answers.append({**answer, "text": text, "result": result})
        except CommandRefused as refusal:
            answers.append({**answer, "error": str(refusal)})
    if how["as_json"]:
        click.echo(json.dumps(answers))
    else:
        _print(answers)
    ctx.exit(1 if any("error" in answer for answer in answers) else 0)


def _print(answers: Sequence[dict[str, Any]]) -> None:
    for answer in answers:
        which = f"process {answer['pid']}"
        if "error" in answer:
            click.echo(f"error: {which}: {answer['error']}", err=True)
        else:
            click.echo(f"{which}: {answer['text']}")
