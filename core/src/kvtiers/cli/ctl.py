"""``kvtiers ctl``: commands to a running engine, over its control socket."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from kvtiers.cli.engines import engines
from kvtiers.control import CommandRefused, send_command

__all__ = ["ctl"]

_SECONDS = 10.0
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
  kvtiers ctl redis off              from now on its chunks are misses, and it gets none
  kvtiers ctl redis on
  kvtiers ctl redis --help           all commands to a tier

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
    return tier


def _send(ctx: click.Context, action: str, how: dict[str, Any], **arguments: Any) -> None:
    """Send a command to the engines that are meant, print their answers, and exit."""
    answers: list[dict[str, Any]] = []
    for engine in _meant(how["pid"], to_all=how["to_all"]):
        answer = {"engine": engine["engine"], "pid": engine["pid"]}
        if not engine.get("control"):
            answers.append({**answer, "error": f"{engine['engine']} takes no commands: see docs/operate.md"})
            continue
        try:
            text, result = send_command(engine["control"], action, how["seconds"], **arguments)
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
        which = f"process {answer['pid']}: " if len(answers) > 1 else ""
        if "error" in answer:
            click.echo(f"error: {which}{answer['error']}", err=True)
        else:
            click.echo(f"{which}{answer['text']}")


def _meant(pid: int | None, *, to_all: bool) -> list[dict[str, Any]]:
    """Return the engines that a command is for: one, unless all are meant. CommandRefused, one line, if none is."""
    found = engines()
    if pid is not None:
        found = [engine for engine in found if engine["pid"] == pid]
        if not found:
            raise CommandRefused(f"no engine with kvtiers runs here as process {pid} of this user")
    if not found:
        raise CommandRefused("no engine with kvtiers runs here as this user")
    if len(found) > 1 and not to_all:
        pids = ", ".join(str(engine["pid"]) for engine in found)
        raise CommandRefused(f"{len(found)} engines run here; give --engine PID ({pids}), or --all")
    return found
