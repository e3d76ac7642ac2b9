"""Quotas of tenants in one store: what each has there, by listings and by what is written since, and who has room.

A store has no idea of tenants, so core counts: the values behind each tenant's part of the names, listed at the start,
and again every five minutes or when a quota is reached, since stores evict by themselves and other engines write. What
is written in between is added before the write begins. So with one engine a tenant never has more than its quota; with
several, what the others have written since the last count comes on top, until the next one.

Some stores look at all that they hold to list one tenant's values. Where that takes long, the tenants that are to be
counted share one listing.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
transfer           ``take``s room before a write, ``settle``s what came of it
quota (1)          lists; deletes a tenant's oldest values where it has more than its quota, or no room: any of them
                   where the store records no times
=================  ==========================================================================================

A write for which there is no room is dropped and counted: nothing waits for a deletion. Before its values have been
counted a tenant has no room; writes wait for that for two seconds in all, where the count can have ended by then.
"""

import heapq
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtiers._failures import logged_boundary, plugin_boundary
from kvtiers.api import ChunkStore, SupportsListing
from kvtiers.api.config import EACH_OTHER_TENANT, quota_of
from kvtiers.api.tenant_room import KEPT_OF_QUOTA
from kvtiers.layout.storage_name import parse_name

__all__ = ["TenantQuotas"]

_log = logging.getLogger("kvtiers.secondary")
_RECOUNT_SECONDS = 300.0
_PAUSE_SECONDS = 1.0
_AWAITED_SECONDS = 2.0
_MOST_TENANTS = 4_096
_MOST_OLDEST = 65_536
_DELETED_PER_CALL = 64
_SLOW_SECONDS = 1.0  # a listing that takes longer, and gives few values, is of a store that looks at all it has
_FEW_PER_SECOND = 1000


@dataclass(slots=True, eq=False)
class _Account:
    """What one tenant has. ``used``: bytes, those of writes in flight included; None: not counted yet."""

    tenant: str
    quota: int
    used: int | None = None
    in_flight: int = 0
    taken: int = 0
    """Since the count that runs, or the last one, began."""
    is_short: bool = False
    due: float = 0.0
    awaited_until: float = 0.0
    """So long, and no longer, a write waits for the first count."""

    @property
    def count_at(self) -> float:
        """The time at which its values are counted again."""
        return self.due if self.is_short else self.due + _RECOUNT_SECONDS


@dataclass(slots=True, eq=False)
class _Count:
    """One tenant in a listing. ``oldest``: the oldest of its values, as a heap: the newest of them is the first."""

    account: _Account
    in_flight: int
    is_full: bool
    total: int = 0
    values: int = 0
    oldest: list[tuple[float, int, str]] = field(default_factory=list)

    def add(self, entry: tuple[float, int, str], most: int) -> None:
        """Add a value: minus its time of writing, its bytes and its name."""
        self.total += entry[1]
        self.values += 1
        if len(self.oldest) < most:
            heapq.heappush(self.oldest, entry)
        elif entry > self.oldest[0]:
            heapq.heapreplace(self.oldest, entry)


