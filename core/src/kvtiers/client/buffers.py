"""Values in a caller's memory: one buffer or several, which are gathered into a row and scattered from it.

Copies are numpy's, which releases the GIL meanwhile: other callers and the driver go on.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Views", "gather", "length_of", "parts_of", "scatter"]

Views: TypeAlias = Any
"""A value in the caller's memory: a C-contiguous buffer, or a list or tuple of them, one behind the other."""
Bytes: TypeAlias = npt.NDArray[np.uint8]


def parts_of(value: Views, *, writable: bool) -> list[Bytes]:
    """Return the parts of a value as bytes. TypeError or ValueError if one is no such buffer, or cannot be written."""
    parts = [_flat(part) for part in (value if isinstance(value, list | tuple) else (value,))]
    if writable and not all(part.flags.writeable for part in parts):
        raise ValueError("a buffer to read into is read-only")
    return parts


def _flat(part: Any) -> Bytes:
    view = memoryview(part)
    return np.frombuffer(view if view.contiguous else view.cast("B"), np.uint8) if view.nbytes else _EMPTY


_EMPTY = np.empty(0, np.uint8)


def length_of(parts: Sequence[Bytes]) -> int:
    """Return the length of a value in bytes."""
    return sum(part.nbytes for part in parts)


def gather(parts: Sequence[Bytes], row: Bytes) -> None:
    """Copy the parts into the row, one behind the other."""
    at = 0
    for part in parts:
        np.copyto(row[at : at + part.nbytes], part)
        at += part.nbytes


def scatter(row: Bytes, parts: Sequence[Bytes]) -> None:
    """Copy what ``gather`` has left in the row back into such parts."""
    at = 0
    for part in parts:
        np.copyto(part, row[at : at + part.nbytes])
        at += part.nbytes
