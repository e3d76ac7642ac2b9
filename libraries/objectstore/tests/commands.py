"""``kvtiers store`` and ``kvtiers check`` on a bucket: the tests that S3, Google Cloud Storage and Azure share.

A subclass gives its ``differences`` and the fixtures ``config``, which makes the options of a tier, ``in_file``, which
makes the same options as they stand in a file, and ``objects``, which writes (``put``) an object as another program.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from libraries.objectstore.tests.differences import Suite
from tests.tenant_scenes import TenantTests

from kvtiers.api import Secret
from kvtiers.cli.main import cli
from kvtiers.layout.seal import seal_value
from kvtiers.layout.storage_name import StorageNames

__all__ = ["BucketTenantTests", "CommandTests", "run"]

BIN = Path(sys.executable).parent
MODEL = "llama-" + "5f" * 12
NAMES = StorageNames(f"prod/{MODEL}/", bytes.fromhex(MODEL[-24:-8]))
VALUES = 40
PAGE = 4096


def kvtiers(*arguments, status=0):
    """Run ``kvtiers`` in this process, since most of what it does takes less than to start one; return its output."""
    done = CliRunner().invoke(cli, [*map(str, arguments)], prog_name="kvtiers")
    assert done.exit_code == status, done.output[-4000:]
    return done


def run(*command, status=0):
    """Run one of our commands in a process; return what it has printed."""
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


class CommandTests(Suite):
    """``kvtiers store`` and ``kvtiers check``."""

    @pytest.fixture
    def filled(self, config):
        """The options of a tier with some values."""
        options = config()
        store = self.differences.store_class(options)

        def put(number):
            value = memoryview(bytearray(PAGE))
            seal_value(value, 1000, name_of(number), NAMES.layout_id)
            store.write(name_of(number), value)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, range(VALUES)))
        store.close()
        return options

    def test_a_store_is_listed_counted_verified_pruned_and_bumped(self, filled, in_file, objects, tmp_path):
        file = tmp_path / "tiers.yaml"
        write_file(file, in_file(filled))

        def on(name, *more, status=0):
            said = kvtiers("store", name, filled.type, "--config", file, "--json", *more, status=status).stdout
            return json.loads(said)

        assert len(on("ls")["values"]) == VALUES
        counted = on("du")["total"]
        assert (counted["values"], counted["bytes"]) == (VALUES, VALUES * PAGE)
        objects.put(f"{filled.prefix}/{name_of(7)}", bytes(PAGE))
        verified = on("verify", status=1)
        assert verified["ok"]["values"] == VALUES - 1
        assert verified["damaged_names"] == [name_of(7)]
        assert on("prune", "--older-than", "1d")["total"]["values"] == 0
        kvtiers("store", "bump", "--config", file)
        assert on("du")["total"]["values"] == 0

    def test_a_check_of_a_file_says_what_is_wrong_and_hides_secrets(self, config, in_file, tmp_path):
        options, said = self.differences.wrong
        write_file(tmp_path / "tiers.yaml", {**in_file(config()), **options})
        printed = kvtiers("check", tmp_path / "tiers.yaml", status=1).output
        assert said in " ".join(printed.split())
        for name, text in options.items():
            assert text not in printed or not isinstance(getattr(config(**options), name), Secret)


class BucketTenantTests(Suite, TenantTests):
    """Quotas, ``store du`` and ``store prune``."""

    @pytest.fixture
    def options(self, config):
        return config()

    @pytest.fixture
    def tier(self, options, in_file):
        return in_file(options)

    @pytest.fixture
    def bytes_of(self, options):
        store = self.differences.store_class(options)
        yield lambda tenant: sum(entry.nbytes for entry in store.list("") if f"/t-{tenant}/" in entry.name)
        store.close()
