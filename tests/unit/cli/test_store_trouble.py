"""``kvtiers store`` on stores that do what directories do not: they fail, have no ages, or hang until it is stopped."""

import json
import os
import signal
import subprocess
import threading
import time

import pytest

from .conftest import KVTIERS, LLAMA


def test_a_store_without_a_listing_is_one_line_and_is_closed(run, config, store, tmp_path):
    name = store(f'def close(self):\n    Path("{tmp_path}/closed").touch()')
    result = run("store", "ls", name, "--config", config(f"{{type: {name}}}"))
    assert result.exit_code == 2
    assert result.stderr == f"error: tier {name!r} cannot list what it holds: its store, Mine, has no method list()\n"
    assert (tmp_path / "closed").exists()


def test_a_store_that_cannot_be_opened_is_one_line(run, config, store):
    name = store(opened='raise ConnectionRefusedError("no server there")')
    result = run("store", "ls", name, "--config", config(f"{{type: {name}}}"))
    assert result.exit_code == 2
    assert result.stderr == f"error: tier {name!r} cannot be opened: ConnectionRefusedError: no server there\n"


LISTING = """
def list(self, prefix):
    for number in range(30):
        yield StoreEntry(f"prod/{MODEL}/{number:016x}00000000", 4096, {MODIFIED})
    {END}
"""


CTRL_C = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n    yield from self.list(prefix)"


def listing(end="return", modified="100.0 + number"):
    return LISTING.replace("{MODEL}", LLAMA).replace("{MODIFIED}", modified).replace("{END}", end)


def test_a_store_that_fails_in_the_middle_of_its_listing_leaves_the_report_so_far(run, config, store):
    name = store(listing(end='raise TimeoutError("no answer")'))
    result = run("store", "du", name, "--config", config(f"{{type: {name}}}"), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["total"]["values"] == 30
    assert found["complete"] is False
    assert f"error: tier {name!r} cannot be listed: TimeoutError: no answer; the figures are those until then" in (
        result.stderr
    )


def test_values_that_are_gone_or_cannot_be_read_are_counted_apart(run, config, store):
    name = store(
        listing()
        + """
def read_into(self, name, dst):
    if name.endswith("1d00000000"):
        raise ConnectionResetError("lost")
    return 0
"""
    )
    result = run("store", "verify", name, "--config", config(f"{{type: {name}}}"), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["gone"]["values"], found["unreadable"]["values"]) == (29, 1)
    assert "ConnectionResetError: lost" in result.stderr


def test_values_are_read_into_the_region_that_the_store_was_given(run, config, store, tmp_path):
    """A store may register its region with a device: memory of another place would be of no use to it."""
    name = store(
        listing().replace("4096, ", "4096 * (1 + number), ")
        + """
def read_into(self, name, dst):
    import numpy
    at = numpy.frombuffer(dst, numpy.uint8).ctypes.data
    regions = [numpy.frombuffer(region, numpy.uint8) for region in self.regions]
    assert any(r.ctypes.data <= at and at + len(dst) <= r.ctypes.data + len(r) for r in regions)
    return 0
""",
        opened="mine = Mine()\nMine.regions = [*getattr(Mine, 'regions', []), context.region]\nreturn mine",
    )
    result = run("store", "verify", name, "--config", config(f"{{type: {name}}}"), "--value-bytes", "8KiB", "--json")
    assert json.loads(result.stdout)["gone"]["values"] == 30, result.stderr


@pytest.mark.parametrize("options", [("--older-than", "1h"), ("--to-size", "4KiB")])
def test_a_store_that_has_no_ages_cannot_be_pruned_by_age(run, config, store, options):
    name = store(listing(modified="None"))
    file = config(f"{{type: {name}}}")
    result = run("store", "prune", name, "--config", file, *options)
    assert result.exit_code == 2
    assert "does not report the age of its values, so they cannot be chosen by age" in result.stderr
    assert "unknown" in run("store", "du", name, "--config", file).stdout


# -- stopping


def test_ctrl_c_ends_with_the_report_so_far(run, config, store):
    name = store(listing(end=CTRL_C))
    file = config(f"{{type: {name}}}")
    for command in ("ls", "du", "verify"):
        result = run("store", command, name, "--config", file, "--json")
        assert result.exit_code == 130
        assert json.loads(result.stdout)["complete"] is False
        assert "interrupted: the figures are those until then" in result.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_everything_is_listed_prunes_nothing_to_size(run, config, store, tmp_path):
    name = store(
        listing(end=CTRL_C) + f'\ndef delete(self, names):\n    Path("{tmp_path}/deleted").write_text(str(names))'
    )
    result = run("store", "prune", name, "--config", config(f"{{type: {name}}}"), "--to-size", "4KiB")
    assert result.exit_code == 130
    assert not (tmp_path / "deleted").exists()


def test_a_second_ctrl_c_ends_although_the_store_hangs(tmp_path):
    """A process of its own: threads that hang would keep this one from ending too."""
    package = tmp_path / "hanging-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[kvtiers.tiers]\nhanging = hanging\n")
    (tmp_path / "hanging.py").write_text(
        f"""
import threading
from kvtiers.api import ChunkStore, StoreEntry, TierConfig, TierPlugin, hookimpl

class Store(ChunkStore):
    def read_into(self, name, dst):
        print("reading", flush=True)
        threading.Event().wait()

    def list(self, prefix):
        yield StoreEntry("prod/{LLAMA}/{"00" * 12}", 4096, 1.0)

    write = exists = delete = read_into

@hookimpl
def kvtiers_tier():
    return TierPlugin(
        name="hanging", kind="store", config=TierConfig, open=lambda config, context: Store(), api_version=1
    )
"""
    )
    (tmp_path / "t.yaml").write_text("version: 1\nprimary: {capacity: 1MiB}\nsecondary: [{type: hanging}]\n")
    command = [KVTIERS, "store", "verify", "hanging", "--config", "t.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "reading\n", process.stderr.read()
            until = time.monotonic() + 30
            while process.poll() is None:
                assert time.monotonic() < until, "it does not end"
                process.send_signal(signal.SIGINT)
                threading.Event().wait(0.05)
        finally:
            process.kill()
        assert process.returncode == 130
