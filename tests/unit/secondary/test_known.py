import pytest

from kvtiers.secondary import known
from kvtiers.secondary.known import DoubtedKeys, KnownNames
from kvtiers.secondary.protocol import Status

DONE, MISSING, PRESENT = Status.DONE, Status.MISSING, Status.PRESENT
KEYS = [b"a", b"b", b"c", b"d"]


@pytest.fixture
def names(clock):
    return KnownNames(60.0, clock)


def test_a_name_is_known_for_its_time_and_then_asked_for_again(names, clock):
    names.learn(["a", "b"])
    assert names.sort(["a", "x", "b"]) == ([0, 2], [1])
    clock.now += 59.9
    assert names.sort(["a", "x", "b"]) == ([0, 2], [1])
    clock.now += 0.2
    assert names.sort(["a", "x", "b"]) == ([], [0, 1, 2])


def test_what_is_forgotten_is_asked_for(names):
    names.learn(["a", "b"])
    names.forget(["a", "c"])
    assert names.sort(["a", "b", "c"]) == ([1], [0, 2])


def test_its_memory_is_bounded_and_loses_the_oldest(names, monkeypatch):
    monkeypatch.setattr(known, "_MOST_KNOWN", 100)
    monkeypatch.setattr(known, "_DROPPED_AT_ONCE", 10)
    for number in range(1000):
        names.learn([f"name {number}"])
        assert len(names._until) <= 100
    present, _ = names.sort([f"name {number}" for number in range(1000)])
    assert present == list(range(1000 - len(present), 1000))
    assert len(present) >= 89


@pytest.fixture
def doubted():
    doubted = DoubtedKeys()
    doubted.note(KEYS, bytes([DONE, Status.CORRUPT, MISSING, Status.FAILED]), is_load=True)
    return doubted


def test_what_was_not_given_is_doubted_and_nothing_else(doubted):
    assert doubted.among(KEYS) == bytes([0, 1, 1, 0])
    assert doubted.among([b"a", b"d"]) == b"", "nothing to be said"


@pytest.mark.parametrize("is_load", [True, False])
def test_a_doubt_ends_with_the_write_or_with_a_load_that_was_given(doubted, is_load):
    doubted.note(KEYS, bytes([DONE, DONE, PRESENT, DONE]), is_load=is_load)
    assert doubted.among(KEYS) == bytes([0, 0, 1, 0]), "what seems to be there is doubted as before"


def test_a_store_begins_no_doubt(doubted):
    doubted.clear()
    doubted.note(KEYS, bytes([Status.DROPPED, MISSING, Status.CORRUPT, PRESENT]), is_load=False)
    assert doubted.among(KEYS) == b""


def test_its_doubts_are_bounded_and_lose_the_oldest(doubted, monkeypatch):
    monkeypatch.setattr(known, "_MOST_DOUBTED", 100)
    monkeypatch.setattr(known, "_DROPPED_AT_ONCE", 10)
    keys = [f"{number}".encode() for number in range(1000)]
    for start in range(0, 1000, 4):
        doubted.note(keys[start : start + 4], bytes([MISSING] * 4), is_load=True)
        assert len(doubted.keys) <= 100
    still = doubted.among(keys)
    assert still.index(1) == 1000 - still.count(1)
    assert still.count(1) >= 89
