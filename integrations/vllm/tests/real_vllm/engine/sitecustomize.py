"""CPU kernels for a vLLM that was built for CUDA: those of another release, where ``CPU_KERNELS`` names its folder.

Python imports this at the start of every process whose PYTHONPATH has this folder first.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


class Kernels:
    """Finds vLLM's compiled CPU kernels, and nothing else, in another folder; asked last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, module = name.rpartition(".")
        library = self._folder / f"{module}.abi3.so"
        if package != "vllm" or module not in ("_C", "_C_AVX2", "_C_AVX512") or not library.exists():
            return None
        return importlib.util.spec_from_file_location(name, library)


if os.environ.get("CPU_KERNELS"):
    sys.meta_path.append(Kernels(Path(os.environ["CPU_KERNELS"])))
