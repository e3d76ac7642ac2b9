"""The ledger: which keys this server has stored, of which kinds, which are locked, and which are being deleted.

A tier has no list of LMCache's keys: their names are hashes. What LMCache lists, counts by salt and evicts is what this
server has stored, and what has not been deleted or missed since. It is forgotten when the server ends; the values stay.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvtiers_lmcache.identity import ObjectKind

__all__ = ["Ledger"]

_MOST_KEYS = 1 << 20


class _Entry(NamedTuple):
    """A key's place in the list, and the kinds of its values."""

    number: int
    kinds: tuple[ObjectKind, ...]


class Ledger:
    """The keys. Any thread. ``most``: of keys; the oldest are forgotten first."""

    def __init__(self, most: int = _MOST_KEYS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[Any, _Entry] = {}
        self._last = 0
        self._locks: Counter[Any] = Counter()
        self._in_deletion: Counter[Any] = Counter()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    # -- what has been stored

    def add(self, keys: Iterable[Any], kind: ObjectKind) -> tuple[list[Any], list[tuple[Any, int]]]:
        """Add values of a kind. Return the keys that had none of it, and what was forgotten: keys and bytes."""
        added, forgotten = [], []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    self._last += 1
                    self._entries[key] = _Entry(self._last, (kind,))
                elif kind in entry.kinds:
                    continue
                else:
                    self._entries[key] = entry._replace(kinds=(*entry.kinds, kind))
                added.append(key)
            while len(self._entries) > self._most:
                oldest = next(iter(self._entries))
                forgotten.append((oldest, _size(self._entries.pop(oldest))))
        return added, forgotten

    def remove(self, keys: Iterable[Any]) -> list[tuple[Any, int]]:
        """Forget keys; return those that were there, with the bytes of their values."""
        with self._lock:
            return [(key, _size(self._entries.pop(key))) for key in keys if key in self._entries]

    def kinds(self, key: Any) -> tuple[ObjectKind, ...]:
        """Return the kinds of a key's values."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.kinds if entry is not None else ()

    def page(self, model: str | None, size: int, after: int) -> tuple[list[tuple[Any, int]], int | None]:
        """Return keys with their bytes, of one model or of all, and where the next page begins; None: nowhere.

        ``after``: where this page begins, 0 for the first.
        """
        with self._lock:
            entries = [
                (entry.number, key, _size(entry))
                for key, entry in self._entries.items()
                if entry.number > after and (model is None or key.model_name == model)
            ]
        page = entries[:size]
        return [(key, nbytes) for _, key, nbytes in page], page[-1][0] if len(entries) > size else None

    # -- locks

    def lock(self, keys: Sequence[Any]) -> list[bool]:
        """Lock keys, once more each; False for those that are being deleted."""
        with self._lock:
            taken = [key not in self._in_deletion for key in keys]
            self._locks.update(key for key, is_taken in zip(keys, taken, strict=True) if is_taken)
            return taken

    def unlock(self, keys: Iterable[Any]) -> None:
        """Remove a lock of each key; one that has none stays without."""
        with self._lock:
            for key in keys:
                if self._locks[key] > 1:
                    self._locks[key] -= 1
                else:
                    del self._locks[key]

    def locked(self) -> int:
        """Return how many keys are locked."""
        with self._lock:
            return len(self._locks)

    def begin_deletion(self, keys: Iterable[Any]) -> list[Any]:
        """Return those of the keys, each once, that are not locked. They cannot be until ``end_deletion``."""
        with self._lock:
            free = [key for key in dict.fromkeys(keys) if key not in self._locks]
            self._in_deletion.update(free)
            return free

    def end_deletion(self, keys: Iterable[Any]) -> None:
        """Let keys be locked again."""
        with self._lock:
            for key in keys:
                if self._in_deletion[key] > 1:
                    self._in_deletion[key] -= 1
                else:
                    del self._in_deletion[key]


def _size(entry: _Entry) -> int:
    return sum(kind.nbytes for kind in entry.kinds)
