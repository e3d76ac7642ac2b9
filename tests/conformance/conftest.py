import os
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest


@pytest.fixture(scope="session")
def run_kit(tmp_path_factory):
    """Run pytest on files, in a process and a configuration of its own; return what became of each test by class."""

    def run(*files, options=(), path=()):
        folder = tmp_path_factory.mktemp("kit")
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", *map(str, files), "-c", "pytest.ini", "--rootdir", str(folder)]
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "--junitxml=report.xml", *options]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, timeout=1700, env=environment
        )
        tests, messages = defaultdict(lambda: defaultdict(set)), defaultdict(str)
        report = folder / "report.xml"
        for case in ET.parse(report).iter("testcase") if report.exists() else ():
            group, name = case.get("classname").rpartition(".")[2], case.get("name").partition("[")[0]
            bad = [child for child in case if child.tag in {"failure", "error", "skipped"}]
            tests[group]["skipped" if any(c.tag == "skipped" for c in bad) else "failed" if bad else "passed"].add(name)
            messages[group, name] += "".join(f"{child.get('message')}\n{child.text}" for child in bad)
        return SimpleNamespace(tests=tests, messages=messages, output=done.stdout + done.stderr, code=done.returncode)

    return run


@pytest.fixture(scope="session")
def assert_caught():
    """Compare, for one broken thing, the tests that failed with those that must."""

    def check(report, name, must, may=frozenset()):
        outcomes = report.tests[f"Test{name}"]
        failed = outcomes["failed"]
        assert outcomes["passed"] | failed, f"no test ran for {name}:\n{report.output[-3000:]}"
        unexpected = "".join(report.messages[f"Test{name}", test] for test in failed - must - may)
        assert must <= failed, f"not caught by {must - failed}"
        assert failed <= must | may, f"also blamed by {failed - must - may}: {unexpected[:3000]}"
        assert not outcomes["skipped"]

    return check
