"""The client as its callers see it: blocking calls from any thread, which never raise and end within their deadline."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from kvtiers._failures import log_with_backoff
from kvtiers.api.units import waitable
from kvtiers.client.arguments import Arguments
from kvtiers.client.buffers import Views
from kvtiers.client.driver import CLOSED, Driver
from kvtiers.client.pieces import JOB_BYTES, Pieces
from kvtiers.client.prefetch import Prefetch
from kvtiers.client.requests import Delete, Get, Prefix, Present, Put, Task
from kvtiers.client.rows import BounceRows
from kvtiers.client.state import ClientState
from kvtiers.layout.tenants import Tenants
from kvtiers.types import NO_HINTS, RequestHints

if TYPE_CHECKING:
    from kvtiers.api import OffloadKey

__all__ = ["Client", "PutResult"]

_log = logging.getLogger("kvtiers")
_DELETED_AT_ONCE = 4_096
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PutResult:
    """What has become of the values of one ``put``.

    ``stored[i]``: a tier has value i now, or has had it by what was seen in the last ``exists_ttl``. ``tiers``: how
    many of the values each tier has, by its name. ``error``: in one line, why some tier has not all of them; "" if each
    that takes stores has, and where the hints of the call have declined them.
    """

    stored: list[bool]
    tiers: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


class Client:
    """Reads and writes values by their keys, in the tiers of a config. Made by ``open_client``. Any thread.

    A key is 1 to 65,531 bytes that name exactly this content: a key that is stored already is not stored again. A
    value is a C-contiguous buffer or a list of them, one behind the other, whose length is one of the client's
    ``value_bytes``; of another length it is not stored, and not found. A buffer lies in host memory (``memoryview``)
    or in a GPU's (``__cuda_array_interface__``: CUDA tensors of torch); a call waits for the work queued on such a
    buffer's stream, torch's current one, and ends when its own copies have ended. ``timeout``: seconds in which
    the call ends, by default the client's; what is not done by then is False in its result. With values in the
    client's region a call that is late first takes their memory back from the tier hosts: that takes up to .15 s, and
    where a host is stopped while it uses them, until it has been killed and reaped. ``tenant``: whose values
    they are, by default the client's; another one's, or those of none, are never found, stored or removed. No call
    raises: mistakes, failures and a closed client are results too, counted in ``stats``, and logged with backoff.
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
        self._value_bytes = value_bytes
        self._deadline = waitable(deadline)
        self._tier_stats = tier_stats
        self._close = close
        self._state = ClientState()
        self._arguments = Arguments(groups, tenants, tenant, rows.in_region, self._state)
        self._pieces = Pieces(driver, rows, self._state)
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
        hints: RequestHints = NO_HINTS,
    ) -> PutResult:
        """Store ``views[i]`` under ``keys[i]``, in all tiers that take stores, and wait for them.

        The buffers are read during the call alone. ``hints``: of the request that the values are of
        (``request_hints`` reads them out of its parameters). One that ends its session (``session_ends``) leaves what
        no one comes back for: its values are not written, and count as declined.
        """
        result = self._never_raises(self._put, keys, views, timeout, tenant, hints)
        return result if result is not None else PutResult([False] * _count(keys), error="not done; see the log")

    def get_into(
        self,
        keys: Sequence[bytes],
        views: Sequence[Views],
        timeout: float | None = None,
        *,
        tenant: str | None = None,
    ) -> list[bool]:
        """Fill ``views[i]`` with the value of ``keys[i]``, where a tier has it; return for each whether it is there.

        The tiers are asked in the config's order. Views of values that were not found keep what they held, but those
        of a GPU that fails, and those in ``region`` that a tier host was filling when it ended. Nothing is written to
        any of them after the call.
        """
        found = self._never_raises(self._get, keys, views, timeout, tenant)
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
        found = self._state.counts()
        found |= {"bounce_rows": self._rows.count, "free_bounce_rows": len(self._rows.free)}
        tiers: dict[str, Any] = {}
        if self._state.is_usable:
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
        if self._state.close():
            self._close(waitable(timeout))

    def _put(
        self,
        keys: Sequence[bytes],
        views: Sequence[Views],
        timeout: float | None,
        tenant: str | None,
        hints: RequestHints,
    ) -> PutResult:
        if hints.session_ends:
            self._state.count(puts=1, put_values=len(keys), declined_values=len(keys))
            return PutResult([False] * len(keys))
        until = self._until(timeout)
        values = self._arguments.values(keys, views, tenant, writable=False)
        if self._state.is_usable and not self._pieces.settle(values, until):
            return PutResult([False] * len(keys), error="the GPU has not ended its work on the values in time")
        todo = self._pieces.cut(values)
        stored = [False] * len(keys)
        tiers: dict[str, int] = {}
        error = ""
        with closing(self._pieces.moved(Put, todo, until)) as pieces:
            for some, request in pieces:
                by_tier = {name: set(good) for name, good in list(request.stored.items())}
                for name, good in by_tier.items():
                    tiers[name] = tiers.get(name, 0) + len(good)
                for value in some:
                    for place in value.places:
                        stored[place] = any(value.key in good for good in by_tier.values())
                error = error or request.error
        if todo:
            error = error or (CLOSED if self._state.is_closed else "no bounce row was free in time")
        if sum(len(value.places) for value in values) < len(keys):
            error = error or "some values were refused; see the log"
        nbytes = sum(value.nbytes for value in values)
        self._state.count(puts=1, put_values=len(keys), put_bytes=nbytes, stored_values=sum(stored))
        return PutResult(stored, tiers, error)

    def _get(
        self,
        keys: Sequence[bytes],
        views: Sequence[Views],
        timeout: float | None,
        tenant: str | None,
    ) -> list[bool]:
        until = self._until(timeout)
        values = self._arguments.values(keys, views, tenant, writable=True)
        found = [False] * len(keys)
        if self._state.is_usable and not self._pieces.settle(values, until):
            return found
        todo = self._pieces.cut(values)
        with closing(self._pieces.moved(Get, todo, until)) as pieces:
            for some, request in pieces:
                self._pieces.scatter(some, request, found)
        self._state.count(gets=1, get_values=len(keys), found_values=sum(found))
        return found

    def _prefix(self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None) -> int:
        until = self._until(timeout)
        self._state.count(lookups=1)
        named = self._arguments.keys(keys, self._value_bytes if value_bytes is None else value_bytes, tenant)
        leading = [key for [key] in takewhile(bool, named)]
        if not leading or not self._state.is_usable:
            return 0
        request = Prefix(leading, until)
        self._driver.send(request)
        self._state.wait(request, until)
        return request.length

    def _prefetch(
        self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None
    ) -> list[bool]:
        until = self._until(timeout)
        named = self._arguments.keys(keys, self._value_bytes if value_bytes is None else value_bytes, tenant)
        wanted = list(dict.fromkeys(key for names in named for key in names))
        most = max(1, min(JOB_BYTES // self._rows.row_stride, self._rows.count // 4))
        near: set[OffloadKey] = set()
        while wanted and self._state.is_usable:
            if (lease := self._rows.take(min(most, len(wanted)), until)) is None:
                break
            some, wanted = wanted[: len(lease.rows)], wanted[len(lease.rows) :]
            request = Prefetch(some, lease, until)
            try:
                self._driver.send(request)
                self._state.wait(request, until)
                near |= request.near
            finally:
                request.release()
        found = [bool(names) and near.issuperset(names) for names in named]
        self._state.count(prefetches=1, prefetched_values=sum(found))
        return found

    def _exists(
        self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None
    ) -> list[bool]:
        until = self._until(timeout)
        self._state.count(lookups=1)
        named = self._arguments.keys(keys, self._value_bytes if value_bytes is None else value_bytes, tenant)
        if not any(named) or not self._state.is_usable:
            return [False] * len(keys)
        request = Present([key for names in named for key in names], until)
        self._driver.send(request)
        self._state.wait(request, until)
        return [bool(names) and request.there.issuperset(names) for names in named]

    def _delete(
        self, keys: Sequence[bytes], value_bytes: int | None, timeout: float | None, tenant: str | None
    ) -> list[bool]:
        until = self._until(timeout)
        self._state.count(deletes=1)
        named = self._arguments.keys(keys, value_bytes, tenant)
        wanted = list(dict.fromkeys(key for names in named for key in names))
        gone: set[OffloadKey] = set()
        error = "" if self._state.is_usable else CLOSED
        for start in range(0, len(wanted) if not error else 0, _DELETED_AT_ONCE):
            request = Delete(wanted[start : start + _DELETED_AT_ONCE], self._rows.none(), until)
            self._driver.send(request)
            self._state.wait(request, until)
            gone |= request.gone
            error = error or request.error
        found = [bool(names) and gone.issuperset(names) for names in named]
        self._state.count(deleted_values=sum(found))
        if kept := len(wanted) - len(gone):
            times = self._state.count(undeleted_values=kept)
            text = "client: %d values may not be deleted: %s (%d so far)"
            log_with_backoff(times, _log.warning, text, kept, error or "a store has failed; see its log", times)
        return found

    def _until(self, timeout: float | None) -> float:
        return time.monotonic() + (self._deadline if timeout is None else waitable(timeout))

    def _never_raises(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        if self._state.is_forked:
            return None
        try:
            return call(*args, **kwargs)
        except Exception:  # noqa: BLE001 -- the caller is an engine; what went wrong is a result, a count and a line
            times = self._state.count(failed_calls=1)
            log_with_backoff(times, _log.exception, "client: a call failed (%d times so far)", times)
            return None


def _count(keys: object) -> int:
    try:
        return len(keys)  # type: ignore[arg-type]
    except TypeError:
        return 0
