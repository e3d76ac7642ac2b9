"""The transfer of values between rows and a store: sealed before a write, checked after a read, by borrowed views.

Runs on the pool's threads, in the tier's host or in the engine's process. Whatever a store does wrong becomes the
status of a value here: an exception, other bytes than were stored, a buffer that was kept.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

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
from kvtiers.host.bounce_buffers import beside_rows
from kvtiers.host.claimed_views import ClaimedViews
from kvtiers.host.first_use_keys import FirstUseKeys
from kvtiers.host.messages import Status
from kvtiers.host.presence import Presence
from kvtiers.host.quotas import TenantQuotas
from kvtiers.host.store_calls import Attempts, KnownNames, RateLimiter, StoreCalls, StoreLog
from kvtiers.host.value_run import Moved, ValueRun
from kvtiers.layout.borrowed_views import LentValues, Loan, ValueViews
from kvtiers.layout.seal import SealVerdict, check_parts, check_value, seal_parts
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
_MOST_VIEWS = 64  # of one value
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

    @property
    def where(self) -> tuple[int, int, int]:
        """Its row, and the lengths of its payload and of all of it."""
        return self.row, self.payload, self.nbytes


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
        self._most_views = _MOST_VIEWS if self._calls.is_batched else 1
        self.batch_values = max(1, min(_BATCH_VALUES, _BATCH_BYTES // largest, self._calls.batch_values))

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
        views = self._load_views if is_load else self._store_views
        if self._claimed is not None and values[0].row >= self._claimed.table.first:
            views = self._claimed
        views.begin([value.row for value in values])
        try:
            if not is_load:
                return self._store_begun(moved, run, values, views)
            if isinstance(views, ClaimedViews) and self.batch_values == 1 and self._is_in_place(values[0], views):
                return self._load_in_place(moved, run, values[0], views)
            return self._load_begun(moved, run, values, views)
        except ClaimRevoked:
            moved.error = moved.error or _CALL_OVER
            return False
        finally:
            views.end(kept=bool(moved.kept))

    def _store_begun(self, moved: Moved, run: ValueRun, values: Sequence[_Value], views: ValueViews) -> bool:
        """Store one batch whose views have begun, by one call of the store; False ends the run."""
        for value in values:
            self._seal(run.names, views, value)
            self._worked(value.payload)
        names, method = [value.name for value in values], self._calls.write_method
        lent = LentValues([views.places(*value.where) for value in values], readonly=True)
        # The views are in no variable here: it would keep the memory when the store has dropped it.
        statuses = self._call(moved, run, values, self._calls.write(names, lent.views), method, is_load=False)
        if not self._taken_back(moved, lent, method) or statuses is None:
            return False
        self._log_not_kept(moved, statuses, max(value.nbytes for value in values))
        revoked = False
        for value, status in zip(values, statuses, strict=True):
            if status is Status.DONE and not views.is_given(value.row):
                # Its parts may have changed after they were hashed: what was written would be found, and fail.
                self._missing(value.name)
                self._delete([value.name])
                revoked = True
                continue
            self._end(moved, value, status)
        if revoked:
            raise ClaimRevoked
        return True

    def _seal(self, names: StorageNames, views: ValueViews, value: _Value) -> None:
        """Seal a value where it lies; one that is encrypted is written to the bounce buffer by that."""
        if value.key is None:
            if views.view_count(value.row, value.payload) > self._most_views:
                views.join(value.row, value.payload)
            seal_parts(*views.parts(*value.where), value.name, names.layout_id)
        else:
            assert views.are_beside_rows, "else the row itself would be encrypted"
            [own] = views.own([value.row], [value.nbytes])
            encrypt_value(views.parts(*value.where)[0], own, value.name, names.layout_id, value.key)
        if not views.is_given(value.row):  # its parts may have changed meanwhile, and would be sealed as they are
            raise ClaimRevoked
        if value.key is not None:
            views.set_joined(value.row)

    def _log_not_kept(self, moved: Moved, statuses: list[Status], nbytes: int) -> None:
        if Status.DROPPED in statuses:
            self._store_log.log_full(nbytes, self._calls.full_because)
        if Status.REFUSED in statuses:
            moved.error = self._calls.refused_because

    def _taken_back(self, moved: Moved, lent: Loan | LentValues, method: str) -> bool:
        """End the loan of a call; False if the store has kept a buffer: its values have failed."""
        if lent.take_back():
            return True
        moved.kept.append(lent)
        error = StoreContractError(self._store, method, _KEPT)
        self._store_log.log_breach(error)
        moved.error = str(error)
        return False

    def _load_begun(self, moved: Moved, run: ValueRun, values: Sequence[_Value], views: ValueViews) -> bool:
        """Load one batch whose views have begun, by one call of the store; False ends the run."""
        own = views.own([value.row for value in values], [value.nbytes for value in values])
        hashes: Sequence[bytes | None] = [None] * len(values)
        if self._calls.in_pieces(values[0].nbytes):
            [first], name = values, values[0].name
            pieces = self._calls.read_pieces(name, own[0], first.payload, hashes=self._keys is None)
            hashed = self._call(moved, run, values, pieces, "read_pieces", is_load=True)
            if hashed is None:
                return False
            hashes, lengths = hashed, [0 if hashed[0] is None else first.nbytes]
        else:
            names, method = [value.name for value in values], self._calls.read_method
            lent = views.borrow([value.row for value in values], [value.nbytes for value in values], readonly=False)
            call = self._calls.read(names, [[view] for view in lent.views])
            found = self._call(moved, run, values, call, method, is_load=True)
            del call  # it holds the views
            if not self._taken_back(moved, lent, method) or found is None:
                return False
            lengths = found
        for value, view, length, payload_hash in zip(values, own, lengths, hashes, strict=True):
            if length == value.nbytes:
                status = self._judge(run, views, value, view, payload_hash)
            else:
                status = self._missing(value.name)
            self._end(moved, value, status)
        return True

    @staticmethod
    def _end(moved: Moved, value: _Value, status: Status) -> None:
        moved.statuses[value.place] = status
        moved.nbytes += value.nbytes if status is Status.DONE else 0

    # -- loads straight into the memory of a client's caller (claims)

    def _is_in_place(self, value: _Value, views: ClaimedViews) -> bool:
        return (
            self._keys is None
            and views.is_in_place(value.row, value.payload)
            and views.view_count(value.row, value.payload) <= self._most_views
        )

    def _load_in_place(self, moved: Moved, run: ValueRun, value: _Value, views: ClaimedViews) -> bool:
        """Load one value straight into its parts, whose call cannot end before this ends, or this process."""
        method = self._calls.read_method
        with views.table.held(value.row) as held:
            if not held.is_open:
                raise ClaimRevoked
            views.table.unland(value.row)  # another tier's host may have landed it, and died
            lent = LentValues([views.places(*value.where)], readonly=False)
            call = self._calls.read([value.name], lent.views)
            lengths = self._call(moved, run, [value], call, method, is_load=True)
            del call
            if not self._taken_back(moved, lent, method):
                held.is_kept = True
                return False
            if lengths is None:
                return False
            status = self._missing(value.name)
            if lengths[0] == value.nbytes:
                verdict = check_parts(*views.parts(*value.where), value.name, run.names.layout_id)
                status = self._judged(verdict, value.name)
                held.has_landed = status is Status.DONE
        self._end(moved, value, status)
        self._worked(value.payload)
        return True

    # -- calls, and what comes of them

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
        self, run: ValueRun, views: ValueViews, value: _Value, own: memoryview, payload_hash: bytes | None
    ) -> Status:
        """Check a value that was read; copy a good one into its row, if it was read beside it."""
        name, layout_id, row, payload = value.name, run.names.layout_id, value.row, value.payload
        if value.key is not None:
            verdict = decrypt_value(own, payload, name, layout_id, value.key)
        else:
            verdict = check_value(own, payload, name, layout_id, payload_hash)
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
