"""Runs a notebook's cells, and gives them with their outputs as Markdown, for the documentation's site and the tests.

A cell is plain Python without magics. Its output is what it prints, then the value of its last expression: as HTML if
the value has that, as text else. The notebook in the repository has no outputs: they are of the machine that runs it.
"""

import ast
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["as_markdown"]


def as_markdown(notebook: Path) -> str:
    """Run a notebook in an empty folder and return it as a page. Any exception of a cell is raised."""
    names: dict[str, Any] = {"__name__": "__notebook__"}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for cell in cells:
                source = "".join(cell["source"])
                parts.append(source if cell["cell_type"] == "markdown" else _run(source, names))
        finally:
            os.chdir(before)
    return "\n\n".join(parts) + "\n"


def _run(source: str, names: dict[str, Any]) -> str:
    """Return a cell and its outputs."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)  # noqa: S102 -- our own notebook
        value = eval(compile(last, "cell", "eval"), names) if last else None  # noqa: S307
    shown = [f"```python\n{source}\n```"]
    if text := printed.getvalue().rstrip():
        shown.append(f"```text\n{text}\n```")
    if hasattr(value, "_repr_html_"):
        # A blank line would end the element for Markdown.
        shown.append("\n".join(line.strip() for line in value._repr_html_().splitlines() if line.strip()))
    elif value is not None:
        shown.append(f"```text\n{value!r}\n```")
    return "\n\n".join(shown)
