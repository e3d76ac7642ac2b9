"""Loads: the longest boundary of a prompt at which all kinds of values are there, and a cache that stands at it."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtiers import Client
from kvtiers_transformers.geometry import Geometry, ValueKind
from kvtiers_transformers.load_or_compute import LoadOrCompute
from kvtiers_transformers.values import Restored, new_values, views_of

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
    """Restores caches of one sequence. ``config``: the model's, of which ``DynamicCache`` makes its layers.

    ``rule``: what loads are worth; None: all are made.
    """

    def __init__(self, client: Client, geometry: Geometry, config: Any, rule: LoadOrCompute | None = None) -> None:
        self._client = client
        self._geometry = geometry
        self._config = config
        self._rule = rule

    def restore(self, chain: Sequence[bytes], seconds: float, tenant: str = "") -> tuple[Any, int]:
        """Return a cache, and at how many chunks it stands; (None, 0) if nothing was found in time.

        The same if computing is expected to be faster, by the rule. ``chain``: the hash of each chunk that may be
        restored. ``tenant``: whose values, "" for no one's. A value that is damaged, or gone, moves the boundary.
        """
        prompt = _Prompt(chain, tenant, time.monotonic() + seconds)
        reach = self._reach(prompt)
        begun = time.monotonic()
        for _ in range(_MOST_TRIES):
            if reach < 1 or time.monotonic() >= prompt.until:
                break
            if not all(self._has(kind, prompt, reach) for kind in self._geometry.at_boundaries):
                reach -= 1
                continue
            restored = Restored(self._geometry, self._config, reach)
            nbytes = sum((reach - restored.first_chunk(kind)) * kind.nbytes for kind in self._geometry.kinds)
            limit = self._limit(reach, nbytes)
            if limit is None:
                break
            prompt = prompt._replace(until=min(prompt.until, begun + limit))
            good = self._fill(restored, prompt, reach)
            self._measure(nbytes, begun, prompt.until, is_whole=good == reach)
            if good == reach:
                return restored.cache(), reach
            reach = min(good, reach - 1)
        return None, 0

    def _limit(self, reach: int, nbytes: int) -> float | None:
        """Return how many seconds a load may take, None if it shall not be made."""
        return self._rule.limit(reach * self._geometry.chunk_tokens, nbytes) if self._rule else float("inf")

    def _measure(self, nbytes: int, begun: float, until: float, *, is_whole: bool) -> None:
        """Note what a load took. One that has failed before its time was up says nothing."""
        now = time.monotonic()
        if self._rule and (is_whole or now >= until):
            self._rule.loaded(nbytes, now - begun if is_whole else max(now - begun, 2 * (until - begun)))

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
        most = max(1, _GROUP_BYTES // kind.nbytes)
        memory = new_values(min(most, end - first), kind.nbytes, kind.parts[0].device)
        each = len(memory)
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
