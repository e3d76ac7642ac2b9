"""The primary tier against a simple model: any mix of leases, failures, evictions and resets keeps the invariants.

The model has rows and chunks one by one, and nothing of recency: which chunk is evicted is the policy's affair, but
never which chunk may be.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvtiers.api import LookupResult
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers_policies.forecast import WithForecast

KEYS = [bytes([65 + number]) * 5 for number in range(16)]
SECONDS = 5.0


@dataclass(eq=False)
class Row:
    """A row in use: a chunk's, or in quarantine (no key)."""

    key: bytes | None
    writing: bool
    readers: int = 0

    @property
    def leased(self):
        return self.writing or self.readers > 0


@dataclass(eq=False)
class Lease:
    """What a writer or a reader holds: rows, and how it may end."""

    kind: str
    rows: list[int]
    keys: list[bytes]
    taken: list[Row] = field(default_factory=list)


class PrimaryAgainstModel(RuleBasedStateMachine):
    leases = Bundle("leases")
    some_keys = st.lists(st.sampled_from(KEYS), max_size=7)
    requests = st.sampled_from(["a", "b", "c", ""])

    @initialize(
        num_rows=st.integers(0, 9),
        policy=st.sampled_from(["lru", "arc", "turn-hazard"]),
        share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    )
    def start(self, num_rows, policy, share, kept=0.0):
        self.may_decline = policy == "turn-hazard"
        self.now = 0.0
        self.tier = CPUPrimaryTier(
            num_rows,
            0,
            memoryview(b""),
            policy=policy,
            protected_share=share,
            protect_seconds=SECONDS,
            kept_share=kept,
            clock=lambda: self.now,
        )
        self.num_rows = self.end = num_rows
        self.opened = num_rows
        self.limit = max(1, int(share * num_rows)) if share else 0
        self.rows = {}
        self.protected = {}
        self.clean = set()
        self.announced = set()
        self.reported = set()
        self.named = {}  # what each running request has named in a lease

    # The model

    def row_of(self, key):
        return next((row for row in self.rows.values() if row.key == key), None)

    def evictable(self):
        return {
            row.key
            for row in self.rows.values()
            if row.key is not None and not row.leased and row.key not in self.protected
        }

    def free(self):
        return sum(number not in self.rows for number in range(self.end)) - self.closed()

    def closed(self):
        """Rows that were never used, and may not be yet."""
        return max(0, self.end - max(self.opened, self.tier._rows._next_fresh))

    def leave(self):
        """Idle chunks of retired rows are gone, protected or not."""
        for number, row in list(self.rows.items()):
            if number >= self.end and row.key is not None and not row.leased:
                del self.rows[number]
                self.protected.pop(row.key, None)
                self.clean.discard(row.key)
                self.announced.discard(row.key)

    def drop(self, row):
        del self.rows[next(number for number, other in self.rows.items() if other is row)]

    def release(self, row):
        """The writer or a reader of this row has ended."""
        if row.key is None and not row.leased:
            self.drop(row)

    def take_rows(self, allocation, keys, wanted, may_leave):
        """Check what was allocated and take it over."""
        assert allocation.keys == wanted
        assert len(allocation.rows) == len(set(allocation.rows)) == len(wanted)
        assert len(allocation.evicted) == max(0, len(wanted) - self.free())
        assert len(set(allocation.evicted)) == len(allocation.evicted)
        assert set(allocation.evicted) <= may_leave - set(keys)
        for key in allocation.evicted:
            self.drop(self.row_of(key))
            self.clean.discard(key)
            self.announced.discard(key)
        assert not set(allocation.rows) & set(self.rows), "a row in two hands"
        assert all(0 <= row < self.end for row in allocation.rows)
        self.rows.update((row, Row(key, writing=True)) for row, key in zip(allocation.rows, wanted, strict=True))
        return [self.rows[row] for row in allocation.rows]

    def end_write(self, lease, landed):
        """End the writes of a lease; return the keys that must have become readable."""
        readable = []
        for row in lease.taken:
            assert row.writing
            row.writing = False
            if row.key is None:
                self.release(row)
            elif row.key in landed:
                readable.append(row.key)
            else:
                self.drop(row)
        self.announced.update(readable)
        return readable

    def name(self, keys, request_id):
        if request_id:
            self.named.setdefault(request_id, set()).update(keys)

    # Writers

    @rule(target=leases, keys=some_keys, request_id=requests)
    def prepare_store(self, keys, request_id):
        missing = [key for key in dict.fromkeys(keys) if self.row_of(key) is None]
        may_leave = self.evictable()
        room = self.free() + len(may_leave - set(keys))
        may_be_declined = self.may_decline and len(missing) > self.free()
        allocation = self.tier.prepare_store(keys, request_id)
        if may_be_declined and allocation is not None:
            worth = len(allocation.keys)  # the head of what is offered, up to the first chunk that is not worth it
            if worth < len(missing):
                keys = keys[: keys.index(missing[worth])]
                missing = missing[:worth]
                room = self.free() + len(may_leave - set(keys))
        if missing and len(missing) > room:
            assert allocation is None
            return multiple()
        taken = self.take_rows(allocation, keys, missing, may_leave)
        self.name(keys, request_id)
        return Lease("store", allocation.rows, missing, taken)

    @rule(
        target=leases,
        keys=some_keys,
        request_id=requests,
        reserve=st.integers(0, 5),
        most=st.one_of(st.none(), st.integers(0, 4)),
        again=st.integers(0, 5),
    )
    def prepare_write(self, keys, request_id, reserve, most, again):
        known = [key for key in KEYS if key in self.named.get(request_id, ()) and self.row_of(key) is not None][:again]
        used, keys = len(known), known + keys
        missing = [key for key in dict.fromkeys(keys) if self.row_of(key) is None]
        may_leave = self.evictable()
        free = self.free()
        room = min(free + len(may_leave) - reserve, free + len(may_leave - set(keys)))
        room = room if most is None else min(room, most)
        allocation = self.tier.prepare_write(keys, request_id, reserve_rows=reserve, max_rows=most, used=used)
        if missing and room <= 0:
            assert allocation is None
            return multiple()
        wanted = missing[: max(room, 0)]
        taken = self.take_rows(allocation, keys, wanted, may_leave)
        self.name(keys[: keys.index(missing[len(wanted)])] if len(wanted) < len(missing) else keys, request_id)
        return Lease("promotion", allocation.rows, allocation.keys, taken)

    @rule(lease=leases, part=st.integers(0, 7))
    def abandon(self, lease, part):
        if lease.kind not in {"store", "promotion"}:
            return
        self.tier.abandon(lease.rows[:part])
        for row in lease.taken[:part]:
            row.key = None

    @rule(target=leases, lease=consumes(leases), ok=st.booleans(), readers=st.integers(0, 2), landed=some_keys)
    def complete(self, lease, ok, readers, landed):
        """End a lease, with any outcome that it may have."""
        if lease.kind == "read":
            self.tier.complete_load(lease.rows) if ok else self.tier.complete_read(lease.rows)
            for row in lease.taken:
                row.readers -= 1
                assert row.readers >= 0
                self.release(row)
            self.leave()
            return multiple()
        landed = set(lease.keys) if ok else set(landed)
        if lease.kind == "promotion":
            readable = self.end_write(lease, landed)
            assert self.tier.complete_write(lease.rows, ok, landed) == readable
            self.protected.update(dict.fromkeys(readable, self.now))
            for key in list(self.protected)[: max(0, len(self.protected) - self.limit)]:
                del self.protected[key]
            self.leave()
            return multiple()
        readable = self.end_write(lease, landed if ok else set())
        assert self.tier.complete_store(lease.rows, ok, readers=readers) == readable
        leases = [self.reading(readable) for _ in range(readers)]
        self.leave()
        return multiple(*leases)

    # Readers

    def reading(self, keys):
        taken = [self.row_of(key) for key in keys]
        for row in taken:
            row.readers += 1
        return Lease("read", [number for row in taken for number, own in self.rows.items() if own is row], keys, taken)

    @rule(target=leases, keys=some_keys, request_id=st.one_of(st.none(), requests))
    def prepare_read_or_load(self, keys, request_id):
        cascade = request_id is None
        rows = self.tier.prepare_read(keys) if cascade else self.tier.prepare_load(keys, request_id)
        found = [self.row_of(key) for key in keys]
        if any(row is None or row.writing for row in found):
            assert rows is None
            return multiple()
        lease = self.reading(keys)
        assert rows == lease.rows
        if not cascade:
            self.name(keys, request_id)
            for key in keys:
                self.protected.pop(key, None)
        return lease

    # Everything else

    @rule(keys=some_keys)
    def touch(self, keys):
        self.tier.touch(keys)

    @rule(request_id=requests)
    def finish(self, request_id):
        self.tier.on_request_finished(request_id)
        self.named.pop(request_id, None)

    @rule(seconds=st.sampled_from([1.0, 3.0, SECONDS]))
    def time_passes(self, seconds):
        self.now += seconds
        self.tier.release_expired(self.now)
        self.protected = {key: since for key, since in self.protected.items() if self.now - since < SECONDS}

    @rule(keys=some_keys)
    def mark_clean(self, keys):
        self.tier.mark_clean(keys)
        self.clean.update(key for key in keys if self.row_of(key) is not None)

    @rule(rows=st.lists(st.integers(-2, 11), max_size=4))
    def complete_what_was_not_leased(self, rows):
        leased = {number for number, row in self.rows.items() if row.leased}
        rows = [row for row in rows if row not in leased]
        before = self.tier.misuse
        self.tier.complete_load(rows)
        self.tier.complete_store(rows, success=False)
        self.tier.complete_write(rows, success=True)
        self.tier.abandon(rows)
        assert self.tier.misuse == before + 4 * len(rows)

    @precondition(lambda self: self.end == self.num_rows)  # else most of a run would be about an empty primary
    @rule(end=st.integers(0, 9))
    def retire(self, end):
        self.tier.retire_rows(end)
        self.end = min(self.end, end)
        self.leave()

    @rule(rows=st.integers(0, 9))
    def open_rows(self, rows):
        """Memory becomes ready; or less of it is, where a rank has come back that has pinned little so far."""
        self.opened = min(rows, self.num_rows)
        self.tier.open_rows(self.opened)

    @rule()
    def reset(self):
        self.tier.take_events()
        self.tier.reset_cache()
        self.rows = {number: row for number, row in self.rows.items() if row.leased}
        for row in self.rows.values():
            row.key = None
        self.protected.clear()
        self.clean.clear()
        self.announced.clear()
        self.named.clear()
        assert self.tier.take_events() == []
        self.reported = set()

    # What must always hold

    @invariant()
    def every_chunk_stands_where_the_model_has_it(self):
        found = [self.row_of(key) for key in KEYS]
        expected = [
            LookupResult.MISS if row is None else LookupResult.HIT_PENDING if row.writing else LookupResult.HIT
            for row in found
        ]
        assert self.tier.find(KEYS) == expected == [self.tier.lookup(key) for key in KEYS]
        run = next((index for index, row in enumerate(found) if row is None), len(KEYS))
        assert self.tier.resident_run(KEYS) == (run, sum(row.writing for row in found[:run]))

    @invariant()
    def every_row_is_accounted_for(self):
        tier, rows = self.tier, list(self.rows.values())
        assert tier.free_rows == self.free()
        assert tier.retired_rows == sum(number not in self.rows for number in range(self.end, self.num_rows))
        assert tier.pending_rows == sum(row.writing and row.key is not None for row in rows)
        assert tier.pinned_rows == sum(row.readers > 0 and row.key is not None for row in rows)
        assert tier.quarantined_rows == sum(row.key is None for row in rows)
        assert tier.protected_rows == len(self.protected) <= self.limit
        assert tier.clean_rows == len(self.clean)
        assert tier.figures() == {
            "rows": self.num_rows,
            "free_rows": tier.free_rows,
            "evictable_rows": tier.evictable,
            "pending_rows": tier.pending_rows,
            "pinned_rows": tier.pinned_rows,
            "protected_rows": tier.protected_rows,
            "quarantined_rows": tier.quarantined_rows,
            "retired_rows": tier.retired_rows,
            "closed_rows": self.closed(),
            "clean_rows": tier.clean_rows,
            **self.of_hints(),
            "misuse": tier.misuse,
            "pool": 0,
        }

    def of_hints(self):
        return dict.fromkeys(("kept_rows", "kept_over_share", "kept_given_up"), 0)

    @invariant()
    def just_the_evictable_chunks_could_leave(self):
        evictable = self.evictable()
        coldest = self.tier.coldest(99, clean=True)
        assert self.tier.evictable == len(coldest) == len(evictable)
        assert set(coldest) == evictable
        assert set(self.tier.coldest(99)) == evictable - self.clean

    @invariant()
    def events_say_what_is_readable(self):
        for event in self.tier.take_events():
            if event.removed:
                assert self.reported.issuperset(event.keys)
                self.reported.difference_update(event.keys)
            else:
                assert self.reported.isdisjoint(event.keys)
                self.reported.update(event.keys)
        assert self.reported == self.announced


