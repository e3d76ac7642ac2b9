"""Values that a store gives in pieces: the same promises as of those that it puts into the row itself."""

import pytest

from kvtiers.host.messages import Status

DONE, MISSING, CORRUPT, FAILED = Status.DONE, Status.MISSING, Status.CORRUPT, Status.FAILED
CUTS = {
    "whole": lambda value: [value],
    "within the payload": lambda value: [value[:1000], memoryview(value)[1000:]],
    "where the payload ends": lambda value: [value[:4000], value[4000:]],
    "in the gap and in the seal": lambda value: [value[:4010], value[4010:4050], value[4050:]],
    "byte by byte": lambda value: [value[at : at + 1] for at in range(len(value))],
    "with nothing in between": lambda value: [b"", value[:7], b"", value[7:], b""],
}


@pytest.fixture
def pieces(kit):
    """A store in whose way of cutting a test may have its say, and which never puts a value into a row."""

    class Pieces(kit.DictStore):
        cut = staticmethod(CUTS["whole"])

        def reads_in_pieces(self, nbytes):
            return nbytes == kit.VALUE

        def read_pieces(self, name, nbytes):
            self.calls.append(("pieces", name))
            value = self.values.get(name)
            return self.cut(value) if value is not None and len(value) == nbytes else None

        def read_into(self, name, dst):
            raise AssertionError("it was to be read in pieces")

    return Pieces()


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_was_stored_comes_back_however_it_is_cut(kit, pieces, keys, cut):
    mover = kit.stored(pieces, keys)
    pieces.cut = cut
    moved = mover.load(kit.run(keys))
    assert set(moved.statuses) == {DONE}
    assert moved.nbytes == len(keys) * kit.VALUE
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("at", [0, 999, 1000, 3999, -64, -20])
def test_a_flipped_bit_in_any_piece_is_a_miss_and_its_value_is_deleted(kit, pieces, keys, cut, at):
    mover = kit.stored(pieces, keys)
    name = kit.NAMES.name(keys[2])
    value = bytearray(pieces.values[name])
    value[at] ^= 0x10
    pieces.values[name] = bytes(value)
    pieces.cut = cut
    assert list(mover.load(kit.run(keys)).statuses) == [DONE, DONE, CORRUPT, DONE]
    assert name not in pieces.values


def test_absent_values_and_those_of_another_length_are_misses(kit, pieces, keys):
    mover = kit.stored(pieces, keys)
    del pieces.values[kit.NAMES.name(keys[0])]
    pieces.values[kit.NAMES.name(keys[1])] += b"x"
    assert list(mover.load(kit.run(keys)).statuses) == [MISSING, MISSING, DONE, DONE]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda value: [value[:-1]], "gave 4095 of the 4096 bytes"),
        (lambda value: [], "gave 0 of the 4096 bytes"),
        (lambda value: [value, b"x"], "gave more than the 4096 bytes"),
        (lambda value: [value[:9], value], "gave more than the 4096 bytes"),
    ],
)
def test_pieces_that_are_not_all_of_the_value_fail_and_touch_no_other_row(kit, pieces, keys, cut, said):
    mover = kit.stored(pieces, keys)
    pieces.cut = cut
    moved = mover.load(kit.run(keys[:1]))
    assert list(moved.statuses) == [FAILED]
    assert said in moved.error
    assert all(kit.rows.is_poisoned(row) for row in range(1, len(keys) + 1))


def test_a_value_that_fails_half_way_is_begun_again(kit, pieces, keys):
    mover = kit.stored(pieces, keys)
    failures = iter([True])

    def cut(value):
        yield value[:1000]
        if next(failures, False):
            raise ConnectionResetError("half-way")
        yield value[1000:]

    pieces.cut = cut
    moved = mover.load(kit.run(keys[:1]))
    assert (list(moved.statuses), moved.retries) == ([DONE], 1)
    assert kit.rows.holds(0, keys[0])


def test_lengths_that_a_store_does_not_want_to_give_in_pieces_are_read_into_the_row(kit, pieces, keys):
    mover = kit.stored(pieces, keys)
    pieces.reads_in_pieces = lambda _nbytes: False
    pieces.read_into = lambda name, dst: kit.DictStore.read_into(pieces, name, dst)
    assert set(mover.load(kit.run(keys)).statuses) == {DONE}
    assert pieces.count("pieces") == 0
