"""The changes of values in the pool: puts and removals, such that no reader ever gets a mix of two values.

A put of a name that exists changes nothing and reports success, so what is there is removed before it.

The master frees an object's memory as it is removed, and the next put gets that memory, be it still read from: the
reader would get a mix of two values. A *lease* that each read takes (10 s: ``default_kv_lease_ttl``) forbids the
removal, but what is damaged or replaced has to go now. So an object that is in use gets another length first: the
master then gives it memory of its own, and keeps the old memory for some minutes (``put_start_release_timeout_sec``),
as it has to for a writer that was overtaken. What is left, some bytes that are not leased yet, is removed; if a reader
was faster, it gets yet another length.

The master distinguishes writers by their client alone. Of two puts of one name by one client the first one's end would
be taken for the second one's, whose bytes are not there yet. So a name is changed by one thread at a time.
"""

import mmap
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtiers_mooncake.codes import ABSENT, NO_ROOM, SUPERSEDED, UNREACHABLE, Code, failure
from kvtiers_mooncake.memory import RegisteredMemory, address_of

__all__ = ["Changes"]

_ROUNDS = 32  # each of which another process can undo, by reading or writing the same name again
_PAGE = 4096
_MOST_BYTES = _PAGE - 1  # less than any value has
_IN_USE = frozenset({Code.LEASED, Code.NOT_READY, Code.BEING_COPIED, Code.REPLICA_BUSY})
_Answers = Callable[[str, Sequence[int]], list[int]]


class Changes:
    """Puts and removals by one client, called from many threads.

    ``replicate``: how values are put. ``answers``: checks and returns the codes of a call.
    """

    def __init__(self, client: Any, memory: RegisteredMemory, replicate: Any, answers: _Answers) -> None:
        self._client, self._replicate, self._answers = client, replicate, answers
        self._page = mmap.mmap(-1, _PAGE)
        memory.add(address_of(memoryview(self._page)), _PAGE)
        self._changing: set[str] = set()
        self._ended = threading.Condition()
        self._removed_in_use = 0

    @property
    def removed_in_use(self) -> int:
        """How many values were removed, or replaced, while a reader may have had them."""
        return self._removed_in_use

    def put(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Put values in place of older ones; return the library's code for each.

        Where a segment cannot be reached, the master is asked once more: it takes one at random.
        """
        with self._changing_alone(names):
            codes = self._put(names, addresses, sizes)
            lost = [i for i, code in enumerate(codes) if code in UNREACHABLE]
            if lost:
                again = self._put([names[i] for i in lost], [addresses[i] for i in lost], [sizes[i] for i in lost])
                for i, code in zip(lost, again, strict=True):
                    codes[i] = code
            return codes

    def remove(self, names: list[str]) -> None:
        """Remove values, where there are any, also those that are being read."""
        with self._changing_alone(names):
            self._remove(names)

    @contextmanager
    def _changing_alone(self, names: Sequence[str]) -> Iterator[None]:
        """Wait until no other thread changes any of these names, and keep others waiting meanwhile."""
        mine = set(names)
        with self._ended:
            self._ended.wait_for(lambda: self._changing.isdisjoint(mine))
            self._changing |= mine
        try:
            yield
        finally:
            with self._ended:
                self._changing -= mine
                self._ended.notify_all()

    def _put(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._remove(names)
        return self._answers("put", self._client.batch_put_from(names, addresses, sizes, self._replicate))

    def _remove(self, names: list[str]) -> None:
        page_at = address_of(memoryview(self._page))
        for turn in range(_ROUNDS):
            codes = self._answers("remove", self._client.batch_remove(names, False))
            for code in codes:
                if code and code not in _IN_USE | ABSENT:
                    raise failure("remove", code)
            names = [name for name, code in zip(names, codes, strict=True) if code in _IN_USE]
            if not names:
                return
            if not turn:
                with self._ended:
                    self._removed_in_use += len(names)
            lengths = [random.randint(1, _MOST_BYTES) for _ in names]  # noqa: S311 -- another one than others take
            codes = self._answers("upsert", self._client.batch_upsert_from(names, [page_at] * len(names), lengths))
            for code in codes:
                # Without room, or without the segment that was chosen, the old object is gone, too.
                if code and code not in SUPERSEDED | NO_ROOM | UNREACHABLE | _IN_USE:
                    raise failure("upsert", code)
        # Readers that ask all the time win each round. What is here now is a few bytes that no reader takes for a
        # value, unless another process has put one in this very moment: then only its seal shows what a reader gets.
        self._answers("remove", self._client.batch_remove(names, True))