class TenantQuotas:
    """Keeps each tenant within its quota in one store. ``quotas``: bytes by tenant, or by ``EACH_OTHER_TENANT``.

    ``namespace``: of the names. ``forget``: called with the names of values that were deleted. ``pause_seconds``:
    between two counts of a tenant, at least; ten times what the last one took, if that is longer. ``awaited_seconds``:
    so long writes wait for a first count. ``most_tenants``: with an account at once. ``most_oldest``: values that a
    count can delete.
    """

    def __init__(
        self,
        store: ChunkStore,
        quotas: Mapping[str, int],
        namespace: str,
        forget: Callable[[Sequence[str]], None],
        label: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        pause_seconds: float = _PAUSE_SECONDS,
        awaited_seconds: float = _AWAITED_SECONDS,
        most_tenants: int = _MOST_TENANTS,
        most_oldest: int = _MOST_OLDEST,
    ) -> None:
        self._store = store
        self._quotas = quotas
        self._namespace = namespace
        self._forget = forget
        self._label = label
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._awaited_seconds = awaited_seconds
        self._most_tenants = most_tenants
        self._most_oldest = most_oldest
        self._accounts: dict[str, _Account] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._one_takes = 0.0
        """Seconds, of the last listing of one tenant."""
        self._all_take = math.inf
        """Seconds, of the last listing of all tenants; as long as there was none, what it would take."""
        with self._changed:
            for tenant in quotas.keys() - {EACH_OTHER_TENANT}:
                self._account(tenant)
        self.deleted = 0
        """Values that were deleted, since their tenant had no room."""

    @staticmethod
    def problem(store: ChunkStore, quotas: Mapping[str, int]) -> str:
        """Return why these quotas cannot be kept in this store, "" if they can."""
        if not quotas or isinstance(store, SupportsListing):
            return ""
        return (
            f"its store, {type(store).__name__}, cannot list what it holds, so no tenant's quota can be kept in it; "
            "leave 'quotas' out"
        )

    def thread(self) -> threading.Thread:
        """Return the thread that counts, to be started."""
        return threading.Thread(target=self._run, name=f"kvtiers-{self._label}-quota", daemon=True)

    def close(self) -> None:
        """Count and delete nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- the transfer threads

    def take(self, tenant: str, nbytes: int) -> bool:
        """Take room for a value of this tenant; False: it has none now. Each that was taken is to be settled."""
        with self._changed:
            account = self._account(tenant)
            if account is None:
                return quota_of(self._quotas, tenant) is None
            if account.used is None and (left := account.awaited_until - self._clock()) > 0:
                self._changed.wait_for(lambda: account.used is not None or self._closed, left)
                if self._accounts.get(tenant) is not account:
                    return False  # it was closed for another tenant's
            if account.used is None or account.used + nbytes > account.quota:
                if nbytes <= account.quota:  # else it never fits
                    account.is_short = True
                    self._changed.notify_all()
                return False
            account.used += nbytes
            account.taken += nbytes
            account.in_flight += nbytes
            return True

    def settle(self, tenant: str, nbytes: int, *, may_be_there: bool) -> None:
        """Record what has come of a value for which there was room; one that may be there stays in the account."""
        with self._changed:
            account = self._account(tenant)
            if account is None:
                return
            account.in_flight -= nbytes
            if not may_be_there and account.used is not None:
                account.used -= nbytes
                account.taken -= nbytes

    def _account(self, tenant: str) -> _Account | None:
        """Return a tenant's account; None if it has no quota, or too many write at the same time."""
        account = self._accounts.pop(tenant, None)
        if account is None:
            quota = quota_of(self._quotas, tenant)
            if quota is None or (len(self._accounts) >= self._most_tenants and not self._close_one()):
                return None
            account = _Account(tenant, quota, is_short=True, awaited_until=self._clock() + self._first_wait())
            self._changed.notify_all()
        self._accounts[tenant] = account  # the one used last is the last one
        return account

    def _first_wait(self) -> float:
        """Return how long writes of a tenant that was not counted yet may wait; 0 if its turn comes too late for that.

        Else tenants that come at the same time would keep the transfer threads from all others.
        """
        before = [account.awaited_until for account in self._accounts.values() if account.used is None]
        is_late = min(before, default=math.inf) <= self._clock()
        most = self._awaited_seconds
        return 0.0 if is_late or (1 + len(before)) * self._one_takes >= most else most

    def _close_one(self) -> bool:
        """Forget the account used longest ago, of a tenant without a quota of its own; False: there is none."""
        for tenant, account in self._accounts.items():
            if tenant not in self._quotas and not account.in_flight:
                del self._accounts[tenant]
                return True
        return False

    # -- the quota thread

    def _run(self) -> None:
        with logged_boundary(_log, "%s: quotas are kept no longer; a bug of kvtiers", self._label, exits=True):
            while accounts := self._next():
                self._count(accounts)

    def _next(self) -> list[_Account]:
        """Wait until a tenant is to be counted; return it, or all that are if that is sooner done; none: closed."""
        with self._changed:
            while not self._closed:
                now = self._clock()
                due = [account for account in self._accounts.values() if account.count_at <= now]
                if due:
                    due.sort(key=lambda account: account.count_at)
                    return due if len(due) * self._one_takes > self._all_take else due[:1]
                next_at = min((account.count_at for account in self._accounts.values()), default=now + _RECOUNT_SECONDS)
                self._changed.wait(next_at - now)
            return []

    def _count(self, accounts: Sequence[_Account]) -> None:
        """Count these tenants' values, in one listing, and delete the oldest of those with too many, or no room."""
        begun = self._clock()
        counts = {}
        with self._changed:
            for account in accounts:
                is_full = account.is_short and account.used is not None
                counts[account.tenant] = _Count(account, account.in_flight, is_full)
                account.taken, account.is_short = 0, False
        most = max(_DELETED_PER_CALL, self._most_oldest // len(accounts))
        with plugin_boundary(exits=True) as listing:
            for tenant, entry in self._listed(f"{accounts[0].tenant}/" if len(accounts) == 1 else ""):
                if tenant in counts:
                    counts[tenant].add(entry, most)
        if self._closed:
            return  # not all were listed
        if listing.error:
            for account in accounts:
                self._put_off(account, begun, f"cannot be listed: {listing.error}")
            return
        self._learn_pace(list(counts.values()), self._clock() - begun)
        with self._changed:
            for count in counts.values():
                count.account.used = count.total + count.in_flight + count.account.taken
            self._changed.notify_all()  # a write may wait for the first count
        for count in counts.values():
            self._make_room(count, begun)

    def _learn_pace(self, counts: Sequence[_Count], seconds: float) -> None:
        if len(counts) > 1:
            self._all_take = seconds
            return
        self._one_takes = seconds
        if self._all_take == math.inf and seconds > _SLOW_SECONDS and counts[0].values < seconds * _FEW_PER_SECOND:
            self._all_take = seconds

    def _make_room(self, count: _Count, begun: float) -> None:
        """Delete the tenant's oldest values if it has more than its quota, or had no room."""
        account, error = count.account, ""
        used = account.used or 0
        if used > account.quota or (count.is_full and used > account.quota * KEPT_OF_QUOTA):
            excess = used - int(account.quota * KEPT_OF_QUOTA)
            error = self._delete(account, sorted(count.oldest, reverse=True), excess)
            if count.values > len(count.oldest):  # there may be more to delete than one count keeps the names of
                account.is_short = account.is_short or (account.used or 0) > account.quota
        self._put_off(account, begun, f"cannot delete: {error}" if error else "")

    def _put_off(self, account: _Account, begun: float, error: str = "") -> None:
        now = self._clock()
        with self._changed:
            account.due = now + max(self._pause_seconds, 10 * (now - begun))
            account.is_short = account.is_short or account.used is None
        if error:
            text = "%s: the quota of tenant %r: the store %s; what has no room is dropped until it can be counted"
            _log.warning(text, self._label, account.tenant, error, extra={"once": True})

    def _listed(self, whose: str) -> Iterator[tuple[str, tuple[float, int, str]]]:
        """Yield the values of tenants of whose part of the names this is the start, each with its tenant."""
        assert isinstance(self._store, SupportsListing)
        for entry in self._store.list(f"{self._namespace}/t-{whose}"):
            if self._closed:
                return
            parsed = parse_name(entry.name)
            if parsed is None or not parsed.tenant:  # a model's name may begin as a tenant's part does
                continue
            written = zlib.crc32(entry.name.encode()) / (1 << 32) if entry.modified is None else entry.modified
            yield parsed.tenant, (-written, entry.nbytes, entry.name)

    def _delete(self, account: _Account, oldest: Sequence[tuple[float, int, str]], excess: int) -> str:
        """Delete the oldest values, of ``excess`` bytes or a little more; return the store's error, if it fails."""
        places = iter(oldest)
        while excess > 0 and not self._closed:
            batch: list[tuple[float, int, str]] = []
            for entry in places:
                batch.append(entry)
                excess -= entry[1]
                if excess <= 0 or len(batch) == _DELETED_PER_CALL:
                    break
            if not batch:
                break
            names = [name for _, _, name in batch]
            self._forget(names)  # also if it fails: they may be gone all the same
            with plugin_boundary(exits=True) as deleting:
                self._store.delete(names)
            if deleting.error:
                return deleting.error
            self.deleted += len(names)
            with self._changed:
                account.used = max(0, (account.used or 0) - sum(nbytes for _, nbytes, _ in batch))
        return ""
