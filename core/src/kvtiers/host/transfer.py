"""The transfer of values between rows and a store: sealed before a write, checked after a read, by borrowed views.

To store values is to seal each (``Seal``), to lend the store views of a batch, and to make one call. To load them is to
lend views of a batch, to make one call, to check each value, and to land what is sound in its row.

===============================  ==================================  ====================================
seal                             a store writes from                 a store reads into
===============================  ==================================  ====================================
plain                            the row, which has the seal, too    the row
plain, in a namespace's epoch    the row, and a bounce buffer        the row
encrypted                        a bounce buffer                     a bounce buffer
===============================  ==================================  ====================================

Rows without room for a seal, and the memory of a client's caller, are like rows of an epoch when a store writes, and
are read by way of a bounce buffer. A store that takes a value in one view only (``StoreCalls.most_views``) gets what
would lie in two from the bounce buffer.

Runs on the pool's threads, in the tier's host or in the engine's process. Whatever a store does wrong becomes the
status of a value here: an exception, other bytes than were stored, a buffer that was kept.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from kvtiers.host.bounce_buffers import BounceBufferViews, beside_rows
from kvtiers.host.messages import Parts, Status
from kvtiers.host.presence import Presence
from kvtiers.host.quotas import TenantQuotas
from kvtiers.host.store_calls import (
    RETRY_PAUSES,
    Attempts,
    KnownNames,
    NoTimeLeft,
    RateLimiter,
    Read,
    StoreCalls,
    StoreLog,
)
from kvtiers.host.value_run import Moved, ValueRun
from kvtiers.layout.borrowed_views import LentValues, Loan, ValueViews
from kvtiers.layout.seal import PlainSeal, Seal, SealVerdict
from kvtiers.layout.storage_name import StorageNames, ValueName

__all__ = ["MoverOptions", "ValueMover", "mover_options"]

_KEPT = (
    "kept the buffer that it was given, or something made of it (a slice, an array, an exception whose traceback has "
    "it), after its return; the row behind it is soon another value's. Copy what is kept: bytes(...)"
)
_DETACHED = "the call is over that its memory was given for"
_NO_KEY = "their tenant's key cannot be read; the log says why"
_BATCH_VALUES = 32
_BATCH_BYTES = 16 * 2**20
_DELETED_PER_CALL = 256
_TURN_BYTES = 3 * 2**20  # hashed or moved in some tenths of a millisecond
_NOT_TAKEN = frozenset({Status.DROPPED, Status.REFUSED})
_Answer = TypeVar("_Answer")


def _go_on() -> None:
    """Do not give way."""


@dataclass(frozen=True, slots=True)
class MoverOptions:
    """How the values of a store are moved. ``sizes[g]``: (payload bytes, value bytes) of KV group g.

    ``retry_pauses``: seconds until a call is retried, doubling from the first to the second.

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
    retry_pauses: tuple[float, float] = RETRY_PAUSES


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


class _Value(NamedTuple):
    """One value of a run: its place in it, its key, what it is sealed for, its row, and its lengths there.

    ``parts``: where it lies in a client's region, if it does.
    """

    place: int
    key: OffloadKey
    name: ValueName
    row: int
    payload: int
    nbytes: int
    parts: Parts

    @property
    def where(self) -> tuple[int, int, int]:
        """Its row, and the lengths of its payload and of all of it."""
        return self.row, self.payload, self.nbytes


class _Turn(threading.local):
    """The bytes that a thread has hashed and moved since it last gave way."""

    nbytes = 0


