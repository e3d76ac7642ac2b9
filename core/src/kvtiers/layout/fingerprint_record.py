"""The fingerprint record: a small value in a store that states what a fingerprint was made from.

Two fingerprints show that the KV of two engines differs, but not why. So an engine that stores also writes, once, what
its fingerprint was made from, under two names of core's own, each one page, sealed like any value::

    {namespace}/_layout/{model slug}-{fingerprint}      of this fingerprint
    {namespace}/_layout/{model slug}                    of the engine that has begun to store last

An engine that opens the store compares the second one with its own, and says in which fields they differ; `kvtiers
store du` reads the first one. Each record also has how its writer stores: the key, the compression, and the limits that
its tier sets on the values. Both are for people only: nothing depends on a record, so one may be lost.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import zlib
from dataclasses import dataclass
from typing import Any

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, TierConfig
from kvtiers.layout.cache_layout import SEAL_BYTES, CacheLayout
from kvtiers.layout.seal import SealVerdict, check_value, seal_value
from kvtiers.layout.storage_name import StorageNames

__all__ = [
    "COMPRESSION_FIELD", "KEY_FIELD", "LIMITS_FIELD", "WRITER_FIELD", "Described", "change_key", "compare_layouts",
    "describe_layout", "is_layout_record", "read_layout", "with_fields", "write_layout",
]  # fmt: skip

_log = logging.getLogger("kvtiers.secondary")
KEY_FIELD = "key"
"""Of a document: the id of the key that the values are encrypted with."""
COMPRESSION_FIELD = "compression"
"""Of a document: how the values are compressed, if they are."""
LIMITS_FIELD = "limits"
"""Of a document: the limits that the tier sets on the values (``TierConfig.shared_limits``)."""
WRITER_FIELD = "writer"
"""Of a document: the machine that wrote it, and when (``host``, ``time``)."""
_FOLDER = "_layout"
_RECORD_BYTES = 4096
_PAYLOAD_BYTES = _RECORD_BYTES - SEAL_BYTES
_NO_LAYOUT = bytes(8)
_LONGEST_TEXT = 80  # of a field; a longer one is shown by its digest
_LARGEST = 1 << 20
_NOT_OF_THE_LAYOUT = frozenset({"fingerprint", "format", KEY_FIELD, COMPRESSION_FIELD, LIMITS_FIELD, WRITER_FIELD})
_DIGESTS = ("rope", "kv_layout", "tensors")  # say that something differs and not what: named if nothing else is


@dataclass(frozen=True, slots=True)
class Described:
    """The record of a fingerprint, for the names with this prefix; ``document``: from ``describe_layout``."""

    prefix: str
    document: str

    def is_of(self, names: StorageNames) -> bool:
        """Return whether the record describes values of these names; a bump changes nothing about that."""
        return names.prefix == self.prefix

    def of_tier(self, config: TierConfig) -> "Described":
        """Return the record with the limits that this tier sets; a tier that only reads sets none."""
        if config.read_only:
            return self
        with plugin_boundary() as reading:
            limits = {str(option): _short(str(value)) for option, value in config.shared_limits.items()}
            document = json.loads(self.document) | {LIMITS_FIELD: limits}
            return Described(self.prefix, json.dumps(document, sort_keys=True))
        _log.warning(
            "%s: its limits are not recorded, as its 'shared_limits' failed: %s",
            config.tier_name,
            reading.error,
            extra={"once": True},
        )
        return self


def is_layout_record(name: str) -> bool:
    """Return whether this is the name of a record, and no value's."""
    return name.partition("/")[2].startswith(f"{_FOLDER}/")


def describe_layout(layout: CacheLayout, release: str, fingerprint: str) -> str:
    """Return the fields of a fingerprint as JSON, long ones as digests. ``release``: the engine's, no part of it."""
    whole = json.loads(layout.fingerprint_json())
    tensors = json.dumps(whole.pop("tensors"), sort_keys=True).encode()
    model = {name: _short(str(value)) for name, value in layout.model.facts().items()}
    document = {"release": release, "fingerprint": fingerprint} | whole
    document |= {"model": model, "tensors": hashlib.sha256(tensors).hexdigest()[:16]}
    return json.dumps(document, sort_keys=True)


def read_layout(store: ChunkStore, namespace: str, model: str, fingerprint: str = "") -> dict[str, Any]:
    """Return the record of a fingerprint ("": of the engine that stored last); {} if none. Raises as the store does."""
    name = _name(namespace, model, fingerprint)
    if not store.exists([name])[0]:
        return {}
    record = memoryview(mmap.mmap(-1, _RECORD_BYTES))  # on a page of its own, as a value in a row
    if store.read_into(name, record) != _RECORD_BYTES:
        return {}
    if check_value(record, _PAYLOAD_BYTES, name, _NO_LAYOUT) is not SealVerdict.OK:
        return {}
    with contextlib.suppress(ValueError, zlib.error):
        text = zlib.decompressobj().decompress(bytes(record[:_PAYLOAD_BYTES]), _LARGEST)
        document = json.loads(text)
        return document if isinstance(document, dict) else {}
    return {}


def write_layout(store: ChunkStore, names: StorageNames, document: str) -> None:
    """Write the record for these names. One that does not fit a page is left out. Raises what the store raises."""
    for fingerprint in (names.fingerprint, ""):
        _write(store, _name(names.namespace, names.model, fingerprint), document, over=not fingerprint)


def change_key(store: ChunkStore, namespace: str, model: str, fingerprint: str, before: str, now: str) -> None:
    """Have a record that states one key state another; one that states something else stays. Raises as the store."""
    document = read_layout(store, namespace, model, fingerprint)
    if document.get(KEY_FIELD) == before:
        text = json.dumps(document | {KEY_FIELD: now}, sort_keys=True)
        _write(store, _name(namespace, model, fingerprint), text, over=True)


def _write(store: ChunkStore, name: str, document: str, *, over: bool) -> None:
    packed = zlib.compress(document.encode(), 9)
    if len(packed) > _PAYLOAD_BYTES:
        return
    record = memoryview(mmap.mmap(-1, _RECORD_BYTES))
    record[: len(packed)] = packed
    seal_value(record, _PAYLOAD_BYTES, name, _NO_LAYOUT)
    if over:
        store.delete([name])  # one that never writes over a value of this length would keep another's
    store.write(name, record.toreadonly())


def with_fields(document: str, fields: dict[str, Any]) -> str:
    """Return a document that states these, too, of how the values are stored; one that is "" is left out."""
    stated = {name: value for name, value in fields.items() if value}
    return json.dumps(json.loads(document) | stated, sort_keys=True) if stated else document


def compare_layouts(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the fields in which two documents differ, with both values; digest fields only if no other field does."""
    differences = {
        name: (before, now)
        for name, before, now in _fields(theirs, ours)
        if before != now and name not in _NOT_OF_THE_LAYOUT
    }
    plain = [name for name in differences if name not in _DIGESTS]
    return [f"{name}: {differences[name][0]!r} there, {differences[name][1]!r} here" for name in plain or differences]


def _fields(theirs: dict[str, Any], ours: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    flat = []
    for document in (theirs, ours):
        model = document.get("model")
        flat.append({**document, **(model if isinstance(model, dict) else {}), "model": ""})
    there, here = flat
    return [(name, there.get(name), here.get(name)) for name in sorted(there.keys() | here.keys())]


def _name(namespace: str, model: str, fingerprint: str) -> str:
    return f"{namespace}/{_FOLDER}/{model}-{fingerprint}" if fingerprint else f"{namespace}/{_FOLDER}/{model}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
