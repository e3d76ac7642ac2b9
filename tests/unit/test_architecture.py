"""ARCHITECTURE.md names symbols, tests and files: each of them is there."""

import ast
import importlib
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.split("## From the ideas")[1].splitlines() if line.startswith("| ")][1:]
SYMBOLS = sorted(set(re.findall(r"`(kvtiers[\w.]*:[\w.]+)`", TEXT)))
TESTS = sorted(set(re.findall(r"`((?:(?:plugins/\w+|integrations/\w+|replay)/)?tests/[\w/.]+(?:::\w+)?)`", TEXT)))


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_every_symbol_that_the_document_names_can_be_imported(symbol):
    module, _, path = symbol.partition(":")
    reduce(getattr, path.split("."), importlib.import_module(module))


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


def test_every_row_of_the_table_leads_to_code_and_a_test_or_says_that_it_is_not_built():
    assert len(ROWS) >= 20
    for row in ROWS:
        _, idea, here, shown, _ = (cell.strip() for cell in row.split("|"))
        assert idea
        assert (re.search(r"`kvtiers\w*[.\w]*:", here) and "`" in shown) or "not built yet" in here, row


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT))))
def test_every_file_that_the_document_names_is_there(path):
    folder = (
        ROOT
        if path.startswith(("tests/", "plugins/", "benchmarks/", "replay/", "integrations/"))
        else ROOT / "core/src/kvtiers"
    )
    assert (folder / path).is_file()


@pytest.mark.parametrize("step", sorted(set(re.findall(r"(?:\w+/)+\w+\.py:\w+", TEXT))))
def test_every_step_of_the_two_walks_is_a_function_of_the_file_that_it_names(step):
    path, _, function = step.partition(":")
    assert re.search(
        rf"^ *def {function}\(", (ROOT / "core/src/kvtiers" / path).read_text(encoding="utf-8"), re.MULTILINE
    )


def test_no_function_is_sixty_lines_long():
    sources = [
        path
        for place in ("core", "replay", "integrations", "libraries", "plugins")
        for path in ROOT.glob(f"{place}/**/src/**/*.py")
    ]
    assert len(sources) > 200
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}")
        for path in sources
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [found for found in functions if found[0] >= 60] == []
