"""ARCHITECTURE.md, the design decisions and the formats name symbols, tests and files: each of them is there."""

import importlib
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_THE_REPOSITORY = ("tests/", "plugins/", "libraries/", "benchmarks/", "replay/", "integrations/")
TEXT = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "docs/design-decisions.md"))
FORMATS = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
SYMBOLS = sorted(set(re.findall(r"`(kvtiers[\w.]*:[\w.]+)`", TEXT)))
TESTS = sorted(set(re.findall(r"`((?:(?:plugins/\w+|integrations/\w+|replay)/)?tests/[\w/.]+(?:::\w+)?)`", TEXT)))


def named(path):
    """Return the file that a path in a document stands for."""
    if path.startswith("stack/"):
        return ROOT / "integrations/vllm/src/kvtiers_vllm" / path
    return ROOT / path if path.startswith(OF_THE_REPOSITORY) else ROOT / "core/src/kvtiers" / path


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_every_symbol_that_the_document_names_can_be_imported(symbol):
    module, _, path = symbol.partition(":")
    reduce(getattr, path.split("."), importlib.import_module(module))


@pytest.mark.slow
def test_every_test_that_the_document_names_is_collected():
    files = sorted({test.partition("::")[0] for test in TESTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False).stdout
    ids = {line.partition("[")[0] for line in collected.splitlines() if "::" in line}
    assert all(test.partition("::")[0].endswith(".py") for test in TESTS), "a folder is no test"
    missing = [
        test
        for test in TESTS
        if not any(one == test or one.startswith(f"{test}{end}") for one in ids for end in ("::", "/"))
    ]
    assert not missing, f"{missing}\n{collected[-2000:]}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT + FORMATS))))
def test_every_file_that_the_document_names_is_there(path):
    assert named(path).is_file()


@pytest.mark.parametrize("step", sorted(set(re.findall(r"(?:\w+/)+\w+\.py:\w+", TEXT))))
def test_every_step_of_the_two_walks_is_a_function_of_the_file_that_it_names(step):
    path, _, function = step.partition(":")
    assert re.search(rf"^ *def {function}\(", named(path).read_text(encoding="utf-8"), re.MULTILINE)
