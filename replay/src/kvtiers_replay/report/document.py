"""The frame of a page: one file with its style inside, which may load nothing and run nothing."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

__all__ = ["document", "figure", "plot_style", "section", "table", "tile"]

# The browser itself sees to it that the page makes no request, whatever a name in it may look like.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def plot_style() -> str:
    """Return the style that plots need, wherever they stand."""
    return _read("plot.css")


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{plot_style()}{_read('page.css')}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and what stands under it."""
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def figure(title: str, note: str, svg: str, *, wide: bool = False) -> str:
    """Return a plot with its caption."""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><figcaption><b>{escape(title)}</b><span>{escape(note)}</span></figcaption>{svg}</figure>"


def tile(value: str, text: str, *, bad: bool = False) -> str:
    """Return one figure that is seen at once, and what it is."""
    kind = "tile bad" if bad else "tile"
    return f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(text)}</span></div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; without columns, without a head."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in columns)] if columns else []
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    shown = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{shown}>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
