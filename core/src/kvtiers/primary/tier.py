"""The primary tier: the cache of chunks in the region's rows, with leases and eviction.

It moves no bytes. The engine and the tiering code lease rows here; workers and tier hosts fill and read them. Each
lease ends with one completion, by row::

                      leases                          ends with                        is a use of the chunk
    GPU store         prepare_store   (writer)        complete_store                   yes
    GPU load          prepare_load    (reader)        complete_load                    yes
    promotion         prepare_write   (writer)        complete_write                   yes
    cascade           prepare_read    (reader)        complete_read                    no

A write that failed while its writer may still touch the row takes two steps: ``abandon`` (the key is gone, the row
is in quarantine), then its completion (the row is free). A failed read takes one: the row stays pinned until then.

Engine's thread only. A lookup's answer holds until the next call that leases rows to a writer, so the lease that
follows from it comes first. Nothing here blocks, and nothing raises after construction: a completion that a row's
state does not allow is ignored and counted (``misuse``).
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import filterfalse, islice

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.primary.eviction import EvictionPolicy, HintedPolicy, TenantShares, make_policy
from kvtiers.primary.kept import Kept
from kvtiers.primary.protection import Protection
from kvtiers.primary.residents import Allocation, Residents
from kvtiers.primary.row_table import RowTable
from kvtiers.types import OffloadEvent, RequestHints

__all__ = ["Allocation", "CPUPrimaryTier", "PoolState"]


class PoolState(IntEnum):
    """Whether the rows are those of the pool that the config names."""

    NONE = 0
    """It names none."""
    HELD = 1
    ALONE = 2
    """They are, but no keeper takes what is new."""
    ABSENT = 3
    """It was not to be had at the start: they are the engine's own."""


