"""Values in a caller's memory: one buffer or several, which are gathered into a row and scattered from it.

Copies of host memory are numpy's, which releases the GIL meanwhile: other callers and the driver go on. Those of GPU
memory are left to ``gpu/cuda/buffers.py``, for a whole piece at once.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers.gpu.cuda.buffers import CudaBuffer, cuda_buffer

__all__ = ["Bytes", "Part", "Views", "gather", "length_of", "parts_of", "scatter"]

Views: TypeAlias = Any
"""A value in the caller's memory: a C-contiguous buffer, or a list or tuple of them, one behind the other.

A buffer is of host memory (the buffer protocol), or of GPU memory (``__cuda_array_interface__``).
"""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Part: TypeAlias = Bytes | CudaBuffer


def parts_of(value: Views, *, writable: bool) -> list[Part]:
    """Return the parts of a value as bytes. TypeError or ValueError if one is no such buffer, or cannot be written."""
    return [_flat(part, writable=writable) for part in (value if isinstance(value, list | tuple) else (value,))]


def _flat(part: Any, *, writable: bool) -> Part:
    if (there := cuda_buffer(part, writable=writable)) is not None:
        return there
    view = memoryview(part)
    if writable and view.nbytes and view.readonly:
        raise ValueError("a buffer to read into is read-only")
    return np.frombuffer(view if view.contiguous else view.cast("B"), np.uint8) if view.nbytes else _EMPTY


_EMPTY = np.empty(0, np.uint8)


def length_of(parts: Sequence[Part]) -> int:
    """Return the length of a value in bytes."""
    return sum(part.nbytes for part in parts)


def gather(parts: Sequence[Part], row: Bytes) -> list[tuple[CudaBuffer, Bytes]]:
    """Copy the parts into the row, one behind the other; return those in GPU memory, with their places, for a copy."""
    return _copy(parts, row, into_row=True)


def scatter(row: Bytes, parts: Sequence[Part]) -> list[tuple[CudaBuffer, Bytes]]:
    """Copy what ``gather`` has left in the row back into such parts; return those in GPU memory, as ``gather``."""
    return _copy(parts, row, into_row=False)


def _copy(parts: Sequence[Part], row: Bytes, *, into_row: bool) -> list[tuple[CudaBuffer, Bytes]]:
    at = 0
    on_gpu = []
    for part in parts:
        place = row[at : at + part.nbytes]
        at += part.nbytes
        if isinstance(part, CudaBuffer):
            if part.nbytes:
                on_gpu.append((part, place))
        elif into_row:
            np.copyto(place, part)
        else:
            np.copyto(part, place)
    return on_gpu
