"""The driver: the one thread that calls a client's tiers, with the requests of all callers and the jobs in flight.

It sleeps while nothing is in flight and all tiers are usable. It is woken by a caller (an eventfd), and by whatever a
tier host sends. Tiers that run on threads of this process have no descriptor to wait with: they are polled.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from kvtiers._failures import logged_boundary
from kvtiers.api import JobResult, OffloadKey, TransferJob
from kvtiers.client.requests import Request, Transfer
from kvtiers.client.rows import RowLease
from kvtiers.secondary.tier_jobs import JobFailed, JobReleased, good_keys, landed_keys
from kvtiers.tiering.engine_side import EventSide
from kvtiers.tiering.ledger import Ledger, LedgerEntry
from kvtiers.tiering.tier_slot import TierSlot
from kvtiers.types import OffloadEvent, RequestContext

__all__ = ["CLOSED", "Driver"]

CLOSED = "the client is closed"
_log = logging.getLogger("kvtiers")
_POLL_SECONDS = 0.0005  # of tiers without a descriptor, while something of theirs is in flight
_AWAKE_SECONDS = 0.005  # the longest sleep while something is in flight: deadlines, hosts that are being started
_UNUSABLE_SECONDS = 0.25  # how often a tier is looked at that is not usable, while nothing is in flight
_DETACH_SECONDS = 0.15
_IN_USE = "the time of a call is over, and it has not given the call's memory back"
_LAST_SECONDS = 5.0  # for the thread to end; nothing that it calls waits
_CONTEXT = RequestContext("")


@dataclass(slots=True, eq=False)
class _Job(LedgerEntry):
    """A job in flight. ``leases``: its request's, which it holds until it is gone.

    ``detach_by``: once its host has been asked to detach it from its memory; a host that has not done so by then is
    killed.
    """

    request: Transfer
    leases: Sequence[RowLease]
    is_detached: bool = False
    detach_by: float | None = None
    is_killed: bool = False


class Driver:
    """The thread. ``wait(seconds, fd)``: waits for tier hosts and the descriptor; None where no tier has a host.

    ``slots``: called on this thread alone, until ``stop`` has returned. ``is_polled``: some tiers have no host.
    ``detach_seconds``: for a tier host to say that it does not write into a call's memory any more.
    """

    def __init__(
        self,
        slots: Sequence[TierSlot],
        wait: Callable[[float | None, int], None],
        *,
        is_polled: bool,
        publisher: EventSide | None = None,
        clock: Callable[[], float] = time.monotonic,
        detach_seconds: float = _DETACH_SECONDS,
    ) -> None:
        self.slots = slots
        self._detach_seconds = detach_seconds
        self._wait = wait
        self._is_polled = is_polled
        self.publisher = publisher
        self._clock = clock
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._incoming: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._requests: dict[Request, None] = {}
        """Begun, and not over."""
        self._ledger: Ledger[_Job] = Ledger(clock)
        self._life = threading.Lock()
        self._closing = False
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvtiers-client", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # -- from any thread

    def send(self, request: Request) -> bool:
        """Hand a request over; False, and it is over, after ``stop``. Its rows are held until it is over.

        So the caller may release them at any time: a job that begins just then still finds them held.
        """
        with self._life:
            if not self._closing:
                if isinstance(request, Transfer):
                    request.lease.hold()
                self._incoming.put(request)
                self._wake()
                return True
        request.end(CLOSED)
        return False

    def wake(self) -> None:
        """Have the thread make a step at once: a request was stopped."""
        with self._life:
            self._wake()

    def stop(self, timeout: float) -> None:
        """Let what is in flight end, within so many seconds, and end the thread. All requests are over then."""
        with self._life:
            if not self._closing:
                self._closing = True
                self._stop_at = self._clock() + timeout
                self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout + _LAST_SECONDS)

    def close(self) -> None:
        """Release the descriptor, after ``stop`` and when the tiers are closed, so that no job uses its memory."""
        for found in list(self._ledger.jobs.values()):
            self._detach(found, ())
        with self._life:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            with contextlib.suppress(BlockingIOError):  # it is full, so the thread is being woken
                os.eventfd_write(self._wake_fd, 1)

    # -- for requests

    def submit(
        self, slot: TierSlot, request: Transfer, keys: Sequence[OffloadKey], rows: Sequence[int], *, is_load: bool
    ) -> bool:
        """Start a job on these rows of the request's leases; False: nothing has started."""
        parts = [request.parts.get(row, ()) for row in rows] if request.parts else ()
        job = TransferJob(self._ledger.next_id(), keys, _numbers(rows), is_load, _CONTEXT, parts)
        return self._start(request, job, slot, slot.submit)

    def delete(self, slot: TierSlot, request: Transfer, keys: Sequence[OffloadKey]) -> bool:
        """Start a job that removes these keys; False: nothing has started."""
        job = TransferJob(self._ledger.next_id(), keys, _numbers(()), is_promotion=False, context=_CONTEXT)
        return self._start(request, job, slot, slot.delete)

    def _start(
        self, request: Transfer, job: TransferJob, slot: TierSlot, submit: Callable[[TransferJob], bool]
    ) -> bool:
        now = self._clock()
        leases = request.job_began() if now < request.until and self._stop_at is None else None
        if leases is None:
            request.error = request.error or "no time left"
            return False
        begun = _Job(job, slot, now, request, leases)
        if self._ledger.begin(begun, submit):
            return True
        self._detach(begun, ())
        _release(leases)
        return False

    def now(self) -> float:
        """Return the time by the driver's clock."""
        return self._clock()

    # -- the thread

    def _run(self) -> None:
        with logged_boundary(_log, "client: its thread has ended; a bug of kvtiers"):
            while not self._is_done():
                self._wait(self._pause(), self._wake_fd)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                self._step()
        with self._life:
            self._closing = True
        with logged_boundary(_log, "client: the end of its thread; a bug of kvtiers"):
            self._end_use()
        self._end_all()

    def _end_use(self) -> None:
        """Kill the hosts that still use the region, and wait for a while until they have ended: calls wait for that."""
        used = self._attached()
        for found in used:
            found.slot.kill_job(found.job.job_id, _IN_USE)
        until = self._clock() + _LAST_SECONDS
        while self._clock() < until and not all(found.is_detached for found in used):
            time.sleep(_AWAKE_SECONDS)
            self._poll()

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        if not (self._requests or self._ledger.jobs or not self._incoming.empty()):
            return True
        late = self._clock() - self._stop_at
        return late >= (_LAST_SECONDS / 2 if self._attached() else 0.0)

    def _attached(self) -> list[_Job]:
        """Return the jobs that still use the region."""
        return [found for found in self._ledger.jobs.values() if found.request.parts and not found.is_detached]

    def _pause(self) -> float | None:
        if self._requests or self._ledger.jobs:
            return _POLL_SECONDS if self._is_polled else _AWAKE_SECONDS
        if self._stop_at is not None:
            return 0.0
        return None if all(slot.available() for slot in self.slots) else _UNUSABLE_SECONDS

    def _step(self) -> None:
        polled_at = self._clock()  # what a host has reported by then is taken in this step
        self._poll()
        self._begin_new()
        for request in list(self._requests):
            if self._clock() >= request.until:
                self._end(request, "not ended in time")
            else:
                self._guarded(request, request.step)
        asked = self._take_back(polled_at)
        for slot in self.slots:
            slot.end_step()
        now = self._clock()
        for found in asked:  # only now their RELEASE is on its way
            found.detach_by = found.detach_by or now + self._detach_seconds
        self._ledger.expire()

    def _begin_new(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._incoming.get_nowait()
                self._requests[request] = None
                if self._clock() >= request.until:
                    self._end(request, "no time left")
                else:
                    self._guarded(request, request.begin)

    def _guarded(self, request: Request, call: Callable[["Driver"], None]) -> None:
        """Make a call of a request; a bug in it ends that request alone."""
        if not request.over.is_set():
            with logged_boundary(_log, "client: a call; a bug of kvtiers") as made:
                call(self)
            if made.error:
                request.end(made.error)
        if request.over.is_set():
            self._end(request)

    def _end(self, request: Request, error: str = "") -> None:
        request.end(error)
        if request in self._requests:
            del self._requests[request]
            if isinstance(request, Transfer):
                _release([request.lease, *request.spares])

    def _poll(self) -> None:
        for slot in self.slots:
            for found, event in self._ledger.take(slot, slot.poll()):
                if isinstance(event, JobFailed):
                    found.request.error = found.request.error or f"{slot.name}: {event.error or 'failed'}"
                    self._guarded(found.request, partial(found.request.job_failed, slot=slot))
                elif isinstance(event, JobReleased):
                    self._detach(found, landed_keys(found.job, event))
                else:
                    self._ended(found, event)

    def _ended(self, found: _Job, result: JobResult) -> None:
        request, job, good = found.request, found.job, good_keys(found.job, result)
        self._detach(found, good)
        found.count(result, good, self._clock())
        self._report(found, good)
        self._guarded(request, lambda driver: request.job_ended(driver, found.slot, job, good))
        _release(found.leases)

    def _take_back(self, polled_at: float) -> list[_Job]:
        """Detach jobs from the region whose calls are over, or are to end; kill a host that does not answer in time.

        Until it has answered, it could write into memory that its caller uses for something else by then, or store
        what lies there. Return the jobs whose hosts are asked. ``polled_at``: a host's time is over if it has not
        answered by then. The time that this thread itself takes to read an answer is not the host's.
        """
        asked: list[_Job] = []
        is_ending = self._stop_at is not None and polled_at >= self._stop_at
        for job_id, found in self._ledger.jobs.items():
            request = found.request
            if found.is_detached or found.is_killed or not (request.is_stopped or (is_ending and request.parts)):
                continue
            if found.detach_by is not None and polled_at >= found.detach_by:
                found.is_killed = True
                found.slot.kill_job(job_id, _IN_USE)
            else:
                found.slot.release_job(job_id)  # again, too: a RELEASE is lost where a host reads nothing
                asked.append(found)
        return asked

    @staticmethod
    def _detach(found: _Job, good: Collection[OffloadKey]) -> None:
        if not found.is_detached:
            found.is_detached = True
            found.request.job_detached(found.job, good)

    def _report(self, ended: _Job, good: Sequence[OffloadKey]) -> None:
        """Publish what a tier has now, or has no longer."""
        if self.publisher is not None and good and not ended.job.is_promotion:
            self.publisher.take([OffloadEvent(good, not ended.num_rows, ended.slot.name)])

    def _end_all(self) -> None:
        for request in list(self._requests):
            self._end(request, CLOSED)
        with contextlib.suppress(queue.Empty):
            while True:
                self._incoming.get_nowait().end(CLOSED)


def _numbers(rows: Sequence[int]) -> memoryview:
    return memoryview(array("i", rows))


def _release(leases: Sequence[RowLease]) -> None:
    for lease in leases:
        lease.release()
