"""The prefix search: how far a request's prefix is present in all KV groups.

Full-attention groups are asked from the left for their leading run, windowed ones from the right for the last place
where a whole window is present; a miss in one group shortens the search in the others, until all agree.
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvtiers.api import LookupResult
from kvtiers.scheduler.engine import EngineRequest, OffloadManager
from kvtiers.scheduler.geometry import Geometry, Group
from kvtiers.scheduler.request_state import RequestState

__all__ = ["WINDOW_SCAN", "Found", "PrefixSearch", "Scanned"]


class Found(NamedTuple):
    """The token up to which a prefix is present; ``wait``: part of it is not readable yet, or more may be found."""

    end: int
    wait: bool


class Scanned(NamedTuple):
    """The meaning of one answer in a scan from the right.

    ``present``: the chunk counts towards the window; otherwise the window has to end before it, and what was found to
    its right does not count. ``wait``: the request has to ask again: ``defer`` in any case, else only if the chunk
    lies in the window that is found in the end.
    """

    present: bool
    wait: bool
    defer: bool


WINDOW_SCAN: Mapping[LookupResult, Scanned] = {
    LookupResult.HIT: Scanned(present=True, wait=False, defer=False),
    LookupResult.HIT_PENDING: Scanned(present=True, wait=True, defer=False),
    LookupResult.RETRY: Scanned(present=False, wait=False, defer=True),
    LookupResult.MISS: Scanned(present=False, wait=False, defer=False),
}


class PrefixSearch:
    """Searches through the manager; keeps no state."""

    def __init__(self, manager: OffloadManager, geometry: Geometry) -> None:
        self._manager = manager
        self._geometry = geometry

    def find(self, request: EngineRequest, tracked: RequestState, start: int, limit: int) -> Found:
        """Return how far the prefix after ``start`` is present, up to ``limit``. Loads may end at both."""
        several = len(self._geometry.groups) > 1
        end = limit
        while end > start:
            asked = end
            run, unknown = self._leading_run(request, tracked, start, end)
            end, wait = run
            if unknown:
                return Found(end, wait=True)
            for group in self._geometry.windowed if end > start else ():
                found, unresolved = self._scan(request, tracked, group, start, end)
                if unresolved:
                    unknown = True  # the other groups are asked about the same place, not about one further left
                else:
                    end, wait = found.end, wait or found.wait
            if unknown:
                return Found(end, wait=True)
            # Asked again about the end that all have in common: what is pending behind it is of no interest.
            if end == asked or not several or not (wait or self._geometry.windowed):
                return Found(end, wait and end > start)
        return Found(start, wait=False)

    def _leading_run(self, request: EngineRequest, tracked: RequestState, start: int, end: int) -> tuple[Found, bool]:
        """Return the run that all full-attention groups have, and whether it ends where an answer is missing."""
        wait, unknown_at = False, -1
        for group in self._geometry.full:
            first = start // group.tokens_per_chunk
            keys = self._keys(request, tracked, group)[first : -(-end // group.tokens_per_chunk)]
            if not keys:
                return Found(start, wait=False), False
            hits = self._manager.lookup_prefix(keys, request.context, first)
            end = max(start, min(end, self._geometry.floor((first + hits.chunks) * group.tokens_per_chunk)))
            wait = wait or hits.pending > 0
            if hits.unresolved:
                unknown_at = end
            if end == start:
                break
        return Found(end, wait), unknown_at == end

    def _scan(
        self, request: EngineRequest, tracked: RequestState, group: Group, start: int, end: int
    ) -> tuple[Found, bool]:
        """Return the last place up to ``end`` with a whole window before it, and whether an answer is still missing."""
        geometry, step = self._geometry, group.tokens_per_chunk
        keys = self._keys(request, tracked, group)
        needed = geometry.chunks_of(geometry.blocks_between(group, start, end))
        # One window's answers may be missing: asking for more than will be used would also promote more.
        most = len(needed)
        wait, unresolved = False, 0
        chunk = needed.stop - 1
        while needed and chunk >= needed.start and unresolved < most:
            known = chunk < len(keys)  # the request's last chunk may not be full
            answer = WINDOW_SCAN[self._manager.lookup(keys[chunk], request.context) if known else LookupResult.MISS]
            if answer.present:
                wait = wait or answer.wait
            else:
                unresolved += answer.defer
                wait = False
                end = geometry.floor(chunk * step)
                needed = geometry.chunks_of(geometry.blocks_between(group, start, end))
                chunk = needed.stop
            chunk -= 1
        return Found(max(start, end), wait), unresolved > 0

    def _keys(self, request: EngineRequest, tracked: RequestState, group: Group) -> list[bytes]:
        return tracked.chunk_keys(request, group.index, self._geometry.blocks_per_chunk)
