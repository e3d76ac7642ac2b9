"""``kvtiers completion``: the script that makes a shell complete commands and options, from click."""

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

_VARIABLE = "_KVTIERS_COMPLETE"  # click's own name for it: the script sets it, and kvtiers answers


@click.command(
    epilog="""\b
Examples:
  eval "$(kvtiers completion bash)"                                    in ~/.bashrc
  eval "$(kvtiers completion zsh)"                                     in ~/.zshrc
  kvtiers completion fish > ~/.config/fish/completions/kvtiers.fish"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script by which this shell completes commands and options of kvtiers."""
    kind = get_completion_class(shell)
    assert kind is not None, "click has all three"
    click.echo(kind(ctx.find_root().command, {}, "kvtiers", _VARIABLE).source())
