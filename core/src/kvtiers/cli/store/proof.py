"""The proof of a deletion: each deleted value is asked for and read again, and the store is listed again.

A store may answer a delete and still give the value: by a copy of a replica, a cache, or a bug of its own. An engine
that still runs may write the same values again while they are deleted. Both are found here, and fail the command.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from kvtiers._failures import plugin_boundary
from kvtiers.cli.store.inventory import Selection, StoredValue
from kvtiers.cli.store.session import StoreSession

__all__ = ["Proof"]

_AT_ONCE = 1024


class Proof:
    """The values that a session has deleted and that its store still gives or lists."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._asked = self._found = self._listed = 0
        self._error = ""
        self._first = ""

    def read_again(self, deleted: Iterable[StoredValue]) -> Iterator[StoredValue]:
        """Yield the deleted values, and read each of them again."""
        deleted = iter(deleted)
        with ThreadPoolExecutor(self._session.threads, thread_name_prefix="kvtiers-proof") as pool:
            while batch := list(islice(deleted, _AT_ONCE)):
                with plugin_boundary() as reading:
                    for value, there in zip(batch, self._session.still_there(batch, pool), strict=True):
                        self._asked += 1
                        if there:
                            self._note(value)
                            self._found += 1
                self._error = self._error or reading.error
                yield from batch

    def list_again(self, selection: Selection) -> None:
        """List once more what was to be deleted."""
        for value in self._session.values(selection):
            self._note(value)
            self._listed += 1

    @property
    def holds(self) -> bool:
        """Return whether nothing is there any more, and all was looked at."""
        return not (self._found or self._listed or self._error or self._session.is_over)

    def in_words(self) -> str:
        """Return the proof as a line."""
        text = f"listed again: {self._listed} values; read again: {self._found} of {self._asked} values"
        if self.holds:
            return f"proof: {text}"
        why = f"such as {self._first}" if self._first else "the run is not complete"
        if self._error:
            why = f"the store failed: {self._error}"
        return f"no proof: {text}; {why}"

    def as_json(self) -> dict[str, Any]:
        """Return the proof as JSON values."""
        return {
            "holds": self.holds,
            "listed": self._listed,
            "asked": self._asked,
            "found": self._found,
            "error": self._error,
        }

    def _note(self, value: StoredValue) -> None:
        self._first = self._first or value.entry.name