class CPUPrimaryTier:
    """The rows of the shared region as a cache of chunks.

    ``view``: the region, flat, row after row, ``row_stride`` bytes apart; it stays the caller's, who must not close
    it before the tier is closed. ``policy``: a policy of its own, or the name of one. Landed promotions
    are protected from eviction until they are first read, for ``protect_seconds`` at most, and on at most
    ``protected_share`` of the rows. Hints keep chunks on at most ``kept_share`` of them. ``record_events``: the caller
    takes the events, of the primary and of the tiers. ``shares``: by tenant, of the rows, which other tenants' chunks
    never take; then ``policy`` is the name of one. ``pool``: what the figures say of it. ``own_rows``: those that are
    this engine's, of ``num_rows``; None: all.
    """

    def __init__(
        self,
        num_rows: int,
        row_stride: int,
        view: memoryview,
        *,
        policy: EvictionPolicy | str = "lru",
        protected_share: float = 0.4,
        protect_seconds: float = 10.0,
        kept_share: float = 0.5,
        record_events: bool = True,
        shares: Mapping[str, float] | None = None,
        pool: PoolState = PoolState.NONE,
        own_rows: range | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if view.ndim != 1 or view.itemsize != 1 or len(view) < num_rows * row_stride:
            shape = f"{view.ndim}-D, {len(view)} items of {view.itemsize} bytes"
            raise ValueError(f"expected a flat view of {num_rows} rows of {row_stride} bytes, got {shape}")
        self.row_stride = row_stride
        self._pool = pool
        self._view = view
        self._rows = RowTable(num_rows, own_rows)
        num_rows = self._rows.num_rows
        self._unread = Protection(max(1, int(protected_share * num_rows)) if protected_share else 0, protect_seconds)
        most_kept, own = int(kept_share * num_rows), None
        if isinstance(policy, str):
            make = partial(make_policy, policy, num_rows, clock)
            own = TenantShares(num_rows, shares, make, most_kept) if shares else None
            policy = own or make()
        self._policy: EvictionPolicy = policy
        self._kept = Kept(most_kept)
        self._all_kept = [self._kept] if own is None else own.all_kept
        self._chunks = Residents(self._rows, self._policy, self._unread, own)
        self._row_of = self._chunks.row_of
        self.records_events = record_events
        self.events: list[OffloadEvent] = []
        """What became resident, and what was evicted, since these were last taken."""
        self.changes = 0
        """Counts on with each call after which a lookup may have another answer."""
        self._clock = clock

    # State

    def get_kv_memoryview(self) -> memoryview:
        """Return the zero-copy view of all rows: flat, bytes; row r starts at byte ``r * row_stride``."""
        return self._view

    def close(self) -> None:
        """Release the view of the region, so that it can be unmapped."""
        self._view = memoryview(b"")

    @property
    def num_rows(self) -> int:
        """All rows of this engine's."""
        return self._rows.num_rows

    @property
    def free_rows(self) -> int:
        """Rows without a chunk and without a lease."""
        return self._rows.free

    @property
    def evictable(self) -> int:
        """Chunks that could be evicted now: ready, without readers, not protected."""
        return self._chunks.evictable

    @property
    def pending_rows(self) -> int:
        """Rows of chunks whose write is in flight."""
        return self._rows.pending

    @property
    def pinned_rows(self) -> int:
        """Rows of chunks with readers."""
        return self._rows.pinned

    @property
    def protected_rows(self) -> int:
        """Rows of landed promotions that are protected until their first read."""
        return len(self._unread.keys)

    @property
    def quarantined_rows(self) -> int:
        """Rows of forgotten chunks that a writer or readers may still touch."""
        return self._rows.quarantined

    @property
    def rows_wanted(self) -> int:
        """Rows, from the first, that were used since all chunks were last forgotten or that wait to be opened.

        Memory is made ready ahead of them.
        """
        return self._rows.wanted

    @property
    def retired_rows(self) -> int:
        """Rows that are never used again, since their memory is not there."""
        return self._rows.retired

    @property
    def closed_rows(self) -> int:
        """Rows that were never used, and are not leased before they are pinned."""
        return self._rows.closed

    @property
    def clean_rows(self) -> int:
        """Rows of chunks that were marked clean."""
        return len(self._chunks.clean)

    @property
    def declined(self) -> int:
        """Chunks that were offered and not stored, since the policy found what would have left worth more."""
        return self._chunks.declined

    @property
    def misuse(self) -> int:
        """Completions and abandonments of rows that were not leased that way; all of them were ignored."""
        return self._rows.misuse

    @property
    def chunks(self) -> int:
        """Chunks that have a row."""
        return len(self._row_of)

    def figures(self) -> dict[str, int]:
        """Return all of these numbers by name, in one call, since it is made at the end of each step."""
        rows, chunks, kept = self._rows, self._chunks, self._all_kept
        return {
            "rows": rows.num_rows,
            "free_rows": rows.free,
            "evictable_rows": chunks.evictable,
            "pending_rows": rows.pending,
            "pinned_rows": rows.pinned,
            "protected_rows": len(self._unread.keys),
            "quarantined_rows": rows.quarantined,
            "retired_rows": rows.retired,
            "closed_rows": rows.closed,
            "clean_rows": len(chunks.clean),
            "kept_rows": sum(hints.held for hints in kept),
            "kept_over_share": sum(hints.over_share for hints in kept),
            "kept_given_up": sum(hints.given_up for hints in kept),
            "misuse": rows.misuse,
            "pool": int(self._pool),
        }

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Return whether this chunk is a MISS, HIT or HIT_PENDING. No side effect: a lookup is not a use."""
        return self.find([key])[0]

    def find(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Do ``lookup`` for each key."""
        miss, pending, hit = LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT
        if not self._rows.pending:
            row_of = self._row_of
            return [hit if key in row_of else miss for key in keys]
        state = self._rows.state
        return [miss if row is None else pending if state[row] < 0 else hit for row in map(self._row_of.get, keys)]

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether none of these chunks is here."""
        return self._row_of.keys().isdisjoint(keys)

    def absent(self, keys: Sequence[OffloadKey], first: int = 0) -> Sequence[int]:
        """Return the places of those of these keys that are not here; ``first`` is the place of the first key."""
        if self._row_of.keys().isdisjoint(keys):
            return range(first, first + len(keys))
        return [place for place, row in enumerate(map(self._row_of.get, keys), first) if row is None]

    def present(self, keys: Sequence[OffloadKey], besides: Collection[OffloadKey] = ()) -> list[OffloadKey]:
        """Return those of these keys that are here, and those that are in ``besides``."""
        row_of = self._row_of
        return [key for key in keys if key in row_of or key in besides]

    def not_ready(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of these chunks are not readable."""
        rows = [row for row in map(self._row_of.get, keys) if row is not None]
        return len(keys) - len(rows) + self._rows.count_pending(rows)

    def resident_run(self, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Return how many of the leading keys are here, up to the first MISS, and how many of those are pending."""
        if not keys or keys[0] not in self._row_of:
            return 0, 0
        rows: list[int] = []
        step = 64  # growing: neither a short run of a long prefix nor a long one costs much more than its length
        while len(rows) < len(keys):
            more = list(map(self._row_of.get, keys[len(rows) : len(rows) + step]))
            if None in more:
                rows += more[: more.index(None)]  # type: ignore[arg-type]  # none of these is None
                break
            rows += more  # type: ignore[arg-type]
            step *= 8
        return len(rows), self._rows.count_pending(rows)

    def ready_run(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys are readable."""
        state = self._rows.state
        for number, row in enumerate(map(self._row_of.get, keys)):
            if row is None or state[row] < 0:
                return number
        return len(keys)

    def last_pending(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the last of these chunks that is not readable yet; nothing if none is here and is not."""
        row_of, state = self._row_of, self._rows.state
        return next(([key] for key in reversed(keys) if (row := row_of.get(key)) is not None and state[row] < 0), [])

    def to_offer(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of these chunks that this engine is to offer to tiers: readable ones in rows of its own."""
        row_of, rows = self._row_of, self._rows
        return [key for key in keys if (row := row_of.get(key)) is not None and rows.is_own(row) and rows.is_ready(row)]

    # The engine's leases

    def prepare_store(self, keys: Sequence[OffloadKey], request_id: str) -> Allocation | None:
        """Lease rows for those of these keys that are not here, or return None and change nothing.

        All of them, or the first ones that the eviction policy says are worth what has to leave for them.

        The keys are in the order of the request's prefix. Those that are here, ready or pending, are used but not
        leased again, and are never evicted for the others.
        """
        return self._allocate(keys, request_id, None, 0)

    def complete_store(self, rows: Sequence[int], success: bool, *, readers: int = 0) -> list[OffloadKey]:
        """End a GPU store, or its quarantine; return the keys that became readable. Without success all are gone.

        ``readers``: how many cascades read each of these chunks at once, as if by as many ``prepare_read``.
        """
        self.changes += 1
        readable, lost = self._rows.complete_write(rows, success, (), readers)
        self._chunks.forget(lost)
        self._note(readable, removed=False)
        if not readers:
            self._chunks.unlock(readable)
        self._leave()
        return readable

    def prepare_load(self, keys: Sequence[OffloadKey], request_id: str) -> list[int] | None:
        """Lease the rows of these chunks, in order, to one reader; None, and no change, if one is not ready."""
        found = self._chunks.pin(keys)
        if found is None:
            return None
        rows, unpinned = found
        self._unread.end(keys)
        # A key named twice was pinned by its first mention only.
        self._policy.access(keys if len(unpinned) == len(keys) else list(dict.fromkeys(keys)), request_id)
        return rows

    def complete_load(self, rows: Sequence[int]) -> None:
        """End one lease to a reader of each of these rows."""
        self._chunks.unpin(rows)
        self._leave()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks as used now; the first of them is evicted last. Unknown keys are ignored."""
        self._policy.access([key for key in dict.fromkeys(keys) if key in self._row_of], "")

    def hint(self, request_id: str, hints: RequestHints) -> None:
        """Pass on to the eviction policy what a client says of a request."""
        self._policy.hint(request_id, hints)

    def keep(self, keys: Sequence[OffloadKey], seconds: float, *, high: bool = False) -> None:
        """Let these chunks, resident or not, leave later than others for so long; never a lock.

        Head first: of more chunks than may be kept, the first ones are. ``high``: later than others that are kept.
        """
        self._take_hints()
        self._chunks.keep(list(dict.fromkeys(keys)), self._clock() + seconds, high=high)

    def _take_hints(self) -> None:
        if self._chunks.hints is None:  # the first ones: without any they cost nothing
            hinted = HintedPolicy(self._policy, self._kept, self._chunks.evictable)
            self._policy = self._chunks.policy = self._chunks.hints = hinted

    def brings_low(self, request_id: str) -> None:
        """Let chunks that this request will bring, and that no other request uses, leave before others."""
        self._take_hints()
        for kept in self._all_kept:  # whose request it is shows with its first use
            kept.brings_low(request_id)

    def on_request_finished(self, request_id: str) -> None:
        """Settle the recency of all chunks that the request has used."""
        self._policy.request_finished(request_id)

    # The tiers' leases

    def prepare_read(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """Lease the rows of these chunks to one cascade; None, and no change, if one is not ready."""
        # A cascade is not a use: it must neither refresh the recency nor end a promotion's protection.
        found = self._chunks.pin(keys)
        return None if found is None else found[0]

    def complete_read(self, rows: Sequence[int]) -> None:
        """End one cascade's lease of each of these rows."""
        self._chunks.unpin(rows)
        self._leave()

    def prepare_write(
        self,
        keys: Sequence[OffloadKey],
        request_id: str,
        *,
        reserve_rows: int,
        max_rows: int | None = None,
        least: int = 1,
        used: int = 0,
    ) -> Allocation | None:
        """Lease rows for promotions of those of these keys that are not here, as many of the first ones as possible.

        At most ``max_rows``, and so that ``reserve_rows`` rows stay free or evictable; None, and no change, if that
        leaves fewer than ``least``. Keys that are here are treated as in ``prepare_store``: give the whole run that was
        found, so that its ready chunks are not evicted for the others. ``used``: the length of the prefix that was
        passed for this request before; its recency is not updated again, which saves time.
        """
        most = len(keys) if max_rows is None else max_rows
        return self._allocate(keys, request_id, most, reserve_rows, least, used)

    def complete_write(
        self,
        rows: Sequence[int],
        success: bool,
        landed: Collection[OffloadKey] | None = None,
        *,
        protects: bool = True,
    ) -> list[OffloadKey]:
        """End a promotion, or its quarantine; return the keys that became readable.

        Of a promotion without success the keys in ``landed`` did become readable; exactly the others are gone.
        ``protects``: they are protected until their first read, for a while.
        """
        self.changes += 1
        readable, lost = self._rows.complete_write(rows, success, landed or ())
        self._chunks.forget(lost)
        self._note(readable, removed=False)
        if readable:
            self._chunks.unlock_idle(self._unread.begin(readable, self._clock()) if protects else readable)
        self._leave()
        return readable

    def abandon(self, rows: Sequence[int]) -> None:
        """Give up writes that their writer may still be about: keys gone, rows in quarantine until completed."""
        self.changes += 1
        self._chunks.forget(self._rows.abandon(rows))

    # The rest

    def poll(self) -> None:
        """Take note of what other engines have done. Once a step."""

    def release_expired(self, now: float) -> None:
        """End the protection of promotions that have waited too long to be read, and hints whose time is over.

        ``now`` by the tier's clock.
        """
        if (hints := self._chunks.hints) is not None:
            hints.expire(now)
        if expired := self._unread.expire(now):
            self._chunks.unlock_idle(expired)

    def store_everything(self) -> None:
        """Never ask the policy what is worth storing: a tier below gets all chunks, by way of the primary."""
        self._chunks.may_decline = False

    def forecast_reuse(
        self,
        seen: Collection[OffloadKey],
        around: Callable[[EvictionPolicy, int, Iterable[OffloadKey]], EvictionPolicy],
    ) -> None:
        """Learn from now on when chunks are used again, whatever the eviction policy is, for ``expected_reuse``.

        ``seen``: chunks that were looked at, which had better leave before others. It changes with time. ``around``:
        returns a policy that evicts as the given one does and learns, for so many rows and these residents.
        """
        self._policy.evict_first(seen)
        if not self._policy.forecasts_reuse():
            self._policy = self._chunks.policy = around(self._policy, self.num_rows, self._row_of)

    def evict_first(self, seen: Collection[OffloadKey] | None) -> None:
        """Have chunks that are in ``seen`` leave before others, from now on; None: no such chunks any more."""
        self._policy.evict_first(seen)

    def expected_reuse(self, keys: Sequence[OffloadKey]) -> Sequence[float]:
        """Return the probability of each of these chunks, which are here, to be used again from now on."""
        return self._policy.expected_reuse(keys)

    def shared_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys, which are here, several sessions have used."""
        return self._policy.shared_prefix(keys)

    def mark_clean(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these chunks are in a secondary tier too. Unknown keys are ignored."""
        self._chunks.clean.update(filter(self._row_of.__contains__, keys))

    def coldest(
        self, count: int, accept: Callable[[OffloadKey], bool] | None = None, *, clean: bool = False
    ) -> list[OffloadKey]:
        """Return up to ``count`` evictable chunks, about in the order in which they would leave. Changes nothing.

        Only those that ``accept`` says True to, and none that is marked clean unless ``clean`` is set.
        """
        keys = self._policy.coldest()
        if not clean:
            keys = filterfalse(self._chunks.clean.__contains__, keys)
        return list(islice(filter(accept, keys) if accept else keys, count))

    def leaving(self, count: int, seen: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return, of the ``count`` chunks that leave next, those not in ``seen``, or fewer. Changes nothing."""
        return self._policy.leaving(count, seen)

    def dirty(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks among ``keys`` that are not marked clean."""
        clean = self._chunks.clean
        return [key for key in keys if key not in clean]

    def want_rows(self, fresh: int) -> None:
        """Take note that so many fresh rows more are wanted, so that memory is made ready for them."""
        self._rows.want(fresh)

    def open_rows(self, rows: int) -> None:
        """From now on, lease only the first ``rows`` rows, and others that were leased before.

        The others are not pinned yet: copies to and from them would hold a GPU's driver, and every launch with it.
        """
        self._rows.open(rows)
        self.changes += 1

    def retire_rows(self, end: int) -> None:
        """Never lease this row or a higher one again: its memory is not there. Its chunk leaves as soon as it is idle.

        A lease of such a row is completed as usual.
        """
        self._rows.retire(end)
        self._leave()

    def reset_cache(self) -> None:
        """Forget all chunks at once. Leased rows become free when their lease has been completed."""
        self.changes += 1
        self._chunks.forget_all()

    def residents(self) -> list[OffloadKey]:
        """Return the keys of all chunks that have a row."""
        return list(self._row_of)

    def take_left(self) -> list[OffloadKey]:
        """Return chunks that another engine has left and this one is to offer to tiers; more at the next call."""
        return []

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget those of these chunks that are not in use; return the others that are here: ask again for those."""
        gone = self._chunks.drop_idle(keys)
        if gone:
            self.changes += 1
            self._note(gone, removed=True)
        return [key for key in keys if key in self._row_of]

    def take_events(self) -> list[OffloadEvent]:
        """Return what became resident and what was evicted since the last call, in order. A reset is no event."""
        events, self.events = self.events, []
        return events

    def _allocate(
        self,
        keys: Sequence[OffloadKey],
        request_id: str,
        limit: int | None,
        reserve: int,
        least: int = 1,
        used: int = 0,
    ) -> Allocation | None:
        allocation = self._chunks.allocate(keys, request_id, limit, reserve, self._clock, least, used)
        if allocation is not None:
            self.changes += 1
            self._note(allocation.evicted, removed=True)
        return allocation

    def _leave(self) -> None:
        if self._rows.leaving and (gone := self._chunks.leave()):
            self.changes += 1
            self._note(gone, removed=True)

    def _note(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self.records_events:
            self.events.append(OffloadEvent(keys, removed))
