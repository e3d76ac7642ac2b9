"""``kvtiers store`` on a bucket: the tests that the tiers by obstore alone share.

A subclass gives ``store_class`` and the fixtures ``config``, which makes the options of a tier, ``tier``, which makes
the same options as they stand in a file, and ``objects``, which writes (``put``) an object as another program does.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from kvtiers.layout.seal import seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers_objectstore.store import ObjectStore

__all__ = ["CommandTests", "run", "write_file"]

BIN = Path(sys.executable).parent
MODEL = "llama-" + "5f" * 12
NAMES = StorageNames(f"prod/{MODEL}/", bytes.fromhex(MODEL[-24:-8]))
VALUES = 40
PAGE = 4096


def run(*command, status=0):
    """Run one of our commands; return what it has printed."""
    done = subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == status, (done.stdout[-2000:], done.stderr[-2000:])
    return done


def write_file(file, tier):
    """Write a configuration with this tier."""
    file.write_text(
        json.dumps({"version": 1, "namespace": "prod", "primary": {"capacity": "64MiB"}, "secondary": [tier]})
    )


def name_of(number):
    return NAMES.name(number.to_bytes(8, "big") + bytes(4))


class CommandTests:
    """The tests."""

    store_class: ClassVar[type[ObjectStore]]

    @pytest.fixture
    def filled(self, config):
        """The options of a tier with some values."""
        options = config()
        store = self.store_class(options)

        def put(number):
            value = memoryview(bytearray(PAGE))
            seal_value(value, 1000, name_of(number), NAMES.layout_id)
            store.write(name_of(number), value)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, range(VALUES)))
        store.close()
        return options

    def test_a_store_is_listed_counted_verified_pruned_and_bumped(self, filled, tier, objects, tmp_path):
        file = tmp_path / "tiers.yaml"
        write_file(file, tier(filled))

        def on(name, *more, status=0):
            said = run("kvtiers", "store", name, filled.type, "--config", file, "--json", *more, status=status).stdout
            return json.loads(said)

        assert len(on("ls")["values"]) == VALUES
        counted = on("du")["total"]
        assert (counted["values"], counted["bytes"]) == (VALUES, VALUES * PAGE)
        objects.put(f"{filled.prefix}/{name_of(7)}", bytes(PAGE))
        verified = on("verify", status=1)
        assert verified["ok"]["values"] == VALUES - 1
        assert verified["damaged_names"] == [name_of(7)]
        assert on("prune", "--older-than", "1d")["total"]["values"] == 0
        run("kvtiers", "store", "bump", "--config", file)
        assert on("du")["total"]["values"] == 0
