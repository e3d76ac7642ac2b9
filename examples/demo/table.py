"""Tables that grow while something runs: each row is printed as soon as it is known."""

import sys
from collections.abc import Sequence

import click

__all__ = ["Table", "say"]


class Table:
    """Prints a head, then rows. ``columns``: (name, width); a negative width sets the column to the left."""

    def __init__(self, *columns: tuple[str, int]) -> None:
        self._widths = [width for _, width in columns]
        say(self._line([name for name, _ in columns]), dim=True)

    def row(self, *cells: str, good: bool = True) -> None:
        """Print a row; one that is not good stands out."""
        say(self._line(cells), fg=None if good else "red")

    def _line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, width in zip(cells, self._widths, strict=True)
        ]
        return "  " + "  ".join(padded).rstrip()


def say(text: str = "", **style: object) -> None:
    """Print a line at once, in a style (``click.style``) where that can be seen."""
    click.secho(text, **style)  # type: ignore[arg-type]
    sys.stdout.flush()
