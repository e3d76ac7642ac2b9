"""The adapter uses vLLM as it is: no walk of the stack, no changed class, and one module that replaces functions."""

import ast
from pathlib import Path

import pytest

import kvtiers_vllm

SOURCES = sorted(Path(kvtiers_vllm.__file__).parent.rglob("*.py"))
PATCHES = "compat.py"
TRICKS = {"_getframe", "currentframe", "f_back", "f_locals", "get_referrers", "__bases__"}


def tricks_in(tree: ast.AST, *, may_patch: bool) -> list[str]:
    """Return what this code does to the interpreter's frames, to classes, and to what it imported from vLLM."""
    borrowed = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) and node.module else alias.name).partition(".")[0] == "vllm"
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_set = not isinstance(node.ctx, ast.Load)
            if node.attr in TRICKS or (node.attr == "__class__" and is_set):
                found.append(node.attr)
            if is_set and not may_patch and _root(node) in borrowed:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not may_patch:
            found += [ast.unparse(node)] if node.func.id in {"setattr", "delattr"} else []
    return found


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_module_plays_no_trick_on_vllm(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert tricks_in(tree, may_patch=path.name == PATCHES) == []


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nframe = sys._getframe(1)",
        "import inspect\nconfig = inspect.currentframe().f_back.f_locals",
        "connector.__class__ = Ours",
        "from vllm.v1.engine.core import EngineCore\nEngineCore.add_lora = ours",
        "import vllm.config as config\nconfig.VllmConfig.__init__ = ours",
        "setattr(core, name, ours)",
    ],
)
def test_a_trick_is_found(code):
    assert tricks_in(ast.parse(code), may_patch=False)


def test_reading_and_building_what_is_vllms_is_no_trick():
    code = "from vllm.config import KVTransferConfig as Config\nours = Config(kv_role=x)\nself.kind = type(x).__class__"
    assert tricks_in(ast.parse(code), may_patch=False) == []
