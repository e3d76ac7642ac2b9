"""The tests of the packages that a change touches, for `make test-changed`.

Usage: changed_tests.py [COMMIT]. Prints the files and folders of tests for all that differs from COMMIT, also if it is
not committed or not added yet; without COMMIT, from where this branch left main.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    (r"(?:.+/)?tests/(?:.+/)?test_\w+\.py", r"\g<0>"),
    (r"(tests/.+)/.+", r"\1"),
    (r".+\.md", "tests/integration/test_documents.py"),
    (r"core/src/kvtiers/(\w+)/.+", r"tests/unit/\1"),
    (r"core/src/kvtiers/_?(\w+)\.py", r"tests/unit/test_\1.py"),
    (r"core/.+", "tests/unit"),
    (r"(plugins/\w+)/.+", r"\1/tests"),
    (r"libraries/.+", "plugins/s3_tier/tests plugins/gcs_tier/tests plugins/azure_tier/tests"),
    (r"integrations/vllm/.+", "integrations/vllm/tests/unit"),
    (r"replay/.+", "replay/tests/unit"),
    (r"examples/.+", "tests/integration/test_documents.py"),
)
"""Patterns of changed files, and the tests of each; the first that fits and whose tests exist counts."""


def git(*arguments: str) -> list[str]:
    """Return the lines that this git command prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def tests_of(path: str) -> set[str]:
    """Return the tests to run when this file, given by its path in the repository, has changed."""
    for pattern, tests in TESTS:
        if match := re.fullmatch(pattern, path):
            found = {test for test in match.expand(tests).split() if (ROOT / test).exists()}
            if found:
                return found
    return set()


def main() -> None:
    """Print the tests, one a line; end with status 1 where nothing that has tests here differs."""
    base = sys.argv[1] if len(sys.argv) > 1 else git("merge-base", "HEAD", "main")[0]
    changed = [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]
    found = set().union(*map(tests_of, changed))
    found = {test for test in found if not any(str(folder) in found for folder in Path(test).parents)}
    if not found:
        sys.exit(f"nothing that has tests differs from {base}; for the engines' suites see make help")
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
