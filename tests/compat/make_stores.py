"""Golden stores: what this release writes into a directory, a slab and Redis, kept to be read by every later release.

``python tests/compat/make_stores.py``: writes ``stores/FORMAT.tar.gz`` if that is not there; a format that was released
is never written again. Values are small, and follow from their numbers (``value``).
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from kvtiers import ModelIdentity, open_client
from kvtiers.layout.seal import SEAL_FORMAT

STORES = Path(__file__).with_name("stores")
IDENTITY = ModelIdentity("golden/model", weights="w1")
LENGTH, COUNT = 1_000, 12


def value(number):
    """Return the bytes of a value: of no library's random numbers, which may change."""
    return np.array([(number * 31 + place * 7 + place // 251) % 256 for place in range(LENGTH)], np.uint8)


def keys(numbers):
    return [b"golden" + number.to_bytes(4, "big") for number in numbers]


def tiers(root, redis_url=None):
    """Return the tiers by name: a directory, a slab, and Redis where there is a server."""
    fs = {"type": "fs", "capacity": "4MiB", "min_free": 0}
    found = {
        "files": {**fs, "name": "files", "path": str(root / "files")},
        "slab": {**fs, "name": "slab", "layout": "slab", "path": str(root / "slab")},
    }
    if redis_url:
        found["redis"] = {"type": "redis", "name": "redis", "url": redis_url}
    return found


def open_one(tier):
    config = {"version": 1, "namespace": "golden", "primary": {"capacity": "1MiB"}, "start_wait": "60s"}
    return open_client(config | {"secondary": [tier]}, IDENTITY, LENGTH, bounce_bytes=1 << 20)


def fill(tier):
    client = open_one(tier)
    try:
        result = client.put(keys(range(COUNT)), [value(number) for number in range(COUNT)])
        assert all(result.stored), result
    finally:
        client.close()


def read(tier):
    """Return which of the values are found; every byte of those is compared."""
    client = open_one(tier)
    try:
        views = [np.zeros(LENGTH, np.uint8) for _ in range(COUNT)]
        found = client.get_into(keys(range(COUNT)), views)
    finally:
        client.close()
    for number, there in enumerate(found):
        assert (views[number] == (value(number) if there else 0)).all(), f"wrong bytes of value {number}"
    return list(found)


def main():
    path = STORES / f"{SEAL_FORMAT}.tar.gz"
    if path.exists():
        sys.exit(f"{path} is there: a released format is not written again")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for tier in tiers(root).values():
            fill(tier)
        with tarfile.open(path, "w:gz") as archive:
            for entry in sorted(root.iterdir()):
                archive.add(entry, entry.name)
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
