"""The round trip through an open tier: write one random value, read it back, compare, delete.

A probe yields findings. ``Bench.stage`` always has the current stage, as a part of a sentence, for the report on a
tier that raises or hangs.
"""

import os
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvtiers.api import (
    ChunkStore,
    Finding,
    JobResult,
    KvtiersError,
    LookupResult,
    NotKept,
    SecondaryTierManager,
    StoreEntry,
    SupportsListing,
    TransferJob,
    make_offload_key,
)
from kvtiers.api.answers import length_of
from kvtiers.api.units import format_duration, format_size
from kvtiers.cli.open_tier import anonymous_region
from kvtiers.layout.borrowed_views import LentValues
from kvtiers.types import RequestContext

__all__ = [
    "OWN_FAULT",
    "REACH",
    "Bench",
    "ProbeError",
    "no_listing",
    "not_kept",
    "probe_manager",
    "probe_name",
    "probe_store",
]

_ROWS = 3
_LISTED = 100
_POLL_SECONDS = 0.001
REACH = "check the tier's options, and that its backend runs and can be reached from here"
OWN_FAULT = "this is a bug of the tier's plugin; report it to its author"
_T = TypeVar("_T")
_GONE = "the value just written cannot be read back: absent, or of another length"
_GONE_FIX = f"see whether something else writes or deletes there; if nothing does, {OWN_FAULT}"


class ProbeError(Exception):
    """The tier broke its contract; the text says how."""

    def __init__(self, text: str, fix: str = OWN_FAULT) -> None:
        super().__init__(text)
        self.fix = fix


