"""Loads: the longest boundary of a prompt at which all kinds of values are there, and a cache that stands at it."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvtiers import Client
from kvtiers_transformers.geometry import Geometry, ValueKind
from kvtiers_transformers.values import Restored, views_of

__all__ = ["Reader", "key_of"]

_GROUP_BYTES = 1 << 30  # got, and laid into the cache, at a time
_MOST_TRIES = 16  # boundaries at which windows and states are looked for


def key_of(chain: bytes, kind: ValueKind) -> bytes:
    """Return the key of a chunk's value of this kind. ``chain``: the hash over all tokens up to the chunk's end."""
    return chain + b"/" + kind.name.encode()


class _Prompt(NamedTuple):
    """A prompt to be restored: the hash of each of its chunks, whose it is, and until when (``time.monotonic``)."""

    chain: Sequence[bytes]
    tenant: str
    until: float


class Reader:
    """Restores caches of one sequence. ``config``: the model's, of which ``DynamicCache`` makes its layers."""

    def __init__(self, client: Client, geometry: Geometry, config: Any) -> None:
        self._client = client
        self._geometry = geometry
        self._config = config

    def restore(self, chain: Sequence[bytes], seconds: float, tenant: str = "") -> tuple[Any, int]:
        """Return a cache, and at how many chunks it stands; (None, 0) if nothing was found in time.

        ``chain``: the hash of each chunk that may be restored. ``tenant``: whose values, "" for no one's. A value that
        is damaged, or gone, moves the boundary.
        """
        prompt = _Prompt(chain, tenant, time.monotonic() + seconds)
        reach = self._reach(prompt)
        for _ in range(_MOST_TRIES):
            if reach < 1 or time.monotonic() >= prompt.until:
                break
            if not all(self._has(kind, prompt, reach) for kind in self._geometry.at_boundaries):
                reach -= 1
                continue
            restored = Restored(self._geometry, self._config, reach)
            good = self._fill(restored, prompt, reach)
            if good == reach:
                return restored.cache(), reach
            reach = min(good, reach - 1)
        return None, 0

    def _reach(self, prompt: _Prompt) -> int:
        """Return how many leading chunks have values of the kind of which all are needed."""
        return self._prefix(self._geometry.rows or self._geometry.kinds[0], prompt, prompt.chain)

    def _has(self, kind: ValueKind, prompt: _Prompt, reach: int) -> bool:
        needed = prompt.chain[max(0, reach - kind.back) : reach]
        return self._prefix(kind, prompt, needed) == len(needed)

    def _prefix(self, kind: ValueKind, prompt: _Prompt, chain: Sequence[bytes]) -> int:
        keys = [key_of(link, kind) for link in chain]
        if not keys:
            return 0
        return self._client.exists_prefix(keys, kind.nbytes, _left(prompt.until), tenant=prompt.tenant)

    def _fill(self, restored: Restored, prompt: _Prompt, reach: int) -> int:
        """Get all values for this boundary; return up to where there may be values, ``reach`` if all are there."""
        for kind in sorted(self._geometry.kinds, key=lambda kind: kind.kind == "rows"):
            good = self._get(kind, prompt, restored.first_chunk(kind), reach, restored)
            if good < reach:
                # Without a row, only boundaries before it are left; without a state, those before this one.
                return good if kind.kind == "rows" else reach - 1
        return reach

    def _get(self, kind: ValueKind, prompt: _Prompt, first: int, end: int, restored: Restored) -> int:
        each = max(1, _GROUP_BYTES // kind.nbytes)
        memory = torch.empty((min(each, end - first), kind.nbytes), dtype=torch.uint8, device=kind.parts[0].device)
        for start in range(first, end, each):
            stop = min(start + each, end)
            rows = memory[: stop - start]
            keys = [key_of(link, kind) for link in prompt.chain[start:stop]]
            found = self._client.get_into(keys, views_of(rows), _left(prompt.until), tenant=prompt.tenant)
            if not all(found):
                return start + found.index(False)
            restored.put(kind, start, rows)
        return end


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())
