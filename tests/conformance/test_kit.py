"""The kit as something that is installed beside other people's tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.testing.running import open_descriptors

LOADED = """
import json, sys
import kvtiers, pytest
before = set(sys.modules)
import kvtiers.testing.pytest_plugin
print(json.dumps(sorted(set(sys.modules) - before)))
"""

NO_FIXTURE = """
from kvtiers.api import ChunkStore
from kvtiers.testing import ChunkStoreTests, SecondaryTierTests, TierPluginTests

class TestStore(ChunkStoreTests):
    store_class = ChunkStore

class TestTier(SecondaryTierTests):
    pass

class TestPlugin(TierPluginTests):
    pass
"""

NO_STORE_CLASS = """
from kvtiers.testing import ChunkStoreTests

class TestStore(ChunkStoreTests):
    pass
"""

STRANGERS = """
from unittest.mock import call, Mock

anything = Mock()

class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)

odd = Odd()

def test_one():
    pass

class TestTwo:
    odd = Odd()
    both = call

    def test_two(self):
        pass
"""


def test_the_pytest_plugin_imports_only_pytest():
    done = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True, timeout=500)
    assert json.loads(done.stdout) == ["kvtiers.testing", "kvtiers.testing.pytest_plugin"]


def test_a_missing_fixture_is_asked_for_by_name(run_kit, tmp_path):
    file = tmp_path / "test_no_fixture.py"
    file.write_text(NO_FIXTURE)
    report = run_kit(file)
    for group, fixture in (("TestStore", "open_store"), ("TestTier", "open_tier"), ("TestPlugin", "tier_options")):
        assert not report.tests[group]["passed"]
        assert report.tests[group]["failed"]
        for test in report.tests[group]["failed"]:
            assert f"{group}: define a fixture '{fixture}'" in report.messages[group, test]


def test_a_missing_store_class_is_one_line_at_collection(run_kit, tmp_path):
    file = tmp_path / "test_no_class.py"
    file.write_text(NO_STORE_CLASS)
    report = run_kit(file)
    assert "TestStore: set 'store_class' to your ChunkStore's class" in report.output
    assert "Traceback" not in report.output


DOWN = """
from functools import partial
import pytest
from tests.stores import DictStore
from kvtiers.testing import ChunkStoreTests, SecondaryTierTests

class Remote(DictStore):
    def exists(self, names):
        raise ConnectionRefusedError("nothing listens on port 6379")

def refuse(context=None):
    raise ConnectionRefusedError("nothing listens on port 6379")

class TestDown(ChunkStoreTests):
    store_class = Remote

    @pytest.fixture
    def open_store(self):
        return Remote

class TestRefused(ChunkStoreTests):
    store_class = Remote

    @pytest.fixture
    def open_store(self):
        return refuse

class TestTierDown(SecondaryTierTests):
    @pytest.fixture
    def open_tier(self):
        return refuse
"""

BLOCK = """
import threading
import pytest
from tests.stores import DictStore
from kvtiers.testing import ChunkStoreTests

never = threading.Event()
"""
BLOCKS = """
class Blocks_STAGE(DictStore):
    def STAGE(self, *arguments):
        never.wait()

class TestBlocks_STAGE(ChunkStoreTests):
    store_class = Blocks_STAGE
    patience = 3.0

    @pytest.fixture
    def open_store(self):
        return Blocks_STAGE
"""
STAGES = ("write", "read_into", "exists", "delete", "close")

BLOCKS_ONCE_MORE = """
import threading
import pytest
from tests.stores import DictStore
from kvtiers.testing import ChunkStoreTests

never = threading.Event()

class Blocks(DictStore):
    has_blocked = False

    def write(self, name, src):
        if len(src) > 1 << 20 and not Blocks.has_blocked:
            Blocks.has_blocked = True
            never.wait()
        super().write(name, src)

class TestBlocks(ChunkStoreTests):
    store_class = Blocks
    persistent = False
    patience = 5.0

    @pytest.fixture
    def open_store(self):
        return Blocks
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(run_kit, tmp_path_factory):
    """What becomes of backends that are down, and of stores that block."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "test_down.py").write_text(DOWN)
    (folder / "test_blocks.py").write_text(BLOCK + "".join(BLOCKS.replace("STAGE", stage) for stage in STAGES))
    return run_kit(*sorted(folder.glob("test_*.py")), path=[ROOT])


@pytest.mark.parametrize("group", ["TestDown", "TestRefused", "TestTierDown"])
def test_a_backend_that_is_down_is_one_error_and_the_other_tests_are_skipped(report, group):
    [failed] = report.tests[group]["failed"]
    assert f"{group}: " in report.messages[group, failed]
    assert "raised ConnectionRefusedError: nothing listens on port 6379" in report.messages[group, failed]
    texts = [text for (of, _), text in report.messages.items() if of == group]
    assert "".join(texts).count("nothing listens on port 6379") <= 2, "the error's message and its text"
    [line] = [line for line in report.output.splitlines() if f"::{group}::" in line]
    assert line.startswith("ERROR"), "the only line of this class in the summary"
    assert len(report.tests[group]["skipped"]) > 10


@pytest.mark.parametrize("stage", STAGES)
def test_a_store_that_blocks_is_one_loud_error_with_the_stack(report, stage):
    group = f"TestBlocks_{stage}"
    [failed] = report.tests[group]["failed"]
    message = report.messages[group, failed]
    assert f"{group}: Blocks_{stage}.{stage} did not return within 3 s (the tests' 'patience')" in message
    assert "never.wait()" in message
    assert len(report.tests[group]["skipped"]) > 10


def test_a_call_that_blocks_within_a_test_fails_that_test_with_the_stack_and_no_other(run_kit, tmp_path):
    file = tmp_path / "test_blocks.py"
    file.write_text(BLOCKS_ONCE_MORE)
    report = run_kit(file, path=[ROOT])
    tests = report.tests["TestBlocks"]
    assert tests["failed"] == {"test_a_value_comes_back_as_it_was_written"}
    message = report.messages["TestBlocks", "test_a_value_comes_back_as_it_was_written"]
    assert "a call does not return; it stands here:" in message
    assert "never.wait()" in message
    assert len(tests["passed"]) > 20


def test_other_people_s_tests_are_left_alone(run_kit, tmp_path):
    file = tmp_path / "test_strangers.py"
    file.write_text(STRANGERS)
    with_plugin, without = run_kit(file), run_kit(file, options=["-p", "no:kvtiers"])
    assert with_plugin.tests == without.tests
    assert with_plugin.tests["TestTwo"]["passed"] == {"test_two"}


def test_a_descriptor_that_is_closed_while_they_are_listed_is_none_of_them(monkeypatch):
    passing, stays = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
    look = Path.is_symlink

    def look_and_close(link):
        found = look(link)
        if link.name == str(passing):
            os.close(passing)
        return found

    monkeypatch.setattr(Path, "is_symlink", look_and_close)
    numbers = {one.partition(" ")[0] for one in open_descriptors()}
    os.close(stays)
    assert str(stays) in numbers
    assert str(passing) not in numbers
