"""The tier slot: one secondary tier in its place in the order: guarded calls, figures, speed, and the rows it may hold.

Nothing that a tier does raises into the engine's step: an exception, or an invalid answer, is logged, counted and
handled as the contract says. A tier that reports what it was not given is retired: it is not called any more, and the
rows that it may still touch stay in quarantine.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from kvtiers._failures import end_forked_child, error_text, forks, log_with_backoff
from kvtiers.api import LookupResult, OffloadKey, SecondaryTierManager, TierRequest, TransferJob
from kvtiers.api.config import Admission
from kvtiers.metrics import SILENT_SECONDS, TierMetrics
from kvtiers.secondary.tier_jobs import EventTier, TierEvent
from kvtiers.tiering.estimates import LoadRate

__all__ = ["PinBudget", "Reservation", "SlowWatch", "TierOptions", "TierSlot"]

_log = logging.getLogger("kvtiers.tiering")
_TRIALS = (16, 64)  # chunks, in turn: two lengths separate latency and rate
_TRIAL_SECONDS = 5.0  # how often a tier that seems too slow is measured again
_HIT = LookupResult.HIT
_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOOK_SECONDS = 1.0
_OFFER_SECONDS = 30.0  # how often a tier of an idle engine is offered again what it has not taken
_KNOWN_SECONDS = 300.0  # so long ago something may have come too late for its tier to be called too slow
_LOOKS = 3  # in a row: the first request after a start, or after a pause, says nothing
_LEAST_LATE = 8  # an answer that does not come counts once for its request, a load once a chunk
_LATE_FOR_EACH = 10  # chunks that came too late, to each that came in time


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of a tier that the tiering code itself uses.

    ``writes_per_hour``: chunks; None: as many as it takes. ``chunks``: that it holds; None: not known. ``remembered``:
    keys that a tier with ``second_access`` remembers as seen once.
    """

    name: str
    read_only: bool = False
    admission: Admission = "all"
    deadline: float = 30.0
    may_lose: float = 0.01
    writes_per_hour: float | None = None
    chunks: int | None = None
    remembered: int = 1_000_000
    shareable: bool = False
    """Several processes may have its store open, and each finds what the others have written."""
    is_remote: bool = False
    """Its store is on another machine, as far as its type says that."""


