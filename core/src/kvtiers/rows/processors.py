"""How many processors this process, in this container, may use."""

import contextlib
import os
from pathlib import Path

from kvtiers.rows.cgroups import control_groups, read_text

__all__ = ["usable_processors"]

_ROOT = Path("/")


def usable_processors(root: Path = _ROOT) -> float:
    """Return the processors of this thread's affinity, or fewer where a control group grants only so much time."""
    grants = [grant for folder, version in control_groups("cpu", root) if (grant := _grant(folder, version)) > 0]
    return min([len(os.sched_getaffinity(0)), *grants])


def _grant(folder: Path, version: int) -> float:
    """Return processor seconds a second that a control group grants; 0.0: as many as there are."""
    if version == 2:
        words = read_text(folder / "cpu.max").split()
    else:
        words = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    with contextlib.suppress(ValueError):  # "max", or no such file
        quota, period = map(int, words)
        return quota / period if period > 0 else 0.0
    return 0.0
