"""``kvtiers new-tier``: a new distribution with one tier that passes the conformance kit from the start.

The templates below ``templates/`` are text with ``$name``s. What differs between variants is a file of its own, which
is filled in at a place of another one.
"""

import importlib.util
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

import click
import yaml

from kvtiers._version import __version__
from kvtiers.api import ConfigError
from kvtiers.cli.output import write_file
from kvtiers.plugins import installed_tiers

__all__ = ["new_tier", "tier_files"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 32  # names of classes are made from it, and lines have their limit
_MAP = {
    "store": "    store.py         the store: put your backend here",
    "manager": "    backend.py       the backend: put your asynchronous client here\n"
    "    tier.py          the tier: jobs, lookups, and the event loop",
}
_ASKING_CONSTANTS = """
_TRUSTED_SECONDS = 10.0  # how long an answer of the backend's is believed
_UNKNOWN = (False, -1.0)"""
_ASKING_STATE = """\
        self._remembered: dict[OffloadKey, tuple[bool, float]] = {}  # whether it is there, and until when
        self._asked: set[OffloadKey] = set()
"""


@click.command(
    "new-tier",
    epilog="""\b
Examples:
  kvtiers new-tier shelf                      a store: four methods that may block
  kvtiers new-tier shelf --batch --listing    and its abilities
  kvtiers new-tier shelf --kind manager       a tier that moves rows by itself, by asyncio

What it writes keeps values as files in a folder, and passes its tests at once: put your backend into store.py
(or backend.py) and run them again.""",
)
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["store", "manager"]),
    default="store",
    show_default=True,
    help="A store, whose calls may block, or a tier that moves rows by itself.",
)
@click.option("--batch", is_flag=True, help="With calls for many values at once, for a backend that pipelines.")
@click.option("--listing", is_flag=True, help="The backend can say what it holds: for `kvtiers store`, or an index.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="The folder to write; it must be empty or not be there.  [default: kvtiers-NAME]",
)
def new_tier(name: str, kind: str, batch: bool, listing: bool, into: Path | None) -> None:
    """Write a distribution with a new tier type NAME, which passes the conformance kit as it is."""
    folder = into or Path(f"kvtiers-{name}")
    _refuse_what_cannot_be(name, folder)
    wanted = tier_files(name, kind, batch=batch, listing=listing)
    for place, text in wanted.items():
        path = folder / place
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path.parent}: cannot be made: {error.strerror}") from None
        write_file(path, text)
    backend = next(place for place in wanted if place.endswith(("/store.py", "/backend.py")))
    click.echo(f"{folder} has {len(wanted)} files now. Next:\n")
    for line, why in (
        (f"cd {folder}", ""),
        ("pip install --editable '.[dev]'", ""),
        ("pytest", "the conformance kit: all passes, on files in a folder"),
        (f"edit {backend}", "put your backend there, and run pytest again"),
    ):
        click.echo(f"  {line:<42} {f'# {why}' if why else ''}".rstrip())


def tier_files(name: str, kind: str, *, batch: bool, listing: bool) -> dict[str, str]:
    """Return the text of each file of the distribution, by its place in it."""
    package = f"kvtiers_{name.replace('-', '_')}"
    values = {
        "name": name,
        "package": package,
        "distribution": f"kvtiers-{name}",
        "camel": "".join(part.capitalize() for part in name.split("-")),
        "summary": f"A kvtiers tier that keeps the KV cache in {name}.",
        "kvtiers": __version__,
        "map": _MAP[kind],
    }
    values |= (_store_parts if kind == "store" else _manager_parts)(values, batch=batch, listing=listing)
    modules = {"store": ("store",), "manager": ("backend", "tier")}[kind]
    places = {
        "pyproject.toml": "common/pyproject.toml",
        "README.md": "common/README.md",
        "tiers.yaml": "common/tiers.yaml",
        ".gitignore": "common/gitignore",
        ".github/workflows/ci.yml": "common/ci.yml",
        f"src/{package}/__init__.py": "common/__init__.py",
        f"src/{package}/py.typed": "common/py.typed",
        f"src/{package}/config.py": "common/config.py",
        f"src/{package}/plugin.py": f"{kind}/plugin.py",
        **{f"src/{package}/{module}.py": f"{kind}/{module}.py" for module in modules},
        "tests/test_conformance.py": f"{kind}/conformance.py",
    }
    return {place: _filled(template, values) for place, template in places.items()}


def _refuse_what_cannot_be(name: str, folder: Path) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name!r} cannot be a tier's name: expected at most {_LONGEST} of a-z, 0-9 and '-', a letter first"
        )
    if yaml.safe_load(name) != name:
        raise ConfigError(f"{name!r} cannot be a tier's name: YAML reads it as {yaml.safe_load(name)!r}, not as a text")
    taken = [entry for entry in installed_tiers() if entry.name == name]
    package = f"kvtiers_{name.replace('-', '_')}"
    if taken or importlib.util.find_spec(package):
        owner = f"kvtiers-{name}" if not taken or taken[0].dist is None else taken[0].dist.name
        raise ConfigError(f"{name!r} is the name of a tier or package of {owner}, which is installed; choose another")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; give an empty or a new folder by --into")


def _store_parts(values: Mapping[str, str], *, batch: bool, listing: bool) -> dict[str, str]:
    names = ["ChunkStore", "NotKept", *["StoreEntry"] * listing]
    return {
        "collections": "Iterator, Sequence" if listing else "Sequence",
        "suppress": "from contextlib import suppress\n" if listing else "",
        "names": ", ".join(names),
        "listing": _filled("store/listing.py", values) if listing else "",
        "moves": _filled("store/moves_batch.py" if batch else "store/moves.py", values),
    }


def _manager_parts(values: Mapping[str, str], *, batch: bool, listing: bool) -> dict[str, str]:
    lookup = "listing" if listing else "asking"
    calls = "batch" if batch else "one_by_one"
    return {
        # Of the backend.
        "collections": "Sequence" if batch else "Awaitable, Iterable, Sequence",
        "typing": "" if batch else "from typing import TypeVar\n",
        "answer": "" if batch else '_Answer = TypeVar("_Answer")\n',
        "calls": _filled(f"manager/{calls}.py", values) + (_filled("manager/listing.py", values) if listing else ""),
        "whole": _filled("manager/batch_below.py", values) if batch else "",
        "end": "" if batch else _filled("manager/one_by_one_below.py", values),
        # Of the tier.
        "constants": "" if listing else _ASKING_CONSTANTS,
        "state": "" if listing else _ASKING_STATE,
        "opened": "            self._held = self._loop.run_until_complete(backend.held())\n" if listing else "",
        "lookup": _filled(f"manager/lookup_{lookup}.py", values),
        "remember": _filled(f"manager/remember_{lookup}.py", values),
        "ask": "" if listing else _filled("manager/ask.py", values),
    }


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = files("kvtiers.cli.new_tier").joinpath("templates", f"{template}.in").read_text(encoding="utf-8")
    return Template(text).substitute(values)
