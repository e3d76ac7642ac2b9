"""The lock as constraints for pip: one line for each package of ``uv.lock``, with the Pythons that it is for.

``python tools/lock_constraints.py > FILE``, then ``pip install --constraint FILE``. A package that the lock has in
several versions has a line for each, of which the markers leave one.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[1] / "uv.lock"


def constraints(lock: dict[str, Any]) -> Iterator[str]:
    """Yield the lines; none for the workspace's own distributions."""
    for package in lock["package"]:
        if "registry" in package["source"]:
            markers = " or ".join(f"({marker})" for marker in package.get("resolution-markers", ()))
            yield f"{package['name']}=={package['version']}" + (f" ; {markers}" if markers else "")


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in constraints(tomllib.loads(LOCK.read_text(encoding="utf-8"))))
