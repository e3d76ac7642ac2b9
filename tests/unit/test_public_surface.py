"""What an engine imports: the lazy names of ``kvtiers``, and that examples and documents need no others."""

import ast
import re
import sys
from pathlib import Path

import pytest

import kvtiers
import kvtiers.api
import kvtiers.testing

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "kvtiers": {*kvtiers.__all__},
    "kvtiers.api": {*kvtiers.api.__all__},
    "kvtiers.metrics": {"export"},
    "kvtiers.testing": {*kvtiers.testing.__all__},
}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "core/*.md",
        "replay/*.md",
        "libraries/*/*.md",
        "plugins/*/*.md",
        "integrations/*/*.md",
    )
    for path in ROOT.glob(pattern)
)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The demo's control experiment switches the check of the seals off, which no public name does, on purpose.
EXCEPTIONS = {("examples/demo/serve.py", "kvtiers.host"), ("examples/demo/serve.py", "kvtiers.layout.seal")}


def imports_of(tree: ast.AST) -> set[tuple[str, str]]:
    """Return (module, name) of each import of kvtiers' own in this code; the name is "" for ``import module``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] == "kvtiers"}


def internal(imports: set[tuple[str, str]]) -> set[str]:
    """Return the internal modules among these imports, and the names that a public module does not export."""
    modules = {module for module, _ in imports if module not in PUBLIC}
    return modules | {f"{module}.{name}" for module, name in imports if name and name not in PUBLIC.get(module, {name})}


def test_the_imports_for_type_checkers_are_the_names_that_are_loaded_late():
    tree = ast.parse(Path(kvtiers.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        node.module: tuple(alias.name for alias in node.names)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
    }
    assert declared == kvtiers._NAMES_BY_MODULE
    assert {*kvtiers._MODULE_OF, "__version__"} == set(kvtiers.__all__)


@pytest.mark.parametrize("name", sorted(set(kvtiers.__all__) - {"__version__"}))
def test_a_public_name_is_the_object_of_its_module(name):
    assert getattr(kvtiers, name) is getattr(sys.modules[kvtiers._MODULE_OF[name]], name)


def test_a_name_that_is_not_there_is_an_attribute_error_and_dir_lists_those_that_are():
    assert set(kvtiers.__all__) <= set(dir(kvtiers))
    with pytest.raises(AttributeError, match=r"^module 'kvtiers' has no attribute 'open_mangaer'$"):
        _ = kvtiers.open_mangaer


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from kvtiers import CacheLayout, open_manager\nimport kvtiers.api", set()),
        ("from kvtiers.types import BlockSpec", {"kvtiers.types"}),
        ("def late():\n    import kvtiers.host.transfer", {"kvtiers.host.transfer"}),
        ("from kvtiers import runtime", {"kvtiers.runtime"}),
        ("from kvtiers.api import load_resolved", {"kvtiers.api.load_resolved"}),
    ],
)
def test_an_internal_import_is_found(code, wrong):
    assert internal(imports_of(ast.parse(code))) == wrong


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_imports_public_names_alone(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = str(path.relative_to(ROOT))
    assert internal(imports_of(tree)) <= {module for file, module in EXCEPTIONS if file == where}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvtiers"
    }
    assert used <= set(kvtiers.__all__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_s_code_imports_public_names_alone(path):
    # A block may be a part of a function, so each import statement is read by itself.
    statement = re.compile(r"^[ \t]*((?:from|import)\s+kvtiers\b[^\n(]*(?:\([^)]*\))?)", re.MULTILINE)
    for block in PYTHON_BLOCK.findall(path.read_text(encoding="utf-8")):
        for text in statement.findall(block):
            assert not internal(imports_of(ast.parse(text))), text
        for module, name in re.findall(r"\b(kvtiers(?:\.[a-z_]+)?)\.([A-Za-z_]+)\b(?!\.)", block):
            assert f"{module}.{name}" in PUBLIC or name in PUBLIC.get(module, ()), f"{module}.{name}"


def test_the_reference_describes_every_public_name_once():
    for module, page in {"kvtiers": "engine", "kvtiers.api": "tier", "kvtiers.testing": "testing"}.items():
        text = (ROOT / "docs/reference" / f"{page}.md").read_text(encoding="utf-8")
        described = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", text, re.MULTILINE)
        assert sorted(described) == sorted(PUBLIC[module] - {"__version__"})
