"""A registered pool: its pages as views of its own memory, and the client of kvtiers' tiers that moves them.

SGLang gives the address and the length of each part of a page (``get_page_buffer_meta``): K and V, one of each layer,
or one in all, by the pool's layout. No byte is copied here. Where SGLang has made the pool of one memfd (``"allocator":
"shm"``), it is the client's region: tier hosts map it, and a page passes no bounce row. Small pages do, and those in
memory that no other process can map: the client copies once, between pool and bounce rows.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvtiers import Client, open_client
from kvtiers.api import ConfigError
from kvtiers_sglang.identity import identity_of, release
from kvtiers_sglang.options import Options, tiers_of

__all__ = ["Pages", "Pool", "keys_of", "open_pool"]

Part = memoryview


class Pages:
    """The pages of one pool. ``sizes``: the bytes of each part of a page; ``nbytes``: of all of them."""

    def __init__(self, pool: Any) -> None:
        """ConfigError if the pool does not show its pages."""
        self._pool = pool
        self.tokens = int(getattr(pool, "page_size", 1) or 1)
        kind, layout = type(pool).__name__, getattr(pool, "layout", None)
        try:
            addresses, sizes = pool.get_page_buffer_meta(torch.arange(self.tokens))
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


class Pool:
    """A pool with its client. No call raises but by a mistake; each ends at ``until``, by ``time.monotonic``."""

    def __init__(self, memory: Any, pages: Pages, client: Client) -> None:
        self.memory = memory
        self.client = client
        self._pages = pages

    def prefix(self, names: Sequence[str], until: float) -> int:
        """Return how many of the leading pages there are."""
        return self.client.exists_prefix(keys_of(names), timeout=_left(until))

    def there(self, names: Sequence[str], until: float) -> list[bool]:
        """Return for each page whether it is there."""
        return self.client.exists(keys_of(names), timeout=_left(until))

    def load(self, names: Sequence[str], slots: Any, until: float) -> list[bool]:
        """Fill pages; return for each whether it was found."""
        return self.client.get_into(keys_of(names), self._pages.views(slots, len(names)), _left(until))

    def store(self, names: Sequence[str], slots: Any, until: float) -> list[bool]:
        """Store pages; return for each whether a tier has it."""
        return list(self.client.put(keys_of(names), self._pages.views(slots, len(names)), _left(until)).stored)


def open_pool(name: str, memory: Any, storage: Any, options: Options) -> Pool:
    """Open the tiers for a pool. ConfigError or StartError, in one line, if it cannot be used."""
    pages = Pages(memory)
    client = open_client(
        tiers_of(options),
        identity_of(name, memory, pages.sizes, storage, options),
        pages.nbytes,
        bounce_bytes=options.bounce_bytes,
        region=_region_of(memory),
        region_required=False,
        deadline=options.deadline,
        way_in=f"in SGLang {release()}, pool {name}",
        release=f"sglang {release()}",
        tenant=options.tenant,
    )
    return Pool(memory, pages, client)


def _region_of(memory: Any) -> tuple[int, Any] | None:
    """Return descriptor and mapping of the memfd that a pool lies in; None where it is of several, or of none."""
    allocator = getattr(memory, "allocator", None)
    fds: Sequence[int] = getattr(allocator, "fds", ())
    mappings: Sequence[Any] = getattr(allocator, "mms", ())
    return (fds[0], mappings[0]) if len(fds) == len(mappings) == 1 else None


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return SGLang's page keys as the client takes them: hashes in hex as bytes, anything else as text."""
    return [bytes.fromhex(name) if len(name) == 64 and _is_hex(name) else b"text:" + name.encode() for name in names]


def _is_hex(name: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in name)


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _view(address: int, nbytes: int) -> Part:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(int(address))).cast("B")
