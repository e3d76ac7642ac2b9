"""The running engines of this machine, as their status sockets answer; for ``status``, ``ctl`` and ``top``."""

from typing import Any

import click

from kvtiers.status import ask_engine, process_of, running

__all__ = ["engines"]


def engines(*, quiet: bool = False) -> list[dict[str, Any]]:
    """Return each engine's answer, its tiers together; one line on stderr for each socket that gives none.

    ``quiet``: no such line, as on a live screen.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name in running():
        try:
            answer = ask_engine(name)
        except (OSError, ValueError) as error:
            if not quiet:
                click.echo(f"{name}: no answer: {error}", err=True)
            continue
        known = found.setdefault((process_of(name), answer["uid"]), answer)
        known["tiers"] |= answer["tiers"]  # each tier of an engine has a socket of its own
    return list(found.values())
