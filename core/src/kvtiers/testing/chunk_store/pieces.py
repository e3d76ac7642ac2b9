"""Tests of ``SupportsPieces``: a store returns in pieces what ``read_into`` would have filled."""

from typing import Any

from kvtiers.api import SupportsPieces
from kvtiers.testing.applies import supports
from kvtiers.testing.chunk_store.base import LARGE, Names, StoreTestBase, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, pattern, same_bytes

__all__ = ["PiecesTests"]


class PiecesTests(StoreTestBase):
    """``reads_in_pieces`` and ``read_pieces``. ``store: Any``: the same object in two roles."""

    @supports(SupportsPieces)
    def test_the_pieces_of_a_value_are_all_of_it_in_order(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        for seed, nbytes in enumerate((PAGE, 33 * PAGE, LARGE)):
            [name] = names(1)
            write(memory, store, name, pattern(seed, nbytes))
            if not store.reads_in_pieces(nbytes):
                continue
            for _ in range(2):
                pieces = store.read_pieces(name, nbytes)
                assert pieces is not None, f"read_pieces gave None for a value of {nbytes} bytes that was written"
                same_bytes(b"".join(map(bytes, pieces)), pattern(seed, nbytes), "a value in pieces")

    @supports(SupportsPieces)
    def test_what_is_absent_or_of_another_length_has_no_pieces(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        one, absent = names(2)
        write(memory, store, one, pattern(1, 3 * PAGE))
        for name, nbytes in ((absent, 3 * PAGE), (one, 2 * PAGE), (one, 4 * PAGE)):
            if store.reads_in_pieces(nbytes):
                pieces = store.read_pieces(name, nbytes)
                assert pieces is None, f"read_pieces gave pieces of what is not a value of {nbytes} bytes"
