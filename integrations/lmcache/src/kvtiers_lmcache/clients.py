"""The clients: one for each kind of objects, opened when the first object of its kind is seen.

LMCache's server starts before any engine has said which model it runs, and serves several. So a client is opened late,
by a thread of its own: a task that needs it waits as long as its deadline lets it, and is a miss if it is not open by
then. A kind that cannot be opened is refused with one line, and tried again after a while.

Where LMCache's server has its L1 in shared memory with a name (``--shm-name``), it is the region of each client: tier
hosts map it, and values pass no bounce row. Small ones do, and those of an L1 that cannot be mapped.
"""

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtiers import Client, OffloadConfig, load_config, open_client
from kvtiers._failures import error_text
from kvtiers.api import ConfigError, KvtiersError
from kvtiers_lmcache.identity import ObjectKind, identity_of, release
from kvtiers_lmcache.key_tenants import KeyTenants
from kvtiers_lmcache.options import Options

__all__ = ["Clients"]

_log = logging.getLogger("kvtiers.lmcache")
_MOST = 16  # kinds: each has shared memory and tier hosts of its own
_AGAIN_SECONDS = 30.0
_SHARED = "/dev/shm/"  # noqa: S108 -- where the kernel names shared memory


class _Opening:
    """A client, or the reason why there is none. ``over``: one of both is there."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.client: Client | None = None
        self.error = ""
        self.again_at = float("inf")


class Clients:
    """The clients of an adapter. Any thread. ConfigError at once if the config of the tiers is wrong.

    ``l1``: LMCache's description of its L1 (``ptr``, ``size``), None where there is none; it has to outlive the
    clients. ``tenants``: finds the tenants of keys, all of which use the same clients.
    """

    def __init__(self, options: Options, l1: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._l1 = l1
        self._config: OffloadConfig = load_config(options.config)
        self.tenants = KeyTenants(options, self._config)
        self._clock = clock
        self._lock = threading.Lock()
        self._openings: dict[ObjectKind, _Opening] = {}
        self._is_closed = False
        self._has_refused = False

    def get(self, kind: ObjectKind, until: float) -> Client | None:
        """Return the client for objects of a kind, which is opened first; None if there is none until then."""
        with self._lock:
            opening = self._openings.get(kind)
            if opening is None or self._clock() >= opening.again_at:
                if self._is_closed or (opening is None and self._is_full(kind)):
                    return None
                opening = self._openings[kind] = _Opening()
                threading.Thread(target=self._open, args=(kind, opening), name="kvtiers-open", daemon=True).start()
        opening.over.wait(max(0.0, until - self._clock()))
        return opening.client

    def of_model(self, model: str) -> list[tuple[ObjectKind, Client]]:
        """Return the open clients of a model."""
        with self._lock:
            opened = [(kind, it.client) for kind, it in self._openings.items() if kind.model == model]
        return [(kind, client) for kind, client in opened if client is not None]

    def stats(self) -> list[dict[str, Any]]:
        """Return the figures of each kind's client, or why it has none."""
        with self._lock:
            openings = list(self._openings.items())
        found = []
        for kind, opening in openings:
            facts: dict[str, Any] = {"model": kind.model, "shapes": kind.shapes, "dtypes": kind.dtypes}
            client = opening.client
            found.append(facts | ({"error": opening.error} if client is None else client.stats()))
        return found

    def close(self, timeout: float) -> None:
        """Close all clients within so many seconds; one that is being opened is closed when it is open."""
        until = self._clock() + timeout
        with self._lock:
            self._is_closed = True
            clients = [it.client for it in self._openings.values() if it.client is not None]
        for client in clients:
            client.close(max(0.0, until - self._clock()))

    def _is_full(self, kind: ObjectKind) -> bool:
        is_full = len(self._openings) >= _MOST
        if is_full and not self._has_refused:
            self._has_refused = True
            _log.warning("%d kinds of objects are in use, the most there can be; refused: %s", _MOST, kind)
        return is_full

    def _open(self, kind: ObjectKind, opening: _Opening) -> None:
        client = None
        try:
            client = self._opened(kind)
        except ConfigError as error:
            opening.error = "; ".join(error.problems)
        except KvtiersError as error:
            opening.error = str(error)
        except Exception as error:  # noqa: BLE001 -- on a thread of its own, and the engine goes on without
            opening.error = error_text(error)
        with self._lock:
            is_late = self._is_closed
            if client is None:
                opening.again_at = self._clock() + _AGAIN_SECONDS
            elif not is_late:
                opening.client = client
        if client is None:
            _log.warning("nothing is stored or found for this kind of objects: %s", opening.error)
        opening.over.set()
        if client is not None and is_late:
            client.close(0.0)

    def _opened(self, kind: ObjectKind) -> Client:
        with _shared(self._l1) as region:
            return open_client(
                self._config,
                identity_of(kind, self._options),
                kind.nbytes,
                bounce_bytes=self._options.bounce_bytes,
                region=region,
                region_required=False,
                deadline=self._options.deadline,
                way_in=f"in LMCache {release()}, objects of {kind.nbytes} bytes",
                release=f"lmcache {release()}",
            )


@contextlib.contextmanager
def _shared(l1: Any) -> Iterator[tuple[int, Any] | None]:
    """Open the shared memory that L1 lies in; give its descriptor and L1. None where it has no name to be opened by."""
    path = _name_of(l1.ptr, l1.size) if l1 is not None else ""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else -1
    except OSError:
        fd = -1
    try:
        yield (fd, (ctypes.c_ubyte * l1.size).from_address(l1.ptr)) if fd >= 0 else None
    finally:
        if fd >= 0:
            os.close(fd)


def _name_of(address: int, nbytes: int) -> str:
    """Return the file of shared memory that all of this memory is one mapping of; "" if there is none."""
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        place, access, _, _, _, *rest = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in place.split("-"))
        if start <= address and address + nbytes <= end:
            path = rest[0] if rest else ""
            return path if access.endswith("s") and path.startswith(_SHARED) else ""
    return ""