class PrimaryWithHints(PrimaryAgainstModel):
    """With any hints: the model of what may leave, and of which leases there is room for, is the same without them."""

    @initialize(
        num_rows=st.integers(0, 9),
        policy=st.sampled_from(["lru", "arc", "turn-hazard"]),
        share=st.sampled_from([0.0, 0.5]),
        kept=st.sampled_from([0.0, 0.3, 1.0]),
        forecasts=st.booleans(),
    )
    def start(self, num_rows, policy, share, kept, forecasts):
        super().start(num_rows, policy, share, kept)
        if forecasts:
            self.tier.forecast_reuse((), WithForecast)
        self.most_kept = int(kept * self.num_rows)
        self.until = {}  # the latest second at which a hint for the key can end

    @rule(
        keys=PrimaryAgainstModel.some_keys,
        seconds=st.sampled_from([0.5, 2.0, 1000.0]),
        high=st.booleans(),
    )
    def keep(self, keys, seconds, high):
        self.tier.keep(keys, seconds, high=high)
        for key in keys:
            self.until[key] = max(self.until.get(key, 0.0), self.now + seconds)

    def of_hints(self):
        kept = self.tier._kept
        return {"kept_rows": kept.held, "kept_over_share": kept.over_share, "kept_given_up": kept.given_up}

    @rule(request_id=PrimaryAgainstModel.requests)
    def low(self, request_id):
        if request_id:
            self.tier.brings_low(request_id)

    @invariant()
    def hints_are_bounded_and_end(self):
        kept = self.tier._kept
        known = [*kept._until[0], *kept._until[1]]
        held = [*kept._held[0], *kept._held[1]]
        assert len(known) == len(set(known)) <= self.most_kept
        assert set(held) <= set(known) & self.evictable()
        assert kept.held == len(held)
        assert sorted(kept._due) == sorted(kept._seconds)
        assert {key: second for second, keys in kept._due.items() for key in keys} == {
            **kept._until[0],
            **kept._until[1],
        }
        assert all(until < self.until[key] + 1 for each in kept._until for key, until in each.items())
        low = [key for keys in kept._first_out.values() for key in keys]
        assert set(low) <= kept._low.keys() & self.evictable() - set(held)
        assert kept._low.keys() <= {row.key for row in self.rows.values()}
        if not kept.is_active:
            assert not {*known, *kept._low, *kept._low_requests}

    @rule()
    def all_hints_end(self):
        self.time_passes(2000.0)
        assert self.tier.figures()["kept_rows"] == 0
        assert not self.tier._kept._until[0]


TestPrimaryWithHints = PrimaryWithHints.TestCase
TestPrimaryWithHints.settings = settings(deadline=None, max_examples=40, stateful_step_count=50)
TestPrimaryAgainstModel = PrimaryAgainstModel.TestCase
TestPrimaryAgainstModel.settings = settings(deadline=None, stateful_step_count=50)
