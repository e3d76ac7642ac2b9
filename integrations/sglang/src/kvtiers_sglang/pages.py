"""A host pool's pages as the client sees them: each page a list of views of the pool's own memory.

SGLang gives the address and the length of each part of a page (``get_page_buffer_meta``): K and V, one of each layer,
or one in all, by the pool's layout. No byte is copied here.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from kvtiers.api import ConfigError

__all__ = ["Pages"]

Part = memoryview


class Pages:
    """The pages of one pool. ``sizes``: the bytes of each part of a page; ``nbytes``: of all of them."""

    def __init__(self, pool: Any, first: Any) -> None:
        """``first``: the slots of the pool's first page. ConfigError if the pool does not show its pages."""
        self._pool = pool
        self.tokens = int(getattr(pool, "page_size", 1) or 1)
        kind, layout = type(pool).__name__, getattr(pool, "layout", None)
        try:
            addresses, sizes = pool.get_page_buffer_meta(first)
        except Exception as error:  # noqa: BLE001 -- whatever a kind of pool raises where it cannot say
            raise ConfigError(
                f"kvtiers: {kind} with layout {layout!r} does not show where a page lies ({error!r}); "
                "choose another --hicache-mem-layout, such as page_first"
            ) from None
        self.sizes = [int(size) for size in sizes]
        self.nbytes = sum(self.sizes)
        if not addresses or len(addresses) != len(sizes) or not self.nbytes:
            raise ConfigError(f"kvtiers: {kind} with layout {layout!r} has no bytes of its own to store")

    def views(self, slots: Any, count: int) -> list[list[Part]]:
        """Return the parts of ``count`` pages, whose slots follow each other. ValueError if these are others."""
        if slots is None or slots.numel() != count * self.tokens:
            raise ValueError(
                f"{count} pages of {self.tokens} slots, and {None if slots is None else slots.numel()} slots"
            )
        addresses, sizes = self._pool.get_page_buffer_meta(slots)
        each = len(self.sizes)
        if list(sizes) != self.sizes * count:
            raise ValueError(f"{count} pages of another shape than the pool's first one")
        parts = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [parts[start : start + each] for start in range(0, len(parts), each)]


def _view(address: int, nbytes: int) -> Part:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(int(address))).cast("B")


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return SGLang's page keys as the client takes them: hashes in hex as bytes, anything else as text."""
    return [bytes.fromhex(name) if len(name) == 64 and _is_hex(name) else b"text:" + name.encode() for name in names]


def _is_hex(name: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in name)
