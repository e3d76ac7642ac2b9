import pytest

from kvtiers.host.messages import Status
from kvtiers.secondary.presence_cache import SuspectKeys

DONE, MISSING, PRESENT = Status.DONE, Status.MISSING, Status.PRESENT
KEYS = [b"a", b"b", b"c", b"d"]


@pytest.fixture
def suspects():
    suspects = SuspectKeys()
    suspects.note(KEYS, bytes([DONE, Status.CORRUPT, MISSING, Status.FAILED]), is_load=True)
    return suspects


def test_what_was_not_given_is_suspects_and_nothing_else(suspects):
    assert suspects.among(KEYS) == bytes([0, 1, 1, 0])
    assert suspects.among([b"a", b"d"]) == b"", "nothing to be said"


@pytest.mark.parametrize("is_load", [True, False])
def test_a_doubt_ends_with_the_write_or_with_a_load_that_was_given(suspects, is_load):
    suspects.note(KEYS, bytes([DONE, DONE, PRESENT, DONE]), is_load=is_load)
    assert suspects.among(KEYS) == bytes([0, 0, 1, 0]), "what seems to be there is suspects as before"


def test_a_store_begins_no_doubt(suspects):
    suspects.clear()
    suspects.note(KEYS, bytes([Status.DROPPED, MISSING, Status.CORRUPT, PRESENT]), is_load=False)
    assert suspects.among(KEYS) == b""


def test_its_doubts_are_bounded_and_lose_the_oldest():
    suspects = SuspectKeys(most=80)
    keys = [f"{number}".encode() for number in range(1000)]
    for start in range(0, 1000, 4):
        suspects.note(keys[start : start + 4], bytes([MISSING] * 4), is_load=True)
        assert len(suspects.keys) <= 80
    still = suspects.among(keys)
    assert still.index(1) == 1000 - still.count(1)
    assert still.count(1) >= 69
