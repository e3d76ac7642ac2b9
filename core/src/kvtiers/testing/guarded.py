"""Guarded memory: rows between guard bytes, which detect stray writes and kept views."""

import gc
import mmap
import threading

import numpy as np
import numpy.typing as npt

from kvtiers.layout.borrowed_views import Loan

__all__ = ["PAGE", "GuardedMemory", "Row", "is_one_version", "pattern", "same_bytes", "version"]

PAGE = 4096  # a value's length is a multiple of it, on every machine
GUARD, POISON = 0xA5, 0xDB

Bytes = npt.NDArray[np.uint8]


def pattern(seed: int, nbytes: int) -> bytes:
    """Return random bytes that are the same for the same seed."""
    return np.random.default_rng(seed).bytes(nbytes)


def version(number: int, nbytes: int) -> bytes:
    """Return a value that has its version at every place."""
    return number.to_bytes(8, "little") * (nbytes // 8)


def is_one_version(content: bytes) -> bool:
    """Return whether the content is one version from its first byte to its last."""
    return content == content[:8] * (len(content) // 8) and int.from_bytes(content[:8], "little") < 1 << 32


def same_bytes(got: bytes, expected: bytes, what: str) -> None:
    """Fail, naming the first wrong byte, unless both are the same. Megabytes are no use in a failed assertion."""
    if got == expected:
        return
    if len(got) != len(expected):
        raise AssertionError(f"{what}: {len(got)} bytes, expected {len(expected)}")
    wrong = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(expected, np.uint8))
    first = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(got)} bytes are wrong, the first at {first}: "
        f"{got[first]:#04x}, expected {expected[first]:#04x}"
    )


class Row:
    """One value's place in guarded memory, with a page of guard bytes on both sides."""

    def __init__(self, region: memoryview, offset: int, nbytes: int) -> None:
        self._region, self._offset, self._nbytes = region, offset, nbytes
        self._around: Bytes = np.frombuffer(region, np.uint8, nbytes + 2 * PAGE, offset - PAGE)
        self._array = self._around[PAGE:-PAGE]
        self._around[:PAGE] = self._around[-PAGE:] = GUARD
        self._array[:] = POISON
        self._loans: list[Loan] = []

    def fill(self, content: bytes) -> None:
        """Put the content into the row."""
        self._array[:] = np.frombuffer(content, np.uint8)

    def poison(self) -> None:
        """Put bytes into the row that no value has."""
        self._array[:] = POISON

    def content(self) -> bytes:
        """Return a copy of what the row holds."""
        return self._array.tobytes()

    def destination(self) -> memoryview:
        """Return a fresh view to read a value into: pass it on at once, keep no other reference to it."""
        return self._borrow(readonly=False)

    def source(self) -> memoryview:
        """Return a fresh read-only view of the value: pass it on at once, keep no other reference to it."""
        return self._borrow(readonly=True)

    def is_kept(self) -> bool:
        """Return whether a view of the row, or anything made from one, is still alive."""
        if all(loan.is_free() for loan in self._loans):
            return False
        gc.collect()  # core forgives a cycle, an exception and its traceback say, as it does this too
        return not all(loan.is_free() for loan in self._loans)

    def is_guarded(self) -> bool:
        """Return whether the bytes on both sides of the row are as they were."""
        return bool((self._around[:PAGE] == GUARD).all() and (self._around[-PAGE:] == GUARD).all())

    def _borrow(self, *, readonly: bool) -> memoryview:
        loan = Loan(self._region, [(self._offset, self._nbytes)], readonly=readonly)
        view = loan.views.pop()  # the store alone holds it now, so that the view itself is found, too, if it is kept
        viewed = np.frombuffer(view, np.uint8)
        # By address: a view of anything but this row would make nonsense of every other check.
        assert (viewed.ctypes.data, viewed.nbytes) == (self._array.ctypes.data, self._nbytes)
        self._loans.append(loan)
        return view


class GuardedMemory:
    """The memory of a test's rows; pages take real memory only once they are touched."""

    def __init__(self, nbytes: int = 1 << 28) -> None:
        self._region = memoryview(mmap.mmap(-1, nbytes))
        self._next = PAGE
        self._lock = threading.Lock()

    def row(self, content: bytes | int) -> Row:
        """Return a new row that holds the content, or one of this many poisoned bytes."""
        nbytes = content if isinstance(content, int) else len(content)
        with self._lock:
            offset, self._next = self._next, self._next + nbytes + 2 * PAGE
        row = Row(self._region, offset, nbytes)
        if isinstance(content, bytes):
            row.fill(content)
        return row
