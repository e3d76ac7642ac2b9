"""The tier type ``memory-async``: the third rung of the contract, moving real bytes without ever blocking.

=================  =========================================================================================
engine's thread    every method of the contract; alone reads and changes what the tier holds (no lock is needed)
mover thread       takes moves from one queue, copies bytes between rows and values, puts outcomes into another
=================  =========================================================================================

A job goes ``submit_*`` (decide, queue a move) -> mover (copy) -> ``get_finished_jobs`` (take values in, report). A
chunk is found once its store has been reported, and the mover never touches a row of a job that has been.
With ``simulate_async=False`` there is no thread: the copy runs within the submit, the rest is the same.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from kvtiers.api import (
    JobResult,
    LookupResult,
    OffloadKey,
    SecondaryTierManager,
    TenantRoom,
    TierContext,
    TierRequest,
    TransferJob,
    tenant_of,
)

__all__ = ["ExampleSecondaryTier"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """One job's copies: rows to read into new values, or values to write into rows; and how it went."""

    job: TransferJob
    rows_to_read: Mapping[OffloadKey, int] = field(default_factory=dict)
    values_to_write: Sequence[tuple[OffloadKey, int, bytes]] = ()
    values: dict[OffloadKey, bytes] = field(default_factory=dict)
    """The values that a store leaves held: those held when it was submitted, then those that were read."""
    failed: bool = False
    seconds: float = 0.0


class ExampleSecondaryTier(SecondaryTierManager):
    """At most ``max_blocks`` chunks in memory, the least recently used out first, moved by a thread of its own.

    A store and a load count as use, a lookup does not. A store never evicts a chunk of its own job; one with more
    chunks than ``max_blocks`` fails and changes nothing. A load of absent chunks succeeds for the others. With quotas a
    tenant that has no room loses its own oldest chunks, before ``max_blocks`` are held.
    """

    def __init__(self, context: TierContext, *, max_blocks: int, simulate_async: bool = True) -> None:
        self._region = context.region[:]  # a view of our own, so that close can release the region
        self._row_stride = context.row_stride
        self._value_bytes = context.value_bytes
        self._max_blocks = max_blocks
        self._values: OrderedDict[OffloadKey, bytes] = OrderedDict()  # the least recently used first
        self._room: TenantRoom | None = None
        self._declined = self._evicted_for_room = 0
        self._moving = 0
        self._finished: list[JobResult] = []
        self._to_move: SimpleQueue[_Move | None] = SimpleQueue()
        self._moved: SimpleQueue[_Move] = SimpleQueue()
        self._gate = Lock()
        self._mover = Thread(target=self._move_all, name="memory-async", daemon=True) if simulate_async else None
        if self._mover:
            self._mover.start()

    def set_quotas(self, quota_of: Callable[[str], int | None]) -> None:
        """Keep tenants within these bytes. Comes before any job."""
        self._room = TenantRoom(quota_of, self._value_bytes)

    def stats(self) -> Mapping[str, float]:
        """Return the counts that quotas of stores have, too; reads two numbers that the engine's thread changes."""
        return {"dropped_quota": self._declined, "quota_deleted": self._evicted_for_room}

    # On the engine's thread.

    def lookup(self, key: OffloadKey, context: TierRequest) -> LookupResult:  # noqa: ARG002 -- the contract's argument
        """Answer at once: the values are in this process."""
        return LookupResult.HIT if key in self._values else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        """Queue a copy of the rows whose chunks are not held yet."""
        if len(set(job.keys)) > self._max_blocks:
            self._submit(_Move(job, failed=True))
            return
        held = {key: self._values[key] for key in job.keys if key in self._values}
        rows = {key: row for key, row in zip(job.keys, job.chunk_ids, strict=True) if key not in held}
        self._submit(_Move(job, rows_to_read=rows, values=held))

    def submit_load(self, job: TransferJob) -> None:
        """Queue a copy of the chunks that are held into their rows. An eviction meanwhile does not hurt it."""
        pairs = zip(job.keys, job.chunk_ids, strict=True)
        self._submit(_Move(job, values_to_write=[(k, row, self._values[k]) for k, row in pairs if k in self._values]))

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Add the values that the mover has copied since the last call, and report those jobs."""
        while not self._moved.empty():
            self._settle(self._moved.get())
        finished, self._finished = self._finished, []
        return finished

    def drain(self, timeout: float) -> bool:
        """Wait for the mover; the results are reported by the next ``get_finished_jobs``."""
        deadline = time.monotonic() + timeout
        while self._moving:
            try:
                self._settle(self._moved.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                return False
        return True

    def close(self) -> None:
        """End the mover after the queued moves, and release the region."""
        if self._mover:
            self._to_move.put(None)
            self._mover.join()
        self._region.release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the mover from moving anything, as a slow backend would: for tests that nothing waits for it."""
        with self._gate:
            yield

    def _submit(self, move: _Move) -> None:
        self._moving += 1
        if self._mover:
            self._to_move.put(move)
        else:
            self._moved.put(self._move(move))

    def _settle(self, move: _Move) -> None:
        self._moving -= 1
        job = move.job
        if move.failed:
            self._finished.append(JobResult(job.job_id, success=False, seconds=move.seconds))
            return
        self._keep(move.values)
        # Tail first, so that a prefix's head, without which the rest is of no use, is evicted last.
        for key in reversed(job.keys):
            if key in self._values:
                self._values.move_to_end(key)
        while len(self._values) > self._max_blocks:
            evicted, _ = self._values.popitem(last=False)  # never of this job: its keys are the last, and all fit
            if self._room is not None:
                self._room.leave(evicted)
        if job.is_promotion:
            landed = {key for key, _, _ in move.values_to_write}
        else:
            landed = {key for key in move.values if key in self._values}
        success = landed == set(job.keys)
        nbytes = self._value_bytes * (len(move.rows_to_read) + len(move.values_to_write))
        self._finished.append(JobResult(job.job_id, success, None if success else landed, nbytes, move.seconds))

    def _keep(self, values: Mapping[OffloadKey, bytes]) -> None:
        """Hold the values of one store, those for which their tenant has no room excepted."""
        full: set[str] = set()  # tenants that have nothing more to lose for this store
        for key, value in values.items():
            if self._room is not None and key not in self._values:
                tenant = tenant_of(key)
                evicted = None if tenant in full else self._room.take(key, values.keys())
                if evicted is None:
                    full.add(tenant)
                    self._declined += 1
                    continue
                for old in evicted:
                    del self._values[old]
                self._evicted_for_room += len(evicted)
            self._values[key] = value

    # On the mover thread (within the submit, with ``simulate_async=False``).

    def _move_all(self) -> None:
        while (move := self._to_move.get()) is not None:
            with self._gate:
                self._moved.put(self._move(move))

    def _move(self, move: _Move) -> _Move:
        begin = time.monotonic()
        try:
            for key, row in move.rows_to_read.items():
                move.values[key] = bytes(self._row(row))
            for _, row, value in move.values_to_write:
                self._row(row)[:] = value
        except Exception:  # noqa: BLE001 -- a job is reported after any error
            _log.exception("job %d failed", move.job.job_id)
            move.failed = True
        move.seconds = time.monotonic() - begin
        return move

    def _row(self, chunk_id: int) -> memoryview:
        start = chunk_id * self._row_stride
        row = self._region[start : start + self._value_bytes]
        if chunk_id < 0 or len(row) != self._value_bytes:  # a slice past the end is silently short
            raise IndexError(f"row {chunk_id} is not in the region")
        return row
