"""Loads: the longest boundary of a prompt at which all kinds of values are there, and a cache that stands at it."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvtiers import Client
from kvtiers_transformers.geometry import Geometry, ValueKind
from kvtiers_transformers.values import Restored

__all__ = ["Reader", "key_of"]

_GROUP_BYTES = 64 << 20  # got, and laid into the cache, at a time
_MOST_TRIES = 16  # boundaries at which windows and states are looked for


def key_of(chain: bytes, kind: ValueKind) -> bytes:
    """Return the key of a chunk's value of this kind. ``chain``: the hash over all tokens up to the chunk's end."""
    return chain + b"/" + kind.name.encode()


class Reader:
    """Restores caches of one sequence. ``config``: the model's, of which ``DynamicCache`` makes its layers."""

    def __init__(self, client: Client, geometry: Geometry, config: Any) -> None:
        self._client = client
        self._geometry = geometry
        self._config = config

    def restore(self, chain: Sequence[bytes], seconds: float) -> tuple[Any, int]:
        """Return a cache, and at how many chunks it stands; (None, 0) if nothing was found in time.

        ``chain``: the hash of each chunk that may be restored. A value that is damaged, or gone, moves the boundary.
        """
        until = time.monotonic() + seconds
        reach = self._reach(chain, until)
        for _ in range(_MOST_TRIES):
            if reach < 1 or time.monotonic() >= until:
                break
            if not all(self._has(kind, chain, reach, until) for kind in self._geometry.at_boundaries):
                reach -= 1
                continue
            restored = Restored(self._geometry, self._config, reach)
            good = self._fill(restored, chain, reach, until)
            if good == reach:
                return restored.cache(), reach
            reach = min(good, reach - 1)
        return None, 0

    def _reach(self, chain: Sequence[bytes], until: float) -> int:
        """Return how many leading chunks have values of the kind of which all are needed."""
        kind = self._geometry.rows or self._geometry.kinds[0]
        keys = [key_of(link, kind) for link in chain]
        return self._client.exists_prefix(keys, kind.nbytes, _left(until)) if keys else 0

    def _has(self, kind: ValueKind, chain: Sequence[bytes], reach: int, until: float) -> bool:
        keys = [key_of(link, kind) for link in chain[max(0, reach - kind.back) : reach]]
        return self._client.exists_prefix(keys, kind.nbytes, _left(until)) == len(keys)

    def _fill(self, restored: Restored, chain: Sequence[bytes], reach: int, until: float) -> int:
        """Get all values for this boundary; return up to where there may be values, ``reach`` if all are there."""
        for kind in sorted(self._geometry.kinds, key=lambda kind: kind.kind == "rows"):
            first = restored.first_chunk(kind)
            good = self._get(kind, chain, first, reach, restored, until)
            if good < reach:
                # Without a row, only boundaries before it are left; without a state, those before this one.
                return good if kind.kind == "rows" else reach - 1
        return reach

    def _get(
        self, kind: ValueKind, chain: Sequence[bytes], first: int, end: int, restored: Restored, until: float
    ) -> int:
        each = max(1, _GROUP_BYTES // kind.nbytes)
        on_device = kind.parts[0].device.type == "cuda"
        memory = torch.empty((min(each, end - first), kind.nbytes), dtype=torch.uint8, pin_memory=on_device)
        for start in range(first, end, each):
            stop = min(start + each, end)
            rows = memory[: stop - start]
            keys = [key_of(link, kind) for link in chain[start:stop]]
            found = self._client.get_into(keys, [row.numpy() for row in rows], _left(until))
            if not all(found):
                return start + found.index(False)
            restored.put(kind, start, rows.to(kind.parts[0].device) if on_device else rows)
        return end


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())