class Bench:
    """The workbench of one trial: an anonymous region of three rows, a random value, and facts about the tier.

    ``needs_listing``: the tier's options need a store that can list. ``report`` gets each stage of the trial as it
    begins.
    """

    def __init__(
        self,
        value_bytes: int,
        namespace: str,
        *,
        read_only: bool,
        needs_listing: bool = False,
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.value_bytes = value_bytes
        self.namespace = namespace
        self.read_only = read_only
        self.needs_listing = needs_listing
        self.is_still_called = False
        """A call is still running: the tier must not be closed meanwhile."""
        self.region = anonymous_region(_ROWS, value_bytes)
        self.payload = os.urandom(value_bytes)
        self.view(0)[:] = self.payload
        self._report = report
        self.stage = "being opened"
        self.known: tuple[str, bytes] | None = None
        """A value of a read-only tier, no longer than ``value_bytes``, by its name."""

    @property
    def stage(self) -> str:
        """The current stage, as a part of a sentence."""
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self._stage = stage
        self._report(stage)

    def view(self, row: int) -> memoryview:
        """Return a view of a row: the first one holds the probe value, tiers read into the others."""
        return self.region[row * self.value_bytes : (row + 1) * self.value_bytes]

    def borrow(
        self,
        store: object,
        method: str,
        rows: Sequence[int],
        *,
        readonly: bool,
        call: Callable[[list[list[memoryview]]], _T],
        lengths: Sequence[int] = (),
        last: int = 0,
    ) -> _T:
        """Make a call of a store that gets views of these rows; ProbeError if it keeps one.

        ``lengths``: of the values; all of the row where there are none. ``last``: each value is in two views, the
        second of so many bytes; 0: it is in one.
        """
        lengths = lengths or [self.value_bytes] * len(rows)
        values = []
        for row, length in zip(rows, lengths, strict=True):
            at, first = row * self.value_bytes, length - last
            ends = [(self.region, at + first, last)] if last else []
            values.append([(self.region, at, first), *ends])
        lent = LentValues(values, readonly=readonly)
        answer = call(lent.views)
        if not lent.take_back():
            raise ProbeError(f"{type(store).__name__}.{method} kept the buffer that it was given, after its return")
        return answer

    def forget(self) -> None:
        """Overwrite the rows that tiers read into, so that they do not hold the probe value."""
        for row in range(1, _ROWS):
            self.view(row)[:] = bytes(self.value_bytes)

    def compare(self, *rows: int) -> None:
        """Raise ProbeError unless these rows hold the probe value, and the first one still does."""
        if any(bytes(self.view(row)) != self.payload for row in rows):
            raise ProbeError("the value read back is not the value written")
        if bytes(self.view(0)) != self.payload:
            raise ProbeError("the tier changed the memory that it was to write from")


def probe_name() -> str:
    """Return a name for a value of the trial's own: no engine uses such a name, and no other trial this one."""
    return f"_check/{secrets.token_hex(16)}"


def probe_store(store: ChunkStore, bench: Bench) -> Iterator[Finding]:
    """Try a ``ChunkStore``; one that is read-only is only listed and read."""
    if bench.read_only:
        yield _read_only(store, bench)
        return
    name, absent = probe_name(), probe_name()
    size = bench.value_bytes
    bench.stage = "writing the probe value"
    begin = time.monotonic()
    bench.borrow(store, "write", [0], readonly=True, call=lambda views: store.write(name, *views[0]))
    written = time.monotonic()
    try:
        bench.stage = "saying whether the probe value is there"
        _expect(
            list(store.exists([name, absent])), [True, False], "exists() of a value that is there and one that is not"
        )
        bench.stage = "reading the probe value back"
        asked = time.monotonic()
        found = _read(store, bench, name)
        if found != size:
            length = f" (read_into() gave {found} bytes, expected {size})" if found else ""
            raise ProbeError(_GONE + length, _GONE_FIX)
        seconds = (written - begin, time.monotonic() - asked)
        bench.compare(1)
    finally:
        bench.stage, before = "deleting the probe value", bench.stage
        store.delete([name])
        bench.stage = before
    bench.stage = "saying that the probe value is deleted"
    _expect(list(store.exists([name])), [False], "exists() of the deleted probe value")
    yield Finding("ok", f"wrote, read back, compared and deleted {format_size(size)} {_times(*seconds)}")


def not_kept(error: NotKept) -> ProbeError:
    """Return what to report of a store that does not keep the probe value."""
    if not error.full:
        return ProbeError(f"the store takes no values: {error}", "let it be written, or set 'read_only: true'")
    fix = "give the store more room, or delete from it; a full store drops what it should keep"
    return ProbeError(f"the store is full: {error}", fix)


def _read(store: ChunkStore, bench: Bench, name: str) -> int:
    answer = bench.borrow(store, "read_into", [1], readonly=False, call=lambda views: store.read_into(name, *views[0]))
    return length_of(store, "read_into", bench.value_bytes, answer)


def _expect(got: object, expected: object, what: str) -> None:
    if got != expected:
        raise ProbeError(f"{what} gave {_plainly(got)}, expected {_plainly(expected)}")


def _plainly(answer: object) -> str:
    return str(answer.value) if isinstance(answer, LookupResult) else repr(answer)


def _times(write: float, read: float) -> str:
    return f"(write {format_duration(write)}, read {format_duration(read)})"


def _read_only(store: ChunkStore, bench: Bench) -> Finding:
    bench.stage = "looking for a value that is not there"
    absent = probe_name()
    _expect(list(store.exists([absent])), [False], "exists() of a value that is not there")
    _expect(_read(store, bench, absent), 0, "read_into() of an absent value")
    if not isinstance(store, SupportsListing):
        return Finding("ok", "read-only: it answers; it cannot list its values, so none was read")
    bench.stage = "listing its values"
    prefix = f"{bench.namespace}/"
    try:
        entries = list(islice(store.list(prefix), _LISTED))
    except KvtiersError as error:
        return no_listing(bench, error)
    for entry in entries:
        if not isinstance(entry, StoreEntry):
            raise ProbeError(f"list() yielded {entry!r:.80}, expected a StoreEntry")
        if not entry.name.startswith(prefix):
            raise ProbeError(f"list() of what begins with {prefix!r} yielded {entry.name!r:.80}")
    if not entries:
        fix = "correct 'namespace' and the tier's options if it should have some"
        return Finding("warning", f"read-only, and it has no value under {prefix!r}", fix)
    count = f"{len(entries)} values" if len(entries) < _LISTED else f"{_LISTED} values or more"
    fitting = next((entry for entry in entries if 0 < entry.nbytes <= len(bench.region)), None)
    if fitting is None:
        smallest = min(entry.nbytes for entry in entries)
        return Finding("warning", f"read-only: {count} listed, none read", f"pass --value-bytes {smallest} to read one")
    bench.stage = f"reading {fitting.name!r}"
    begin = time.monotonic()
    found = store.read_into(fitting.name, bench.region[: fitting.nbytes]) == fitting.nbytes
    if found and fitting.nbytes <= bench.value_bytes:
        bench.known = fitting.name, bytes(bench.region[: fitting.nbytes])
    # Another writer may have deleted or replaced it since it was listed, so that absence is no fault.
    how = f"one of {format_size(fitting.nbytes)} read in {format_duration(time.monotonic() - begin)}"
    return Finding("ok", f"read-only: {count} listed, {how if found else 'the first one gone before it was read'}")


def no_listing(bench: Bench, error: KvtiersError) -> Finding:
    """Return the finding on a store that says why it cannot list now: an error only where the options need it."""
    if bench.needs_listing:
        return Finding("error", f"its quotas cannot be kept, since its values cannot be listed: {error}")
    return Finding("warning", f"its values cannot be listed, so 'kvtiers store' cannot be used with it: {error}")


def probe_manager(tier: SecondaryTierManager, bench: Bench) -> Iterator[Finding]:
    """Try a ``SecondaryTierManager`` with a store and a promotion of one probe key, stepped as an engine would."""
    key = make_offload_key(secrets.token_bytes(32), 0)
    request = RequestContext("kvtiers-check")
    tier.on_new_request(request)
    try:
        bench.stage = "looking up a key that is not there"
        _expect(_lookup(tier, key, request), LookupResult.MISS, "lookup() of a key that is not there")
        if bench.read_only:
            yield Finding("ok", "read-only: it answers lookups; a tier of this kind cannot list, so nothing was read")
            return
        begin = time.monotonic()
        bench.stage = "storing the probe value"
        _transfer(tier, TransferJob(1, [key], _rows(0), is_promotion=False, context=request))
        stored = time.monotonic()
        bench.stage = "looking up the probe value"
        _expect(_lookup(tier, key, request), LookupResult.HIT, "lookup() of the stored probe key")
        bench.stage = "loading the probe value"
        asked = time.monotonic()
        _transfer(tier, TransferJob(2, [key], _rows(1), is_promotion=True, context=request))
        seconds = (stored - begin, time.monotonic() - asked)
        bench.compare(1)
    finally:
        tier.on_request_finished(request)
    yield Finding("ok", f"stored, loaded and compared {format_size(bench.value_bytes)} {_times(*seconds)}")


def _rows(row: int) -> memoryview:
    return memoryview(array("i", [row]))


def _step_until(tier: SecondaryTierManager, done: Callable[[], bool]) -> None:
    while not done():
        tier.on_schedule_end()
        time.sleep(_POLL_SECONDS)


def _lookup(tier: SecondaryTierManager, key: bytes, request: RequestContext) -> LookupResult:
    answers: list[LookupResult] = []

    def answered() -> bool:
        answers.append(tier.lookup_many([key], request)[0])
        return answers[-1] is not LookupResult.RETRY

    _step_until(tier, answered)
    return answers[-1]


def _transfer(tier: SecondaryTierManager, job: TransferJob) -> None:
    results: list[JobResult] = []

    def reported() -> bool:
        results.extend(tier.get_finished_jobs())
        return bool(results)

    (tier.submit_load if job.is_promotion else tier.submit_store)(job)
    _step_until(tier, reported)
    _expect([result.job_id for result in results], [job.job_id], "the finished jobs")
    if not results[0].success:
        raise ProbeError("the tier reports that the job has failed", "look at the tier's log; check its options")
