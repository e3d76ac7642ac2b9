import threading

import pytest

from kvtiers.host.transfer_queue import RowFence


@pytest.fixture
def calls():
    return []


def test_released_rows_are_copied_into_no_more(calls):
    guard, copied = RowFence(), []
    assert guard.land(lambda: copied.append(1) is None)
    guard.detach(lambda: calls.append("free"))
    assert calls == ["free"]
    assert not guard.land(lambda: copied.append(2))
    assert copied == [1]


def test_a_copy_that_is_in_flight_ends_before_the_rows_are_free(calls):
    guard, begun, go_on = RowFence(), threading.Event(), threading.Event()

    def copy():
        begun.set()
        assert go_on.wait(60)
        calls.append("copied")

    lander = threading.Thread(target=guard.land, args=(copy,))
    lander.start()
    assert begun.wait(60)
    guard.detach(lambda: calls.append("free"))
    assert calls == []
    go_on.set()
    lander.join(60)
    assert calls == ["copied", "free"]


def test_it_is_reported_once_and_not_after_the_result(calls):
    guard = RowFence()
    guard.detach(lambda: calls.append("free"))
    guard.detach(lambda: calls.append("again"))
    over = RowFence()
    over.end()
    over.detach(lambda: calls.append("late"))
    assert calls == ["free"]
