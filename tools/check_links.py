"""Check that every link between the documents leads somewhere: to a file or folder, and to a heading in it.

Looks at each Markdown file of the project. Links to other sites are not followed: a build must not fail because
a server that is not ours does.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
INLINE = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def documents() -> Iterator[Path]:
    """Yield every Markdown file that is not in a hidden folder (a virtual environment, a cache)."""
    for folder, folders, files in os.walk(ROOT):
        # A virtual environment has more files than the project, and may be installed at this moment.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".md") and not name.startswith("."))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, made as GitHub makes them: doubles get -1, -2, and so on."""
    names: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        name, count = base, 0
        while name in names:
            count += 1
            name = f"{base}-{count}"
        names.add(name)
    return names


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each link that is not inside code."""
    text = path.read_text(encoding="utf-8")
    # Blanks of the same length, so that the lines keep their numbers.
    for code in (FENCE, CODE):
        text = code.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for pattern in (INLINE, REFERENCE):
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match[1]


def problem(path: Path, target: str) -> str | None:
    """Say what is wrong with a link from this document, or None."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target, re.IGNORECASE):
        return None
    name, _, anchor = target.partition("#")
    file = (path.parent / unquote(name)).resolve() if name else path
    if not file.exists():
        return f"{target!r} leads to no file"
    if ROOT not in [file, *file.parents]:
        return f"{target!r} leads out of the project"
    if anchor and file.suffix == ".md" and unquote(anchor) not in anchors(file):
        return f"{target!r}: no heading {anchor!r} in {file.relative_to(ROOT)}"
    return None


def main() -> None:
    """Print a line for each broken link; exit with 1 if there is any."""
    found, problems = 0, 0
    for path in documents():
        for line, target in links(path):
            found += 1
            said = problem(path, target)
            if said:
                problems += 1
                print(f"{path.relative_to(ROOT)}:{line}: {said}")
    print(f"{found} links, {problems} broken")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
