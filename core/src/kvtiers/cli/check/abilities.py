"""Probes of a store's optional abilities: batches, pieces, listing, figures, as core uses each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvtiers._failures import CallThread
from kvtiers.api import (
    ChunkStore,
    Finding,
    KvtiersError,
    StoreEntry,
    SupportsBatch,
    SupportsListing,
    SupportsPieces,
    SupportsStats,
)
from kvtiers.api.answers import kept_each, lengths_each
from kvtiers.api.units import format_duration
from kvtiers.cli.check.round_trip import Bench, ProbeError, no_listing, not_kept, probe_name
from kvtiers.layout.cache_layout import SEAL_BYTES

__all__ = ["probe_abilities"]

_LIST_SECONDS = 5.0

Probe = Callable[[], Iterator[Finding]]


def probe_abilities(store: ChunkStore, bench: Bench) -> list[Probe]:
    """Return a probe for each of the store's abilities; those of a read-only one write nothing.

    That one's listing belongs to its round trip.
    """
    probes: list[Probe] = []
    if isinstance(store, SupportsBatch):
        probes.append(partial(_batch_reads if bench.read_only else _batch, store, store, bench))
    if isinstance(store, SupportsPieces):
        probes.append(partial(_pieces_reads if bench.read_only else _pieces, store, store, bench))
    if isinstance(store, SupportsStats):
        probes.append(partial(_stats, store, bench))
    if isinstance(store, SupportsListing) and not bench.read_only:
        probes.append(partial(_listing, store, store, bench))  # the last one: it may be left running
    return probes


def _batch(store: ChunkStore, batched: SupportsBatch, bench: Bench) -> Iterator[Finding]:
    """Write and read two values in as few calls as the store takes, each value in one view and then in two."""
    names, absent = [probe_name(), probe_name()], probe_name()
    size = bench.value_bytes
    try:
        for last in (0, SEAL_BYTES):
            bench.stage = f"writing two probe values, each in {2 if last else 1} views"
            for some in _calls_of(batched, names):
                wrote = bench.borrow(
                    store,
                    "write_many",
                    [0] * len(some),
                    readonly=True,
                    call=lambda views, some=some: batched.write_many(some, views),  # type: ignore[misc]
                    last=last,
                )
                if refused := [answer for answer in kept_each(store, some, wrote) if answer is not None]:
                    raise not_kept(refused[0])
            bench.stage = f"reading two probe values, each into {2 if last else 1} views"
            for asked, expected in ((names, [size, size]), ([names[0], absent], [size, 0])):
                bench.forget()
                lengths = _read(store, batched, bench, asked, last)
                if lengths != expected:
                    raise ProbeError(f"read_many_into() gave {lengths}, expected {expected}")
                bench.compare(*[row for row, there in zip((1, 2), expected, strict=True) if there])
    finally:
        bench.stage, before = "deleting the probe values", bench.stage
        store.delete(names)
        bench.stage = before
    yield Finding("ok", "several values, each in several views: wrote, read back and compared two")


def _calls_of(batched: SupportsBatch, names: Sequence[str]) -> list[Sequence[str]]:
    """Return the names of each call: no more than ``batch_values``."""
    most = max(1, batched.batch_values)
    return [names[start : start + most] for start in range(0, len(names), most)]


def _read(
    store: ChunkStore,
    batched: SupportsBatch,
    bench: Bench,
    names: Sequence[str],
    last: int = 0,
    sizes: Sequence[int] = (),
) -> list[int]:
    """Read values into the rows from the second one on; return the lengths."""
    sizes, lengths = sizes or [bench.value_bytes] * len(names), list[int]()
    for some in _calls_of(batched, names):
        at = len(lengths)
        rooms = sizes[at : at + len(some)]
        got = bench.borrow(
            store,
            "read_many_into",
            range(1 + at, 1 + at + len(some)),
            readonly=False,
            call=lambda views, some=some: batched.read_many_into(some, views),  # type: ignore[misc]
            lengths=rooms,
            last=last,
        )
        lengths += lengths_each(store, "read_many_into", rooms, got)
    return lengths


def _pieces(store: ChunkStore, in_pieces: SupportsPieces, bench: Bench) -> Iterator[Finding]:
    if not in_pieces.reads_in_pieces(bench.value_bytes):
        return
    name = probe_name()
    bench.stage = "reading the probe value in pieces"
    store.write(name, bench.view(0).toreadonly())
    try:
        pieces = in_pieces.read_pieces(name, bench.value_bytes)
        if pieces is None:
            raise ProbeError("read_pieces() gave nothing for the value just written")
        if b"".join(map(bytes, pieces)) != bench.payload:
            raise ProbeError("the pieces of read_pieces() are not the written bytes")
    finally:
        store.delete([name])
    if in_pieces.read_pieces(name, bench.value_bytes) is not None:
        raise ProbeError("read_pieces() gave pieces of a value that is not there")
    yield Finding("ok", "values in pieces: read one and compared it")


def _batch_reads(store: ChunkStore, batched: SupportsBatch, bench: Bench) -> Iterator[Finding]:
    """Read a value that there is, if one is known, and one that there is not."""
    bench.stage = "reading several values in one call"
    name, value = bench.known or (probe_name(), bytes(bench.value_bytes))
    names = [name, probe_name()]
    bench.forget()
    there, absent = _read(store, batched, bench, names, sizes=[len(value), bench.value_bytes])
    if absent or (there and bench.known is None):
        raise ProbeError(f"read_many_into() gave {[there, absent]}, though a value that was asked for is not there")
    if there == len(value) and bytes(bench.view(1)[: len(value)]) != value and _is_unchanged(store, bench):
        raise ProbeError("read_many_into() and read_into() of one value give different bytes")
    how = "read one and compared it" if there else "read none, as there are"
    yield Finding("ok", f"several values: {how}")


def _pieces_reads(store: ChunkStore, in_pieces: SupportsPieces, bench: Bench) -> Iterator[Finding]:
    bench.stage = "reading a value in pieces"
    if in_pieces.reads_in_pieces(bench.value_bytes):
        if in_pieces.read_pieces(probe_name(), bench.value_bytes) is not None:
            raise ProbeError("read_pieces() gave pieces of a value that is not there")
        yield Finding("ok", "values in pieces: gives none of an absent value")
    if bench.known is None or not in_pieces.reads_in_pieces(len(bench.known[1])):
        return
    name, value = bench.known
    pieces = in_pieces.read_pieces(name, len(value))
    if pieces is not None and b"".join(map(bytes, pieces)) != value and _is_unchanged(store, bench):
        raise ProbeError("the pieces of read_pieces() are not the bytes of read_into()")
    yield Finding("ok", "values in pieces: read one and compared it")


def _is_unchanged(store: ChunkStore, bench: Bench) -> bool:
    """Return whether the known value is still the same: no other writer has replaced it."""
    assert bench.known is not None
    name, value = bench.known
    again = bench.view(1)[: len(value)]
    return store.read_into(name, again) == len(value) and bytes(again) == value


def _stats(store: SupportsStats, bench: Bench) -> Iterator[Finding]:
    bench.stage = "giving its figures"
    figures: object = store.stats()
    if not isinstance(figures, Mapping):
        raise ProbeError(f"stats() returned {figures!r:.80}, expected figures by name")
    for name, figure in figures.items():
        if not isinstance(name, str):
            raise ProbeError(f"stats() has a figure named {name!r:.80}, expected a text")
        if not isinstance(figure, int | float) or not math.isfinite(figure):
            raise ProbeError(f"stats() has {figure!r:.80} for {name!r:.80}, expected a number")
    yield Finding("ok", f"figures of its own: {len(figures)}")


def _listing(store: ChunkStore, listing: SupportsListing, bench: Bench) -> Iterator[Finding]:
    """List the one probe value. A large store may have to read each name, so the time is bounded."""
    name = probe_name()
    bench.stage = "listing the probe value"
    store.write(name, bench.view(0).toreadonly())
    try:
        entries: list[object] = []
        errors: list[BaseException] = []
        lister = CallThread(lambda: entries.extend(listing.list(name)), errors)
        lister.start()
        lister.join(_LIST_SECONDS)
        bench.is_still_called = lister.is_alive()
        if errors and isinstance(errors[0], KvtiersError):
            yield no_listing(bench, errors[0])
            return
        if errors:
            raise errors[0]
        if bench.is_still_called:
            yield Finding(
                "ok", f"listing was not finished within {format_duration(_LIST_SECONDS)}: the store holds many values"
            )
            return
        if any(not isinstance(entry, StoreEntry) for entry in entries):
            raise ProbeError(f"list() yielded {entries[0]!r:.80}, expected a StoreEntry")
        got = [(entry.name, entry.nbytes) for entry in entries if isinstance(entry, StoreEntry)]
        if got != [(name, bench.value_bytes)]:
            raise ProbeError(
                f"list() of the probe value's own name gave {got!r:.200}, expected it once, with its length"
            )
    finally:
        store.delete([name])
    yield Finding("ok", "listing: found the probe value, with its length")
