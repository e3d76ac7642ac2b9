"""A session of ``kvtiers store``: an open store, Ctrl-C as a request to stop, and an end at the first failure.

Listing, checking and deleting are iterators that end early when the user or the store wants it, so that a command
always prints its report; ``finish`` then says why the report is not complete.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from threading import Event
from typing import Any

import click

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, ConfigError, SupportsListing, TierConfig, TierUnavailable
from kvtiers.api.units import format_size
from kvtiers.cli.main import LateExitError
from kvtiers.cli.progress import Report, show_progress, stop_on_interrupt
from kvtiers.cli.store.inventory import Origin, Selection, StoredValue, Totals, find_tier, open_listable, unavailable
from kvtiers.cli.store.verify import Judge, LiveKeys, SealCheck, Verdict, check_stored
from kvtiers.config import load_config
from kvtiers.encryption.config import EncryptionConfig, encryption_of
from kvtiers.layout.fingerprint_record import change_key, read_layout

__all__ = ["StoreSession", "open_session"]

_ALIGN = 4096
_DELETED_AT_ONCE = 256
_FAILED, _INTERRUPTED = 1, 130


class StoreSession:
    """An open store of one tier, for the commands."""

    def __init__(
        self,
        tier: TierConfig,
        namespace: str,
        value_bytes: int,
        stop: Event,
        report: Report,
        encryption: EncryptionConfig | None,
    ) -> None:
        self.name = tier.tier_name
        self.encryption = encryption_of(tier, encryption)
        """Where the keys of this tier's values come from; None if it is not encrypted."""
        self.keys = LiveKeys(self.encryption)
        self.failure = ""
        self._tier = tier
        self._namespace = namespace
        self._stop = stop
        self._report = report
        self._opened: list[ChunkStore] = []
        self._listing: SupportsListing
        self._store, self._listing, self._region = self._open(value_bytes)

    def _open(self, value_bytes: int) -> tuple[ChunkStore, SupportsListing, memoryview]:
        store, listing, region = open_listable(self._tier, self._namespace, value_bytes, self._tier.threads)
        self._opened.append(store)
        return store, listing, region

    def close(self) -> None:
        """Close the store."""
        for store in self._opened:
            store.close()

    @property
    def threads(self) -> int:
        """Return how many threads may use the store."""
        return self._tier.threads

    @property
    def is_over(self) -> bool:
        """Return whether the run was stopped, or has failed."""
        return self._stop.is_set() or bool(self.failure)

    def values(self, selection: Selection) -> Iterator[StoredValue]:
        """Yield the selected values."""
        seen = Totals()
        with self._failing():
            for value in selection.of(self._listing, self.name):
                if self._stop.is_set():
                    return
                seen.add(value.entry)
                self._report(lambda: f"{seen.values} values of {format_size(seen.nbytes)} found")
                yield value

    def records(self, origins: Iterable[Origin]) -> dict[Origin, dict[str, Any]]:
        """Return what the store has recorded of the fingerprints of these values: release, groups, and the rest."""
        found: dict[Origin, dict[str, Any]] = {}
        for origin in origins:
            with contextlib.suppress(Exception):  # a store is plugin code; the counts are the answer
                if origin.fingerprint and not self.is_over:
                    found[origin] = read_layout(self._store, origin.namespace, origin.model, origin.fingerprint)
        return found

    def change_records(self, origins: Iterable[Origin]) -> None:
        """Have the records of these values, which were carried over, state the current key."""
        for namespace, model, fingerprint in origins:
            ring = self.keys.of_scope(namespace)
            if ring is None or ring.previous is None:
                continue
            for which in (fingerprint, ""):
                with contextlib.suppress(Exception):  # it is for people only
                    change_key(self._store, namespace, model, which, ring.previous.id, ring.current.id)

    def check(
        self, values: Iterable[StoredValue], judge: Judge | None = None, done: str = "read"
    ) -> Iterator[tuple[StoredValue, Verdict]]:
        """Read the values and yield each with its verdict. ``judge``: another than the check of its seal."""
        self.keys.of_scope(self._namespace)  # if there are none, that is the problem, and no value's
        read, bad = Totals(), 0
        checks = SealCheck(self._store_for, self._tier.threads, judge or self._check_seal)
        for value, verdict in checks.run(values, self._stop):
            read.add(value.entry)
            bad += verdict in {Verdict.DAMAGED, Verdict.UNREADABLE}
            self._report(lambda: f"{read.values} values of {format_size(read.nbytes)} {done}, {bad} damaged")  # noqa: B023 -- asked at once, if at all
            yield value, verdict
        if checks.error:
            click.echo(f"warning: {checks.error}", err=True)

    def _check_seal(self, _store: ChunkStore, read: memoryview, value: StoredValue) -> Verdict:
        assert value.parsed is not None, "it has a name of ours"
        return check_stored(read, value.entry.name, value.parsed, self.keys)

    def _store_for(self, nbytes: int) -> tuple[ChunkStore, memoryview]:
        if nbytes * self._tier.threads > len(self._region):
            # The old one stays open: it may still be listing.
            self._store, _, self._region = self._open(-(-nbytes // _ALIGN) * _ALIGN)
        return self._store, self._region

    def delete(self, values: Iterable[StoredValue]) -> Iterator[StoredValue]:
        """Delete the values in batches, and yield the deleted ones. An absent value is no error."""
        deleted = Totals()
        values = iter(values)
        while batch := list(islice(values, _DELETED_AT_ONCE)):
            if self._stop.is_set():
                return
            with plugin_boundary() as deleting:
                self._store.delete([value.entry.name for value in batch])
            if deleting.error:
                self.failure = str(unavailable(self.name, "cannot delete", deleting.error))
                return
            for value in batch:
                deleted.add(value.entry)
                yield value
            self._report(lambda: f"{deleted.values} values of {format_size(deleted.nbytes)} deleted")

    def still_there(self, values: Sequence[StoredValue], pool: Executor) -> Iterator[bool]:
        """Yield for each value whether the store says that it has it, or gives it. Raises what the store raises."""
        threads = self._tier.threads
        store, region = self._store_for(max(value.entry.nbytes for value in values))
        row_bytes = len(region) // threads
        rows = [region[row * row_bytes : (row + 1) * row_bytes] for row in range(threads)]

        def is_there(value: StoredValue, row: memoryview) -> bool:
            with row[: value.entry.nbytes] as read:
                return any(store.exists([value.entry.name])) or store.read_into(value.entry.name, read) > 0

        for start in range(0, len(values), threads):
            part = values[start : start + threads]
            yield from pool.map(is_there, part, rows[: len(part)])

    def finish(self, ctx: click.Context, status: int = 0) -> None:
        """Exit with this status, or with the one of an incomplete run."""
        for problem in self.keys.problems:
            click.echo(f"warning: {problem}", err=True)
        if self.failure:
            click.echo(f"error: {self.failure}; the figures are those until then", err=True)
            ctx.exit(_FAILED)
        if self._stop.is_set():
            click.echo("interrupted: the figures are those until then", err=True)
            ctx.exit(_INTERRUPTED)
        ctx.exit(status)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except TierUnavailable as error:
            self.failure = str(error)


@contextlib.contextmanager
def open_session(file: str, tier_name: str, value_bytes: int, *, writes: bool) -> Iterator[StoreSession]:
    """Open the store of this tier; read-only unless it ``writes``, also where the config allows writes."""
    config = load_config(file)
    tier = find_tier(config, tier_name, file)
    if writes and tier.read_only:
        raise ConfigError(
            f"{file}: tier {tier_name!r} is read-only, so nothing is deleted from it; "
            "use a config without 'read_only: true'"
        )
    if not writes:
        tier = tier.model_copy(update={"read_only": True})
    try:
        with stop_on_interrupt() as stop, show_progress() as report:
            session = StoreSession(tier, config.namespace, value_bytes, stop, report, config.encryption)
            with contextlib.closing(session):
                yield session
    except KeyboardInterrupt:
        # The second one: something hangs, and a normal exit would wait for it.
        click.echo("interrupted", err=True)
        raise LateExitError(_INTERRUPTED) from None
