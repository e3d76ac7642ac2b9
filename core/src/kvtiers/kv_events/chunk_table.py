"""The chunk table: descriptions of chunks beyond their keys, and the events that are made of them.

An engine describes a chunk when it stores it or asks for it; its events come later, when it has landed and when it is
evicted. A description is kept while its chunk is in the primary, so their number is bounded by its rows, and for the
latest ``most_recent`` others: chunks on their way in, or out to a tier. Of a chunk that is not described the hash in
its key is published, that of its last block, without tokens: routers that have the block from the engine's own events
find it by that.

Two chunks may share a block: the first ones where a chunk has several, all where two tenants have the same prompt. Some
routers count how often a block was stored and remove it when it was removed as often; others remove it at once. So that
both are right, a block of the primary is reported as stored with the first of its chunks, and as removed with the last.
A tier's blocks are too many to remember: what it has stored is reported each time, and a removal as often as that was.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from kvtiers.api import OffloadKey, block_hash_of, group_of
from kvtiers.kv_events.naming import GroupFacts, Place
from kvtiers.kv_events.wire import Stored, Wire
from kvtiers.types import ChunkBlocks, OffloadEvent

__all__ = ["ChunkTable"]

_MOST_RECENT = 1 << 14
_MOST_COUNTED = 1 << 15  # some 8 MiB
_MOST_REPORTS = 8


class _Known(NamedTuple):
    """A description in its compact form, as events name it."""

    hashes: tuple[int | bytes, ...]
    parent: int | bytes | None
    tokens: "array[int]"
    adapter: str | None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None
    is_bare: bool = False
    """Whether it is that of a chunk that is not described: its last block."""

    def parts(self, wanted: Sequence[bool]) -> "list[_Known]":
        """Return descriptions of those of its blocks that are wanted, one for each run of them."""
        if all(wanted):
            return [self]
        size, found = len(self.tokens) // len(self.hashes), []
        for is_wanted, run in groupby(range(len(wanted)), wanted.__getitem__):
            if is_wanted:
                first, *more = run
                end = first + 1 + len(more)
                parent = self.hashes[first - 1] if first else self.parent
                extra = self.extra_keys and self.extra_keys[first:end]
                tokens = self.tokens[first * size : end * size]
                found.append(_Known(self.hashes[first:end], parent, tokens, self.adapter, extra))
        return found


class ChunkTable:
    """Makes events. The publisher's thread alone. ``places``: by a tier's name, "" for the primary.

    ``most_recent``: descriptions that are kept beyond those of the primary. ``most_counted``: chunks of tiers of which
    it is remembered how often they were reported, up to ``most_reports``.
    """

    def __init__(
        self,
        wire: Wire,
        groups: Sequence[GroupFacts],
        places: Mapping[str, Place],
        *,
        tokens: bool,
        most_recent: int = _MOST_RECENT,
        most_counted: int = _MOST_COUNTED,
        most_reports: int = _MOST_REPORTS,
    ) -> None:
        self._most_recent = most_recent
        self._most_counted = most_counted
        self._most_reports = most_reports
        self._wire = wire
        self._groups = groups
        self._places = places
        self._tokens = tokens
        self._resident: dict[OffloadKey, _Known] = {}
        self._bare: set[OffloadKey] = set()
        """Chunks in the primary that are not described."""
        self._recent: OrderedDict[OffloadKey, _Known] = OrderedDict()
        self._holders: Counter[tuple[int, bool, int | bytes]] = Counter()
        """By KV group, ``is_bare`` and block: the chunks in the primary that have it."""
        self._reports: OrderedDict[tuple[str, OffloadKey], int] = OrderedDict()
        """How often it was reported that a tier has stored a chunk, for the latest ``most_counted`` of them."""

    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take what an engine says of chunks."""
        for chunk in chunks:
            if chunk.key not in self._resident:
                self._recent[chunk.key] = self._compact(chunk)
                self._recent.move_to_end(chunk.key)
        self._forget_oldest()

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Take note that these chunks have left the primary, without an event."""
        for key in keys:
            self._evicted(group_of(key), key)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._recent) > self._most_recent:
            self._recent.popitem(last=False)

    def events(self, change: OffloadEvent) -> Iterator[msgspec.Struct]:
        """Yield the events of a change of what is resident."""
        place = self._places.get(change.tier) or Place("STORAGE", None, change.tier)
        if change.removed:
            yield from self._removed(change, place)
        else:
            yield from self._stored(change, place)

    def clear(self) -> None:
        """Forget all chunks."""
        self._resident.clear()
        self._bare.clear()
        self._recent.clear()
        self._holders.clear()
        self._reports.clear()

    def empty_primary(self) -> Iterator[msgspec.Struct]:
        """Yield the events of an eviction of all chunks in the primary, for a stream that has others' blocks, too."""
        yield from self.events(OffloadEvent([*self._resident, *self._bare], removed=True))

    # -- inside

    def _compact(self, chunk: ChunkBlocks) -> _Known:
        hash_of = self._wire.hash_of
        return _Known(
            tuple(hash_of(each) for each in chunk.hashes),
            None if chunk.parent is None else hash_of(chunk.parent),
            _tokens_of(chunk) if self._tokens else array("I"),
            chunk.adapter,
            None if chunk.extra_keys is None or not self._tokens else tuple(chunk.extra_keys),
        )

    def _stored(self, change: OffloadEvent, place: Place) -> Iterator[msgspec.Struct]:
        """Yield events of described chunks, those of one prefix together, and of others by KV group."""
        event: Stored | None = None
        last: tuple[int, _Known] | None = None
        bare: dict[int, list[int | bytes]] = {}
        for key in change.keys:
            group = group_of(key)
            for known in self._reported(change.tier, key) if change.tier else self._landed(group, key):
                if known.is_bare:
                    bare.setdefault(group, []).extend(known.hashes)
                    continue
                if event is not None and last is not None and _follows(last, (group, known)):
                    event.block_hashes.extend(known.hashes)
                    event.token_ids.extend(known.tokens)
                    if event.extra_keys is not None and known.extra_keys is not None:
                        event.extra_keys.extend(known.extra_keys)
                else:
                    if event is not None:
                        yield event
                    event = self._event_of(group, known, place)
                last = (group, known)
        if event is not None:
            yield event
        for group, hashes in bare.items():
            yield self._wire.stored(hashes, None, **self._words(group, place), **self._kind(group))

    def _removed(self, change: OffloadEvent, place: Place) -> Iterator[msgspec.Struct]:
        if place.locality == "REMOTE" and place.tier is None and not self._wire.removals_name_places:
            return  # a router that leaves out what is remote would take it for a local place of this medium
        found: dict[tuple[int, int], list[int | bytes]] = {}
        for key in change.keys:
            group = group_of(key)
            times = self._reports.pop((change.tier, key), 1)
            gone = self._find(key).hashes if change.tier else self._evicted(group, key)
            for time in range(times if gone else 0):
                found.setdefault((time, group), []).extend(gone)
        for (_, group), hashes in found.items():
            yield self._wire.removed(hashes, **self._words(group, place))

    def _find(self, key: OffloadKey) -> _Known:
        return self._resident.get(key) or self._recent.get(key) or self._bare_chunk(key)

    def _bare_chunk(self, key: OffloadKey) -> _Known:
        return _Known((self._wire.hash_of(block_hash_of(key)),), None, array("I"), None, None, is_bare=True)

    def _reported(self, tier: str, key: OffloadKey) -> list[_Known]:
        """Take note that a tier has a chunk; return it, unless that was reported often enough."""
        times = self._reports.pop((tier, key), 0)
        self._reports[tier, key] = min(times + 1, self._most_reports)
        if len(self._reports) > self._most_counted:
            self._reports.popitem(last=False)
        return [self._find(key)] if times < self._most_reports else []

    def _landed(self, group: int, key: OffloadKey) -> list[_Known]:
        """Take note that a chunk is in the primary; return the parts of it that no other chunk there has."""
        if key in self._resident or key in self._bare:  # the caller says it twice, so it is said twice
            return [self._find(key)]
        known = self._recent.pop(key, None)
        if known is None:
            self._bare.add(key)
            known = self._bare_chunk(key)
        else:
            self._resident[key] = known
        holds = [(group, known.is_bare, each) for each in known.hashes]
        parts = known.parts([not self._holders[hold] for hold in holds])
        self._holders.update(holds)
        return parts

    def _evicted(self, group: int, key: OffloadKey) -> Sequence[int | bytes]:
        """Keep a chunk's description for a while only; return its blocks that no other chunk in the primary has."""
        if key in self._resident:
            known = self._recent[key] = self._resident.pop(key)
        elif key in self._bare:
            self._bare.remove(key)
            known = self._bare_chunk(key)
        else:
            return ()
        gone = []
        for each in known.hashes:
            hold = (group, known.is_bare, each)
            self._holders[hold] -= 1
            if not self._holders[hold]:
                del self._holders[hold]
                gone.append(each)
        return gone

    def _event_of(self, group: int, known: _Known, place: Place) -> Stored:
        has_tokens = bool(known.tokens)
        return self._wire.stored(
            list(known.hashes),
            known.parent,
            token_ids=list(known.tokens),
            block_size=self._groups[group].tokens_per_block if has_tokens else 0,
            lora_name=known.adapter,
            extra_keys=None if known.extra_keys is None else list(known.extra_keys),
            **self._words(group, place),
            **self._kind(group),
        )

    def _words(self, group: int, place: Place) -> dict[str, object]:
        number = self._groups[group].number if group < len(self._groups) else group
        return {
            "medium": place.medium,
            "group_idx": number,
            "locality": place.locality,
            "ownership": place.tier,
        }

    def _kind(self, group: int) -> dict[str, object]:
        if group >= len(self._groups):
            return {}
        facts = self._groups[group]
        return {"kv_cache_spec_kind": facts.kind, "kv_cache_spec_sliding_window": facts.window}


def _tokens_of(chunk: ChunkBlocks) -> "array[int]":
    try:
        return array("I", chunk.tokens)
    except OverflowError:  # an engine's own placeholders
        return array("q", chunk.tokens)


def _follows(last: tuple[int, _Known], this: tuple[int, _Known]) -> bool:
    """Return whether a chunk continues the one before it, so that one event can name both."""
    (group, before), (its_group, known) = last, this
    return (
        group == its_group
        and known.parent == before.hashes[-1]
        and known.adapter == before.adapter
        and bool(known.tokens) == bool(before.tokens)
        and (known.extra_keys is None) == (before.extra_keys is None)
    )
