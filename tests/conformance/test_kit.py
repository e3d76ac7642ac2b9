"""The kit as something that is installed beside other people's tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
