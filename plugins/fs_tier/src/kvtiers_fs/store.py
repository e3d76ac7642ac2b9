"""The store of the tier type ``fs``: a file a value, in one directory, for many processes and machines at once."""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from kvtiers.api import ChunkStore, ConfigError, Finding, NotKept, StoreEntry
from kvtiers.api.units import format_size
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import TOO_LARGE, RootRemovedError
from kvtiers_fs.evictor import Evictor, free_bytes
from kvtiers_fs.limits import Limits
from kvtiers_fs.paths import Place, place_of
from kvtiers_fs.quota import Ledger, UsageFile
from kvtiers_fs.root import open_root
from kvtiers_fs.values import ValueFiles
from kvtiers_fs.waits import USUAL_WAITS, Waits

__all__ = ["FsStore"]

_log = logging.getLogger("kvtiers_fs")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FREE_SECONDS = 1.0


class FsStore(ChunkStore):
    """Values under one directory. Opening it asks for the root and one small file, however many values there are.

    It has the calls of ``SupportsBatch`` for values in several places; a value is a file, so a call moves one.

    A store that is read-only changes nothing at all, not even the values' last use. Another one has a thread, which
    removes what goes over the limits (``evictor``).
    """

    batch_values = 1

    def __init__(self, config: FsConfig, *, read_only: bool = False, waits: Waits = USUAL_WAITS) -> None:
        self._config = config
        self._waits = waits
        self._directory = open_root(config, read_only=read_only)
        self._evictor: Evictor | None = None
        self._ledger: Ledger | None = None
        self._dropped = 0
        self._room = (0.0, 0)
        self._making = threading.Lock()
        try:
            self._files = ValueFiles(
                self._directory,
                direct=config.direct,
                fsync=config.fsync,
                max_age=config.max_age,
                refresh=not read_only,
            )
            self._usage = UsageFile(self._directory, read_only=read_only)
        except BaseException as error:
            self._directory.close()
            if not (isinstance(error, PermissionError) or getattr(error, "errno", 0) == errno.EROFS):
                raise
            raise ConfigError(
                f"path {str(config.path)!r} cannot be written by uid {os.geteuid()}: {error}; give it the right to, or "
                "set 'read_only: true'"
            ) from None
        self._limits = Limits(config, self._directory, waits.look)
        known, values = self._usage.load().total()
        self._figures: Mapping[str, float] = {"bytes": known, "values": values}
        if not read_only:
            self._evictor = Evictor(
                self._directory,
                self._usage,
                self._limits,
                capacity=config.capacity,
                max_age=config.max_age,
                min_free=config.min_free,
                round_seconds=waits.round,
            )
            # A fraction of the deadline: beyond it, and its grace, the engine takes this wait for a store that hangs.
            patience = min(waits.report, config.deadline / 4)
            self._ledger = self._evictor.ledger = Ledger(config.capacity, known, self._evictor.wake, patience, waits)
            self._evictor.start()

    def read_into(self, name: str, dst: memoryview) -> int:
        """Fill the start of ``dst`` from the value's file."""
        return self._files.read(place_of(name), [dst])

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> Sequence[int]:
        """Fill the views of each from its file, which the system scatters."""
        return [self._files.read(place_of(name), views) for name, views in zip(names, dsts, strict=True)]

    def write(self, name: str, src: memoryview) -> None:
        """Write the value's file aside and rename it. NotKept beyond the capacity or the free-space floor.

        Not full, but refused, where the file system has become read-only.
        """
        _, ledger = self._writable()
        self._write_views(name, [src], ledger.waits_until())

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> Sequence[NotKept | None]:
        """Write each value's file out of its views, which the system gathers."""
        _, ledger = self._writable()
        until = ledger.waits_until()
        return [self._is_kept(name, views, until) for name, views in zip(names, srcs, strict=True)]

    def _is_kept(self, name: str, views: Sequence[memoryview], until: float) -> NotKept | None:
        try:
            self._write_views(name, views, until)
        except NotKept as error:
            return error
        return None

    def _write_views(self, name: str, parts: Sequence[memoryview], until: float) -> None:
        evictor, ledger = self._writable()
        nbytes, place = sum(map(len, parts)), place_of(name)
        try:
            self._expect_free(nbytes, evictor)
            ledger.claim(nbytes, until)
        except NotKept:
            self._dropped += 1
            raise
        try:
            with ledger.changing(place.shard):
                before = self._write(place, parts)
                ledger.count(place.shard, nbytes - (before or 0), before is None)
            self._limits.record(name)
        except OSError as error:
            if error.errno not in _FULL and error.errno != errno.EROFS:
                self._directory.skip_closed(place.folder, error)
                raise NotKept(f"{place.folder!r} may not be written to: {error.strerror}", full=False) from None
            self._dropped += 1
            if error.errno == errno.EROFS:  # as ext4 makes itself after an error of the disk: it is read all the same
                path = str(self._config.path)
                raise NotKept(f"the file system of {path!r} has become read-only", full=False) from None
            if error.errno == errno.EFBIG:  # removing others would not help
                raise NotKept(TOO_LARGE.format(what=f"a value of {nbytes} bytes")) from None
            evictor.disk_is_full()
            raise NotKept(f"the disk has no room: {error.strerror}") from None
        finally:
            ledger.settle(nbytes)

    def _write(self, place: Place, parts: Sequence[memoryview]) -> int | None:
        try:
            return self._files.write(place, parts)
        except RootRemovedError:
            self._make_again()
        return self._files.write(place, parts)

    def _make_again(self) -> None:
        """Make the root again that was removed while it was open; every descriptor of it leads there from now on."""
        with self._making:
            if not self._directory.is_removed():
                return  # another thread was sooner
            root = open_root(self._config, read_only=False)
            evictor, ledger = self._writable()
            with evictor.turn:  # a round must not save what it has loaded from the old file
                self._usage.replace(UsageFile(root, read_only=False))
                ledger.restart()
                self._directory.replace(root)
        _log.warning("%s was removed while it was in use; it was made again, and is empty", self._config.path)

    def _writable(self) -> tuple[Evictor, Ledger]:
        if self._evictor is None or self._ledger is None:
            raise PermissionError(errno.EROFS, "this tier is read-only", str(self._config.path))
        return self._evictor, self._ledger

    def _expect_free(self, nbytes: int, evictor: Evictor) -> None:
        """Raise NotKept if this write would go below ``min_free``. Asks the system each second, oftener near it."""
        until, room = self._room
        if time.monotonic() >= until or nbytes > room:
            # Half of it: other processes take from the same room until this one asks again.
            room = (free_bytes(self._directory.fd) - self._config.min_free) // 2
            until = time.monotonic() + _FREE_SECONDS
            if nbytes > 2 * room:
                evictor.disk_is_full()
                raise NotKept(f"the disk would have less than {format_size(self._config.min_free)} free")
        self._room = (until, room - nbytes)

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask for each file, without opening it."""
        is_there = self._files.is_there
        return [is_there(place_of(name)) for name in names]

    def delete(self, names: Sequence[str]) -> None:
        """Remove the files, and folders that are empty then."""
        _, ledger = self._writable()
        folders = set()
        for name in names:
            place = place_of(name)
            with ledger.changing(place.shard):
                nbytes = self._directory.remove(place.folder, place.leaf)
                if nbytes is not None:
                    ledger.count(place.shard, -nbytes, -1)
                    folders.add(place.folder)
        for folder in folders:
            self._directory.remove_empty(folder)

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Walk the folders whose names fit, one shard at a time; ``modified`` is a value's last use."""
        for head in self._directory.heads(prefix):
            for shard in sorted(head.shards):
                for file in self._directory.files(head.folder, shard):
                    if file.last is not None and (name := head.name + file.last).startswith(prefix):
                        yield StoreEntry(name, file.nbytes, file.modified)

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the file system: its type, what it supports, and whether capacity and values fit."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_fs.diagnosis import diagnose

        if self._evictor is not None:
            self._evictor.round()  # the figures shall include the latest writes and removals
        limits = self._limits if self._evictor is not None else None
        return diagnose(self._config, self._directory, self._usage, value_bytes, limits)

    def stats(self) -> Mapping[str, float]:
        """Return the evictor's last figures; does no I/O, so that it answers also while the file system hangs."""
        figures = (self._evictor.figures() if self._evictor else None) or self._figures
        return {**figures, "dropped_values": self._dropped, "direct": float(self._files.is_direct)}

    def close(self) -> None:
        """Report this process's writes, end the thread, close the directory."""
        if self._evictor is not None and not self._evictor.stop(self._waits.close):
            return  # the file system hangs: its thread still uses the descriptors, which end with the process
        self._usage.close()
        self._directory.close()
