"""Processes of one release of kvtiers or another, over the same stores: what each finds, stores and says of them.

A release is a folder that comes first on Python's path: a copy of core, or wheels that were unpacked there. None is
this source tree.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_RUN_KVTIERS = "from kvtiers.cli.main import main; main()"
_PLAY = """
import json, sys, make_stores
print(json.dumps([getattr(make_stores, what)(tier, **more) for what, tier, more in json.loads(sys.argv[1])]))
"""
_ROLLING = """
import json, random, sys, time
import numpy as np
from make_stores import LENGTH, keys, open_one, value

tiers, seed, seconds = map(json.loads, sys.argv[1:])
client = open_one(*tiers)
chance, loaded, wrong, stored = random.Random(seed), 0, 0, 0
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + seconds
while time.monotonic() < until:
    some = chance.sample(range(60), 8)
    views = [np.zeros(LENGTH, np.uint8) for _ in some]
    found = client.get_into(keys(some), views)
    loaded += sum(found)
    wrong += sum(there and not (view == value(number)).all() for number, view, there in zip(some, views, found))
    missing = [number for number, there in zip(some, found) if not there]
    if missing:
        stored += sum(client.put(keys(missing), [value(number) for number in missing]).stored)
client.close()
print(json.dumps({"loaded": loaded, "wrong": wrong, "stored": stored}))
"""


def python(release, *arguments, **more):
    """Start Python with this release, or with this source tree (None)."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(([str(release)] if release else []) + paths)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
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


def play(release, *steps):
    """Let a process of this release do these steps, each with a client of its own; return what each one found."""
    return json.loads(said(python(release, "-c", _PLAY, json.dumps(steps))).splitlines()[-1])


def command(release, folder, tier, *arguments):
    """Run ``kvtiers store`` on this tier; return what it prints as JSON."""
    config = {"version": 1, "namespace": "golden", "primary": {"capacity": "1MiB"}, "secondary": [tier]}
    (folder / "tiers.yaml").write_text(json.dumps(config))
    where = [tier["name"], "--config", folder / "tiers.yaml", "--json", "--value-bytes", "4KiB"]
    return json.loads(said(python(release, "-c", _RUN_KVTIERS, "store", arguments[0], *where, *arguments[1:])))


def at_once(releases, tiers, seconds):
    """Let an engine of each of these releases want the same values for some seconds; return what each has counted."""
    engines = [
        python(release, "-c", _ROLLING, *map(json.dumps, [tiers, seed, seconds]), stdin=subprocess.PIPE)
        for seed, release in enumerate(releases)
    ]
    try:
        for engine in engines:
            assert engine.stdout.readline() == "ready\n", engine.stderr.read()
        for engine in engines:
            engine.stdin.write("go\n")
            engine.stdin.flush()
        return [json.loads(said(engine).splitlines()[-1]) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
