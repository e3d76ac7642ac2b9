"""The opening of a store: the keys, the plugin, the namespace's epoch, the seal, then a mover of its values.

Here is decided how values are stored: in clear or encrypted (``Seal``), and compressed or not (``CompressedStore``).

All of it is tried again until it succeeds: keys may have been rotated since, and a store may come back as another one.
Runs on one transfer thread of the store's pool.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, ConfigError
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.first_use_keys import FirstUseKeys
from kvtiers.encryption.key_source import open_file_warnings, open_keys
from kvtiers.encryption.keys import KeyRing
from kvtiers.encryption.seal import EncryptedSeal
from kvtiers.encryption.tenant_keys import TenantKeyReader
from kvtiers.host.bounce_buffers import BounceBufferViews
from kvtiers.host.compressed_store import compressed_store
from kvtiers.host.layout_record import LayoutRecord
from kvtiers.host.quotas import TenantQuotas
from kvtiers.host.store_calls import KnownNames
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.namespace_epoch import read_epoch
from kvtiers.layout.seal import PlainSeal, Seal
from kvtiers.layout.storage_name import StorageNames

__all__ = ["OpenStore", "StoreOpener", "close_store"]

_log = logging.getLogger("kvtiers.secondary")


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store in use. ``compressed``: the store that values are moved to; it compresses them, if that is on."""

    store: ChunkStore
    compressed: ChunkStore
    mover: ValueMover
    epoch: str
    keys: KeyRing | None


class StoreOpener:
    """Opens the store of one pool, as often as it takes, and goes on to read tenants' keys until it is closed.

    ``encryption``: where the keys come from that values are encrypted with. ``record``: the layout record, compared
    with the store's.
    ``callers``: the views for jobs of which values lie in a client's region. ``stop``: ends waits, when closed.
    ``pauses``: between attempts to read tenants' keys, in seconds, as those to open the store. ``key_wait``: for the
    first of these attempts.
    """

    def __init__(
        self,
        views: ValueViews,
        record: LayoutRecord,
        stop: threading.Event,
        *,
        label: str,
        pauses: tuple[float, float],
        key_wait: float,
        callers: BounceBufferViews | None,
        encryption: EncryptionConfig | None,
    ) -> None:
        self._views = views
        self._record = record
        self._stop = stop
        self._label = label
        self._pauses = pauses
        self._key_wait = key_wait
        self._callers = callers
        self._encryption = encryption
        self._tenant_keys: TenantKeyReader | None = None

    def open(
        self, open_store: Callable[[], ChunkStore], names: StorageNames, options: MoverOptions
    ) -> tuple[OpenStore | None, str]:
        """Open the store that ``open_store`` gives; without one, return in one line why it cannot be opened."""
        keys, error = self._open_keys(names.namespace)
        if error:
            return None, error
        with plugin_boundary(exits=True) as opening:
            store = open_store()
        if opening.error:
            return None, opening.error
        if problem := TenantQuotas.problem(store, options.quotas):
            close_store(store, self._label)
            return None, problem
        with plugin_boundary(exits=True) as first_use:
            epoch = read_epoch(store, names.namespace)
            seal = self._seal(epoch, keys, names.namespace)
            self._record.compare(store, names, keys)
            compressed, known = compressed_store(store, options.compression), KnownNames(options.exists_ttl)
            quotas = None
            if options.quotas:
                quotas = TenantQuotas(store, options.quotas, names.namespace, known.forget, self._label)
            mover = ValueMover(
                compressed,
                self._views,
                options,
                self._stop,
                seal,
                label=self._label,
                callers=self._callers,
                known=known,
                quotas=quotas,
            )
        if first_use.error:
            close_store(store, self._label)
            return None, first_use.error
        return OpenStore(store, compressed, mover, epoch, keys), ""

    def close(self) -> None:
        """Read no further key."""
        if self._tenant_keys is not None:
            self._tenant_keys.close()

    def _open_keys(self, namespace: str) -> tuple[KeyRing | None, str]:
        """Read the keys, if values are encrypted; return why they cannot be had, if so."""
        encryption = self._encryption
        if encryption is None:
            return None, ""
        try:
            keys = open_keys(encryption, namespace)
        except ConfigError as error:
            return None, str(error)
        _log.info("%s: encrypted: %s", self._label, keys.in_words(), extra={"once": True})
        for line in open_file_warnings(encryption):
            _log.warning("%s: %s", self._label, line, extra={"once": True})
        return keys, ""

    def _seal(self, epoch: str, keys: KeyRing | None, namespace: str) -> Seal:
        """Return how values are sealed, once the keys of tenants have been read, or are still to come."""
        encryption = self._encryption
        if encryption is None or keys is None:
            return PlainSeal(epoch)
        if encryption.tenants:
            self._read_tenant_keys(encryption, keys, namespace)
        first_use = FirstUseKeys(encryption, namespace, keys, self._label) if encryption.others_have_own else None
        return EncryptedSeal(epoch, keys, first_use)

    def _read_tenant_keys(self, encryption: EncryptionConfig, keys: KeyRing, namespace: str) -> None:
        """Read the keys of tenants that have their own; those that do not come at once are added later."""
        self.close()  # those of an opening that failed after it
        reader = self._tenant_keys = TenantKeyReader(
            encryption, namespace, keys, self._label, self._pauses, wait=self._key_wait
        )
        if self._stop.is_set():  # ``close`` may not have seen them
            self.close()
        reader.read()


def close_store(store: ChunkStore, label: str) -> None:
    """Close a store; what its plugin raises is a line of the log."""
    with plugin_boundary(exits=True) as closing:
        store.close()
    if closing.error:
        _log.warning("%s: its close() failed: %s", label, closing.error)
