"""The part of the documentation's build that MkDocs lacks: pages that lie outside of ``docs/``, or are generated.

A MkDocs hook (``mkdocs.yml`` names it). Documents link to each other by their places in the repository, so that the
links work where the repository is browsed. The site has a page for each file or folder that such a link leads to:
Markdown is rendered, a source file is shown, a folder is listed; and each link is turned into one between pages. So a
link that leads nowhere fails the strict build. The page of options is made from the config models.
"""

import os
import re
import sys
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads a hook by its path alone

from check_links import CODE, FENCE, INLINE, ROOT, links
from option_tables import options_page
from run_notebook import as_markdown

DOCS = ROOT / "docs"
HOME = ROOT / "README.md"
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh"}
# In the navigation, and so pages whether a document links to them or not.
ALWAYS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
READMES = ("plugins/*/README.md", "libraries/*/README.md", "integrations/*/README.md", "replay/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of ``docs/``, and the generated one."""
    files.append(File.generated(config, "reference/options.md", content=options_page()))
    files.append(File.generated(config, "notebook.md", content=as_markdown(DOCS / "notebook.ipynb")))
    for path in outside():
        add = partial(File.generated, config, page_of(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(add(abs_src_path=str(path)) if path.suffix == ".md" else add(content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn the links of this page, which lead through the repository, into links between pages of the site."""
    source = source_of(page)
    if source is None:
        return markdown
    code = [match.span() for pattern in (FENCE, CODE) for match in pattern.finditer(markdown)]
    return INLINE.sub(partial(site_link, source, page.file.src_uri, code), markdown)


def site_link(source: Path, page: str, code: list[tuple[int, int]], match: re.Match[str]) -> str:
    """Return this link as it must be on the page; as it is where it is in code or leads to another site."""
    target, _, anchor = match[1].partition("#")
    if not target or ":" in target or any(start <= match.start() < end for start, end in code):
        return match[0]
    path = (source.parent / unquote(target)).resolve()
    relative = os.path.relpath(page_of(path), Path(page).parent)
    return match[0].replace(match[1], f"{relative}#{anchor}" if anchor else relative)


def source_of(page: Page) -> Path | None:
    """Return the document that this page shows; None for a page that is generated."""
    if page.file.abs_src_path:
        return Path(page.file.abs_src_path)
    return None


def outside() -> list[Path]:
    """Return the files and folders outside of ``docs/`` that have a page: those that a document links to, and so on."""
    waiting = [*DOCS.rglob("*.md"), *(ROOT / name for name in ALWAYS)]
    waiting += [path for pattern in READMES for path in ROOT.glob(pattern)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.exists():  # MkDocs says where a link leads nowhere
            continue
        seen.add(path)
        if path.suffix == ".md":
            targets = [target.partition("#")[0] for _, target in links(path)]
            waiting += [(path.parent / unquote(name)).resolve() for name in targets if name and ":" not in name]
        elif (path / "README.md").is_file():
            waiting.append(path / "README.md")
        elif path.is_dir():
            waiting += entries(path)
    return sorted(path for path in seen if DOCS not in path.parents and not (path / "README.md").is_file())


def page_of(path: Path) -> str:
    """Return the place on the site of what is at this path of the repository."""
    if path == HOME:
        return "index.md"
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    if (path / "README.md").is_file():
        path /= "README.md"
    place = f"project/{os.path.relpath(path, ROOT)}"
    if path.is_dir():
        return f"{place}/index.md"
    return place if path.suffix == ".md" else f"{place}.md"


def shown(path: Path) -> str:
    """Return a page that shows a source file, or lists a folder."""
    title = f"# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        here = Path(page_of(path)).parent
        return title + "\n".join(f"* [{item.name}]({os.path.relpath(page_of(item), here)})" for item in entries(path))
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}````\n"


def entries(folder: Path) -> list[Path]:
    """Return what is in this folder, without what is built or hidden."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__pycache__")))
