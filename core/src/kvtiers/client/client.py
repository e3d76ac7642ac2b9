"""The client as its callers see it: blocking calls from any thread, which never raise and end within their deadline."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from kvtiers._failures import error_text, log_with_backoff
from kvtiers.api import ConfigError, OffloadKey, make_offload_key
from kvtiers.client.buffers import Bytes, Views, gather, length_of, parts_of, scatter
from kvtiers.client.driver import CLOSED, Driver
from kvtiers.client.prefetch import Prefetch
from kvtiers.client.requests import Delete, Get, Prefix, Present, Put, Task
from kvtiers.client.rows import BounceRows, RowLease
from kvtiers.layout.tenants import Tenants
from kvtiers.metrics import ClientMetrics
from kvtiers.region.claims import ClaimState, ClaimTable

__all__ = ["Client", "PutResult"]

_log = logging.getLogger("kvtiers")
_JOB_BYTES = 16 << 20  # of one piece of a call: the next one is gathered while its host works on it
_CLAIMED_BYTES = 64 << 20  # of a piece that is not gathered: its host has enough to do
_MOST_PIECES = {True: 3, False: 16}  # of one call at a time: of a get, whose rows wait to be scattered, and of a put
_RELEASE_SECONDS = 0.05  # for the driver to drop what has not begun: nothing depends on it
_REVOKE_SECONDS = 0.002  # how often a claim is tried again that a host is using
_COPYING_SECONDS = 0.1  # for a host to end a copy into a caller's memory
_IN_USE = "the time of a call is over, and it is still writing into the call's memory"
_DELETED_AT_ONCE = 4_096
_LONGEST_KEY = 65_531
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Moving = TypeVar("_Moving", Put, Get)


@dataclass(frozen=True, slots=True)
class PutResult:
    """What has become of the values of one ``put``.

    ``stored[i]``: a tier has value i now, or has had it by what was seen in the last ``exists_ttl``. ``tiers``: how
    many of the values each tier has, by its name. ``error``: in one line, why some tier has not all of them; "" if each
    that takes stores has.
    """

    stored: list[bool]
    tiers: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


class _Value(NamedTuple):
    """A value of a call, and the places that it has in it: a key may be given twice."""

    key: OffloadKey
    nbytes: int
    parts: list[list[Bytes]]
    places: list[int]
    claimed: list[tuple[int, int]] | None = None
    """Where its parts lie in the client's region; None: not all of them do."""