class ValueMover:
    """Moves values between rows and one store. Used by several threads at once.

    ``seal``: how values are named, sealed and checked. A value that has no name, since its tenant's own key cannot be
    read, is absent, and is not written. ``label``: the tier's name in log lines. ``callers``: the views for jobs of
    which values lie in a client's region. ``known``: the names that the store has, shared with ``quotas``, which are
    kept if there are some.
    """

    def __init__(
        self,
        store: ChunkStore,
        views: ValueViews,
        options: MoverOptions,
        stop: threading.Event,
        seal: Seal | None = None,
        *,
        label: str = "",
        callers: BounceBufferViews | None = None,
        known: KnownNames | None = None,
        quotas: TenantQuotas | None = None,
    ) -> None:
        self._store = store
        self._seal = seal or PlainSeal()
        self._callers = callers
        self._options = options
        self.quotas = quotas
        self._turn = _Turn()
        self._limiter = RateLimiter(options.rate_limit, stop)
        self._attempts = Attempts(
            store.transient_errors, options.retries, self._limiter, stop, pauses=options.retry_pauses
        )
        self._known = known or KnownNames(options.exists_ttl)
        self._store_log = StoreLog(label or type(store).__name__)
        self._presence = Presence(store, self._attempts, self._known, self._store_log)
        self._calls = StoreCalls(store)
        largest = max(value for _, value in options.sizes)
        beside = beside_rows(views, largest) if self._seal.writes_beside or self._seal.reads_beside else views
        self._store_views = beside if self._seal.writes_beside else views
        self._load_views = beside if self._seal.reads_beside else views
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
        names, *older = self._seal.names(run.names, run.keys)
        moved, places = self._begin(run, names, Status.MISSING)
        self._move_all(moved, run, self._values(run, names, places), is_load=True)
        for names in older:
            left = [place for place, status in enumerate(moved.statuses) if status == Status.MISSING]
            places = [place for place in left if names.has_name(run.keys[place])]
            self._move_all(moved, run, self._values(run, names, places), is_load=True)
        return moved

    def store(self, run: ValueRun) -> Moved:
        """Seal the rows and write those values that the store does not have yet."""
        names = self._seal.names(run.names, run.keys)[0]
        moved, places = self._begin(run, names, Status.REFUSED)
        values = self._values(run, names, places)
        with plugin_boundary(exits=True) as store:
            self._mark_present(moved, run, values)
        if store.error:
            moved.error = store.error
            return moved
        wanted = [value for value in values if moved.statuses[value.place] != Status.PRESENT]
        if self.quotas is not None:
            wanted = self._take_room(moved, wanted, self.quotas)
        try:
            if run.overwrites:
                self._remove_suspects(run, [value.name.text for value in wanted if run.overwrites[value.place]])
            self._move_all(moved, run, wanted, is_load=False)
        finally:
            if self.quotas is not None:
                self._settle(moved, wanted, self.quotas)
        return moved

    def delete(self, run: ValueRun) -> Moved:
        """Remove the values of these keys; DONE also where there was none."""
        if self._options.read_only:
            return Moved.nothing(len(run.keys), "the tier is read-only")
        all_names = self._seal.names(run.names, run.keys)
        moved, places = self._begin(run, all_names[0], Status.REFUSED)
        for start in range(0, len(places), _DELETED_PER_CALL):
            part = places[start : start + _DELETED_PER_CALL]
            keys = [run.keys[place] for place in part]
            some = [name for names in all_names for name in names.names(filter(names.has_name, keys))]
            if run.is_over():
                moved.error = "no time left"
                break
            self._known.forget(some)  # also if it fails: it may have been removed all the same
            with self._store_log.watched("delete") as store:
                _, retries = self._attempts.call(partial(self._store.delete, some), give_up_at=run.give_up_at)
                moved.retries += retries
            if store.error:
                moved.error = store.error
                break
            for place in part:
                moved.statuses[place] = Status.DONE
        return moved

    def probe(
        self, names: StorageNames, keys: Sequence[OffloadKey], *, is_prefix: bool, give_up_at: float
    ) -> list[bool]:
        """Ask which keys the store has. Of a prefix, which is one tenant's, answers may end after the first absence."""
        all_names = self._seal.names(names, keys[:1] if is_prefix else keys)
        return self._presence.probe(all_names, keys, give_up_at, is_prefix=is_prefix)

    # -- which values are moved

    @staticmethod
    def _begin(run: ValueRun, names: StorageNames, nameless: Status) -> tuple[Moved, list[int]]:
        """Return the outcome of a run before it is moved, and the places of the values that have a name.

        ``nameless``: the status of the others.
        """
        moved = Moved.nothing(len(run.keys))
        places = [place for place, key in enumerate(run.keys) if names.has_name(key)]
        if len(places) < len(run.keys):
            moved.statuses = bytearray([nameless]) * len(run.keys)
            for place in places:
                moved.statuses[place] = Status.FAILED
            moved.error = "" if nameless is Status.MISSING else _NO_KEY
        return moved, places

    def _values(self, run: ValueRun, names: StorageNames, places: Sequence[int]) -> list[_Value]:
        """Return the values at these places, which have a name each."""
        sizes, rows, keys = self._options.sizes, run.rows, [run.keys[place] for place in places]
        return [
            _Value(place, key, name, rows[place], *sizes[group_of(key)], run.parts[place] if run.parts else ())
            for place, key, name in zip(places, keys, names.value_names(keys), strict=True)
        ]

    def _mark_present(self, moved: Moved, run: ValueRun, values: Sequence[_Value]) -> None:
        """Give those values that need no write the status PRESENT."""
        if run.overwrites:
            values = [value for value in values if not run.overwrites[value.place]]
        names = [value.name.text for value in values]
        present, unknown = self._known.sort(names)
        per_call = self._presence.names_per_call
        # Asked one by one, a name costs a small value's write, and the engine's lookup, which missed, has asked before.
        for start in range(0, len(unknown) if per_call > 1 else 0, per_call):
            if not run.wanted():
                break
            some = unknown[start : start + per_call]
            answers, retries = self._presence.exist([names[index] for index in some], run.give_up_at)
            moved.retries += retries
            present += [index for index, there in zip(some, answers, strict=True) if there]
        for index in present:
            moved.statuses[values[index].place] = Status.PRESENT

    @staticmethod
    def _take_room(moved: Moved, wanted: Sequence[_Value], quotas: TenantQuotas) -> list[_Value]:
        """Return those values for which their tenants have room."""
        roomy = []
        for value in wanted:
            if quotas.take(tenant_of(value.key), value.nbytes):
                roomy.append(value)
            else:
                moved.statuses[value.place] = Status.NO_ROOM
        return roomy

    @staticmethod
    def _settle(moved: Moved, wanted: Sequence[_Value], quotas: TenantQuotas) -> None:
        for value in wanted:  # one whose write has failed may be there all the same
            may_be_there = moved.statuses[value.place] not in _NOT_TAKEN
            quotas.settle(tenant_of(value.key), value.nbytes, may_be_there=may_be_there)

    def _remove_suspects(self, run: ValueRun, names: Sequence[str]) -> None:
        """Delete what is to be overwritten: a store that writes only what is not there would keep it for ever."""
        for start in range(0, len(names), _DELETED_PER_CALL):
            if run.is_over():
                return
            self._delete(names[start : start + _DELETED_PER_CALL])

    # -- moving

    def _move_all(self, moved: Moved, run: ValueRun, values: Sequence[_Value], *, is_load: bool) -> None:
        for start in range(0, len(values), self.batch_values):
            if run.is_over():
                moved.error = moved.error or "no time left"
                break
            if not self._move(moved, run, values[start : start + self.batch_values], is_load=is_load):
                break
        self._known.learn([value.name.text for value in values if moved.statuses[value.place] == Status.DONE])

    def _move(self, moved: Moved, run: ValueRun, values: Sequence[_Value], *, is_load: bool) -> bool:
        """Move one batch; False ends the run: the store failed, or there is no time left."""
        views = self._load_views if is_load else self._store_views
        if run.parts and self._callers is not None:
            views = self._callers
        views.begin([value.row for value in values], [value.parts for value in values])
        try:
            if is_load:
                return self._load_batch(moved, run, values, views)
            return self._store_batch(moved, run, values, views)
        finally:
            views.end(kept=bool(moved.kept))

    def _store_batch(self, moved: Moved, run: ValueRun, values: Sequence[_Value], views: ValueViews) -> bool:
        """Seal one batch, and write it in one call of the store."""
        for value in values:
            self._seal_value(views, value)
            self._worked(value.payload)
        if not run.fence.is_given():  # the memory may have changed meanwhile, and was sealed, or copied, as it was
            moved.error = moved.error or _DETACHED
            return False
        names, method = [value.name.text for value in values], self._calls.write_method
        lent = LentValues([views.places(*value.where) for value in values], readonly=True)
        has_begun = False

        def write() -> list[Status]:
            nonlocal has_begun
            if not run.fence.is_given():  # between two attempts
                raise NoTimeLeft(_DETACHED)
            has_begun = True
            return self._calls.write(names, lent.views)

        statuses = self._call(moved, run, values, write, method, lent, is_load=False)
        if statuses is not None:
            self._log_not_kept(moved, statuses, max(value.nbytes for value in values))
        is_given = run.fence.is_given()
        torn = [] if is_given or not has_begun else self._torn(values, statuses, views)
        for value, status in zip(values, statuses or (), strict=False):
            if value not in torn:
                self._end(moved, value, status)
        if torn:
            moved.error = moved.error or _DETACHED
            names = [value.name.text for value in torn]
            self._known.forget(names)
            self._delete(names)
        return is_given and statuses is not None

    @staticmethod
    def _torn(values: Sequence[_Value], statuses: Sequence[Status] | None, views: ValueViews) -> list[_Value]:
        """Return the values that a store may have written out of memory that was another's by then.

        That memory may have changed after it was hashed: such a value would be found, and fail its check.
        """
        return [
            value
            for index, value in enumerate(values)
            if (statuses is None or statuses[index] is Status.DONE) and views.view_count(value.row, value.payload) > 1
        ]

    def _seal_value(self, views: ValueViews, value: _Value) -> None:
        """Seal a value where it lies, or beside its row, and have it lie in no more places than the store takes."""
        self._seal.seal(value.name, *views.parts(*value.where))
        if self._seal.reads_beside:
            views.set_joined(value.row)
        if views.view_count(value.row, value.payload) > self._calls.most_views:
            views.join(value.row, value.payload)

    def _log_not_kept(self, moved: Moved, statuses: list[Status], nbytes: int) -> None:
        if Status.DROPPED in statuses:
            self._store_log.log_full(nbytes, self._calls.full_because)
        if Status.REFUSED in statuses:
            moved.error = self._calls.refused_because

    def _load_batch(self, moved: Moved, run: ValueRun, values: Sequence[_Value], views: ValueViews) -> bool:
        """Read one batch in one call of the store, check it, and land what is sound in its rows."""
        rows, sizes = [value.row for value in values], [value.nbytes for value in values]
        own = views.own(rows, sizes)
        if self._calls.in_pieces(sizes[0]):
            pieces = partial(self._read_pieces, values[0], own[0])
            found = self._call(moved, run, values, pieces, "read_pieces", is_load=True)
        else:
            names, lent = [value.name.text for value in values], views.borrow(rows, sizes, readonly=False)
            whole = partial(self._read, names, lent)
            found = self._call(moved, run, values, whole, self._calls.read_method, lent, is_load=True)
        if found is None:
            return False
        for value, view, read in zip(values, own, found, strict=True):
            self._end(moved, value, self._landed(run, views, value, view, read))
        return True

    def _read(self, names: Sequence[str], lent: Loan) -> list[Read]:
        return self._calls.read(names, [[view] for view in lent.views])

    def _read_pieces(self, value: _Value, own: memoryview) -> list[Read]:
        return self._calls.read_pieces(value.name.text, own, value.payload, hashes=not self._seal.reads_beside)

    def _landed(self, run: ValueRun, views: ValueViews, value: _Value, own: memoryview, read: Read) -> Status:
        """Check a value that was read, and copy a good one into its row, if it was read beside it."""
        if read.nbytes != value.nbytes:
            return self._missing(value.name)
        verdict = self._seal.check(value.name, own, value.payload, read.hashed)
        status = self._judged(verdict, value.name, keeps=self._options.read_only or run.keep_damaged)
        self._worked(value.payload)
        if status is Status.DONE and not run.fence.land(value.row, lambda: views.land(value.row, value.payload)):
            return Status.FAILED
        return status

    @staticmethod
    def _end(moved: Moved, value: _Value, status: Status) -> None:
        moved.statuses[value.place] = status
        moved.nbytes += value.nbytes if status is Status.DONE else 0

    # -- calls, and what comes of them

    def _call(
        self,
        moved: Moved,
        run: ValueRun,
        values: Sequence[_Value],
        call: Callable[[], list[_Answer]],
        method: str,
        lent: Loan | LentValues | None = None,
        *,
        is_load: bool,
    ) -> list[_Answer] | None:
        """Call the store, and end the loan of its views; None if it failed, or has kept one: the run ends."""
        nbytes = sum(value.nbytes for value in values)
        with self._store_log.watched(method) as store:
            answers, retries = self._attempts.call(call, give_up_at=run.give_up_at, nbytes=nbytes, urgent=is_load)
            moved.retries += retries
        self._worked(nbytes)
        if lent is not None and not lent.take_back():
            moved.kept.append(lent)
            error = StoreContractError(self._store, method, _KEPT)
            self._store_log.log_breach(error)
            moved.error = str(error)
            return None
        if store.error:
            moved.error = store.error
            return None
        return answers

    def _missing(self, name: ValueName) -> Status:
        """Return the status of a value that is not there, which is no longer known as present."""
        self._known.forget([name.text])
        return Status.MISSING

    def _worked(self, nbytes: int) -> None:
        """Count bytes that this thread has hashed or moved; yield the processor after so many."""
        turn = self._turn
        turn.nbytes += nbytes
        if turn.nbytes >= _TURN_BYTES:
            turn.nbytes = 0
            self._options.give_way()

    def _judged(self, verdict: SealVerdict, name: ValueName, *, keeps: bool) -> Status:
        """Return the status of a value with this verdict. One that is damaged is deleted, unless ``keeps`` says no."""
        if verdict is SealVerdict.OK:
            return Status.DONE
        if verdict is SealVerdict.CORRUPT and not keeps:
            self._delete([name.text])  # else it would be found, and fail, for ever
        missing = self._missing(name)
        return Status.CORRUPT if verdict is SealVerdict.CORRUPT else missing

    def _delete(self, names: Sequence[str]) -> None:
        with self._store_log.watched("delete"):  # the values are counted as misses already
            self._store.delete(names)
