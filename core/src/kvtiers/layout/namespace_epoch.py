"""The epoch record: a small value in a store by which a bump retires every value of a namespace.

It stands under a name of core's own, ``{namespace}/_epoch``, one page long, sealed like any value; its payload is the
epoch, 16 random hex digits. Each tier that opens the store reads it, and puts the epoch into the names and layout ids
that it uses from then on (``StorageNames.of_epoch``). An epoch is one store's own, so such values are sealed
beside the rows, which other stores of the cascade may be sealing (``host/bounce_buffers.py``). Without a record the
names have no epoch. An epoch never comes back, so what was retired stays retired; a record that is lost costs only
hits, provided that the writer of the record deletes what it retires.
"""

import mmap
import re
import secrets

from kvtiers.api import ChunkCorrupt, ChunkStore, StoreContractError
from kvtiers.api.answers import length_of, present_each
from kvtiers.layout.seal import SealVerdict, check_value, seal_value

__all__ = ["is_record", "new_epoch", "read_epoch", "write_epoch"]

_NAME = "/_epoch"
_RECORD_BYTES = 4096
_EPOCH_BYTES = 16
_EPOCH = re.compile(rf"[0-9a-f]{{{_EPOCH_BYTES}}}")
_NO_LAYOUT = bytes(8)
_SAYS_NOTHING = "is damaged, so it is unknown which values are retired; run 'kvtiers store bump' again"


def is_record(name: str) -> bool:
    """Return whether this is the name of a record, and no value's."""
    return name.endswith(_NAME)


def new_epoch() -> str:
    """Return a fresh, random epoch."""
    return secrets.token_hex(_EPOCH_BYTES // 2)


def read_epoch(store: ChunkStore, namespace: str) -> str:
    """Return the epoch of a namespace in a store; "" if it was never bumped. Raises what the store raises.

    StoreContractError if they are no answers, so that a bug of the plugin is not taken for damage. ChunkCorrupt if
    there is a record that says nothing: which values are retired is not known then.
    """
    name = namespace + _NAME
    if not present_each(store, [name], store.exists([name]))[0]:
        return ""
    record = memoryview(mmap.mmap(-1, _RECORD_BYTES))  # on a page of its own, as a value in a row
    if length_of(store, "read_into", _RECORD_BYTES, store.read_into(name, record)) != _RECORD_BYTES:
        raise _says_nothing(store, namespace)
    epoch = bytes(record[:_EPOCH_BYTES]).decode("latin-1")
    sound = check_value(record, _EPOCH_BYTES, name, _NO_LAYOUT) is SealVerdict.OK
    if not (sound and _EPOCH.fullmatch(epoch)):
        raise _says_nothing(store, namespace)
    return epoch


def _says_nothing(store: ChunkStore, namespace: str) -> Exception:
    """Return the error for a record that says nothing: damage, unless the store says of every name that it is there."""
    never = f"{namespace}/_{secrets.token_hex(8)}"
    if present_each(store, [never], store.exists([never]))[0]:
        return StoreContractError(store, "exists", f"answered True for {never}, which was never written")
    return ChunkCorrupt(f"{namespace}{_NAME} {_SAYS_NOTHING}")


def write_epoch(store: ChunkStore, namespace: str, epoch: str) -> None:
    """Write the record of a bump. Raises what the store raises."""
    name = namespace + _NAME
    record = memoryview(mmap.mmap(-1, _RECORD_BYTES))
    record[:_EPOCH_BYTES] = epoch.encode()
    seal_value(record, _EPOCH_BYTES, name, _NO_LAYOUT)
    store.write(name, record.toreadonly())
