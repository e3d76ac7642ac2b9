"""The glossary's list of words that are not used, against all that is written in the project.

Module and class names that were replaced by the glossary's words do not come back either.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
SETTINGS = ("Makefile", "pyproject.toml", "mkdocs.yml", ".pre-commit-config.yaml", ".ci/run")
FOLDERS = (
    "core",
    "integrations",
    "libraries",
    "plugins",
    "replay",
    "examples",
    "benchmarks",
    "tools",
    "tests",
    "docs",
    "changelog.d",
    ".github",
)
KINDS = (".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".html", ".css", ".cu", ".in")
PLACES = (*FOLDERS, *PAGES, *SETTINGS)
FORBIDDEN = (
    *("nobody", "nobodys", "somebody", "somebodys", "someone", "anybody", "anybodys", "everybody", "everybodys"),
    *("whoever", "whomever", "heir", "heirs"),
    *("lend", "lends", "lent", "lending", "lender", "borrower", "borrowers", "owe", "owes", "owed", "owing"),
    *("bury", "buries", "buried", "burial", "burials"),
    *("let go", "lets go", "letting go", "leave to copy", "anew", "news"),
    *("meet", "meets", "met", "tell", "tells", "telling", "told", "know", "knows", "knew"),
    *("under way", "helper", "helpers"),
)
# Whole files in which a word is data, or means something else: (path, word).
ALLOWED = (
    (r"(integrations/\w+/)?benchmarks/.*|tests/unit/test_benchmarks\.py", "met"),  # a goal is met, or missed
    (r"plugins/redis_tier/tests/servers\.py", "meet"),  # CLUSTER MEET is a command of Redis's
    (r"replay/src/kvtiers_replay/report/templates/colours\.css", "tell"),  # colours that eyes tell apart
    (r"tests/unit/test_words\.py", ".*"),
    (r"docs/glossary\.md", ".*"),
)
# The glossary explains the tier host as a helper process; only there, and with both words.
EXPLAINED = re.compile(r"helper[ _]process(es)?(?![a-z])")
# As their authors wrote them; and what is no source of ours.
SKIPPED = re.compile(r"tests/compat/api_|(^|/)(build|dist|\.[^/]+|[^/]+\.egg-info)/")
# Parts of identifiers count as words, and a line's end or an underscore as a space.
_ANY = "|".join(FORBIDDEN).replace(" ", r"[\s_]+")
_CAPITAL = "|".join(word.title().replace(" ", "") for word in FORBIDDEN)
PATTERN = re.compile(rf"(?i:(?<![a-z])(?:{_ANY})(?![a-z]))|(?<![A-Z])(?:{_CAPITAL})(?![a-z])")


def found_in(text: str) -> list[str]:
    """Return each forbidden word of a text with its line."""
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for match in PATTERN.finditer(text)
        if not EXPLAINED.match(text, match.start())
    ]


def is_allowed(path: str, word: str) -> bool:
    """Return whether a file may have a word that is forbidden elsewhere."""
    return any(re.fullmatch(paths, path) and re.fullmatch(words, word, re.IGNORECASE) for paths, words in ALLOWED)


def lines_of(place: str) -> list[str]:
    """Return where a place has forbidden words. A place is a file, or a folder with files of all kinds of text."""
    path = ROOT / place
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*.*") if file.suffix in KINDS)
    assert files, "there is no such place"
    named = {file.relative_to(ROOT).as_posix(): file for file in files}
    return [
        f"{name}:{line}"
        for name, file in named.items()
        if not SKIPPED.search(name)
        for line in found_in(file.read_text("utf-8"))
        if not is_allowed(name, line.split(": ", 1)[1])
    ]


@pytest.mark.parametrize("place", PLACES)
def test_no_word_that_the_glossary_forbids_is_used(place):
    lines = lines_of(place)
    assert not lines, "see docs/glossary.md:\n" + "\n".join(lines)


@pytest.mark.parametrize(("paths", "words"), ALLOWED)
def test_each_exception_is_still_needed(paths, words):
    names = [path.relative_to(ROOT).as_posix() for place in FOLDERS for path in (ROOT / place).rglob("*.*")]
    assert any(
        re.fullmatch(words, line.split(": ", 1)[1], re.IGNORECASE)
        for name in names
        if re.fullmatch(paths, name) and name.endswith(KINDS) and not SKIPPED.search(name)
        for line in found_in((ROOT / name).read_text("utf-8"))
    )


def test_the_glossary_names_each_forbidden_word_and_a_better_one():
    _, _, table = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")
    rows = re.findall(r"^\| (?!not \|)([^|]+?) \| ([^|]+?) \|$", table, re.MULTILINE)
    named = {word for words, better in rows if better.strip("- ") for word in words.split(", ")}
    assert named == set(FORBIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        "Nobody waits.",
        "def _let_go(self)",
        "it has let\n    go of it",
        "self._news",
        "WorkerNews",
        "BuriesNames",
        "SOMEBODY",
        "an heir",
        "in_flight or under_way",
        "a helper of its own",
        "test_files_that_are_nobodys",
    ],
)
def test_a_forbidden_word_is_found_in_names_and_across_lines(text):
    assert found_in(text)


@pytest.mark.parametrize(
    "text",
    ["the method", "silent", "newsletter", "theirs", "let Google", "metrics", "the helper process", "acknowledge"],
)
def test_a_longer_word_is_not_taken_for_a_forbidden_one(text):
    assert not found_in(text)


def test_each_word_of_the_glossary_has_one_entry():
    text, _, _ = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")
    words = re.findall(r"^\| (?!word \||-)([^|]+?) \|", text, re.MULTILINE)
    assert len(words) > 60
    assert len(words) == len(set(words))


# What replaced them stands in the glossary, in ARCHITECTURE.md, or beside them here.
OLD_MODULES = (
    *("base", "told", "known", "last_calls", "health", "hosts", "host_group", "host_backend", "host_link", "host"),
    *("lookups", "lookup", "store_jobs", "row_guard", "launcher", "staging", "sealing", "sealer", "protocol", "views"),
    *("held", "sealed", "live", "trial", "probe", "doctor", "store_session", "store_report", "bump", "opening"),
    *("asked", "arrivals", "rest", "guard", "plain", "nodes", "looks", "updates", "epoch", "measure", "copies"),
    *("open_copier", "waits", "origins", "tracked", "beneath", "tree", "usage", "mover", "names", "mapping"),
    *("bench", "party", "played", "made_up", "peers"),
)
OLD_CLASSES = (
    *("ToldRequests", "LastCalls", "HostGroup", "HostBackend", "HostLink", "StoreJobs", "DoubtedKeys", "TierLookups"),
    *("AskedTier", "Rest", "AdapterLook", "AdapterLooks", "Held", "Origins", "RowGuard", "Tell"),
)
# Two are right where they are: a package's interface, and a probe that no tier makes.
STILL_RIGHT = re.compile(
    r"core/src/kvtiers/(primary/eviction|testing/chunk_store)/base\.py"
    r"|integrations/transformers/src/kvtiers_transformers/probe\.py"
)


def test_no_module_has_a_name_that_was_replaced():
    paths = [
        path.relative_to(ROOT).as_posix()
        for folder in (*FOLDERS, "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem in OLD_MODULES
    ]
    assert [path for path in paths if not SKIPPED.search(path) and not STILL_RIGHT.fullmatch(path)] == []


def test_no_class_has_a_name_that_was_replaced():
    pattern = re.compile(rf"^\s*class ({'|'.join(OLD_CLASSES)})\b", re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in pattern.findall(path.read_text("utf-8"))
    ]
    assert found == []
