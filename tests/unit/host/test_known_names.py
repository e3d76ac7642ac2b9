import pytest

from kvtiers.host.store_calls import KnownNames


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


def test_its_memory_is_bounded_and_loses_the_oldest():
    names = KnownNames(60.0, most=80)
    for number in range(1000):
        names.learn([f"name {number}"])
        assert len(names._until) <= 80
    present, _ = names.sort([f"name {number}" for number in range(1000)])
    assert present == list(range(1000 - len(present), 1000))
    assert len(present) >= 69
