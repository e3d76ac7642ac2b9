"""The contract by which a companion distribution adds a command to ``kvtiers``.

A distribution declares an entry point in the group ``kvtiers.commands``, named as the command, that leads to a
``CommandPlugin``. The module that holds it imports nothing heavy: ``kvtiers --help`` reads it; the command itself is
imported when it is used.
"""

from dataclasses import dataclass

__all__ = ["COMMAND_API_VERSION", "COMMAND_GROUP", "CommandPlugin"]

COMMAND_API_VERSION = 1
"""The number of this contract. A companion states, as a literal, the one it was written for."""

COMMAND_GROUP = "kvtiers.commands"


@dataclass(frozen=True, slots=True)
class CommandPlugin:
    """One command: its name, its line in ``kvtiers --help``, and where its ``click.Command`` is (``module:attribute``).

    ``api_version`` is the literal number of the contract that the companion was written for.
    """

    name: str
    help: str
    target: str
    api_version: int
