"""The command ``kvtiers``: subcommands are imported on use, and errors are lines, not tracebacks."""

import errno
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from kvtiers._process import hold_standard_descriptors
from kvtiers.api import ConfigError, KvtiersError, TierPluginError
from kvtiers.api.command import COMMAND_GROUP
from kvtiers.cli.trial import tried
from kvtiers.plugins import installed_names, load_command

__all__ = ["LateExitError", "cli", "main"]


_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


_HELP_SECONDS = 3.0  # for a companion's import, which only its line in the list waits for


class Lazy(NamedTuple):
    """A command's place (``module:attribute``), and its line in the list of commands."""

    target: str
    help: str


COMMANDS = {
    "check": Lazy("kvtiers.cli.check.commands:check", "Validate a config, try every tier, and examine this machine."),
    "completion": Lazy("kvtiers.cli.completion:completion", "Print a shell's completion script."),
    "new-tier": Lazy("kvtiers.cli.new_tier.command:new_tier", "Write a new tier type's distribution to start from."),
    "metrics": Lazy(
        "kvtiers.cli.metrics:metrics", "Serve the figures of this machine's engines to Prometheus, or print them."
    ),
    "pool": Lazy("kvtiers.cli.pool:pool", "Keep CPU memory that outlives its engine, so that a restart is warm."),
    "report": Lazy("kvtiers.cli.report:report", "Gather what a bug report needs, without secrets."),
    "ctl": Lazy("kvtiers.cli.ctl:ctl", "Command a running engine: switch, limit, attach, drain or clear its tiers."),
    "status": Lazy("kvtiers.cli.status:status", "Show the tiers of running engines, and whether they pay."),
    "store": Lazy(
        "kvtiers.cli.store.commands:store", "List, count, check, delete and retire the values in a tier's store."
    ),
    "top": Lazy("kvtiers.cli.top:top", "Show the tiers of running engines live: hits, GB/s, queues, seconds saved."),
    "tiers": Lazy("kvtiers.cli.tiers:tiers", "List the installed tier types and their options."),
    "warm": Lazy("kvtiers.cli.warm:warm", "Fill a running engine's CPU memory from a tier, ahead of its requests."),
}
"""The commands of core. Companions add theirs through the entry-point group ``kvtiers.commands``."""

COMPANIONS = {
    **dict.fromkeys(("bench", "evaluate", "plan", "replay", "size"), "replay"),
    "vllm-config": "vllm",
}
"""By the name of a companion's command, the extra of kvtiers that installs it."""


class LateExitError(SystemExit):
    """Exit with this status although threads hang, such as those of a backend that never answers."""


class LazyGroup(click.Group):
    """A group whose commands are imported on use; its help imports none of core's, and companions' in a child."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        """Return the names of core's commands and of the installed companions'."""
        return sorted({*self._lazy, *installed_names(COMMAND_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name; TierPluginError, one line, if its companion is missing or broken."""
        if cmd_name in self._lazy:
            target = self._lazy[cmd_name].target
        elif cmd_name in self.list_commands(ctx):
            target = load_command(cmd_name).target
        elif cmd_name in COMPANIONS:
            extra = COMPANIONS[cmd_name]
            raise TierPluginError(
                f"the command {cmd_name!r} comes with kvtiers-{extra}, which is not installed: "
                f"pip install --find-links wheels 'kvtiers[{extra}]'"
            )
        else:
            return None
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names of commands for a shell, without importing them, and the group's own options."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._help_of(name)) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._help_of(name)) for name in self.list_commands(ctx)])

    def _help_of(self, name: str) -> str:
        if name in self._lazy:
            return self._lazy[name].help
        try:
            return tried(f"command {name!r}", lambda: load_command(name).help, _HELP_SECONDS)
        except TierPluginError as error:
            return f"(unusable: {error})"

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print problems as lines that begin with ``error:``, with exit status 2."""
        try:
            return super().invoke(ctx)
        except KvtiersError as error:
            lines = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
            for line in lines:
                click.echo(f"error: {line}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


def _print_versions(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:  # noqa: ARG001 -- click's
    if wanted and not ctx.resilient_parsing:
        # Imported here: it looks through every installed distribution.
        from kvtiers.cli.versions import version_lines

        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.command(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  kvtiers check tiers.yaml           is this config right, and will it run here?
  kvtiers tiers                      what can stand under 'secondary:'?
  kvtiers COMMAND --help             all about one command

Exit status: 0 all is well, 1 a check found an error, 2 the config or the command line is wrong.""",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_versions,
    help="Show the versions of kvtiers and of all that belongs to it.",
)
def cli() -> None:
    """Move an LLM engine's KV cache out of GPU memory, through tiers, and back."""


def _open_closed_streams() -> None:
    """Let what is printed go nowhere where a daemon's wrapper has closed standard output or standard error."""
    hold_standard_descriptors()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 -- to the end


def _is_nowhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def main() -> None:
    """Run the command line and end the process."""
    _open_closed_streams()
    try:
        try:
            cli(prog_name="kvtiers")
        finally:
            sys.stdout.flush()  # here, where an error can still be said in a line
    except MemoryError as error:
        why = str(error) or "a limit of this process (ulimit -v), or of the machine"
        sys.exit(f"error: no memory to be had: {why}")
    except OSError as error:
        if _is_nowhere():
            sys.exit("error: the working directory has been removed; change to another one")
        if error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter flushes at its exit
        click.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        sys.exit(1)
    except LateExitError as end:
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for the threads that hang.
        os._exit(end.code if isinstance(end.code, int) else 1)
