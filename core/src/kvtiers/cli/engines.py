"""The running engines of this machine, as their control sockets answer; for the commands to and about them."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import click

from kvtiers.control import CommandRefused, process_of, running
from kvtiers.status import ANSWER_SECONDS, ask_engine

__all__ = ["NO_COMMANDS", "ask_all", "engines", "meant"]

_AT_ONCE = 32
_SOCKETS = "/proc/net/unix"

NO_COMMANDS = "takes no commands: it has its tiers under vLLM's own tiering, or is of an older release"


def ask_all(seconds: float = ANSWER_SECONDS) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each control socket, what it answers, and why it does not, "" if it does; side by side, as one may hang."""
    names = running()
    if names:
        with ThreadPoolExecutor(min(len(names), _AT_ONCE)) as pool:
            yield from pool.map(partial(_asked, seconds=seconds), names)


def _asked(name: str, seconds: float) -> tuple[str, dict[str, Any], str]:
    try:
        return name, ask_engine(name, seconds), ""
    except CommandRefused as refusal:
        return name, {}, str(refusal)


def engines(*, quiet: bool = False, seconds: float = ANSWER_SECONDS) -> list[dict[str, Any]]:
    """Return each engine's answer, its tiers together; one line on stderr for each socket that gives none.

    ``quiet``: no such line, as on a live screen.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    if not quiet and sys.platform == "linux" and not os.access(_SOCKETS, os.R_OK):
        click.echo(f"no engine can be found: {_SOCKETS} cannot be read", err=True)
    for name, answer, error in ask_all(seconds):
        if error:
            if not quiet and name in running():  # else it has ended meanwhile
                click.echo(f"{name}: no answer: {error}", err=True)
            continue
        answer.pop("stats", None)  # for `kvtiers metrics`: too much for a person
        known = found.setdefault((process_of(name), answer["uid"]), answer)
        known["tiers"] |= answer["tiers"]  # each tier of an engine has a socket of its own
    return list(found.values())


def meant(pid: int | None, *, to_all: bool) -> list[dict[str, Any]]:
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
