import threading

import pytest

from kvtiers.host.messages import Status
from kvtiers.host.row_fence import RowFence


@pytest.fixture
def calls():
    return []


def test_released_rows_are_copied_into_no_more(calls):
    guard, copied = RowFence(), []
    assert guard.land(1, lambda: copied.append(1))
    assert guard.is_given()
    guard.detach(lambda: calls.append("free"))
    assert not guard.is_given()
    assert calls == ["free"]
    assert not guard.land(2, lambda: copied.append(2))
    assert copied == [1]
    assert list(guard.statuses([2, 1])) == [Status.FAILED, Status.DONE]


def test_a_copy_that_is_in_flight_ends_before_the_rows_are_free(calls):
    guard, begun, go_on = RowFence(), threading.Event(), threading.Event()

    def copy():
        begun.set()
        assert go_on.wait(60)
        calls.append("copied")

    lander = threading.Thread(target=guard.land, args=(1, copy))
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
