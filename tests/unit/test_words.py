"""The glossary's list of words that are not used, against the source trees."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PLACES = ("core/src", "integrations/vllm/src", "plugins", "replay/src", "examples", "docs", *PAGES)
FORBIDDEN = (
    "nobody",
    "somebody",
    "whoever",
    "heir",
    "heirs",
    "lent",
    "owed",
    "buried",
    "let go",
    "lets go",
    "anew",
    "news",
    "met",
    "told",
    "knows",
)
# Parts of identifiers count as words, and a line's end or an underscore as a space.
_ANY = "|".join(FORBIDDEN).replace(" ", r"[\s_]+")
_CAPITAL = "|".join(word.title().replace(" ", "") for word in FORBIDDEN)
PATTERN = re.compile(rf"(?i:(?<![a-z])(?:{_ANY})(?![a-z]))|(?<=[a-z])(?:{_CAPITAL})(?![a-z])")


def found_in(text: str) -> list[str]:
    """Return each forbidden word of a text with its line."""
    return [f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in PATTERN.finditer(text)]


def files_of(place: str) -> list[Path]:
    """Return the files of a place in the tree, which is a file, or a folder with Python and Markdown files."""
    path = ROOT / place
    if path.is_file():
        return [path]
    return sorted(
        file for file in [*path.rglob("*.py"), *path.rglob("*.md")] if file != GLOSSARY and "tests" not in file.parts
    )


@pytest.mark.parametrize("place", PLACES)
def test_no_word_that_the_glossary_forbids_is_used(place):
    files = files_of(place)
    assert files, "there is no such place"
    lines = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in found_in(path.read_text("utf-8"))]
    assert not lines, "see docs/glossary.md:\n" + "\n".join(lines)


def test_the_glossary_names_each_forbidden_word_and_a_better_one():
    _, _, table = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")
    rows = re.findall(r"^\| (?!not \|)([^|]+?) \| ([^|]+?) \|$", table, re.MULTILINE)
    named = {word for words, better in rows if better.strip("- ") for word in words.split(", ")}
    assert named >= set(FORBIDDEN) - {"heirs"}


@pytest.mark.parametrize(
    "text",
    [
        "Nobody waits.",
        "def _let_go(self)",
        "it has let\n    go of it",
        "self._news",
        "WorkerNews",
        "SOMEBODY",
        "an heir",
    ],
)
def test_a_forbidden_word_is_found_in_names_and_across_lines(text):
    assert found_in(text)


@pytest.mark.parametrize("text", ["the method", "silent", "newsletter", "theirs", "let Google", "metrics"])
def test_a_longer_word_is_not_taken_for_a_forbidden_one(text):
    assert not found_in(text)


def test_each_word_of_the_glossary_has_one_entry():
    text, _, _ = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")
    words = re.findall(r"^\| (?!word \||-)([^|]+?) \|", text, re.MULTILINE)
    assert len(words) > 60
    assert len(words) == len(set(words))