class TierSlot:
    """A tier in its place in the order, with the manager's state about it."""

    def __init__(self, index: int, tier: EventTier, options: TierOptions) -> None:
        self.index = index
        self.tier = tier
        self.options = options
        self.name = options.name
        self.metrics = TierMetrics()
        self.read_only_by_config = options.read_only
        """The config as it is now says that nothing is stored in it."""
        self.retired = ""
        """Why it is out of use; empty while it is not."""
        self.rate = LoadRate()
        self.reserved_chunks = 0
        """Chunks for which a row was reserved so far, for this tier to fill."""
        self.promised_chunks = 0
        """Chunks that it is to load, for an engine that begins loads at the end of its step."""
        self.not_stored: OffloadKey | None = None
        """The last chunk that the tier was given and did not store, until it is offered again."""
        self._offered_at = -math.inf
        self._tried_at = -math.inf
        self._trials = 0
        self._slow_watch = SlowWatch(self.name, self.metrics, self._figures)
        self.wants_requests = _overrides(tier, "on_new_request") or _overrides(tier, "on_request_finished")
        """The tier does something when a request begins or ends."""

    def available(self) -> bool:
        """Return whether the tier may be asked and given jobs now."""
        return not self.metrics.switched_off and self._is_yes(self.tier.is_available)

    @property
    def read_only(self) -> bool:
        """Nothing is stored in the tier: by its config, or since an operator has said so."""
        return self.read_only_by_config or self.metrics.switched_read_only > 0

    @property
    def switch(self) -> str:
        """How an operator has switched the tier: "on", "off" or "read-only"; "on" leaves it to the config."""
        if self.metrics.switched_off:
            return "off"
        return "read-only" if self.metrics.switched_read_only else "on"

    def ask(self, keys: Sequence[OffloadKey], context: TierRequest) -> tuple[int, bool]:
        """Return how many of the leading keys the tier has, and whether its answer about the next one is RETRY."""
        answers = self._take(self.tier.lookup_many, keys, context)
        self.metrics.lookups += len(answers)
        hits = answers.count(_HIT)
        if hits < len(answers):
            hits = next(i for i, answer in enumerate(answers) if answer is not _HIT)
            return hits, answers[hits] is LookupResult.RETRY
        return hits, False

    def ask_each(self, keys: Sequence[OffloadKey], context: TierRequest) -> dict[OffloadKey, LookupResult]:
        """Return the tier's answers about these chunks, each asked for by itself; none about one that it raises at."""
        said = {key: answers[0] for key in keys if (answers := self._take(self.tier.lookup_many, [key], context))}
        self.metrics.lookups += len(said)
        return said

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether the tier has said of each of these chunks that it lacks it, and would say so again."""
        return self._is_yes(self.tier.lacks_all, keys)

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Ask the tier at once about chunks that will be looked up soon, if it does something about that."""
        if self.available():
            self._do(self.tier.announce, keys)

    def submit(self, job: TransferJob) -> bool:
        """Hand the job over; False if the tier did not take it, so that nothing has started."""
        return self._do(self.tier.submit_load if job.is_promotion else self.tier.submit_store, job)

    @property
    def can_delete(self) -> bool:
        """Whether the tier can remove chunks."""
        return self.tier.can_delete

    def delete(self, job: TransferJob) -> bool:
        """Hand over a job that removes chunks; False if nothing has started, as with a tier that cannot do that."""
        return self.tier.can_delete and self._do(self.tier.submit_delete, job)

    def poll(self) -> list[TierEvent]:
        """Return the tier's new events; none of a retired one. What comes before an exception is kept."""
        events: list[TierEvent] = []
        if not self.retired:
            before = forks.count
            try:  # not by _take: every step comes by here, with nothing to take
                events.extend(self.tier.poll())
            except Exception:  # noqa: BLE001 -- see _do
                self._count_raised()
            finally:
                if forks.count != before:
                    end_forked_child()
        return events

    def abandon(self, job_id: int) -> None:
        """Notify the tier that one of its jobs was given up."""
        self._do(self.tier.abandon_job, job_id)

    def release_job(self, job_id: int) -> None:
        """Detach a job whose request is over from its memory, if the tier can: a JobReleased says so."""
        self._do(self.tier.release_job, job_id)

    def kill_job(self, job_id: int, reason: str) -> None:
        """End whatever still touches the rows of a job, if the tier has processes for that."""
        self._do(self.tier.kill_job, job_id, reason)

    def cancel(self, job_id: int) -> None:
        """Notify the tier that one of its jobs is not wanted any more, through no fault of the tier's."""
        self._do(self.tier.cancel_job, job_id)

    def request_started(self, context: TierRequest) -> bool:
        """Notify the tier of a request; True if it wants all the request's chunks."""
        return self._is_yes(self.tier.on_new_request, context)

    def request_finished(self, context: TierRequest) -> None:
        """Notify the tier that no further call will name this request."""
        self._do(self.tier.on_request_finished, context)

    def end_step(self) -> None:
        """Notify the tier that the step is over."""
        if not self.retired:
            before = forks.count
            try:  # not by _do, as in ``poll``
                self.tier.on_schedule_end()
            except Exception:  # noqa: BLE001 -- see _do
                self._count_raised()
            finally:
                if forks.count != before:
                    end_forked_child()

    def tend(self, now: float) -> None:
        """Look after the tier while no step comes; between any two other calls, from any thread."""
        self._do(self.tier.tend)
        self.watch_speed(now)

    def condition(self) -> tuple[float, ...]:
        """Return what people are to know of a tier that is tended: whether it is in use, full, refusing, too slow."""
        if not self.tier.is_tended:
            return ()
        own = self._figures()
        return self.available(), own.get("full", 0), own.get("refusing", 0), self.metrics.too_slow

    def may_have_room(self, now: float) -> bool:
        """Return whether the tier is full or refuses some values, by what it said a while ago, and may be asked."""
        since = self._figures().get("not_taken_seconds", 0.0) if self.not_stored is not None else 0.0
        return min(since, now - self._offered_at) >= _OFFER_SECONDS

    def take_not_stored(self, now: float) -> Sequence[OffloadKey]:
        """Return the chunk that is to be offered to the tier again, if there is one."""
        key, self.not_stored, self._offered_at = self.not_stored, None, now
        return [] if key is None else [key]

    def watch_speed(self, now: float) -> None:
        """Log when the tier becomes too slow, and when it is fast enough again."""
        if line := self._slow_watch.look(now):
            _log.warning("%s", line)

    def _figures(self) -> dict[str, float]:
        return self.own_stats(lambda _name: dict(self.tier.stats()))

    def has_pending_work(self) -> bool:
        """Return whether the tier wants the engine to keep stepping."""
        return self._is_yes(self.tier.has_pending_work)

    def has_spoken(self) -> bool:
        """Return whether the tier has reported to the engine's thread that it is open, or why it is not."""
        return self.tier.has_spoken()

    def own_stats(self, read: Callable[[str], dict[str, float]]) -> dict[str, float]:
        """Return the tier's own figures, read by its name."""
        before = forks.count
        try:
            return read(self.name)
        except Exception:  # noqa: BLE001 -- see _do
            self._count_raised()
            return {}
        finally:
            if forks.count != before:
                end_forked_child()

    def retire(self, reason: str) -> None:
        """Put a tier that breaks the contract out of use, for good."""
        self.metrics.refused_results += 1
        if not self.retired:
            self.retired = reason
            self.metrics.out_of_use = 1
            _log.error("%s: put out of use: %s; restart the engine to use it again", self.name, reason)

    def leave(self) -> None:
        """Make no further call to the tier: it is being closed."""
        self.retired = self.retired or "it is closed"

    @property
    def ended_chunks(self) -> int:
        """Reserved chunks that are no longer in flight: they landed, or never will."""
        return self.reserved_chunks - self.metrics.loading_chunks

    def seconds_of(self, chunks: int, seconds: float) -> float:
        """Return what loading so many chunks takes by the tier's rate; ``seconds``, where no load was measured yet.

        The seconds of jobs that run side by side all count in their sum.
        """
        per_chunk = self.rate.seconds_per_chunk
        return seconds if per_chunk is None else chunks * per_chunk

    def count_saved(self, computing: float, loading: float) -> None:
        """Count the seconds saved by loads that took ``loading`` seconds instead of ``computing``."""
        self.metrics.computing_seconds += computing
        self.metrics.saved_seconds += max(0.0, computing - loading)

    def trial(self, now: float) -> int:
        """Return how many chunks may be loaded only to measure the tier again: a few every 5 s, else none."""
        if now - max(self.rate.measured_at, self._tried_at) < _TRIAL_SECONDS:
            return 0
        self._tried_at = now
        self._trials += 1
        return _TRIALS[(self._trials - 1) % len(_TRIALS)]

    # The engine's step makes a dozen of these calls: no layer more than these. A child that a tier forks in one of them
    # ends with the call, as in ``same_process``: it would go on as a second engine.

    def _do(self, call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        """Make a call; False if it raised, or if the tier is retired and was not called."""
        if self.retired:
            return False
        before = forks.count
        try:
            call(*args, **kwargs)
        except Exception:  # noqa: BLE001 -- what plugin_boundary is, without its two calls
            self._count_raised()
            return False
        finally:
            if forks.count != before:
                end_forked_child()
        return True

    def _is_yes(self, call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        if self.retired:
            return False
        before = forks.count
        try:
            return bool(call(*args, **kwargs))
        except Exception:  # noqa: BLE001 -- see _do
            self._count_raised()
            return False
        finally:
            if forks.count != before:
                end_forked_child()

    def _take(self, call: Callable[_P, Iterable[_T] | None], *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Return what a call returns, as a list; what comes before an exception is kept."""
        taken: list[_T] = []
        if not self.retired:
            before = forks.count
            try:
                taken.extend(call(*args, **kwargs) or ())
            except Exception:  # noqa: BLE001 -- see _do
                self._count_raised()
            finally:
                if forks.count != before:
                    end_forked_child()
        return taken

    def _count_raised(self) -> None:
        self.metrics.raised = times = self.metrics.raised + 1
        raised = error_text(sys.exception() or Exception())
        log_with_backoff(times, _log.exception, "%s: the tier raised %s (%d times so far)", self.name, raised, times)


class PinBudget:
    """The pin budget: the most rows that jobs, reservations and quarantine may hold, of one tier and of all.

    Rows are taken by a reservation and given back by it, nowhere else. It goes with its rows: from the lookup or the
    completed store that makes it to the job that moves them, which releases it when it has ended. Shares are of all
    rows; a row that several tiers read counts for each of them.
    """

    def __init__(self, num_rows: int, all_tiers: float, one_tier: float) -> None:
        self.set_shares(num_rows, all_tiers, one_tier)
        self.held = 0
        """Rows that all tiers together hold."""

    def set_shares(self, num_rows: int, all_tiers: float, one_tier: float) -> None:
        """Use other shares from now on; what is held above them is not taken back."""
        # Never above the share, but for the one row that each gets. The small number is floating point's.
        self.all_rows = max(1, int(all_tiers * num_rows + 1e-9))
        """Rows that all tiers together may hold."""
        self.tier_rows = max(1, int(one_tier * num_rows + 1e-9))
        """Rows that one tier may hold."""

    @property
    def room_in_all(self) -> int:
        """Rows that all tiers together may still hold."""
        return max(0, self.all_rows - self.held)

    def room(self, slot: TierSlot) -> int:
        """Rows that this tier may still hold, by its own budget and that of all tiers."""
        return max(0, min(self.tier_rows - slot.metrics.pinned_rows, self.all_rows - self.held))

    def count_over(self, slot: TierSlot, chunks: int) -> None:
        """Count chunks for which this tier had no room, for the budget that has the least left."""
        if self.tier_rows - slot.metrics.pinned_rows <= self.all_rows - self.held:
            slot.metrics.over_one_tier += chunks
        else:
            slot.metrics.over_all_tiers += chunks

    def reserve(self, slot: TierSlot, rows: int = 0) -> "Reservation":
        """Set aside so many rows for a tier; the caller has checked that there is room for them."""
        slot.metrics.pinned_rows += rows
        self.held += rows
        return Reservation(self, slot, rows)

    def give_back(self, slot: TierSlot, rows: int) -> None:
        """Take so many rows back from a reservation of this tier: for ``Reservation`` alone."""
        slot.metrics.pinned_rows -= rows
        self.held -= rows


class Reservation:
    """Rows of the budgets that are set aside for one tier, until they are released, all at once or a few at a time."""

    __slots__ = ("_budget", "rows", "slot")

    def __init__(self, budget: PinBudget, slot: TierSlot, rows: int) -> None:
        self._budget = budget
        self.slot = slot
        self.rows = rows

    def add(self, rows: int) -> None:
        """Set aside so many rows more."""
        self._budget.reserve(self.slot, rows).move(rows, self)

    def release(self, rows: int | None = None) -> None:
        """Give back so many rows, or all; when all are back nothing more happens."""
        back = self.rows if rows is None else min(rows, self.rows)
        self.rows -= back
        self._budget.give_back(self.slot, back)

    def split(self, rows: int) -> "Reservation":
        """Return a reservation of so many of these rows; this one keeps the others."""
        part = Reservation(self._budget, self.slot, 0)
        self.move(rows, part)
        return part

    def move(self, rows: int, to: "Reservation") -> None:
        """Let another reservation of the same tier have so many of these rows."""
        self.rows -= rows
        to.rows += rows


def _overrides(tier: SecondaryTierManager, method: str) -> bool:
    return getattr(type(tier), method, None) is not getattr(SecondaryTierManager, method)


class SlowWatch:
    """The watch over a slow tier: one log line when it becomes too slow, with what to do, and one when it recovers.

    Late answers and loads are no failure: the requests are computed, and all looks well. A tier counts as too slow
    when, in several checks in a row, nearly all of its answers and loads come too late. ``own``: the tier's own
    figures, for the line. Engine's thread.
    """

    def __init__(self, name: str, metrics: TierMetrics, own: Callable[[], Mapping[str, float]]) -> None:
        self._name = name
        self._metrics = metrics
        self._own = own
        self._look_at = 0.0
        self._seen = (0, 0)
        self._late_at = -math.inf
        self._run = 0
        """Looks in a row that say the opposite of what holds."""
        self._late = 0
        """What came too late in this run, and in the time in which it is too slow."""

    def look(self, now: float) -> str:
        """Check the figures, once a second at most; return a line for the log, or "" for none."""
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_SECONDS
        metrics = self._metrics
        before, self._seen = self._seen, (metrics.wait_expired + metrics.recomputed_cheaper, metrics.loaded_chunks)
        late, brought = (count - earlier for count, earlier in zip(self._seen, before, strict=True))
        if late:
            self._late_at = now
        elif metrics.too_slow and now - self._late_at >= _KNOWN_SECONDS:
            self._run = self._late = metrics.too_slow = 0  # without a line: it may be so, or not
        if not (late or brought):
            return ""
        if metrics.too_slow:
            return self._ends(late, brought)
        return self._begins(late, brought)

    def _begins(self, late: int, brought: int) -> str:
        is_late = late > _LATE_FOR_EACH * brought
        self._run, self._late = (self._run + 1, self._late + late) if is_late else (0, 0)
        if self._run < _LOOKS or self._late < _LEAST_LATE:
            return ""
        self._run, self._metrics.too_slow = 0, 1
        own = self._own()
        if (silent := own.get("silent_seconds", 0.0)) >= SILENT_SECONDS:
            return (
                f"{self._name}: no answer for {silent:.0f} s: {own.get('waiting_calls', 0):.0f} calls wait for its "
                "store, and what it may have was computed; look whether its backend hangs, and at the way to it"
            )
        return (
            f"{self._name}: too slow: {self._late} of its answers and loads came too late{_answers(own)}, and what "
            "it may have was computed; look at the way to its store, or give it longer by 'lookup_wait' and 'load_wait'"
        )

    def _ends(self, late: int, brought: int) -> str:
        self._late += late
        self._run = self._run + 1 if brought >= late else 0
        if self._run < _LOOKS:
            return ""
        late, self._late, self._run, self._metrics.too_slow = self._late, 0, 0, 0
        return f"{self._name}: fast enough again; {late} of its answers and loads came too late meanwhile"


def _answers(own: Mapping[str, float]) -> str:
    if not (questions := own.get("lookup_questions", 0)):
        return ""
    return f" (an answer takes it {own.get('lookup_seconds', 0.0) / questions * 1e3:.0f} ms)"
