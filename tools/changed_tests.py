"""The tests of the packages that a change touches, for `make test-changed`.

Usage: changed_tests.py [COMMIT]. Prints the files and folders of tests for all that differs from COMMIT, also if it is
not committed or not added yet; without COMMIT, from where this branch left main.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "tests/integration/test_documents.py tests/integration/test_printed_commands.py "
    "tests/packaging/test_project_files.py"
)
FILES = "tests/packaging/test_project_files.py tests/packaging/test_lock.py"
TESTS = (
    # Those of engines run in environments of their own.
    (r"(?!integrations/(?:lmcache|sglang|transformers)/|.+/real_vllm/)(?:.+/)?tests/(?:.+/)?test_\w+\.py", r"\g<0>"),
    (r".+\.md", PAGES),
    (r"(tests/.+)/.+", r"\1"),
    (
        r"tests/tenant_scenes\.py",
        "plugins/mooncake_tier/tests/test_tenants.py plugins/redis_tier/tests/test_tenants.py",
    ),
    # What others share: of the tests that use it, the quick ones.
    (r"conftest\.py|tests/[^/]+", "tests/unit tests/integration/pool tests/integration/manager"),
    (r"pyproject\.toml", f"tests/unit {FILES}"),
    (r"Makefile|constraints\.txt|\..+", FILES),
    (r"core/src/kvtiers/(\w+)/.+", r"tests/unit/\1"),
    (r"core/src/kvtiers/_?(\w+)\.py", r"tests/unit/test_\1.py"),
    (r"core/.+", "tests/unit"),
    (r"(plugins/\w+)/.+", r"\1/tests"),
    (r"libraries/.+", "plugins/s3_tier/tests plugins/gcs_tier/tests plugins/azure_tier/tests"),
    (r"(?:integrations/\w+/)?benchmarks/.+", "tests/unit/test_benchmarks.py"),
    (r"integrations/vllm/.+", "integrations/vllm/tests/unit"),
    (r"replay/.+", "replay/tests/unit"),
    (r"docs/.+|examples/.+", PAGES),
    (
        r"mkdocs\.yml|tools/.+",
        f"tests/unit/test_changed_tests.py tests/unit/test_docs_site.py tests/unit/test_metrics.py {FILES}",
    ),
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
