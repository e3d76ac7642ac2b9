"""Command-line output and options: tables (rich on a terminal, plain aligned text elsewhere), units, files."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvtiers.api import ConfigError
from kvtiers.api.units import parse_size

__all__ = ["file_to_write", "in_words", "print_heading", "print_table", "value_bytes_option", "with_unit", "write_file"]

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "broken": "bold red"}
_VALUE_ALIGN = 4096


def with_unit(parse: Callable[[object], float], multiple: int = 1) -> Callable[..., Any]:
    """Return a callback for an option that is written with a unit: more than 0, and a multiple of ``multiple``.

    An option without a default is None where it is not given.
    """

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            number = parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None
        if number <= 0 or (multiple > 1 and number % multiple):
            step = f" and a multiple of {multiple}" if multiple > 1 else ""
            raise click.BadParameter(f"expected more than 0{step}, got {value!r}", ctx, param)
        return number

    return convert


def value_bytes_option(text: str) -> Callable[..., Any]:
    """Return the option ``--value-bytes`` with ``text`` as its help."""
    return click.option(
        "--value-bytes",
        metavar="SIZE",
        callback=with_unit(parse_size, _VALUE_ALIGN),
        default="2MiB",
        show_default=True,
        help=text,
    )


def file_to_write(*endings: str) -> Callable[..., Path | None]:
    """Return a callback for an option that names a file to write; a problem is reported before minutes of work."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
        if value is None:
            return None
        path = Path(value)
        if path.suffix not in endings:
            raise click.BadParameter(f"expected a name that ends in {' or '.join(endings)}, got {value!r}", ctx, param)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise click.BadParameter(f"{value!r} cannot be written: there is no such folder, or it is one", ctx, param)
        return path

    return convert


def write_file(path: Path, text: str) -> None:
    """Write a result. ConfigError, one line, if that is not possible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def in_words(seconds: float) -> str:
    """Return a time for people, in one or two units: "3.4 s", "2 min 3 s", "56 min", "5 h 12 min", "3 days"."""
    if seconds < 10 or not math.isfinite(seconds):
        return f"{seconds:.2g} s"
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if whole < 60:
        return f"{whole} s"
    if minutes < 10:
        return f"{minutes} min {whole % 60} s" if whole % 60 else f"{minutes} min"
    if hours < 1:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{hours // 24:,} days"


def print_heading(text: str) -> None:
    """Print one line above a table."""
    click.secho(text, bold=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Print rows of text under these column names; a first cell that is a level (ok, warning, error) is coloured."""
    if sys.stdout.isatty():
        _print_rich(columns, rows, header)
        return
    lines = [list(columns), *rows] if header else rows
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        click.echo("  " + "  ".join(cells).rstrip())


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], header: bool) -> None:
    # Imported here: it is the slowest import of the command line, and pipes do not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=header, header_style="dim", padding=(0, 1), pad_edge=True)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    for row in rows:
        # Text, not markup: what a tier says may have brackets in it.
        table.add_row(
            *[Text(cell, style=_STYLES.get(cell, "")) if i == 0 else Text(cell) for i, cell in enumerate(row)]
        )
    Console().print(table)
