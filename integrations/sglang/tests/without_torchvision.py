"""An import hook that stands in for torchvision, which SGLang imports for images.

A build of it fits one build of torch alone, and PyPI's is not for the CPU. Nothing here looks at an image. Imported
first by whatever imports SGLang.
"""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

STANDS_IN_FOR = {"torchvision"}


class _Hook:
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_its = name.partition(".")[0] in STANDS_IN_FOR
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_its else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__, module.__version__ = [], "0.0"  # type: ignore[attr-defined]
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: there is no source."""


def _anything(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


sys.meta_path.insert(0, _Hook())  # type: ignore[arg-type]
