"""Golden stores: what this release writes into a directory, a slab and Redis, kept to be read by every later release.

``python tests/compat/make_stores.py``: writes ``stores/FORM-NUMBERS.tar.gz`` (``formats.py``) of each form that is not
there; what was released is never written again. Values are small, and follow from their numbers (``value``).
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from kvtiers import ModelIdentity, open_client

STORES = Path(__file__).with_name("stores")
IDENTITY = ModelIdentity("golden/model", weights="w1")
LENGTH, COUNT = 1_000, 12


def value(number, length=LENGTH):
    """Return the bytes of a value: of no library's random numbers, which may change."""
    return np.array([(number * 31 + place * 7 + place // 251) % 256 for place in range(length)], np.uint8)


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


def open_one(*tiers, length=LENGTH, tenant=None, **options):
    config = {"version": 1, "namespace": "golden", "primary": {"capacity": "1MiB"}, "start_wait": "60s"} | options
    arguments = {"bounce_bytes": 1 << 20} | ({"tenant": tenant} if tenant else {})
    return open_client(config | {"secondary": list(tiers)}, IDENTITY, length, **arguments)


def open_here(tier, **options):
    """Open a client with its store in this process: the start of a host takes longer than all that is done with it."""
    own = {} if tier["type"] == "mooncake" else {"io": "thread"}  # its client may end a process
    return open_one(own | tier, **options)


def fill(tier, numbers=range(COUNT), length=LENGTH, **options):
    client = open_here(tier, length=length, **options)
    try:
        _put(client, numbers, length)
    finally:
        client.close()


def read(tier, numbers=range(COUNT), length=LENGTH, fills=False, **options):
    """Return which of the values are found; every byte of those is compared. ``fills``: store what is missed."""
    client = open_here(tier, length=length, **options)
    try:
        views = [np.zeros(length, np.uint8) for _ in numbers]
        found = list(client.get_into(keys(numbers), views))
        if fills:
            _put(client, [number for number, there in zip(numbers, found, strict=True) if not there], length)
    finally:
        client.close()
    for number, view, there in zip(numbers, views, found, strict=True):
        assert (view == (value(number, length) if there else 0)).all(), f"wrong bytes of value {number}"
    return found


def _put(client, numbers, length):
    result = client.put(keys(numbers), [value(number, length) for number in numbers])
    assert all(result.stored), result


def main():
    from formats import FORMS, stem, stored_as  # not with an older release, which plays with the functions above

    missing = {form: STORES / f"{stem(form)}.tar.gz" for form in FORMS}
    missing = {form: path for form, path in missing.items() if not path.exists()}
    for form, path in missing.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as key_folder:
            root = Path(folder)
            of_tier, config, arguments = stored_as(form, Path(key_folder))
            for tier in tiers(root).values():
                fill(tier | of_tier, **config, **arguments)
            with tarfile.open(path, "w:gz") as archive:
                for entry in sorted(root.iterdir()):
                    archive.add(entry, entry.name)
        sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")
    if not missing:
        sys.exit("the stores of each form are there: what was released is not written again")


if __name__ == "__main__":
    main()
