"""``kvtiers report``: what a bug report needs, in one text that its writer sees first, and without secrets."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from kvtiers.api import ConfigError
from kvtiers.api.units import format_size
from kvtiers.cli.engines import ask_all
from kvtiers.cli.machine import Machine
from kvtiers.cli.output import file_to_write, write_file
from kvtiers.cli.redaction import Redaction
from kvtiers.cli.versions import library_versions, version_lines
from kvtiers.config import read_config

__all__ = ["report"]

_TAIL_BYTES = 8 << 20
_SECONDS = 60.0
# What engines write of a request has its prompt or its answer, either of which may speak of kvtiers.
_OF_A_REQUEST = re.compile(
    r"Received request |Request .{1,200}? (?:details|JSON body): |Generated response |"  # vLLM; an id may have spaces
    r"Receive(?: OpenAI)?: obj=|Finish: obj=|ReqInput\(|request\.(?:received|finished)|"  # SGLang
    r"prompt(?:_token_ids)?\W{0,3}[:=]|[\"'](?:messages|text|content|output)\\*[\"']\s*:"
)
# Where a record of a log in JSON has the name of its logger, by the names of its keys.
_LOGGERS = (("logger",), ("name",), ("logger_name",), ("log.logger",), ("log", "logger"), ("record", "name"))
_NUMBERS = re.compile(r"\[[\d\s.,eE+-]*\]")
_RUN_KVTIERS = "from kvtiers.cli.main import main; main()"


@click.command(
    epilog="""\b
Examples:
  kvtiers report tiers.yaml
  kvtiers report tiers.yaml --log vllm.log --output report.txt

It shows all of it, and asks, before it writes a file; nothing is sent anywhere. Passwords, keys and tokens are taken
out wherever they stand, and lines of the log with a prompt or an answer, of the forms that vLLM and SGLang write, are
left out. Names of hosts, buckets and folders are not: look at it before you post it.
Exit status: 0, or 1 if the answer was no."""
)
@click.argument("config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--log",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The engine's log: its last lines that name kvtiers.",
)
@click.option("--lines", type=click.IntRange(1), default=200, show_default=True, help="How many lines of the log.")
@click.option(
    "--output",
    metavar="FILE",
    default="kvtiers-report.txt",
    show_default=True,
    callback=file_to_write(".txt", ".md"),
    help="The file to write, .txt or .md.",
)
@click.option("--yes", is_flag=True, help="Write it without asking.")
@click.pass_context
def report(ctx: click.Context, config: Path | None, log: Path | None, lines: int, output: Path, yes: bool) -> None:
    """Gather what a bug report needs: versions, machine, CONFIG without its secrets, running engines, the log."""
    secrets = Redaction()
    parts = {"versions": [*version_lines(), f"Python {platform.python_version()}", *library_versions()]}
    parts["machine"] = [*_machine()]
    if config is not None:
        parts[f"config {config.name}"] = secrets.config(_text_of(config))
        parts["kvtiers check --offline"] = _checked(config)
    parts["running engines"] = [*_engines()]
    if log is not None:
        parts[f"log {log.name}"] = _last_lines(log, lines)
    text = secrets.apply("\n".join(line for title, found in parts.items() for line in _section(title, found)))
    click.echo(text)
    if not yes and not click.confirm(f"Write this to {output}?", default=False):
        ctx.exit(1)
    write_file(output, text)
    click.echo(f"{output} is written; it is sent nowhere.")


def _text_of(config: Path) -> str:
    try:
        return read_config(config).decode("utf-8", errors="replace")
    except ConfigError as error:
        raise ConfigError([f"{config}: {problem}" for problem in error.problems]) from None


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"== {title}", *(lines or ["nothing"]), ""]


def _machine() -> Iterator[str]:
    here = Machine()
    yield platform.platform()
    yield f"processors: {os.cpu_count()}, NUMA nodes: {len(here.numa_nodes())}"
    memory = here.total_memory()
    yield f"{format_size(memory)} of memory" if memory else "memory: not known"
    if command := shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total"
        yield from _output([command, query, "--format=csv,noheader"])


def _checked(config: Path) -> list[str]:
    return _output([sys.executable, "-c", _RUN_KVTIERS, "check", "--offline", str(config)])


def _output(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(  # noqa: S603 -- our own interpreter, or a program by its full path
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{Path(command[0]).name}: {error}"]
    return (done.stdout + done.stderr).rstrip().splitlines()


def _engines() -> Iterator[str]:
    for name, answer, error in ask_all():
        if error:
            yield f"{name}: no answer: {error}"
        else:
            text = json.dumps(answer, indent=1)
            yield from _NUMBERS.sub(lambda found: " ".join(found[0].split()), text).splitlines()


def _last_lines(log: Path, lines: int) -> list[str]:
    """Return the last lines that name kvtiers, out of the last megabytes; not those of a request."""
    if not log.is_file():
        raise ConfigError(f"{log}: expected a regular file, with the log in it")
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    found = [line for line in text.splitlines() if "kvtiers" in line.lower()]
    own = [line for line in found if not _OF_A_REQUEST.search(_without_own_key(line))]
    left_out = len(found) - len(own)
    lines_that_name, are = ("line that names", "is") if left_out == 1 else ("lines that name", "are")
    note = f"({left_out} {lines_that_name} kvtiers in a request's prompt or answer {are} left out)"
    return [note] * bool(left_out) + own[-lines:]


def _without_own_key(line: str) -> str:
    """Return a line; one of kvtiers' own, of a log in JSON whose message is called ``text``, without that key.

    A request may have a ``text`` as well, which is its prompt: only a logger's name shows that a line is ours.
    """
    before, brace, rest = line.partition("{")
    try:
        record = json.loads(brace + rest)
        text = record.pop("text")
    except (ValueError, KeyError, RecursionError):
        return line
    is_own = isinstance(text, str) and any(_is_ours(record, place) for place in _LOGGERS)
    return f"{before}{text} {json.dumps(record)}" if is_own else line


def _is_ours(record: Any, place: Sequence[str]) -> bool:
    """Return whether a record has one of kvtiers' loggers there."""
    for key in place:
        record = record.get(key) if isinstance(record, dict) else None
    return isinstance(record, str) and record.partition(".")[0] == "kvtiers"
