"""The transfer of values between rows and a store: sealed before a write, checked after a read, by borrowed views.

Runs on the pool's threads, in the tier's host or in the engine's process. Whatever a store does wrong becomes the
status of a value here: an exception, other bytes than were stored, a buffer that was kept.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar, cast

from kvtiers._failures import plugin_boundary
from kvtiers.api import (
    ChunkStore,
    Compression,
    OffloadKey,
    RateLimit,
    StoreContractError,
    TierConfig,
    group_of,
    tenant_of,
)
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing, SealingKey
from kvtiers.encryption.seal import decrypt_value, encrypt_value
from kvtiers.host.bounce_buffers import BounceBufferViews, beside_rows
from kvtiers.host.claimed_views import ClaimedViews
from kvtiers.host.first_use_keys import FirstUseKeys
from kvtiers.host.messages import Status
from kvtiers.host.presence import Presence
from kvtiers.host.quotas import TenantQuotas
from kvtiers.host.store_calls import Attempts, KnownNames, RateLimiter, StoreCalls, StoreLog
from kvtiers.host.value_run import Moved, ValueRun
from kvtiers.layout.borrowed_views import Loan, ValueViews
from kvtiers.layout.seal import SealVerdict, check_parts, check_value, seal_parts, seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers.region.claims import ClaimRevoked

__all__ = ["MoverOptions", "ValueMover", "mover_options"]

_KEPT = (
    "kept the buffer that it was given, or something made of it (a slice, an array, an exception whose traceback has "
    "it), after its return; the row behind it is soon another value's. Copy what is kept: bytes(...)"
)
_CALL_OVER = "the call is over that its memory was given for"
_NO_KEY = "their tenant's key cannot be read; the log says why"
_BATCH_VALUES = 32
_BATCH_BYTES = 16 * 2**20
_DELETED_PER_CALL = 256
_MOST_PARTS = 63  # of a payload: the rest of its value is another one
_TURN_BYTES = 3 * 2**20  # hashed or moved in some tenths of a millisecond
_NOT_TAKEN = frozenset({Status.DROPPED, Status.REFUSED})
_Answer = TypeVar("_Answer")


def _go_on() -> None:
    """Do not give way."""


@dataclass(frozen=True, slots=True)
class MoverOptions:
    """How the values of a store are moved. ``sizes[g]``: (payload bytes, value bytes) of KV group g.

    ``give_way``: called by each thread after so many bytes, to yield the processor to a thread that waits. Without that
    it would wait for the kernel's next clock tick: 4 ms at 250 ticks a second, ten times what a value takes.
    """

    sizes: Sequence[tuple[int, int]]
    retries: int = 2
    read_only: bool = False
    exists_ttl: float = 60.0
    rate_limit: RateLimit = field(default_factory=RateLimit)
    give_way: Callable[[], object] = _go_on
    compression: Compression = "none"
    quotas: Mapping[str, int] = field(default_factory=dict)


def mover_options(
    config: TierConfig, sizes: Sequence[tuple[int, int]], give_way: Callable[[], object] = _go_on
) -> MoverOptions:
    """Return the mover's options from a tier's config."""
    return MoverOptions(
        sizes,
        config.retries,
        config.read_only,
        config.exists_ttl,
        config.rate_limit,
        give_way,
        config.compression,
        {} if config.read_only else config.quotas,
    )


def _in_clear(_key: OffloadKey) -> None:
    """Return what encrypts a value with this key: nothing."""


class _Value(NamedTuple):
    """One value of a run: its place in it, its name, where it lies, its lengths, and what encrypts it, if any does."""

    place: int
    name: str
    row: int
    payload: int
    nbytes: int
    key: SealingKey | None


class _Turn(threading.local):
    """The bytes that a thread has hashed and moved since it last gave way."""

    nbytes = 0


class ValueMover:
    """Moves values between rows and one store. Used by several threads at once.

    ``epoch``: the namespace's, in this store. ``label``: the tier's name in log lines. ``claimed``: views of values in
    a client's caller's memory; row numbers from its table's first one on are theirs. ``keys``: values are encrypted
    into bounce buffers, from which they are written, and decrypted there; their names are keyed. A tenant whose own
    keys are missing is without this store: its values are absent, and are not written. For quotas: ``namespace``, that
    of the names, and ``lists``, the store that lists them, where ``store`` is a wrapper of it.
    """

    def __init__(
        self,
        store: ChunkStore,
        views: ValueViews,
        options: MoverOptions,
        stop: threading.Event,
        epoch: str = "",
        label: str = "",
        claimed: ClaimedViews | None = None,
        keys: KeyRing | None = None,
        first_use: FirstUseKeys | None = None,
        namespace: str = "",
        lists: ChunkStore | None = None,
    ) -> None:
        self._store = store
        self._claimed = claimed
        self._keys = keys
        label = label or type(store).__name__
        self._first_use = first_use
        self._epoch = epoch
        self._views = views
        self._options = options
        self._turn = _Turn()
        self._limiter = RateLimiter(options.rate_limit, stop)
        self._attempts = Attempts(store.transient_errors, options.retries, self._limiter, stop)
        self._known = KnownNames(options.exists_ttl)
        self._store_log = StoreLog(label)
        self._presence = Presence(store, self._attempts, self._known, self._store_log)
        self._calls = StoreCalls(store)
        self.quotas: TenantQuotas | None = None
        """Where tenants have some: for a thread of its own."""
        if options.quotas:
            self.quotas = TenantQuotas(lists or store, options.quotas, namespace, self._known.forget, label)
        largest = max(value for _, value in options.sizes)
        # An epoch is one store's own and enters the seal: in the row it would collide with the seal that another tier's
        # host is writing, and one of the two would store the other's.
        self._store_views = beside_rows(views, largest) if epoch or keys is not None else views
        self._load_views = views if keys is None else self._store_views
        self._takes_parts = self._calls.takes_parts and keys is None
        takes_parts = self._takes_parts and isinstance(self._store_views, BounceBufferViews)
        self._part_views = cast("BounceBufferViews", self._store_views) if takes_parts else None
        self.batch_values = max(1, min(_BATCH_VALUES, _BATCH_BYTES // largest)) if self._calls.in_batches else 1

    def set_rate_limit(self, limit: RateLimit) -> None:
        """Make calls under another rate limit from now on."""
        self._limiter.set(limit)

    def log_hung(self, seconds: float) -> None:
        """Log which calls of the store have not returned for so long, each once. From any thread."""
        for ident in self._attempts.hung(seconds):
            self._store_log.log_hung(seconds, ident)

    def load(self, run: ValueRun) -> Moved:
        """Fill the rows; a value that is absent, foreign or damaged is not DONE, whatever its row holds now."""
        return self._move_named(run, Status.MISSING, self._load)

    def store(self, run: ValueRun) -> Moved:
        """Seal the rows and write those values that the store does not have yet."""
        return self._move_named(run, Status.REFUSED, self._store_values)

    def delete(self, run: ValueRun) -> Moved:
        """Remove the values of these keys; DONE also where there was none."""
        return self._move_named(run, Status.REFUSED, self._delete_values)

    def probe(
        self, names: StorageNames, keys: Sequence[OffloadKey], *, is_prefix: bool, give_up_at: float
    ) -> list[bool]:
        """Ask which keys the store has. Of a prefix, which is one tenant's, answers may end after the first absence."""
        all_names = self._all_names(names, self._ring_of(keys[:1] if is_prefix else keys))
        return self._presence.probe(all_names, keys, give_up_at, is_prefix=is_prefix)

    def _move_named(
        self, run: ValueRun, without: Status, move: Callable[[ValueRun, Sequence[StorageNames]], Moved]
    ) -> Moved:
        """Move the values that have a name; those of tenants whose keys cannot be had get the status ``without``."""
        ring = self._ring_of(run.keys)
        all_names = self._all_names(run.names, ring)
        if ring is None or not ring.missing:
            return move(run, all_names)
        places = [place for place, key in enumerate(run.keys) if all_names[0].has_name(key)]
        if len(places) == len(run.keys):
            return move(run, all_names)
        moved = move(run.only(places), all_names).widened(places, len(run.keys), without)
        moved.error = moved.error or ("" if without is Status.MISSING else _NO_KEY)
        return moved

    def _load(self, run: ValueRun, all_names: Sequence[StorageNames]) -> Moved:
        moved = Moved.nothing(len(run.keys))
        indexes: Sequence[int] = range(len(run.keys))
        for names in all_names:
            indexes = [index for index in indexes if names.has_name(run.keys[index])]
            self._move_all(moved, replace(run, names=names), indexes, is_load=True)
            indexes = [index for index in indexes if moved.statuses[index] == Status.MISSING]
            if not indexes:
                break
        return moved

    def _store_values(self, run: ValueRun, all_names: Sequence[StorageNames]) -> Moved:
        moved = Moved.nothing(len(run.keys))
        run = replace(run, names=all_names[0])
        with plugin_boundary(exits=True) as store:
            present = self._present(run, moved)
        if store.error:
            moved.error = store.error
            return moved
        for index in present:
            moved.statuses[index] = Status.PRESENT
        wanted = [index for index, status in enumerate(moved.statuses) if status != Status.PRESENT]
        if self.quotas is not None:
            wanted = self._take_room(run, wanted, moved, self.quotas)
        try:
            self._remove_suspects(run, wanted)
            self._move_all(moved, run, wanted, is_load=False)
        finally:
            if self.quotas is not None:
                self._settle(run, wanted, moved, self.quotas)
        return moved

    def _take_room(self, run: ValueRun, wanted: Sequence[int], moved: Moved, quotas: TenantQuotas) -> list[int]:
        """Return the indexes of those values for which their tenants have room."""
        sizes, roomy = self._options.sizes, []
        for index in wanted:
            key = run.keys[index]
            if quotas.take(tenant_of(key), sizes[group_of(key)][1]):
                roomy.append(index)
            else:
                moved.statuses[index] = Status.NO_ROOM
        return roomy

    def _settle(self, run: ValueRun, wanted: Sequence[int], moved: Moved, quotas: TenantQuotas) -> None:
        sizes = self._options.sizes
        for index in wanted:
            key = run.keys[index]  # one whose write has failed may be there all the same
            may_be_there = moved.statuses[index] not in _NOT_TAKEN
            quotas.settle(tenant_of(key), sizes[group_of(key)][1], may_be_there=may_be_there)

    def _delete_values(self, run: ValueRun, all_names: Sequence[StorageNames]) -> Moved:
        moved = Moved.nothing(len(run.keys), "the tier is read-only" if self._options.read_only else "")
        keys = () if self._options.read_only else run.keys
        per_call = _DELETED_PER_CALL
        for start in range(0, len(keys), per_call):
            part = keys[start : start + per_call]
            some = [name for names in all_names for name in names.names([key for key in part if names.has_name(key)])]
            if time.monotonic() >= run.give_up_at or not run.wanted():
                moved.error = "no time left"
                break
            self._known.forget(some)  # also if it fails: it may have been removed all the same
            with self._store_log.watched("delete") as store:
                _, retries = self._attempts.call(partial(self._store.delete, some), give_up_at=run.give_up_at)
                moved.retries += retries
            if store.error:
                moved.error = store.error
                break
            moved.statuses[start : start + len(part)] = bytes([Status.DONE]) * len(part)
        return moved

    def _present(self, run: ValueRun, moved: Moved) -> list[int]:
        """Return the indexes of values that need no write."""
        names = run.names.names(run.keys)
        present, unknown = self._known.sort(names)
        if run.overwrites:
            present, unknown = ([i for i in some if not run.overwrites[i]] for some in (present, unknown))
        per_call = self._presence.names_per_call
        if per_call == 1:
            # A question costs a small value's write, and the engine's lookup, which missed, has asked before.
            return present
        for start in range(0, len(unknown), per_call):
            if not run.wanted():
                break
            some = unknown[start : start + per_call]
            answers, retries = self._presence.exist([names[i] for i in some], run.give_up_at)
            moved.retries += retries
            present += [i for i, there in zip(some, answers, strict=True) if there]
        return present

    def _remove_suspects(self, run: ValueRun, wanted: Sequence[int]) -> None:
        """Delete what is to be overwritten: a store that writes only what is not there would keep it for ever."""
        if not run.overwrites:
            return
        names = run.names.names([run.keys[i] for i in wanted if run.overwrites[i]])
        for start in range(0, len(names), _DELETED_PER_CALL):
            if time.monotonic() >= run.give_up_at or not run.wanted():
                return
            self._delete(names[start : start + _DELETED_PER_CALL])

    # -- moving

    def _ring_of(self, keys: Sequence[OffloadKey]) -> KeyRing | None:
        return self._keys if self._first_use is None else self._first_use.ring_of(keys)

    def _all_names(self, names: StorageNames, ring: KeyRing | None) -> Sequence[StorageNames]:
        """Return the names that values have in this store: first those that are written, then one that is read."""
        names = names.of_epoch(self._epoch)
        return [names] if ring is None else KeyedNames.of_ring(names, ring)

    def _move_all(self, moved: Moved, run: ValueRun, indexes: Sequence[int], *, is_load: bool) -> None:
        sizes, sealing = self._options.sizes, run.names.key_of if isinstance(run.names, KeyedNames) else _in_clear
        values = [
            _Value(i, name, run.rows[i], *sizes[group_of(run.keys[i])], sealing(run.keys[i]))
            for i, name in zip(indexes, run.names.names([run.keys[i] for i in indexes]), strict=True)
        ]
        for start in range(0, len(values), self.batch_values):
            if time.monotonic() >= run.give_up_at or not run.wanted():
                moved.error = moved.error or "no time left"
                break
            if not self._move(moved, run, values[start : start + self.batch_values], is_load=is_load):
                break
        self._known.learn([value.name for value in values if moved.statuses[value.place] == Status.DONE])

    def _move(self, moved: Moved, run: ValueRun, values: Sequence[_Value], *, is_load: bool) -> bool:
        """Move one batch; False ends the run: the store failed, or there is no time left."""
        if self._claimed is not None and values[0].row >= self._claimed.table.first:
            return self._move_claimed(moved, run, values, self._claimed, is_load=is_load)
        views = self._load_views if is_load else self._store_views
        in_parts = None if is_load else self._part_views
        is_copied = not is_load and in_parts is None and self._keys is None
        views.begin([value.row for value in values], filled=is_copied)
        try:
            if in_parts is not None:
                return self._store_in_parts(moved, run, values[0], in_parts)
            return self._move_begun(moved, run, values, views, is_load=is_load)
        finally:
            views.end(kept=bool(moved.kept))

    def _move_claimed(
        self, moved: Moved, run: ValueRun, values: Sequence[_Value], views: ClaimedViews, *, is_load: bool
    ) -> bool:
        """Move values that lie in a caller's memory, which may get it back at any time."""
        first = values[0]
        views.begin([value.row for value in values], filled=False)
        try:
            if is_load:
                in_place = self._calls.reads_parts and views.is_in_place(first.row, first.payload)
                if in_place and self._keys is None and views.has_parts(first.row, first.payload, _MOST_PARTS):
                    return self._load_in_place(moved, run, first, views)
            elif self._takes_parts and views.has_parts(first.row, first.payload, _MOST_PARTS):
                return self._store_in_parts(moved, run, first, views)
            elif self._keys is None:
                for value in values:
                    views.fill(value.row, value.payload)
            return self._move_begun(moved, run, values, views, is_load=is_load)
        except ClaimRevoked:
            moved.error = moved.error or _CALL_OVER
            return False
        finally:
            views.end(kept=bool(moved.kept))

    def _move_begun(
        self, moved: Moved, run: ValueRun, values: Sequence[_Value], views: ValueViews, *, is_load: bool
    ) -> bool:
        """Move one batch whose views have begun, by one call of the store; False ends the run."""
        if is_load and self._calls.in_pieces(values[0].nbytes):
            return self._load_in_pieces(moved, run, values[0], views)
        places, names, rows, payloads, sizes, keys = zip(*values, strict=True)
        if not is_load:
            for value, own in zip(values, views.own(rows, sizes), strict=True):
                self._seal(run.names, views, value, own)
                self._worked(value.payload)
        method = self._calls.method(is_load=is_load)
        loan = views.borrow(rows, sizes, readonly=not is_load)
        # The views are in no variable here: it would keep the exporter when the store has dropped it.
        found: list[bool] | None = None
        taken: list[Status] | None = None
        if is_load:
            found = self._call(moved, run, values, self._calls.read(names, [*loan.views]), method, is_load=True)
        else:
            taken = self._call(moved, run, values, self._calls.write(names, [*loan.views]), method, is_load=False)
        if not self._taken_back(moved, [loan], method):
            return False
        if found is not None:
            judged = zip(names, rows, views.own(rows, sizes), payloads, keys, found, strict=True)
            statuses = [
                self._judge(run, views, name, row, value, payload, key) if there else self._missing(name)
                for name, row, value, payload, key, there in judged
            ]
        elif taken is not None:
            statuses = self._written(moved, taken, max(sizes))
        else:
            return False
        for place, nbytes, status in zip(places, sizes, statuses, strict=True):
            moved.statuses[place] = status
            moved.nbytes += nbytes if status is Status.DONE else 0
        return True

    @staticmethod
    def _seal(names: StorageNames, views: ValueViews, value: _Value, own: memoryview) -> None:
        """Seal a value where a store's client will read it; one that is encrypted is written there by that."""
        if value.key is None:
            seal_value(own, value.payload, value.name, names.layout_id)
            return
        assert isinstance(views, BounceBufferViews), "else the row itself would be encrypted"
        payload, _ = views.parts(value.row, value.payload, value.nbytes)
        encrypt_value(payload, own, value.name, names.layout_id, value.key)
        if not views.is_given(value.row):  # its parts may have changed meanwhile, and would be sealed as they are
            raise ClaimRevoked

    def _store_in_parts(self, moved: Moved, run: ValueRun, value: _Value, views: BounceBufferViews) -> bool:
        """Store one value whose payload stays where it is, with a seal that does not."""
        place = value.row, value.payload, value.nbytes
        seal_parts(*views.parts(*place), value.name, run.names.layout_id)
        if not views.is_given(value.row):
            raise ClaimRevoked
        self._worked(value.payload)
        loans = views.borrow_parts(*place)
        call = self._calls.write_parts(value.name, [view for loan in loans for view in loan.views])
        answers = self._call(moved, run, [value], call, "write_parts", is_load=False)
        del call
        if not self._taken_back(moved, loans, "write_parts") or answers is None:
            return False
        [status] = self._written(moved, answers, value.nbytes)
        if status is Status.DONE and not views.is_given(value.row):
            # Its parts may have changed after they were hashed: what was written would be found, and fail.
            self._missing(value.name)
            self._delete([value.name])
            raise ClaimRevoked
        moved.statuses[value.place] = status
        moved.nbytes += value.nbytes if status is Status.DONE else 0
        return True

    def _written(self, moved: Moved, statuses: list[Status], nbytes: int) -> list[Status]:
        if Status.DROPPED in statuses:
            self._store_log.log_full(nbytes, self._calls.full_because)
        if Status.REFUSED in statuses:
            moved.error = self._calls.refused_because
        return statuses

    def _taken_back(self, moved: Moved, loans: Sequence[Loan], method: str) -> bool:
        """End the loans of a call; False if the store has kept a buffer: its values have failed."""
        kept = [loan for loan in loans if not loan.take_back()]
        if kept:
            moved.kept += kept
            error = StoreContractError(self._store, method, _KEPT)
            self._store_log.log_breach(error)
            moved.error = str(error)
        return not kept

    def _load_in_place(self, moved: Moved, run: ValueRun, value: _Value, views: ClaimedViews) -> bool:
        """Load one value straight into its parts, whose call cannot end before this ends, or this process."""
        place = value.row, value.payload, value.nbytes
        with views.table.held(value.row) as held:
            if not held.is_open:
                raise ClaimRevoked
            views.table.unland(value.row)  # another tier's host may have landed it, and died
            loans = views.borrow_parts(*place, readonly=False)
            call = self._calls.read_parts(value.name, [view for loan in loans for view in loan.views])
            answers = self._call(moved, run, [value], call, "read_parts_into", is_load=True)
            del call
            if not self._taken_back(moved, loans, "read_parts_into"):
                held.is_kept = True
                return False
            if answers is None:
                return False
            status = self._missing(value.name)
            if answers[0]:
                verdict = check_parts(*views.parts(*place), value.name, run.names.layout_id)
                status = self._judged(verdict, value.name)
                held.has_landed = status is Status.DONE
        moved.statuses[value.place] = status
        moved.nbytes += value.nbytes if status is Status.DONE else 0
        self._worked(value.payload)
        return True

    def _load_in_pieces(self, moved: Moved, run: ValueRun, value: _Value, views: ValueViews) -> bool:
        """Load one value that the store does not get a view for."""
        [view] = views.own([value.row], [value.nbytes])
        call = self._calls.read_pieces(value.name, view, value.payload, hashes=self._keys is None)
        answers = self._call(moved, run, [value], call, "read_pieces", is_load=True)
        if answers is None:
            return False
        [hashed] = answers
        if hashed is None:
            status = self._missing(value.name)
        else:
            status = self._judge(run, views, value.name, value.row, view, value.payload, value.key, hashed)
        moved.statuses[value.place] = status
        moved.nbytes += value.nbytes if status is Status.DONE else 0
        return True

    def _call(
        self,
        moved: Moved,
        run: ValueRun,
        values: Sequence[_Value],
        call: Callable[[], list[_Answer]],
        method: str,
        *,
        is_load: bool,
    ) -> list[_Answer] | None:
        """Call the store; None if it failed, or did not answer for each of these values."""
        nbytes = sum(value.nbytes for value in values)
        with self._store_log.watched(method) as store:
            answers, retries = self._attempts.call(call, give_up_at=run.give_up_at, nbytes=nbytes, urgent=is_load)
        self._worked(nbytes)
        if store.error:
            moved.error = store.error
            return None
        moved.retries += retries
        return answers

    def _missing(self, name: str) -> Status:
        """Return the status of a value that is not there, which is no longer known as present."""
        self._known.forget([name])
        return Status.MISSING

    def _worked(self, nbytes: int) -> None:
        """Count bytes that this thread has hashed or moved; yield the processor after so many."""
        turn = self._turn
        turn.nbytes += nbytes
        if turn.nbytes >= _TURN_BYTES:
            turn.nbytes = 0
            self._options.give_way()

    def _judge(
        self,
        run: ValueRun,
        views: ValueViews,
        name: str,
        row: int,
        value: memoryview,
        payload: int,
        key: SealingKey | None,
        hashed: bytes | None = None,
    ) -> Status:
        """Check a value that was read; copy a good one into its row, if it was read beside it."""
        layout_id = run.names.layout_id
        if key is not None:
            verdict = decrypt_value(value, payload, name, layout_id, key)
        else:
            verdict = check_value(value, payload, name, layout_id, hashed)
        status = self._judged(verdict, name)
        self._worked(payload)
        if status is Status.DONE and not run.land(lambda: views.land(row, payload)):
            return Status.FAILED
        return status

    def _judged(self, verdict: SealVerdict, name: str) -> Status:
        """Return the status of a value with this verdict. One that is damaged is deleted."""
        if verdict is SealVerdict.OK:
            return Status.DONE
        if verdict is SealVerdict.CORRUPT and not self._options.read_only:
            self._delete([name])  # else it would be found, and fail, for ever
        missing = self._missing(name)
        return Status.CORRUPT if verdict is SealVerdict.CORRUPT else missing

    def _delete(self, names: Sequence[str]) -> None:
        with self._store_log.watched("delete"):  # the values are counted as misses already
            self._store.delete(names)
