"""The fingerprint record of one tier, as its host uses it: compared when the store is opened, written with a value.

The comparison is a line of the log for people who wonder about misses. Nothing depends on a record, so whatever goes
wrong with one is a debug line.
"""

import json
import logging
import re
import socket
import time
from datetime import UTC, datetime
from typing import Any

from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore
from kvtiers.api.config import Compression
from kvtiers.encryption.keys import KeyRing
from kvtiers.layout.fingerprint_record import (
    COMPRESSION_FIELD,
    KEY_FIELD,
    LIMITS_FIELD,
    WRITER_FIELD,
    Described,
    compare_layouts,
    read_layout,
    with_fields,
    write_layout,
)
from kvtiers.layout.storage_name import StorageNames

__all__ = ["LayoutRecord"]

_log = logging.getLogger("kvtiers.secondary")
_LONGEST_DIFFERENCE = 1_000


class LayoutRecord:
    """What the fingerprint in the names was made from. Any thread.

    ``described``: the record that is still to be written; None: there is none, or it has been written.
    """

    def __init__(self, described: Described | None, label: str, compression: Compression = "none") -> None:
        self.described = described
        self._compression = compression
        self._label = label

    def compare(self, store: ChunkStore, names: StorageNames, keys: KeyRing | None) -> None:
        """Log, once, why the values of the same model that were stored last are not this engine's, or not kept as its.

        The limits are those of the values that both have: what another model's engines set is theirs to decide.
        """
        described = self.described
        if described is None:
            return
        ours = json.loads(described.document)
        with plugin_boundary(exits=True) as reading:
            theirs = read_layout(store, names.namespace, names.model)
        if reading.error:
            _log.debug("%s: what was stored last is not known: %s", self._label, reading.error)
            return
        if theirs and (text := self._difference(theirs, ours, keys)):
            plain = text if text.isprintable() else repr(text)[1:-1]  # what is in a store must not forge log lines
            _log.warning("%s: %s", self._label, plain, extra={"once": True})

    def write(self, store: ChunkStore, names: StorageNames, epoch: str, keys: KeyRing | None) -> None:
        """Write the record to the store, with the first value of these names; later calls do nothing."""
        described, self.described = self.described, None
        if described is None or not described.is_of(names):
            return
        stored = {
            KEY_FIELD: "" if keys is None else keys.current.id,
            COMPRESSION_FIELD: "zstd" if self._compression == "zstd" else "",
            WRITER_FIELD: {"host": socket.gethostname(), "time": time.time()},
        }
        with plugin_boundary(exits=True) as writing:
            write_layout(store, names.of_epoch(epoch), with_fields(described.document, stored))
        if writing.error:
            _log.debug("%s: its layout is not recorded: %s", self._label, writing.error)

    def _difference(self, theirs: dict[str, Any], ours: dict[str, Any], keys: KeyRing | None) -> str:
        """Return why the values that were stored last are not this engine's, or not kept as its; "" if they are."""
        if text := _other_key(theirs, keys):
            return text
        if theirs.get("fingerprint") != ours["fingerprint"]:
            text = "; ".join(compare_layouts(theirs, ours)) or "in what is not recorded"
            return (
                f"the latest values of this model are under fingerprint {str(theirs.get('fingerprint'))[:80]}, so this "
                f"engine does not find them; they differ from its own: {text[:_LONGEST_DIFFERENCE]}"
            )
        if self._compression == "none" and theirs.get(COMPRESSION_FIELD) == "zstd":
            return (
                "the latest values of this model are compressed (zstd), so this engine, which has 'compression: none', "
                "does not find them; set 'compression: read', or 'zstd'"
            )
        return _other_limits(theirs, ours)


def _other_key(theirs: dict[str, Any], keys: KeyRing | None) -> str:
    """Return in one line that the values that were stored last have no key of ours; "" if they have."""
    there = str(theirs.get(KEY_FIELD, ""))
    ours = [""] if keys is None else keys.ids
    if there in ours or not re.fullmatch(r"([0-9a-f]{8})?", there):  # anything could be logged by a store else
        return ""
    if keys is None:
        return (
            f"the latest values of this model are encrypted (key {there}), so this engine, which has no "
            "'encryption', does not find them"
        )
    stored = f"of key {there}" if there else "not encrypted"
    return (
        f"the latest values of this model are {stored}, so this engine, which has {keys.in_words()}, does not find "
        "them; if that is not meant, correct 'encryption.key', or give theirs as 'encryption.previous'"
    )


def _other_limits(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return in one line which limits the engine that stored last has, and which are ours; "" if they are the same."""
    there, here = theirs.get(LIMITS_FIELD), ours.get(LIMITS_FIELD)
    if not isinstance(there, dict) or not isinstance(here, dict):  # from before they were recorded, or of a reader
        return ""
    differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if not differing:
        return ""
    before, now = (
        ", ".join(f"{name} {of.get(name, 'not set')}" for name in differing)[:_LONGEST_DIFFERENCE]
        for of in (there, here)
    )
    return (
        f"{_writer(theirs)} has {before}, this engine has {now}: each applies its own; "
        "give all engines that share the store the same"
    )


def _writer(record: dict[str, Any]) -> str:
    """Return in words who wrote a record, in which anything may stand."""
    try:
        writer = record[WRITER_FIELD]
        when = datetime.fromtimestamp(float(writer["time"]), UTC)
        return f"the engine on {str(writer['host'])[:80]} that began to store this model at {when:%Y-%m-%d %H:%M} UTC"
    except (LookupError, TypeError, ValueError, OverflowError, OSError):
        return "the engine that began to store this model last"