class Client:
    """Reads and writes values by their keys, in the tiers of a config. Made by ``open_client``. Any thread.

    A key is 1 to 65,531 bytes that name exactly this content: a key that is stored already is not stored again. A value
    is a C-contiguous buffer or a list of them, one behind the other, whose length is one of the client's
    ``value_bytes``; of another length it is not stored, and not found. ``timeout``: seconds in which the call ends, by
    default the client's; what is not done by then is False in its result. ``tenant``: whose values they are, by default
    the client's; another one's, or those of none, are never found, stored or removed. No call raises: mistakes,
    failures and a closed client are results too, counted in ``stats``, and logged with backoff.
    """

    def __init__(
        self,
        driver: Driver,
        rows: BounceRows,
        groups: Mapping[int, int],
        value_bytes: int,
        deadline: float,
        tier_stats: Callable[[], dict[str, Any]],
        close: Callable[[float], None],
        tenants: Tenants,
        tenant: str = "",
    ) -> None:
        """Take the parts. ``groups``: the KV group of each length of values. ``value_bytes``: the default length.

        ``tenants``: whose values there may be. ``tenant``: whose they are where a call does not say it.
        """
        self._driver = driver
        self._rows = rows
        self._groups = groups
        self._value_bytes = value_bytes
        self._deadline = deadline
        self._tier_stats = tier_stats
        self._close = close
        self._tenants = tenants
        self._tenant = tenant
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._metrics = ClientMetrics()
        self._is_closed = False
        self.region: memoryview = rows.region
        """Memory for the caller that tier hosts map, so that values in it pass no bounce row.

        It is the caller's own, or ``region_bytes`` of zeros: to divide, for numpy or torch (``frombuffer``), also after
        ``close``. These are unmapped when the client and all that was made from them are gone, and no forked child has
        them.
        """

    # -- calls

    def put(
        self,
        keys: Sequence[bytes],
        views: Sequence[Views],
        timeout: float | None = None,
        *,
        tenant: str | None = None,
    ) -> PutResult:
        """Store ``views[i]`` under ``keys[i]``, in all tiers that take stores, and wait for them.

        The buffers are read during the call alone.
        """
        result = self._never_raises(self._put, keys, views, timeout, tenant)
        return result if result is not None else PutResult([False] * _count(keys), error="not done; see the log")

    def get_into(
        self,
        keys: Sequence[bytes],
        views: Sequence[Views],
        timeout: float | None = None,
        *,
        in_place: bool = False,
        tenant: str | None = None,
    ) -> list[bool]:
        """Fill ``views[i]`` with the value of ``keys[i]``, where a tier has it; return for each whether it is there.

        The tiers are asked in the config's order. Views of values that were not found keep what they held; nothing is
        written to any of them after the call.

        ``in_place``: values whose views lie in ``region`` may be read straight there, without a copy, by a store that
        can (``SupportsScatter``); then views of values that were not found may hold anything. As the memory is the
        caller's again when the call ends, a store that still reads into it then costs its tier host, which is killed:
        for calls with time enough. The call ends when the kernel has ended that process.
        """
        found = self._never_raises(self._get, keys, views, timeout, tenant, in_place)
        return found if found is not None else [False] * _count(keys)

    def prefetch(
        self,
        keys: Sequence[bytes],
        value_bytes: int | None = None,
        timeout: float | None = None,
        *,
        tenant: str | None = None,
    ) -> list[bool]:
        """Bring values of this length nearer; return for each key whether it is near now.

        Near is the first usable tier that takes stores, or one before it: what only a later tier has is loaded from
        there and stored in the near one. Few rows are used at a time, so that other calls find some. ``value_bytes``:
        by default the first length that the client was opened with.
        """
        near = self._never_raises(self._prefetch, keys, value_bytes, timeout, tenant)
        return near if near is not None else [False] * _count(keys)

    def exists_prefix(
        self,
        keys: Sequence[bytes],
        value_bytes: int | None = None,
        timeout: float | None = None,
        *,
        tenant: str | None = None,
    ) -> int:
        """Return how many of the leading keys the tiers have with values of this length.

        ``value_bytes``: by default the first one that the client was opened with. An answer of the tiers is reused for
        ``exists_ttl``, an absence for a second at most.
        """
        return self._never_raises(self._prefix, keys, value_bytes, timeout, tenant) or 0

    def exists(
        self,
        keys: Sequence[bytes],
        value_bytes: int | None = None,
        timeout: float | None = None,
        *,
        tenant: str | None = None,
    ) -> list[bool]:
        """Return for each key, whatever the others are, whether a tier has it; else as ``exists_prefix``."""
        there = self._never_raises(self._exists, keys, value_bytes, timeout, tenant)
        return there if there is not None else [False] * _count(keys)

    def delete(
        self,
        keys: Sequence[bytes],
        value_bytes: int | None = None,
        timeout: float | None = None,
        *,
        tenant: str | None = None,
    ) -> list[bool]:
        """Remove the values of these keys; return for each whether every tier that takes stores is without it now.

        ``value_bytes``: of this length alone; by default of all the client's lengths. A key that is nowhere is True. A
        value in a read-only tier stays, and is found. A tier that moves rows by itself (``SecondaryTierManager``) has
        no way to remove one: with such a tier all are False, and the log says so. A ``put`` of the same key at the same
        time may win or lose.
        """
        gone = self._never_raises(self._delete, keys, value_bytes, timeout, tenant)
        return gone if gone is not None else [False] * _count(keys)

    def stats(self) -> dict[str, Any]:
        """Return the counts of this client since it was opened, and each tier's figures under ``tiers``.

        Those of a tier are its own, and under ``transfers`` what the client has moved (``kvtiers.metrics.export``).
        With KV events also what was published of them, under ``events``.
        """
        found = self._metrics.as_data()
        found |= {"bounce_rows": self._rows.count, "free_bounce_rows": len(self._rows.free)}
        tiers: dict[str, Any] = {}
        if self._is_usable():
            task = Task(lambda: tiers.update(self._tier_stats()), time.monotonic() + self._deadline)
            if self._driver.send(task):
                task.over.wait(self._deadline)
        publisher = self._driver.publisher
        return found | {"tiers": tiers} | ({} if publisher is None else {"events": dict(publisher.report())})

    def close(self, timeout: float = 5.0) -> None:
        """Let calls in flight end, within so many seconds, then close the tiers. Later calls find and store nothing."""
        self._never_raises(self._close_once, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _close_once(self, timeout: float) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._close(timeout)

    def _put(
        self, keys: Sequence[bytes], views: Sequence[Views], timeout: float | None, tenant: str | None
    ) -> PutResult:
        until = self._until(timeout)
        values = self._values(keys, views, tenant, writable=False)
        todo = self._pieces(values)
        stored = [False] * len(keys)
        tiers: dict[str, int] = {}
        error = ""
        with closing(self._moved(Put, todo, until)) as pieces:
            for some, request in pieces:
                by_tier = {name: set(good) for name, good in list(request.stored.items())}
                for name, good in by_tier.items():
                    tiers[name] = tiers.get(name, 0) + len(good)
                for value in some:
                    for place in value.places:
                        stored[place] = any(value.key in good for good in by_tier.values())
                error = error or request.error
        if todo:
            error = error or (CLOSED if self._is_closed else "no bounce row was free in time")
        if sum(len(value.places) for value in values) < len(keys):
            error = error or "some values were refused; see the log"
        nbytes = sum(value.nbytes for value in values)
        self._count(puts=1, put_values=len(keys), put_bytes=nbytes, stored_values=sum(stored))
        return PutResult(stored, tiers, error)

    def _get(
        self,
        keys: Sequence[bytes],
        views: Sequence[Views],
        timeout: float | None,
        tenant: str | None,
        in_place: bool,
    ) -> list[bool]:
        until = self._until(timeout)
        todo = self._pieces(self._values(keys, views, tenant, writable=True))
        found = [False] * len(keys)
        with closing(self._moved(Get, todo, until, in_place=in_place)) as pieces:
            for some, request in pieces:
                self._scatter(some, request, found)
        self._count(gets=1, get_values=len(keys), found_values=sum(found))
        return found

    def _moved(
        self, kind: type[_Moving], todo: deque[Sequence[_Value]], until: float, *, in_place: bool = False
    ) -> Generator[tuple[Sequence[_Value], _Moving], None, None]:
        """Move values piece by piece; yield each when it is over, or its time is, and no host writes to it any more.

        Its rows are the caller's until the next one is asked for. What is left in ``todo`` has got no rows in time.
        """
        begun: deque[tuple[Sequence[_Value], _Moving]] = deque()
        try:
            while todo or begun:
                if todo and len(begun) < _MOST_PIECES[kind is Get]:
                    # Not waited for while this call has some rows: they may be all that there are.
                    piece = self._begin(kind, todo, until, 0.0 if begun else until, in_place=in_place)
                    if piece is not None:
                        begun.append(piece)  # first: an interrupt must leave no claim open
                        self._driver.send(piece[1])
                        continue
                    if not begun:
                        break
                some, request = begun[0]
                self._await(request, until)
                self._revoke(some, request)
                yield some, request
                begun.popleft()[1].release()
        finally:
            for some, request in begun:
                self._revoke(some, request)
                request.release()

    def _begin(
        self,
        kind: type[_Moving],
        todo: deque[Sequence[_Value]],
        until: float,
        rows_until: float,
        *,
        in_place: bool,
    ) -> tuple[Sequence[_Value], _Moving] | None:
        """Return the next piece, or as much of it as there are rows for, to be sent; None if there are none until then.

        The caller holds the request's rows.
        """
        claims = self._rows.claims if todo[0][0].claimed is not None else None
        lease: RowLease | None = None
        if self._is_usable():
            lease = (self._rows if claims is None else claims).take(len(todo[0]), rows_until)
        if lease is None:
            return None
        piece = todo.popleft()
        some, rest = piece[: len(lease.rows)], piece[len(lease.rows) :]
        if rest:
            todo.appendleft(rest)
        try:
            for row, value in zip(lease.rows, some, strict=True):
                if claims is not None:
                    claims.table.open(row, value.claimed or (), in_place=in_place)
                elif kind is Put:
                    gather(value.parts[0], self._rows.row(row, value.nbytes))
            request = kind([value.key for value in some], lease, until)
        except BaseException:
            lease.release()
            raise
        if claims is not None:
            self._count(direct_values=len(some))
        return some, request

    def _revoke(self, some: Sequence[_Value], request: Put | Get) -> None:
        """End the claims of a piece, so that no host writes to its memory any more; learn what has landed there."""
        claims = self._rows.claims
        if claims is None or some[0].claimed is None:
            return
        left = dict(zip(request.lease.rows, some, strict=True))
        states = self._ended(request, claims.table, left) if request.stop() else {}
        if isinstance(request, Get):
            for row, value in left.items():
                # Also what a job has done whose result came when the request was over.
                if value.key not in request.found and states.get(row, claims.table.state(row)) is ClaimState.LANDED:
                    request.found[value.key] = row

    def _ended(self, request: Put | Get, table: ClaimTable, rows: Collection[int]) -> dict[int, ClaimState]:
        """Revoke these claims and return their last states; wait for a host that writes to their memory just now."""
        # Neither task may be dropped for coming late.
        soon = Task(lambda: self._driver.release_jobs(request), math.inf)
        if self._driver.send(soon):
            soon.over.wait(_RELEASE_SECONDS)
        states: dict[int, ClaimState] = {}
        kill_at = time.monotonic() + _COPYING_SECONDS
        while True:
            for row in rows:
                if row not in states and (state := table.revoke(row)) is not None:
                    states[row] = state
            if len(states) == len(rows):
                return states
            if not request.stop():  # no host uses them any more, though one has left a lock behind
                return states | {row: table.state(row) for row in rows if row not in states}
            if time.monotonic() >= kill_at:
                kill_at = math.inf
                self._driver.send(Task(lambda: self._driver.kill_jobs(request, _IN_USE), math.inf))
            time.sleep(_REVOKE_SECONDS)

    def _scatter(self, some: Sequence[_Value], request: Get, found: list[bool]) -> None:
        for value in some:
            if (row := request.found.get(value.key)) is not None:
                for place, parts in zip(value.places, value.parts, strict=True):
                    if row < self._rows.count:
                        scatter(self._rows.row(row, value.nbytes), parts)
                    found[place] = True
                self._count(found_bytes=value.nbytes)

    def _prefix(self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None) -> int:
        until = self._until(timeout)
        self._count(lookups=1)
        named = self._named(keys, self._value_bytes if value_bytes is None else value_bytes, tenant)
        leading = [key for [key] in takewhile(bool, named)]
        if not leading or not self._is_usable():
            return 0
        request = Prefix(leading, until)
        self._driver.send(request)
        self._await(request, until)
        return request.length

    def _prefetch(
        self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None
    ) -> list[bool]:
        until = self._until(timeout)
        named = self._named(keys, self._value_bytes if value_bytes is None else value_bytes, tenant)
        wanted = list(dict.fromkeys(key for names in named for key in names))
        most = max(1, min(_JOB_BYTES // self._rows.row_stride, self._rows.count // 4))
        near: set[OffloadKey] = set()
        while wanted and self._is_usable() and (lease := self._rows.take(min(most, len(wanted)), until)) is not None:
            some, wanted = wanted[: len(lease.rows)], wanted[len(lease.rows) :]
            request = Prefetch(some, lease, until)
            try:
                self._driver.send(request)
                self._await(request, until)
                near |= request.near
            finally:
                request.release()
        found = [bool(names) and near.issuperset(names) for names in named]
        self._count(prefetches=1, prefetched_values=sum(found))
        return found

    def _exists(
        self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None
    ) -> list[bool]:
        until = self._until(timeout)
        self._count(lookups=1)
        named = self._named(keys, self._value_bytes if value_bytes is None else value_bytes, tenant)
        if not any(named) or not self._is_usable():
            return [False] * len(keys)
        request = Present([key for names in named for key in names], until)
        self._driver.send(request)
        self._await(request, until)
        return [bool(names) and request.there.issuperset(names) for names in named]

    def _delete(
        self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None
    ) -> list[bool]:
        until = self._until(timeout)
        self._count(deletes=1)
        named = self._named(keys, value_bytes, tenant)
        wanted = list(dict.fromkeys(key for names in named for key in names))
        gone: set[OffloadKey] = set()
        error = "" if self._is_usable() else CLOSED
        for start in range(0, len(wanted) if not error else 0, _DELETED_AT_ONCE):
            request = Delete(wanted[start : start + _DELETED_AT_ONCE], self._rows.none(), until)
            self._driver.send(request)
            self._await(request, until)
            gone |= request.gone
            error = error or request.error
        found = [bool(names) and gone.issuperset(names) for names in named]
        self._count(deleted_values=sum(found))
        if kept := len(wanted) - len(gone):
            times = self._count(undeleted_values=kept)
            text = "client: %d values may not be deleted: %s (%d so far)"
            log_with_backoff(times, _log.warning, text, kept, error or "a store has failed; see its log", times)
        return found

    def _whose(self, tenant: str | None, values: int) -> str | None:
        """Return the tenant of a call, "" for none; None for one that may not be: its values are refused."""
        try:
            return self._tenants.check(self._tenant if tenant is None else tenant)
        except (ConfigError, TypeError) as error:
            self._refuse(f"a call: {error}", values)
            return None

    def _named(self, keys: Sequence[bytes], value_bytes: int | None, tenant: str | None) -> list[list[OffloadKey]]:
        """Return the names of each key for values of this length, or of all lengths; none for a mistake: refused."""
        whose = self._whose(tenant, len(keys))
        if whose is None:
            return [[] for _ in keys]
        groups = [*self._groups.values()] if value_bytes is None else [self._groups.get(value_bytes, -1)]
        if -1 in groups:
            self._refuse(f"values of {value_bytes!r} bytes; this client's have {self._lengths()}", len(keys))
            return [[] for _ in keys]
        named = [
            [make_offload_key(key, group, whose) for group in groups] if _is_key(key, whose) else [] for key in keys
        ]
        if wrong := named.count([]):
            self._refuse("a key that is not 1 to 65,531 bytes", wrong)
        return named

    def _values(
        self, keys: Sequence[bytes], views: Sequence[Views], tenant: str | None, *, writable: bool
    ) -> list[_Value]:
        """Return the values of a call, each key once; those that do not fit are refused."""
        values: dict[OffloadKey, _Value] = {}
        whose = self._whose(tenant, len(keys))
        if whose is None:
            return []
        if len(keys) != len(views):
            self._refuse(f"{len(keys)} keys with {len(views)} values", len(keys))
            return []
        for place, (key, view) in enumerate(zip(keys, views, strict=True)):
            try:
                parts = parts_of(view, writable=writable)
                group = self._groups.get(length_of(parts))
            except (TypeError, ValueError, BufferError) as error:
                self._refuse(error_text(error))
                continue
            if group is None or not _is_key(key, whose):
                what = f"of {length_of(parts)} bytes" if group is None else f"with a key of {type(key).__name__}"
                self._refuse(f"a value {what}; this client's have {self._lengths()}")
                continue
            offload_key = make_offload_key(key, group, whose)
            if (known := values.get(offload_key)) is None:
                values[offload_key] = _Value(offload_key, length_of(parts), [parts], [place])
            else:
                known.parts.append(parts)
                known.places.append(place)
        return [self._claimed(value) for value in values.values()]

    def _claimed(self, value: _Value) -> _Value:
        """Return a value with where it lies in the region, if it does, and has one place in its call."""
        if self._rows.claims is None or len(value.places) > 1:
            return value
        return value._replace(claimed=self._rows.claims.parts_of(value.parts[0]))

    def _pieces(self, values: Sequence[_Value]) -> deque[Sequence[_Value]]:
        """Return the pieces of a call, in each of which all values are claimed or none is."""
        pieces: deque[Sequence[_Value]] = deque()
        claims = self._rows.claims
        for rows, most_bytes in ((self._rows, _JOB_BYTES), (claims, _CLAIMED_BYTES)):
            if rows is None:
                continue
            some = [value for value in values if (value.claimed is not None) == (rows is claims)]
            most = max(1, min(most_bytes // self._rows.row_stride, rows.count // 2))
            pieces.extend(some[start : start + most] for start in range(0, len(some), most))
        return pieces

    def _await(self, request: Put | Get | Prefix | Present | Delete | Prefetch, until: float) -> None:
        if not request.over.wait(max(0.0, until - time.monotonic())):
            self._count(expired_calls=1)
            request.error = request.error or "not ended in time"

    def _until(self, timeout: float | None) -> float:
        return time.monotonic() + (self._deadline if timeout is None else max(0.0, timeout))

    def _is_usable(self) -> bool:
        return not self._is_closed and os.getpid() == self._process

    def _lengths(self) -> str:
        return f"{', '.join(map(str, self._groups))} bytes"

    def _count(self, **more: int) -> int:
        """Add to these counts; return the last one."""
        with self._lock:
            for name, number in more.items():
                total: int = getattr(self._metrics, name) + number
                setattr(self._metrics, name, total)
            return total

    def _refuse(self, what: str, values: int = 1) -> None:
        times = self._count(refused_values=values)
        log_with_backoff(times, _log.warning, "client: refused %s (%d values so far)", what, times)

    def _never_raises(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        if os.getpid() != self._process:  # in a forked child, a lock may be held by a thread that is not there
            return None
        try:
            return call(*args, **kwargs)
        except Exception:  # noqa: BLE001 -- the caller is an engine; what went wrong is a result, a count and a line
            times = self._count(failed_calls=1)
            log_with_backoff(times, _log.exception, "client: a call failed (%d times so far)", times)
            return None


def _is_key(key: object, tenant: str) -> bool:
    return isinstance(key, bytes) and 0 < len(key) <= _LONGEST_KEY - len(tenant)


def _count(keys: object) -> int:
    try:
        return len(keys)  # type: ignore[arg-type]
    except TypeError:
        return 0
