"""Processes of one release of kvtiers or another, over the same stores: what each finds, stores and says of them.

A release is a folder that comes first on Python's path: a copy of core, or wheels that were unpacked there. None is
this source tree.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_FILES = """
def files():
    "Where the packages of kvtiers that are loaded come from."
    found = {name: module for name, module in sys.modules.items() if "." not in name and name.startswith("kvtiers")}
    return {name: module.__file__ for name, module in found.items()}
"""
_PLAY = """
import contextlib, io, json, sys, make_stores
from kvtiers.cli.main import main

def command(_tier, arguments):
    "Run a command of kvtiers as its program does; return what it prints as JSON."
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
    return json.loads(printed.getvalue())

for line in sys.stdin:
    found = [{**vars(make_stores), "command": command}[what](tier, **more) for what, tier, more in json.loads(line)]
    print(json.dumps([found, files()]), flush=True)
"""
_ROLLING = """
import json, random, sys, time
import numpy as np
from make_stores import LENGTH, keys, open_one, value

tiers, seed, seconds, own, others, options = map(json.loads, sys.argv[1:])
client = open_one(*tiers, **options)
chance, loaded, of_others, wrong, stored = random.Random(seed), 0, 0, 0, 0
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + seconds
latest = until + 60
while time.monotonic() < until or (others and not of_others and time.monotonic() < latest):
    some = chance.sample([*range(60), *own, *others], 8)
    views = [np.zeros(LENGTH, np.uint8) for _ in some]
    found = client.get_into(keys(some), views)
    loaded += sum(found)
    of_others += sum(there for number, there in zip(some, found) if number in others)
    wrong += sum(there and not (view == value(number)).all() for number, view, there in zip(some, views, found))
    missing = [number for number, there in zip(some, found) if not there and number not in others]
    if missing:
        stored += sum(client.put(keys(missing), [value(number) for number in missing]).stored)
client.close()
counts = {"loaded": loaded, "of_others": of_others, "wrong": wrong, "stored": stored}
print(json.dumps([counts, files()]))
"""


def python(release, *arguments, **more):
    """Start Python with this release, or with this source tree (None)."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(([str(release)] if release else []) + paths)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more,
    )  # fmt: skip


def said(process):
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, out + errors
    return out


def filled(tier, numbers=range(12), **options):
    """Return the step of ``play`` that stores values."""
    return "fill", tier, options | {"numbers": list(numbers)}


def looked_for(tier, numbers=range(12), **options):
    """Return the step of ``play`` that says which values are found; every byte of those is compared."""
    return "read", tier, options | {"numbers": list(numbers)}


def command(folder, tier, *arguments, **options):
    """Return the step of ``play`` that runs ``kvtiers store`` on this tier, with these options in its config."""
    config = {"version": 1, "namespace": "golden", "primary": {"capacity": "1MiB"}, "secondary": [tier]} | options
    (folder / "tiers.yaml").write_text(json.dumps(config))
    where = [tier["name"], "--config", str(folder / "tiers.yaml"), "--json", "--value-bytes", "4KiB"]
    return "command", tier, {"arguments": ["store", arguments[0], *where, *arguments[1:]]}


class Player:
    """A process of a release that does steps, each with a client of its own."""

    def __init__(self, release):
        self._release = release
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by close; a pipe without a reader would fill
        self._process = python(release, "-c", _FILES + _PLAY, stdin=subprocess.PIPE, stderr=self._errors)

    def play(self, *steps):
        """Do these steps; return what each one found."""
        self._process.stdin.write(json.dumps(steps) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._said()
        found, files = json.loads(line)
        _are_of(self._release, files, [tier for _, tier, _ in steps])
        return found

    def close(self):
        try:
            self._process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        with self._errors:
            assert self._process.returncode == 0, self._said()

    def kill(self):
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _said(self):
        self._errors.seek(0)
        return self._errors.read()


class Players:
    """One process of each release, started at its first step: a start takes longer than most steps."""

    def __init__(self):
        self._players = {}

    def play(self, release, *steps):
        """Let the process of a release, or of this tree (None), do these steps; return what each one found."""
        if release not in self._players:
            self._players[release] = Player(release)
        try:
            return self._players[release].play(*steps)
        except BaseException:  # the next test gets a process of its own
            self._players.pop(release).kill()
            raise

    def close(self):
        for player in self._players.values():
            player.close()


def _are_of(release, files, tiers):
    """Raise unless core and these tiers' plugins are loaded, and come from the release: core, and what else it has."""
    assert {"kvtiers", *(f"kvtiers_{tier['type']}" for tier in tiers)} <= files.keys()
    for name, file in files.items():
        folder = release and Path(release) / name
        if folder and (folder.is_dir() or name == "kvtiers"):
            assert Path(file).is_relative_to(folder), f"{name} is not the release's: {file}"
        elif not folder:
            assert Path(file).is_relative_to(HERE.parents[1]), f"{name} is not this source tree's: {file}"


def at_once(releases, tiers, seconds, *, disjoint=False, **options):
    """Let an engine of each of these releases want the same values for some seconds; return what each has counted.

    ``disjoint``: they want values, too, that engines of one release alone store, and go on until they have found one
    of another release's (``of_others``).
    """
    sides = list(dict.fromkeys(releases))
    numbers = {release: [60 + 20 * place + each for each in range(20)] for place, release in enumerate(sides)}
    engines = []
    for seed, release in enumerate(releases):
        own = numbers[release] if disjoint else []
        others = [number for side in sides if side != release for number in numbers[side]] if disjoint else []
        arguments = map(json.dumps, [tiers, seed, seconds, own, others, options])
        engines.append(python(release, "-c", _FILES + _ROLLING, *arguments, stdin=subprocess.PIPE))
    try:
        for engine in engines:
            assert engine.stdout.readline() == "ready\n", engine.stderr.read()
        for engine in engines:
            engine.stdin.write("go\n")
            engine.stdin.flush()
        counted = []
        for release, engine in zip(releases, engines, strict=True):
            counts, files = json.loads(said(engine).splitlines()[-1])
            _are_of(release, files, tiers)
            counted.append(counts)
        return counted
    finally:
        for engine in engines:
            engine.kill()
