"""Presence questions to one store: which keys it has a value of, asked by their names under each live key.

A store that answers for one name a call is asked for the end of a prefix by bisection. What it answers is remembered
(``KnownNames``), so that stores of what it has are left out.
"""

from collections.abc import Sequence

from kvtiers.api import ChunkStore, OffloadKey
from kvtiers.api.answers import present_each
from kvtiers.host.store_calls import Attempts, KnownNames, StoreLog
from kvtiers.layout.storage_name import StorageNames

__all__ = ["Presence"]

_NAMES_PER_CALL = 256


class Presence:
    """Asks one store. Used by several threads at once. ``names_per_call``: how many names it takes in one question."""

    def __init__(self, store: ChunkStore, attempts: Attempts, known: KnownNames, store_log: StoreLog) -> None:
        self._store = store
        self._attempts = attempts
        self._known = known
        self._store_log = store_log
        self.names_per_call = 1 if store.asks_one_by_one else _NAMES_PER_CALL

    def probe(
        self, all_names: Sequence[StorageNames], keys: Sequence[OffloadKey], give_up_at: float, *, is_prefix: bool
    ) -> list[bool]:
        """Ask which keys the store has. Of a prefix the answers may end after the first absence.

        ``all_names``: those that values are written with, then those that they are read with too. A key that has no
        name, since its tenant's own key is missing, is absent, unasked.
        """
        per_call = self.names_per_call
        if is_prefix and per_call == 1:
            return self._bisect(all_names, keys, give_up_at)
        answers: list[bool] = []
        for start in range(0, len(keys), per_call):
            some = keys[start : start + per_call]
            if is_prefix:
                ends = (place for place, key in enumerate(some, 1) if not all_names[0].has_name(key))
                some = some[: next(ends, len(some))]
            answers += self._of_any(all_names, some, give_up_at)
            if is_prefix and not answers[-1]:
                break
        return answers

    def exist(self, names: Sequence[str], give_up_at: float) -> tuple[list[bool], int]:
        """Ask in one call which of these names are there, and remember it; return the answers and how many retries."""
        store = self._store
        with self._store_log.watched("exists", ends=False):
            there, retries = self._attempts.call(
                lambda: present_each(store, names, store.exists(names)), give_up_at=give_up_at
            )
        self._known.learn(name for name, answer in zip(names, there, strict=True) if answer)
        self._known.forget(name for name, answer in zip(names, there, strict=True) if not answer)
        return there, retries

    def _bisect(self, all_names: Sequence[StorageNames], keys: Sequence[OffloadKey], give_up_at: float) -> list[bool]:
        """Find the end of a prefix: in two questions if all of it is there, in one if nothing is, else in 2 + log2(n).

        What lies below a hit counts as present, unasked.
        """

        def is_there(index: int) -> bool:
            return self._of_any(all_names, keys[index : index + 1], give_up_at)[0]

        if not keys or not is_there(0):
            return [False] * min(1, len(keys))
        present, absent = 1, len(keys) + 1  # counts that are known to be present, and known not to be
        middle = len(keys)  # of known prompts all is there, and a burst of them asks a lot
        while absent - present > 1:
            if is_there(middle - 1):
                present = middle
            else:
                absent = middle
            middle = (present + absent) // 2
        if len(all_names) == 1:  # else it is not known under which key
            self._known.learn(all_names[0].names(keys[:present]))
        return [True] * present + [False] * (present < len(keys))

    def _of_any(self, all_names: Sequence[StorageNames], keys: Sequence[OffloadKey], give_up_at: float) -> list[bool]:
        """Ask for values by their names under each live key: by an older one where there is none by a newer one."""
        there = [False] * len(keys)
        for names in all_names:
            absent = [index for index, key in enumerate(keys) if not there[index] and names.has_name(key)]
            if not absent:
                continue
            answers, _ = self.exist(names.names([keys[index] for index in absent]), give_up_at)
            for index, answer in zip(absent, answers, strict=True):
                there[index] = answer
        return there
