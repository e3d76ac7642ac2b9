"""The removal of values that other processes may be reading.

The master frees an object's memory as it is removed, and the next put gets that memory, be it still read from: the
reader would get a mix of two values. A *lease* that each read takes (10 s: ``default_kv_lease_ttl``) forbids the
removal, but what is damaged or replaced has to go now. So an object that is in use gets another length first: the
master then gives it memory of its own, and keeps the old memory for some minutes (``put_start_release_timeout_sec``),
as it has to for a writer that was overtaken. What is left, some bytes that are not leased yet, is removed; if a reader
was faster, it gets yet another length.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtiers_mooncake.codes import ABSENT, NO_ROOM, SUPERSEDED, Code, failure

__all__ = ["Changes", "remove_safely"]

_ROUNDS = 32  # each of which another process can undo, by reading or writing the same name again
_MOST_BYTES = 4095  # less than any value has
_IN_USE = frozenset({Code.LEASED, Code.NOT_READY, Code.BEING_COPIED, Code.REPLICA_BUSY})
_Answers = Callable[[str, Sequence[int]], list[int]]


class Changes:
    """The names that threads of this process are changing: each is changed by one thread at a time.

    The master distinguishes writers by their client alone. Of two puts of one name by one client the first one's end
    would be taken for the second one's, whose bytes are not there yet.
    """

    def __init__(self) -> None:
        self._changing: set[str] = set()
        self._ended = threading.Condition()

    @contextmanager
    def of(self, names: Sequence[str]) -> Iterator[None]:
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


def remove_safely(client: Any, names: list[str], page_at: int, answers: _Answers) -> int:
    """Remove the objects of these names, where there are any; return how many were in use.

    ``page_at``: the address of a registered page. ``answers``: checks the codes of a call.
    """
    in_use = 0
    for turn in range(_ROUNDS):
        codes = answers("remove", client.batch_remove(names, False))
        for code in codes:
            if code and code not in _IN_USE | ABSENT:
                raise failure("remove", code, "")
        names = [name for name, code in zip(names, codes, strict=True) if code in _IN_USE]
        if not names:
            return in_use
        in_use += len(names) if not turn else 0
        lengths = [random.randint(1, _MOST_BYTES) for _ in names]  # noqa: S311 -- another one than others take
        for code in answers("upsert", client.batch_upsert_from(names, [page_at] * len(names), lengths)):
            # Without room the old object is gone, too.
            if code and code not in SUPERSEDED | NO_ROOM | _IN_USE:
                raise failure("upsert", code, "")
    # Readers that ask all the time win each round. What is here now is a few bytes that no reader takes for a value,
    # unless another process has put one in this very moment: then only its seal shows what a reader may get.
    answers("remove", client.batch_remove(names, True))
    return in_use
