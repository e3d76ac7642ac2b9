"""Moves values between rows and a store: seals, checks, retries, and takes back what it lends.

Runs on the pool's threads, in the tier's host or in the engine's process. All that a store can do wrong ends here as a
status: an exception, a value of other bytes, a buffer that was kept.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import ChunkStore, OffloadKey, RateLimit, StoreFull, SupportsBatch, TierConfig, group_of
from kvtiers.rows.names import StorageNames
from kvtiers.rows.seal import SealVerdict, check_value, seal_value
from kvtiers.secondary.limits import RateLimiter
from kvtiers.secondary.protocol import Status
from kvtiers.secondary.retry import Attempts
from kvtiers.secondary.views import Loan, ValueViews

__all__ = ["Moved", "MoverOptions", "ValueMover", "mover_options"]

_BATCH_VALUES = 32
_BATCH_BYTES = 16 * 2**20
_KNOWN_NAMES = 100_000


@dataclass(frozen=True, slots=True)
class MoverOptions:
    """``sizes[g]``: (payload bytes, value bytes) of KV group g."""

    sizes: Sequence[tuple[int, int]]
    retries: int = 2
    read_only: bool = False
    exists_ttl: float = 60.0
    rate_limit: RateLimit = field(default_factory=RateLimit)


def mover_options(config: TierConfig, sizes: Sequence[tuple[int, int]]) -> MoverOptions:
    """Return the options of a tier that the mover obeys."""
    return MoverOptions(sizes, config.retries, config.read_only, config.exists_ttl, config.rate_limit)


@dataclass(slots=True)
class Moved:
    """What became of a run of values: a Status each, bytes moved, and the views that the store did not give back."""

    statuses: bytearray
    nbytes: int = 0
    retries: int = 0
    error: str = ""
    kept: list[Loan] = field(default_factory=list)


class ValueMover:
    """The calls of one store, made safe. Used by several threads at once."""

    def __init__(self, store: ChunkStore, views: ValueViews, options: MoverOptions, stop: threading.Event) -> None:
        self._store = store
        self._views = views
        self._options = options
        self._attempts = Attempts(store.transient_errors, options.retries, stop)
        self._limiter = RateLimiter(options.rate_limit, stop)
        self._known: dict[str, float] = {}
        self._known_lock = threading.Lock()
        largest = max(value for _, value in options.sizes)
        self.batch_values = (
            max(1, min(_BATCH_VALUES, _BATCH_BYTES // largest)) if isinstance(store, SupportsBatch) else 1
        )

    def load(self, names: StorageNames, keys: Sequence[OffloadKey], rows: Sequence[int], give_up_at: float) -> Moved:
        """Fill the rows; a value that is absent, foreign or damaged is not DONE, whatever its row holds now."""
        moved = Moved(bytearray([Status.FAILED]) * len(keys))
        for start in range(0, len(keys), self.batch_values):
            part = slice(start, start + self.batch_values)
            if not self._move(moved, part, names, keys[part], rows[part], give_up_at, is_load=True):
                break
        return moved

    def store(self, names: StorageNames, keys: Sequence[OffloadKey], rows: Sequence[int], give_up_at: float) -> Moved:
        """Seal the rows and write those values that the store does not have yet."""
        moved = Moved(bytearray([Status.FAILED]) * len(keys))
        try:
            present = self._present(names.names(keys), moved, give_up_at)
        except Exception as error:  # noqa: BLE001 -- a store is somebody else's code
            moved.error = _text(error)
            return moved
        for index in present:
            moved.statuses[index] = Status.PRESENT
        wanted = [index for index, status in enumerate(moved.statuses) if status != Status.PRESENT]
        for start in range(0, len(wanted), self.batch_values):
            some = wanted[start : start + self.batch_values]
            some_keys, some_rows = [keys[i] for i in some], [rows[i] for i in some]
            if not self._move(moved, some, names, some_keys, some_rows, give_up_at, is_load=False):
                break
        return moved

    def probe(self, names: StorageNames, keys: Sequence[OffloadKey], *, is_prefix: bool) -> list[bool]:
        """Ask which keys the store has. Of a prefix the answers may end after the first absence."""
        wanted = names.names(keys)
        per_call = max(1, self._store.exists_per_call)
        if is_prefix and per_call == 1:
            return self._bisect(wanted)
        answers: list[bool] = []
        for start in range(0, len(wanted), per_call):
            answers += self._exists(wanted[start : start + per_call])
            if is_prefix and not answers[-1]:
                break
        return answers

    def _bisect(self, names: Sequence[str]) -> list[bool]:
        """Find the end of a prefix in 1 + log2(n) questions: what lies below a hit counts as present, unasked."""
        if not names or not self._exists(names[:1])[0]:
            return [False] * min(1, len(names))
        present, absent = 1, len(names) + 1  # counts that are known to be present, and known not to be
        while absent - present > 1:
            middle = (present + absent) // 2
            if self._exists(names[middle - 1 : middle])[0]:
                present = middle
            else:
                absent = middle
        return [True] * present + [False] * (present < len(names))

    def _exists(self, names: Sequence[str]) -> list[bool]:
        self._limiter.pass_through(0)
        answers, _ = self._attempts.call(lambda: list(self._store.exists(names)), time.monotonic() + 60.0)
        if len(answers) != len(names):
            raise ValueError(f"{type(self._store).__name__}.exists gave {len(answers)} answers to {len(names)} names")
        return [bool(answer) for answer in answers]

    def _present(self, names: Sequence[str], moved: Moved, give_up_at: float) -> list[int]:
        """Return the indexes of values that need no write, remembering for a while what the store has."""
        now = time.monotonic()
        with self._known_lock:
            unknown = [i for i, name in enumerate(names) if self._known.get(name, 0.0) < now]
        present = set(range(len(names))).difference(unknown)
        per_call = max(1, self._store.exists_per_call)
        for start in range(0, len(unknown), per_call):
            some = unknown[start : start + per_call]
            self._limiter.pass_through(0)
            asked = [names[i] for i in some]
            answers, retries = self._attempts.call(lambda asked=asked: self._store.exists(asked), give_up_at)  # type: ignore[misc]
            moved.retries += retries
            present.update(i for i, there in zip(some, answers, strict=True) if there)
        self._remember([names[i] for i in present], now)
        return sorted(present)

    def _remember(self, names: Sequence[str], now: float) -> None:
        with self._known_lock:
            self._known.update(dict.fromkeys(names, now + self._options.exists_ttl))
            while len(self._known) > _KNOWN_NAMES:
                del self._known[next(iter(self._known))]

    def _forget(self, name: str) -> None:
        with self._known_lock:
            self._known.pop(name, None)

    def _move(
        self,
        moved: Moved,
        where: slice | Sequence[int],
        names: StorageNames,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        give_up_at: float,
        *,
        is_load: bool,
    ) -> bool:
        """Move one batch; False ends the run: the store failed, or there is no time left."""
        if time.monotonic() >= give_up_at:
            moved.error = moved.error or "no time left"
            return False
        wanted = names.names(keys)
        sizes = [self._options.sizes[group_of(key)] for key in keys]
        if not is_load:
            for name, row, (payload, value) in zip(wanted, rows, sizes, strict=True):
                seal_value(self._views.own(row, value), payload, name, names.layout_id)
        self._limiter.pass_through(sum(value for _, value in sizes))
        loans = [
            self._views.lend(row, value, readonly=not is_load) for row, (_, value) in zip(rows, sizes, strict=True)
        ]
        answers = self._call_store(moved, wanted, loans, give_up_at, is_load=is_load)
        kept = [loan for loan in loans if not loan.take_back()]
        if kept:
            moved.kept += kept
            moved.error = f"{type(self._store).__name__} kept the buffer that it was lent; it must copy what it keeps"
            return False
        if answers is None:
            return False
        for index, name, row, size, answer in zip(_indexes(where), wanted, rows, sizes, answers, strict=False):
            status = self._verdict(names, name, row, size, is_load=is_load) if answer else _NO[is_load]
            moved.statuses[index] = status
            moved.nbytes += size[1] if status is Status.DONE else 0
        if not is_load:
            self._remember([name for name, answer in zip(wanted, answers, strict=True) if answer], time.monotonic())
        return True

    def _call_store(
        self, moved: Moved, names: Sequence[str], loans: Sequence[Loan], give_up_at: float, *, is_load: bool
    ) -> list[bool] | None:
        call = self._call_of(names, [loan.view for loan in loans], is_load=is_load)
        try:
            answers, retries = self._attempts.call(call, give_up_at)
        except Exception as error:  # noqa: BLE001 -- a store is somebody else's code
            moved.error = _text(error)
            return None
        moved.retries += retries
        if len(answers) != len(names):
            moved.error = f"{type(self._store).__name__} gave {len(answers)} answers to {len(names)} names"
            return None
        return answers

    def _call_of(self, names: Sequence[str], views: Sequence[memoryview], *, is_load: bool) -> Callable[[], list[bool]]:
        store = self._store
        if isinstance(store, SupportsBatch):
            batch = store.read_many_into if is_load else store.write_many
            return lambda: [bool(answer) for answer in batch(names, views)]
        if is_load:
            return lambda: [bool(store.read_into(names[0], views[0]))]
        return lambda: [_written(store, names[0], views[0])]

    def _verdict(self, names: StorageNames, name: str, row: int, size: tuple[int, int], *, is_load: bool) -> Status:
        if not is_load:
            return Status.DONE
        payload, value = size
        verdict = check_value(self._views.own(row, value), payload, name, names.layout_id)
        if verdict is SealVerdict.OK:
            return Status.DONE
        self._forget(name)
        if verdict is SealVerdict.FOREIGN:
            return Status.MISSING
        if not self._options.read_only:
            self._delete(name)  # else it would be found, and fail, for ever
        return Status.CORRUPT

    def _delete(self, name: str) -> None:
        with contextlib.suppress(Exception):  # the value is counted as a miss already; there is nothing to add
            self._store.delete([name])


_NO = {True: Status.MISSING, False: Status.DROPPED}


def _written(store: ChunkStore, name: str, view: memoryview) -> bool:
    try:
        store.write(name, view)
    except StoreFull:
        return False
    return True


def _indexes(where: slice | Sequence[int]) -> Sequence[int]:
    return range(where.start, where.stop) if isinstance(where, slice) else where


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
